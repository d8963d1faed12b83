"""Pruned: tables of which only the largest entries are left (magnitude pruning, and both stages of PEP).

    e(i) = m_i ⊙ V_i        m the `keep` entries of all tables that are largest in magnitude, of each table at least one

Applied to a model, `Pruned` cuts at once: train the model first, and train what is left further. In a run it is both stages
of Liu et al. (ICLR 2021): train while a threshold rises until it meets the budget, or until learned thresholds meet it
(`pep+pruned`); then retrain the survivors from their initial values, and pack the tables. With by="magnitude" the run trains
to its best epoch and cuts then: the control.

    prune, retrain     the two stages for your own model, with a ticket at every budget
    PruningDriver      the two stages of a run with the method `Pruned`
    prune_run          a run at several budgets with one first stage: `rarebit prune`

A killed process can resume everything. The first stage keeps in its folder

    checkpoints/        of training
    start/              the initial values of the tables, saved once: a ticket of all entries
    tickets/BUDGET/     the entries that survived, the step, and the thresholds
    scans.jsonl         one line per scan of the tables: step, entries left, and their share by row frequency

and `prune_run` writes `prune.json` (settings and results), `pruning/` (the first stage), `unpruned/` (the run without
pruning) and one run per budget, with its packed model.

Not for rows that are looked up once: nothing shows which entries they need.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from rarebit.callbacks import TrainingMethod
from rarebit.codes.packed import Pack
from rarebit.data.dataset import Dataset
from rarebit.data.order import batch_bounds
from rarebit.errors import CheckpointError, DataError, ModelFileError, NoTableError, TrainingError
from rarebit.methods._sizing import check_share
from rarebit.pruning._insight import FrequencyGroups, pruning_insight, write_insight
from rarebit.pruning.masked import (
    DESCRIPTION,
    Masked,
    MaskedStack,
    MaskedTable,
    Ticket,
    keep_largest,
    load_ticket,
    save_ticket,
)
from rarebit.pruning.pep import (
    PEP,
    LearnedPruner,
    check_budgets,
    empty_tables,
    pruner_of,
    threshold_parameters,
    thresholded_tables,
)
from rarebit.settings import check_types, from_mapping, require, to_mapping, updated
from rarebit.storage import files
from rarebit.storage.files import file_lock, write_json
from rarebit.tables.apply import TableInfo, apply_, end_training_, find_sites, find_tables
from rarebit.tables.collection import Stack
from rarebit.tables.table import AnyTable, Method, Table, full_table, stored_tensors
from rarebit.technique import Control, Rank, SharedStage, Technique, technique_name, technique_text
from rarebit.training.fit import History, LineProgress, Progress, Silence, fit, measured
from rarebit.training.metrics import evaluate
from rarebit.training.optimizers import TableMode
from rarebit.training.run import (
    CHECKPOINTS,
    STAGE,
    RunResult,
    Trained,
    TrainingJob,
    make_folder,
    run,
    start_model,
    stored_settings,
    with_checksum,
)
from rarebit.training.settings import RunSettings, Training, load_splits

__all__ = ["Pruned"]

PrunedBy = Literal["threshold", "magnitude"]
PrunedStart = Literal["ticket", "random", "trained"]

ENTRY_BYTES, OFFSET_BYTES, BIT_BYTES, TABLE_BYTES = 5, 4, 0.125, 12
"""Of a packed table: a value and its column; the offset of a row that has entries; the bit of any row; one more offset, and the bits
of a last word."""


@dataclass(frozen=True)
class SharedPruning(SharedStage):
    """A first stage of pruning that several runs share."""

    budgets: tuple[int, ...]
    """The entries that the runs keep."""
    as_ticket: bool = False
    """Whether only the ticket is kept, for runs that differ in their second stage only. Those may run at the same time:
    one makes the ticket, and the others wait for it."""


@dataclass(frozen=True, kw_only=True)
class Pruned(Method):
    """Keep the largest entries of all tables, and set the others to zero.

    >>> Pruned(keep=30_000)
    Pruned(keep=30000, by='threshold', start='ticket', epochs=None, tables=None)
    """

    title: ClassVar[str] = "single entries cut until a budget is met, the rest retrained"
    paper: ClassVar[str] = (
        "Liu et al., Learnable Embedding Sizes for Recommender Systems, ICLR 2021"
    )
    control: ClassVar[str] = "magnitude"
    controls: ClassVar[tuple[str, ...]] = ("magnitude",)
    cost: ClassVar[str] = "trains twice; packed tables take about 5 bytes per entry and 4 per row"
    applies: ClassVar[str] = (
        "tables that must become much smaller; not for hardware that needs whole rows"
    )
    training_only: ClassVar[bool] = True
    composition_rank: ClassVar[Rank] = Rank.MASKS
    follows: ClassVar[frozenset[str]] = frozenset({"pep"})
    excludes: ClassVar[Mapping[str, str]] = {
        "hashing": "buckets of many ids have no entries to spare; use one of them",
        "low-rank": "a product of factors is small already; use one of them, or mlet+pruned",
    }
    masks_entries: ClassVar[bool] = True

    keep: int
    """Entries to keep, over all tables."""
    by: PrunedBy = "threshold"
    """"threshold": cut during training. "magnitude": cut once, after training."""
    start: PrunedStart = "ticket"
    """Where a run retrains the survivors from: "ticket", their initial values; "random", new ones; "trained": it does not
    retrain them."""
    epochs: int | None = None
    """Epochs of pruning; those of the run if not given."""
    tables: TableMode | None = None
    """How the optimizer updates tables while a threshold prunes them. If not given: on a schedule "rowwise", which leaves
    rows that are never seen as they are; with learned thresholds as in the rest of the run."""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.tables is None or self.by == "threshold",
            f"tables={self.tables!r} is for pruning by a threshold; with by='magnitude' the run's own setting holds",
        )
        require(self.keep >= 1, f"at least one entry must be kept, got keep={self.keep}")
        require(
            self.epochs is None or self.epochs >= 1,
            f"epochs must be at least 1, got epochs={self.epochs}",
        )

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the largest budget whose packed tables take at most this share of the bytes, however it is spread over rows.

        >>> Pruned.for_share([(1000, 64)], share=0.1).keep
        4292
        """
        check_share(share)
        room = share * 4 * sum(rows * width for rows, width in shapes) - _empty_bytes(shapes)
        # as many rows have entries as there are rows, or as there are entries
        full = room / ENTRY_BYTES
        sparse = (room + OFFSET_BYTES * sum(rows for rows, _ in shapes)) / (
            ENTRY_BYTES + OFFSET_BYTES
        )
        return cls(keep=max(int(full), int(sparse), 1))

    def drive(self, job: TrainingJob) -> Trained:
        """Train in two stages."""
        return PruningDriver(self, job).run()

    def shared_stage(self, techniques: Sequence[Technique]) -> tuple[Technique, ...] | None:
        """Return what the first stage depends on, which is not the start of the second; without a second there is none."""
        if self.start == "trained":
            return None
        first = replace(self, start="ticket")
        return tuple(first if one is self else one for one in techniques if isinstance(one, Method))

    def share(self, folder: Path) -> "SharedPruning":
        """Return a first stage that keeps only the ticket."""
        return SharedPruning(folder, (self.keep,), as_ticket=True)

    def make_control(self, name: str, techniques: Sequence[Technique]) -> Control | None:
        """Return the same budget, met by cutting the smallest entries after training."""
        if name != "magnitude":
            return None
        others = [t for t in techniques if t is not self and technique_name(t) != "pep"]
        methods = (*others, replace(self, by="magnitude", epochs=None, tables=None))
        return Control("+".join(map(technique_text, methods)), methods)

    def wrap(self, base: AnyTable) -> Table:
        """Return the table with all but its largest entries masked."""
        return self.wrap_all({"table": base})[0]

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return the tables with all but the largest entries of all of them masked."""
        masked = Masked(keep_largest(tables, self.keep)).wrap_all(tables)
        return [
            MaskedTable(self, table.inner, table.kept)
            for table in masked
            if isinstance(table, MaskedTable)
        ]

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return pruned tables behind one lookup of their rows and one of their masks."""
        masked = [table for table in tables if isinstance(table, MaskedTable)]
        return MaskedStack(self, masked, lengths)

    def serve(self, table: Table) -> AnyTable:
        """Return the table packed; a plain table with zeros where that is no smaller."""
        packed, plain = Pack().wrap(table), table.merge()
        sizes = [sum(t.nbytes for t in stored_tensors(found)) for found in (packed, plain)]
        return packed if sizes[0] < sizes[1] else plain


