"""Prune a model to several budgets and train each again: what `rarebit prune` does, as one function.

prune.json      what was asked for, and what came out
pruning/        the first stage, made once for all budgets
unpruned/       the same run without pruning: what a budget costs is seen beside it
BUDGET/         a run for each budget, with its packed model
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rarebit.data.dataset import Dataset
from rarebit.data.schema import Schema
from rarebit.errors import ModelFileError
from rarebit.pruning._insight import pruning_insight, write_insight
from rarebit.pruning._prune import TICKETS, TicketFolder, read_scans
from rarebit.pruning.masked import Ticket
from rarebit.pruning.pruned import (
    BYTES_A_ROW,
    BYTES_A_TABLE,
    BYTES_AN_ENTRY,
    Pruned,
    PrunedStart,
    SharedPruning,
)
from rarebit.settings import check_types, from_mapping, require, to_mapping
from rarebit.storage.files import write_json
from rarebit.tables.find import TableInfo, find_tables
from rarebit.training.loop import Progress
from rarebit.training.run import (
    STAGE,
    RunResult,
    make_folder,
    run,
    start_model,
    stored_settings,
    with_checksum,
)
from rarebit.training.settings import RunSettings, load_splits

__all__ = [
    "PruneResult",
    "PruneSettings",
    "explain_pruning",
    "prune_run",
    "read_prune",
]

PRUNE_FILE, UNPRUNED = "prune.json", "unpruned"


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """How far to prune: budgets of entries, or shares of zeros, or bytes of packed tables.

    >>> PruneSettings(sparsity=(0.9, 0.99)).entries([(1000, 64)])
    (6400, 640)
    """

    budgets: tuple[int, ...] = ()
    """Entries that are to be left over all tables."""
    sparsity: tuple[float, ...] = ()
    """Shares of the entries that are to be zero."""
    num_bytes: tuple[int, ...] = ()
    """Bytes that the packed tables may have, if no row is empty."""
    start: PrunedStart = "ticket"
    """Where what is left is trained from: "ticket", the values it had at first; "random", new ones;
    "trained", not at all."""
    epochs: int | None = None
    """Epochs of pruning; as many as the run has if not given."""

    def __post_init__(self) -> None:
        check_types(self)
        given = [name for name in ("budgets", "sparsity", "num_bytes") if getattr(self, name)]
        require(
            len(given) == 1,
            "pruning needs to know how far: one of budgets, sparsity and bytes, got "
            + (" and ".join(given) or "none"),
        )
        for share in self.sparsity:
            require(0 < share < 1, f"sparsity must lie in (0, 1), got sparsity={share}")
        require(
            self.epochs is None or self.epochs >= 1,
            f"epochs must be at least 1, got epochs={self.epochs}",
        )

    def entries(self, shapes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return the budgets for tables of these rows and widths, the largest first."""
        rows, total = sum(n for n, _ in shapes), sum(n * width for n, width in shapes)
        empty = BYTES_A_ROW * rows + BYTES_A_TABLE * len(shapes)
        found = [
            *self.budgets,
            *(round(total * (1 - share)) for share in self.sparsity),
            *(int((size - empty) / BYTES_AN_ENTRY) for size in self.num_bytes),
        ]
        require(
            not self.num_bytes or min(found) >= 1,
            f"tables of {rows:,} rows take {empty:,.0f} bytes before the first entry is kept; allow more "
            "bytes",
        )
        require(min(found) >= 1, f"a budget must be at least 1 entry, got {min(found)}")
        require(
            max(found) < total,
            f"a budget must be below the {total:,} entries that the tables have, got {max(found):,}",
        )
        return tuple(sorted(set(found), reverse=True))


@dataclass(frozen=True)
class PruneResult:
    """What pruning gave."""

    tables: tuple[TableInfo, ...]
    """The tables that were pruned, as they were."""
    unpruned: RunResult
    """The run without pruning."""
    pruned: dict[int, RunResult]
    """The run of each budget, the largest first."""
    folder: Path

    @property
    def entries(self) -> int:
        """The entries there were."""
        return sum(info.rows * info.width for info in self.tables)