def _empty_bytes(shapes: Sequence[tuple[int, int]]) -> float:
    """Return the bytes of packed tables whose rows all have entries, without those."""
    return (OFFSET_BYTES + BIT_BYTES) * sum(rows for rows, _ in shapes) + TABLE_BYTES * len(shapes)


START, TICKETS, SCANS = "start", "tickets", "scans.jsonl"
REPORT_BELOW = 0.8
"""Progress reports the number of entries again once it falls to this share of the last one."""


@dataclass(frozen=True)
class Pruning:
    """The result of pruning a model."""

    tickets: tuple[Ticket, ...]
    """The entries that survive at each budget, the largest first, and their initial values."""
    history: History
    scans: tuple[Mapping[str, Any], ...]
    """Each scan of the tables: the step, the entries left, and their share by frequency."""


def prune(
    model: nn.Module,
    train: Dataset,
    valid: Dataset | None = None,
    *,
    budgets: Sequence[int],
    settings: Training = Training(tables="rowwise"),
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    every: int | None = None,
    progress: Progress | bool = True,
    **overrides: Any,
) -> Pruning:
    """Train a model in place while thresholds cut entries of its tables, and take a ticket at each budget.

    A budget is the number of entries left over all tables. If the model has thresholds (`PEP`), those cut; else one
    threshold for all its tables rises so that the last step meets the smallest budget. Learned thresholds may need more
    epochs: a budget that they do not meet is an error, and `resume=True` with more epochs resumes.

    The default is the row-wise optimizer, whose weight decay changes only the rows of a step: a row that is never seen
    does not vanish. Validation rows only measure the tickets.

    >>> from rarebit.models.fm import FM
    >>> data = Dataset.from_columns({"user": [0, 1, 2, 1], "item": [0, 0, 1, 1]}, label=[0, 1, 0, 1])
    >>> found = prune(FM(data.schema, dim=4), data, budgets=[12, 6], epochs=9, every=1, progress=False)
    >>> [(ticket.num_kept, ticket.facts["step"]) for ticket in found.tickets]
    [(12, 5), (6, 9)]
    """
    settings = replace(updated(settings, overrides), patience=None)
    tell = progress if not isinstance(progress, bool) else LineProgress() if progress else Silence()
    place = None if folder is None else Path(folder)
    require(not resume or place is not None, "resume=True needs the folder of the pruning")
    try:
        thresholded_tables(model)
    except NoTableError:
        changes = apply_(model, PEP(schedule="given"), verbose=False)
        if not resume:
            tell.say(str(changes))
    tickets: dict[int, Ticket] = {} if place is None else TicketFolder(place / TICKETS)
    start = _start_values(model, place, resume=resume)
    steps = settings.epochs * len(batch_bounds(len(train), settings.batch_size))
    scans = _Scans(model, train, budgets, place, tell)
    pruner = pruner_of(
        model,
        budgets,
        steps=steps,
        every=every,
        tickets=tickets,
        facts=lambda: {} if valid is None else {"valid_auc": evaluate(model, valid).auc},
        watch=scans,
    )
    history = fit(
        model,
        train,
        settings=settings,
        callbacks=[pruner],
        folder=None if place is None else place / CHECKPOINTS,
        resume=resume,
        progress=tell,
    )
    missing = [budget for budget in pruner.budgets if budget not in tickets]
    if missing:
        raise TrainingError(
            f"the learned thresholds have not met the budget of {missing[0]:,} entries in {settings.epochs} "
            "epochs; resume with more epochs, or start higher or with a larger decay, as with PEP(init=-8.0, decay=1e-4)"
            if isinstance(pruner, LearnedPruner)
            else f"the pruning in the folder has passed the budget of {missing[0]:,} entries, which is a new one; "
            "prune in another folder"
        )
    found = tuple(tickets[budget].with_start(start) for budget in pruner.budgets)
    return Pruning(found, history, tuple(scans.seen if place is None else read_scans(place)))


def retrain(
    build: Callable[[], nn.Module],
    ticket: Ticket,
    train: Dataset,
    valid: Dataset | None = None,
    *,
    start: Literal["ticket", "build"] = "ticket",
    settings: Training = Training(),
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
    **overrides: Any,
) -> Trained:
    """Build a model, mask the entries that a ticket cuts, train the others, and return model and history.

    The surviving entries start at their initial values before pruning (the winning ticket), or with start="build" at
    those that `build` draws; `build` draws all other weights. Everything else is as in `fit`.

    >>> import torch
    >>> from rarebit.models.fm import FM
    >>> data = Dataset.from_columns({"user": [0, 1, 2, 1]}, label=[0, 1, 0, 1])
    >>> build = lambda: FM(data.schema, dim=4)
    >>> pruning = prune(build(), data, budgets=[5], epochs=9, every=1, progress=False)
    >>> model, history = retrain(build, pruning.tickets[0], data, epochs=2, progress=False)
    >>> int(torch.count_nonzero(model.backbone.tables.tables()[0].weight))
    5
    """
    require(start in ("ticket", "build"), f"start must be 'ticket' or 'build', got start={start!r}")
    require(
        start == "build" or bool(ticket.start),
        "the ticket has no initial values to start from; use one that prune returned, or start='build'",
    )
    model = masked_model(build, ticket if start == "ticket" else ticket.with_start(None))
    history = fit(
        model,
        train,
        valid,
        settings=settings,
        folder=folder,
        resume=resume,
        progress=progress,
        **overrides,
    )
    return Trained(model, history)