def prune_run(
    settings: RunSettings,
    pruning: PruneSettings,
    *,
    folder: str | os.PathLike[str],
    resume: bool = False,
    device: torch.device | str = "cpu",
    progress: Progress | bool = True,
    data_progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = print,
) -> PruneResult:
    """Prune the model of a run once for all budgets, train each again, and the unpruned model beside them.

    The folder holds all of it; `resume` goes on with what was stopped there, and makes nothing again.

    >>> import tempfile
    >>> small = RunSettings.from_mapping({
    ...     "model": {"name": "fm", "dim": 2}, "data": {"rows": 2000}, "training": {"epochs": 1}})
    >>> found = prune_run(
    ...     small, PruneSettings(budgets=(300,)), folder=tempfile.mkdtemp(), progress=False,
    ...     say=lambda line: None)
    >>> list(found.pruned)
    [300]
    """
    settings = with_checksum(settings)
    require(
        not any(isinstance(method, Pruned) for method in settings.methods),
        "the budgets say what is pruned; leave pruned out of the methods",
    )
    schema = load_splits(settings.data, progress=data_progress).train.schema
    tables = _tables_to_prune(settings, schema)
    budgets = pruning.entries([(info.rows, info.width) for info in tables])
    out = make_folder(Path(folder))
    if not resume:
        _refuse_used(out)
        write_json(out / PRUNE_FILE, _asked(settings, pruning), error=ModelFileError)

    def make(name: str, methods: tuple[Any, ...], shared: SharedPruning | None = None) -> RunResult:
        say(f"{name}:")
        return run(
            replace(settings, methods=methods),
            folder=out / name,
            resume=resume and (out / name).exists(),
            device=device,
            progress=progress,
            say=say,
            shared=shared,
        )

    # a pruned model that is not trained again is gone once the next budget is met
    together = None if pruning.start == "trained" else SharedPruning(out / STAGE, budgets)
    pruned = {
        budget: make(
            str(budget),
            (*settings.methods, Pruned(keep=budget, start=pruning.start, epochs=pruning.epochs)),
            together,
        )
        for budget in budgets
    }
    unpruned = make(UNPRUNED, settings.methods)
    result = PruneResult(tables, unpruned, pruned, out)
    values = {**_asked(settings, pruning), "result": _described(result)}
    write_json(out / PRUNE_FILE, values, error=ModelFileError)
    return result


def read_prune(folder: str | os.PathLike[str]) -> tuple[RunSettings, PruneSettings]:
    """Return what the pruning in a folder was asked for."""
    path = Path(folder) / PRUNE_FILE
    try:
        values = json.loads(path.read_text("utf-8"))
        return RunSettings.from_mapping(values["settings"]), from_mapping(
            PruneSettings, values["pruning"]
        )
    except FileNotFoundError:
        raise ModelFileError(f"{str(folder)!r} holds no pruning: {PRUNE_FILE} is missing") from None
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{str(path)!r} is damaged: {error}") from None


def _tables_to_prune(settings: RunSettings, schema: Schema) -> tuple[TableInfo, ...]:
    with torch.random.fork_rng(devices=[]):
        model = start_model(settings, schema, say=_say_nothing)
    return tuple(info for info in find_tables(model) if info.width > 1)


def _asked(settings: RunSettings, pruning: PruneSettings) -> dict[str, Any]:
    return {"settings": stored_settings(settings), "pruning": to_mapping(pruning)}


def _described(result: PruneResult) -> dict[str, Any]:
    return {
        "entries": result.entries,
        "unpruned": _figures(result.unpruned),
        "budgets": {budget: _figures(found) for budget, found in result.pruned.items()},
    }


def _figures(found: RunResult) -> dict[str, Any]:
    return {
        "test": asdict(found.test),
        "num_parameters": found.num_parameters,
        "table_bytes": found.table_bytes,
        "best_epoch": found.history.best_epoch,
    }


def _refuse_used(folder: Path) -> None:
    if (folder / PRUNE_FILE).exists():
        raise ModelFileError(
            f"{str(folder)!r} holds a pruning already; go on with it by resume "
            f"(rarebit prune --resume {folder}), or choose another folder"
        )


def _say_nothing(line: str) -> None:
    del line


INSIGHT = "insight"


def explain_pruning(result: PruneResult, train: Dataset, *, plots: bool = True) -> list[Path]:
    """Write which rows kept how much, and how fields meet before and after; return the files.

    "After" is the smallest budget. The plots need matplotlib.
    """
    insight = pruning_insight(
        _tickets(result),
        train.counts(),
        scans=read_scans(_stage(result, min(result.pruned))),
        before=result.unpruned.model,
        after=result.pruned[min(result.pruned)].model,
    )
    return write_insight(insight, result.folder / INSIGHT, plots=plots)


def _tickets(result: PruneResult) -> list[Ticket]:
    return [TicketFolder(_stage(result, budget) / TICKETS)[budget] for budget in result.pruned]


def _stage(result: PruneResult, budget: int) -> Path:
    """Return the folder of the first stage: that of all budgets, or of this one."""
    shared = result.folder / STAGE
    return shared if shared.exists() else result.folder / str(budget) / STAGE