def masked_model(build: Callable[[], nn.Module], ticket: Ticket) -> nn.Module:
    """Build a model and mask the entries that a ticket cuts; the others get its initial values."""
    model = build()
    apply_(model, Masked(ticket), where=lambda info: info.name in ticket.kept, verbose=False)
    return model


def read_scans(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return every scan of the pruning in a folder, in the order of the steps."""
    found: dict[int, dict[str, Any]] = {}
    path = Path(folder) / SCANS
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # a killed process may leave half a line
            scan = json.loads(line)
            found[scan["step"]] = scan  # a repeated step has a second line
    return [found[step] for step in sorted(found)]


class TicketFolder(dict[int, Ticket]):
    """Tickets by budget, each also stored in a folder."""

    def __init__(self, folder: Path) -> None:
        names = [path.parent.name for path in folder.glob(f"*/{DESCRIPTION}")]
        budgets = sorted(int(name) for name in names if name.isdigit())
        super().__init__({budget: load_ticket(folder / str(budget)) for budget in budgets})
        self.folder = folder

    def __setitem__(self, budget: int, ticket: Ticket) -> None:
        save_ticket(ticket, self.folder / str(budget))
        super().__setitem__(budget, ticket)


class _Scans:
    """Records every scan of the tables, and reports how many entries are left."""

    def __init__(
        self,
        model: nn.Module,
        train: Dataset,
        budgets: Sequence[int],
        folder: Path | None,
        tell: Progress,
    ) -> None:
        self.model, self.budgets, self.folder, self.tell = model, sorted(budgets), folder, tell
        self.groups: FrequencyGroups | None = None
        with suppress(DataError):  # a model whose tables are not named by fields has none
            self.groups = FrequencyGroups.of(model, train.counts())
        self.seen: list[dict[str, Any]] = []
        self.last_reported = float("inf")

    def __call__(self, step: int, left: int) -> None:
        scan: dict[str, Any] = {"step": step, "kept": left}
        if empty := empty_tables(self.model):
            scan["empty_tables"] = empty
        if self.groups is not None:
            scan["by_frequency"] = self.groups.shares(thresholded_tables(self.model))
        self.seen.append(scan)
        if self.folder is not None:
            with (self.folder / SCANS).open("a", encoding="utf-8") as file:
                # the newline first: a killed process may have left half a line
                file.write("\n" + json.dumps(scan))
        if left <= REPORT_BELOW * self.last_reported:
            self.last_reported = left
            missing = [f"{budget:,}" for budget in self.budgets if budget < left]
            to_go = f", next budget {missing[-1]}" if missing else ", all budgets met"
            none = f"; none in {', '.join(empty)}" if empty else ""
            self.tell.say(f"step {step:,}: {left:,} entries left{to_go}{none}")


def _start_values(model: nn.Module, place: Path | None, *, resume: bool) -> dict[str, Tensor]:
    """Return the initial values of the tables; with a folder, save them before training."""
    # a killed process may not have saved them
    if place is not None and resume and (place / START / DESCRIPTION).exists():
        return load_ticket(place / START).start
    tables = thresholded_tables(model)
    start = {name: full_table(table.inner).cpu().clone() for name, table in tables.items()}
    if place is not None:
        if not resume and place.exists() and any(place.iterdir()):
            raise CheckpointError(
                f"{str(place)!r} holds a pruning already; resume it with resume=True, or choose another "
                "folder"
            )
        every = {name: torch.ones_like(values, dtype=torch.bool) for name, values in start.items()}
        save_ticket(Ticket(every, start=start), place / START)
    return start


LOCK, TICKET = "lock", "ticket"
"""Files of a first stage that several runs share."""
OTHER_DRAW = 1_000_003
"""Added to the seed to draw new initial values."""


@dataclass(frozen=True)
class PruningDriver:
    """Trains a run in two stages."""

    pruned: Pruned
    job: TrainingJob

    def run(self) -> Trained:
        """Find the entries that survive, then retrain them; the job's folder is that of the second stage."""
        job, shared = self.job, self.job.shared
        acting = [technique_name(m) for m in job.settings.methods if isinstance(m, TrainingMethod)]
        require(
            not acting or self.pruned.start != "trained",
            f"{', '.join(acting)} acts when pruned tables are retrained, and "
            "start='trained' does not retrain them; use start='ticket'",
        )
        if isinstance(shared, SharedPruning) and shared.as_ticket:
            return self._retrained(self._shared_ticket(shared.folder))
        folder = None if job.folder is None else job.folder.parent / STAGE
        if shared is not None:
            folder = shared.folder
        (model, history), ticket = self._first_stage(
            folder, resume=job.resume or shared is not None
        )
        if self.pruned.start != "trained":
            return self._retrained(ticket)
        self._cut(model, ticket)
        history = measured(model, history, job.valid, epoch=len(history.epochs))
        return _with_report(Trained(model, history), ticket)

    def _first_stage(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        """Return a model after the first stage, and its ticket."""
        job, shared, keep = self.job, self.job.shared, self.pruned.keep
        methods = self._without(Pruned, TrainingMethod)
        training = job.settings.training
        training = replace(training, epochs=self.pruned.epochs or training.epochs)
        if self.pruned.by == "magnitude":
            model = job.start(methods)
            start = {name: full_table(table).cpu().clone() for name, table in _wide(model).items()}
            checkpoints = None if folder is None else folder / CHECKPOINTS
            trained = job.fit(model, methods, training=training, folder=checkpoints, resume=resume)
            return trained, keep_largest(_wide(model), keep).with_start(start)
        acting = [
            technique_text(m)
            for m in methods
            if not isinstance(m, PEP) and m.callback() is not None  # each scan names empty tables
        ]
        require(
            not acting,
            f"{', '.join(acting)} acts around training, and pruning by a threshold does not support that; use "
            "pruned with by='magnitude', or other settings",
        )
        model = job.start(methods)
        # row-wise weight decay does not change rows that are never seen
        usual: TableMode = training.tables if threshold_parameters(model) else "rowwise"
        mode = self.pruned.tables or usual
        if mode != training.tables:
            job.say(
                f"pruning with tables='{mode}', where the rest of the run has tables='{training.tables}'"
            )
        training = replace(training, tables=mode)
        pruning = prune(
            model,
            job.train,
            budgets=shared.budgets if isinstance(shared, SharedPruning) else [keep],
            settings=training,
            folder=folder,
            resume=resume,
            progress=job.progress,
        )
        [ticket] = [t for t in pruning.tickets if t.facts["budget"] == keep]
        losses = [round(record.train_loss, 5) for record in pruning.history.epochs]
        ticket.facts |= {"tables": mode, "train_loss": losses}
        return Trained(model, pruning.history), ticket

    def _shared_ticket(self, folder: Path) -> Ticket:
        """Return the ticket of several runs; the first of them makes it."""
        files.make_folder(folder)
        with file_lock(folder / LOCK, wait=True):
            if (folder / TICKET / DESCRIPTION).exists():
                return load_ticket(folder / TICKET)
            _, ticket = self._first_stage(folder / STAGE, resume=True)
            save_ticket(ticket, folder / TICKET)
            shutil.rmtree(folder / STAGE, ignore_errors=True)
        return ticket

    def _retrained(self, ticket: Ticket) -> Trained:
        """Retrain the survivors from their initial values or from new ones."""
        job, methods = self.job, self._without(Pruned, PEP)
        levels = _levels(ticket.facts)
        learned = f"; learned s {levels} at that time" if levels else ""
        job.say(f"retraining the {ticket.num_kept:,} entries that are left{learned}")
        if few := [name for name, kept in ticket.kept.items() if torch.count_nonzero(kept) <= 1]:
            job.say(f"no more than one entry is left of {', '.join(few)}; keep more entries")
        if self.pruned.start == "random":
            seed = job.settings.training.seed + OTHER_DRAW
            drawn = _wide(job.start(methods, seed=seed, say=_silent))
            ticket = ticket.with_start({name: full_table(drawn[name]) for name in ticket.kept})

        def build() -> nn.Module:
            model = job.start(methods, say=_silent)
            end_training_(model)
            return model

        # methods that change tables are merged; those that act around training act now
        acting = [m for m in methods if isinstance(m, TrainingMethod)]
        trained = job.fit(masked_model(build, ticket), acting, folder=job.folder)
        self._cut(trained.model, ticket)
        return _with_report(trained, ticket)

    def _cut(self, model: nn.Module, ticket: Ticket) -> None:
        """Merge the trained tables, and cut them to the ticket."""
        end_training_(model)
        last = any(method.after_training for method in self.job.settings.methods)
        # a method that comes after training takes a plain table; otherwise the tables are packed
        left: Method = Masked(ticket.with_start(None)) if last else self.pruned
        apply_(model, left, where=lambda info: info.name in ticket.kept, verbose=False)
        if last:
            end_training_(model)

    def _without(self, *kinds: type[Technique]) -> list[Technique]:
        return [m for m in self.job.settings.methods if not isinstance(m, kinds)]


def _with_report(trained: Trained, ticket: Ticket) -> Trained:
    """Add what the first stage found to the reports of a run."""
    if ticket.facts:
        trained.history.reports["pruned"] = {"kept": ticket.num_kept, **ticket.facts}
    return trained


def _levels(report: Mapping[str, Any]) -> str:
    """Return mean and standard deviation of the learned s in a report, as text; empty without them."""
    return f"{report['mean_s']:.3f} ± {report['std_s']:.3f}" if "mean_s" in report else ""


def _wide(model: nn.Module) -> Mapping[str, AnyTable]:
    """Return the tables wider than first-order weights."""
    return {site.info.name: site.table for site in find_sites(model) if site.info.width > 1}


def _silent(line: str) -> None:
    del line


PRUNE_FILE, UNPRUNED = "prune.json", "unpruned"


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """How far to prune: entries to keep, or shares of zeros, or bytes of packed tables.

    >>> PruneSettings(sparsity=(0.9, 0.99)).entries([(1000, 64)])
    (6400, 640)
    """

    budgets: tuple[int, ...] = ()
    """Entries to keep, over all tables."""
    sparsity: tuple[float, ...] = ()
    """Shares of the entries to set to zero."""
    num_bytes: tuple[int, ...] = ()
    """Bytes of the packed tables, if no row is empty."""
    start: PrunedStart = "ticket"
    """Where to retrain the survivors from: "ticket", their initial values; "random", new ones; "trained": not at all."""
    epochs: int | None = None
    """Epochs of pruning; those of the run if not given."""
    tables: TableMode | None = None
    """How the optimizer updates tables during pruning, as in `Pruned`."""

    def __post_init__(self) -> None:
        check_types(self)
        given = [name for name in ("budgets", "sparsity", "num_bytes") if getattr(self, name)]
        require(
            len(given) == 1,
            "pruning needs one of budgets, sparsity and bytes, got "
            + (" and ".join(given) or "none"),
        )
        for share in self.sparsity:
            require(0 < share < 1, f"sparsity must lie in (0, 1), got sparsity={share}")
        require(
            self.epochs is None or self.epochs >= 1,
            f"epochs must be at least 1, got epochs={self.epochs}",
        )

    def method(self, keep: int) -> Pruned:
        """Return the method that prunes to this many entries."""
        return Pruned(keep=keep, start=self.start, epochs=self.epochs, tables=self.tables)

    def entries(self, shapes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return the budgets for tables of these rows and widths, the largest first."""
        rows, total = sum(n for n, _ in shapes), sum(n * width for n, width in shapes)
        empty = _empty_bytes(shapes)
        found = [
            *self.budgets,
            *(round(total * (1 - share)) for share in self.sparsity),
            *(int((size - empty) / ENTRY_BYTES) for size in self.num_bytes),
        ]
        require(
            not self.num_bytes or min(found) >= 1,
            f"tables of {rows:,} rows take {empty:,.0f} bytes before the first entry is kept; allow more "
            "bytes",
        )
        return tuple(check_budgets(found, total))


@dataclass(frozen=True)
class PruneResult:
    """The runs of a pruning."""

    tables: tuple[TableInfo, ...]
    """The tables before pruning."""
    unpruned: RunResult
    """The run without pruning."""
    pruned: dict[int, RunResult]
    """The run of each budget, the largest first."""
    folder: Path

    @property
    def entries(self) -> int:
        """Entries of the tables before pruning."""
        return sum(info.rows * info.width for info in self.tables)

    def learned_levels(self, budget: int) -> str:
        """Return mean and standard deviation of the learned s at a budget, as text; empty without them."""
        found = self.pruned.get(budget)
        return "" if found is None else _levels(found.history.reports.get("pruned", {}))


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
    """Prune the model of a run once for all budgets, retrain it for each, and train the unpruned model for comparison.

    `resume=True` resumes the pruning in the folder, and repeats nothing.

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
        "the budgets replace the method pruned; leave it out of the methods",
    )
    schema = load_splits(settings.data, progress=data_progress).train.schema
    with torch.random.fork_rng(devices=[]):
        model = start_model(settings, schema, say=_silent)
    tables = tuple(info for info in find_tables(model) if info.width > 1)
    budgets = pruning.entries([(info.rows, info.width) for info in tables])
    out = make_folder(Path(folder))
    asked = {"settings": stored_settings(settings), "pruning": to_mapping(pruning)}
    if not resume:
        with file_lock(out / LOCK):
            if (out / PRUNE_FILE).exists():
                raise ModelFileError(
                    f"{str(out)!r} holds a pruning already; resume it (rarebit prune --resume {shlex.quote(str(out))}), or "
                    "choose another folder"
                )
            write_json(out / PRUNE_FILE, asked, error=ModelFileError)

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

    # without retraining, a run needs the model at its budget, which the first stage trains further
    together = None if pruning.start == "trained" else SharedPruning(out / STAGE, budgets)
    pruned = {
        budget: make(
            str(budget),
            (*settings.methods, pruning.method(budget)),
            together,
        )
        for budget in budgets
    }
    unpruned = make(UNPRUNED, settings.methods)
    result = PruneResult(tables, unpruned, pruned, out)
    figures = {
        "entries": result.entries,
        "unpruned": _figures(unpruned),
        "budgets": {budget: _figures(found) for budget, found in pruned.items()},
    }
    write_json(out / PRUNE_FILE, {**asked, "result": figures}, error=ModelFileError)
    return result


def read_prune(folder: str | os.PathLike[str]) -> tuple[RunSettings, PruneSettings]:
    """Return the settings of the pruning in a folder."""
    path = Path(folder) / PRUNE_FILE
    try:
        values = files.read_json(path)
        return RunSettings.from_mapping(values["settings"]), from_mapping(
            PruneSettings, values["pruning"]
        )
    except (FileNotFoundError, NotADirectoryError):
        raise ModelFileError(f"{str(folder)!r} holds no pruning: {PRUNE_FILE} is missing") from None
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{str(path)!r} is damaged: {error}") from None


def _figures(found: RunResult) -> dict[str, Any]:
    return {
        "test": asdict(found.test),
        "num_parameters": found.num_parameters,
        "table_bytes": found.table_bytes,
        "best_epoch": found.history.best_epoch,
        **found.history.reports.get("pruned", {}),
    }


INSIGHT = "insight"


def explain_pruning(result: PruneResult, train: Dataset, *, plots: bool = True) -> list[Path]:
    """Write how much of each row survived, and how fields interact before and after; return the files.

    "After" is the smallest budget. The plots need matplotlib.
    """
    shared = result.folder / STAGE
    stages = {
        budget: shared if shared.exists() else result.folder / str(budget) / STAGE
        for budget in result.pruned
    }
    smallest = min(result.pruned)
    insight = pruning_insight(
        [TicketFolder(stage / TICKETS)[budget] for budget, stage in stages.items()],
        train.counts(),
        scans=read_scans(stages[smallest]),
        before=result.unpruned.model,
        after=result.pruned[smallest].model,
    )
    return write_insight(insight, result.folder / INSIGHT, plots=plots)
