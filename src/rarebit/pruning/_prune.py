"""Pruning in two stages: find which entries survive, then train what is left again.

    prune            train while entries are cut, and take a ticket at every budget
    retrain          rebuild the model, hold all other entries at zero, and train the rest from where it began
    PruningDriver    both stages for a run, whose method `Pruned` asks for it

With a folder, all of it survives a killed process:

    checkpoints/        of training
    start/              the values the tables started from, saved once: a ticket of all entries
    tickets/BUDGET/     which entries survived, the step, and the thresholds
    scans.jsonl         one line per look at the tables: the step, the entries left, and the share of them that rows of
                        each frequency have left
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rarebit.callbacks import TrainingMethod
from rarebit.data.dataset import Dataset
from rarebit.data.order import batch_bounds
from rarebit.errors import CheckpointError, DataError, NoTableError, TrainingError
from rarebit.pruning._frequency_groups import FrequencyGroups
from rarebit.pruning.masked import (
    DESCRIPTION,
    Masked,
    Ticket,
    keep_largest,
    load_ticket,
    save_ticket,
)
from rarebit.pruning.pep import (
    PEP,
    LearnedPruner,
    pruner_of,
    threshold_parameters,
    thresholded_tables,
    usual_interval,
)
from rarebit.pruning.pruned import Pruned, SharedPruning
from rarebit.settings import require, updated
from rarebit.storage.disk import file_lock
from rarebit.tables.apply import apply_, end_training_
from rarebit.tables.find import find_sites
from rarebit.tables.table import AnyTable, Method, full_table
from rarebit.technique import Technique, technique_name, technique_text
from rarebit.training.fit import History, fit, measured
from rarebit.training.loop import LineProgress, Progress, Silence
from rarebit.training.metrics import evaluate
from rarebit.training.run import CHECKPOINTS, STAGE, Trained, TrainingJob
from rarebit.training.settings import Training

__all__ = [
    "TICKETS",
    "Pruning",
    "PruningDriver",
    "TicketFolder",
    "masked_model",
    "prune",
    "read_scans",
    "retrain",
]

START, TICKETS, SCANS = "start", "tickets", "scans.jsonl"
REPORT_BELOW = 0.8
"""The share of the entries reported last at which the number is reported again."""


@dataclass(frozen=True)
class Pruning:
    """The result of pruning a model."""

    tickets: tuple[Ticket, ...]
    """Which entries survive at each budget, the largest first, and where they started."""
    history: History
    scans: tuple[Mapping[str, Any], ...]
    """What each look at the tables saw: the step, the entries left, and their share by frequency."""


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
    """Train a model in place while entries of its tables are cut, and take a ticket at each budget.

    The budgets are numbers of entries left over all tables. Where the model has thresholds (`PEP`), those cut; else one
    threshold for all its tables rises so that the last step meets the smallest budget. Learned thresholds may need longer:
    a budget they have not met after all epochs is an error, and `resume=True` with more epochs resumes.

    The default is the row-wise optimizer, whose weight decay reaches only the rows of a step: a row that is never seen
    does not vanish. Validation rows only measure the tickets; they pick nothing.

    >>> from rarebit.models.fm import FM
    >>> data = Dataset.from_columns({"user": [0, 1, 2, 1], "item": [0, 0, 1, 1]}, label=[0, 1, 0, 1])
    >>> found = prune(FM(data.schema, dim=4), data, budgets=[12, 6], epochs=9, every=1, progress=False)
    >>> [(ticket.num_kept, ticket.facts["step"]) for ticket in found.tickets]
    [(12, 5), (6, 9)]
    """
    settings = dataclasses.replace(updated(settings, overrides), patience=None)
    tell = progress if not isinstance(progress, bool) else LineProgress() if progress else Silence()
    place = None if folder is None else Path(folder)
    require(not resume or place is not None, "resume=True needs the folder of the pruning")
    try:
        thresholded_tables(model)
    except NoTableError:
        changes = apply_(model, PEP(schedule="given"), verbose=False)
        if not resume:
            tell.say(str(changes))
    tickets: MutableMapping[int, Ticket] = {} if place is None else TicketFolder(place / TICKETS)
    start = _start_values(model, place, resume=resume)
    steps = settings.epochs * len(batch_bounds(len(train), settings.batch_size))
    scans = _Scans(model, train, budgets, place, tell)
    pruner = pruner_of(
        model,
        budgets,
        steps=steps,
        every=usual_interval(steps) if every is None else every,
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
            "epochs; resume with more epochs, or start higher, as with PEP(init=-8.0)"
            if isinstance(pruner, LearnedPruner)
            else f"the pruning in the folder has gone past the budget of {missing[0]:,} entries, which was not "
            "asked for at first; prune in another folder"
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
    """Build a model, hold the entries that a ticket cuts at zero, train the others, and return it.

    The surviving entries start where they started before pruning (the winning ticket), or with start="build" where
    `build` drew them; `build` makes all other weights. Everything else is as in `fit`.

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
        "the ticket has no first values to start from; use one that prune returned, or start='build'",
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
    """Build a model and hold the entries that a ticket cuts at zero; the others start where it says."""
    model = build()
    apply_(model, Masked(ticket), where=lambda info: info.name in ticket.kept, verbose=False)
    return model


def read_scans(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return every look at the tables of a pruning in a folder, in the order of the steps."""
    found: dict[int, dict[str, Any]] = {}
    path = Path(folder) / SCANS
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # a line that a killed process left half written
            scan = json.loads(line)
            found[scan["step"]] = scan  # a repeated step has a second line
    return [found[step] for step in sorted(found)]


class TicketFolder(MutableMapping[int, Ticket]):
    """Tickets by budget, one folder each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, budget: int) -> Ticket:
        if budget not in set(self):
            raise KeyError(budget)
        return load_ticket(self.folder / str(budget))

    def __setitem__(self, budget: int, ticket: Ticket) -> None:
        save_ticket(ticket, self.folder / str(budget))

    def __delitem__(self, budget: int) -> None:
        raise NotImplementedError("a ticket is kept")

    def __iter__(self) -> Iterator[int]:
        found = self.folder.glob("*/ticket.json")
        return iter(sorted(int(path.parent.name) for path in found if path.parent.name.isdigit()))

    def __len__(self) -> int:
        return len(list(iter(self)))


class _Scans:
    """Records every look at the tables, and reports how many entries are left."""

    def __init__(
        self,
        model: nn.Module,
        train: Dataset,
        budgets: Sequence[int],
        folder: Path | None,
        tell: Progress,
    ) -> None:
        self.model, self.budgets = model, sorted(budgets)
        self.folder, self.tell = folder, tell
        self.groups: FrequencyGroups | None = None
        with suppress(DataError):  # a model whose tables are not named by fields has none
            self.groups = FrequencyGroups.of(model, train.counts())
        self.seen: list[dict[str, Any]] = []
        self.last_reported = float("inf")

    def __call__(self, step: int, left: int) -> None:
        scan: dict[str, Any] = {"step": step, "kept": left}
        if self.groups is not None:
            scan["by_frequency"] = self.groups.shares(thresholded_tables(self.model))
        self.seen.append(scan)
        if self.folder is not None:
            with (self.folder / SCANS).open("a", encoding="utf-8") as file:
                # the newline first: a killed process may have left half a line
                file.write("\n" + json.dumps(self.seen[-1]))
        if left <= REPORT_BELOW * self.last_reported:
            self.last_reported = left
            missing = [f"{budget:,}" for budget in self.budgets if budget < left]
            to_go = f", next budget {missing[-1]}" if missing else ", all budgets met"
            self.tell.say(f"step {step:,}: {left:,} entries left{to_go}")


def _start_values(model: nn.Module, place: Path | None, *, resume: bool) -> dict[str, Tensor]:
    """Return the values the tables start from; with a folder they are saved before training."""
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
"""In the folder of a first stage that several runs share."""
OTHER_DRAW = 1_000_003
"""Added to the seed where tables start from other values than before."""


@dataclass(frozen=True)
class PruningDriver:
    """Trains a run in two stages."""

    pruned: Pruned
    job: TrainingJob

    def run(self) -> Trained:
        """Find which entries survive, then train them again; the job's folder is that of the second stage."""
        job, shared = self.job, self.job.shared
        late = [m for m in job.settings.methods if isinstance(m, TrainingMethod)]
        require(
            not late or self.pruned.start != "trained",
            f"{', '.join(map(technique_name, late))} acts when pruned tables are trained again, and "
            "start='trained' leaves that out; use start='ticket'",
        )
        if isinstance(shared, SharedPruning) and shared.as_ticket:
            return self._retrained(self._shared_ticket(shared.folder))
        folder = None if job.folder is None else job.folder.parent / STAGE
        if shared is not None:
            folder = shared.folder
        trained, ticket = self._first_stage(folder, resume=job.resume or shared is not None)
        if self.pruned.start == "trained":
            self._cut(trained.model, ticket)
            history = trained.history
            history = measured(trained.model, history, job.valid, epoch=len(history.epochs))
            return Trained(trained.model, history)
        return self._retrained(ticket)

    def _first_stage(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        stage = self._by_magnitude if self.pruned.by == "magnitude" else self._by_threshold
        return stage(folder, resume=resume)

    def _shared_ticket(self, folder: Path) -> Ticket:
        """Return which entries survive, as the first of several runs found out."""
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / LOCK, wait=True):
            if (folder / TICKET / DESCRIPTION).exists():
                return load_ticket(folder / TICKET)
            _, ticket = self._first_stage(folder / STAGE, resume=True)
            save_ticket(ticket, folder / TICKET)
            shutil.rmtree(folder / STAGE, ignore_errors=True)
        return ticket

    def _by_threshold(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        """Train while a threshold cuts entries, until the budget is met."""
        job, methods = self.job, self._without(Pruned, TrainingMethod)
        acting = [technique_text(m) for m in methods if m.callback() is not None]
        require(
            not acting,
            f"{', '.join(acting)} acts around training, and pruning by a threshold has no room for that; use "
            "pruned with by='magnitude', or other settings",
        )
        model = job.start(methods)
        training = job.settings.training
        training = replace(training, epochs=self.pruned.epochs or training.epochs)
        if not threshold_parameters(model):
            # row-wise weight decay leaves rows alone that are never seen
            training = replace(training, tables="rowwise")
        shared = job.shared
        pruning = prune(
            model,
            job.train,
            budgets=shared.budgets if isinstance(shared, SharedPruning) else [self.pruned.keep],
            settings=training,
            folder=folder,
            resume=resume,
            progress=job.progress,
        )
        [ticket] = [t for t in pruning.tickets if t.facts["budget"] == self.pruned.keep]
        return Trained(model, pruning.history), ticket

    def _by_magnitude(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        """Train to the best epoch, and cut all but the largest entries."""
        methods = self._without(Pruned, TrainingMethod)
        model = self.job.start(methods)
        start = {name: full_table(table).cpu().clone() for name, table in _wide(model).items()}
        training = self.job.settings.training
        trained = self.job.fit(
            model,
            methods,
            training=replace(training, epochs=self.pruned.epochs or training.epochs),
            folder=None if folder is None else folder / CHECKPOINTS,
            resume=resume,
        )
        return trained, keep_largest(_wide(model), self.pruned.keep).with_start(start)

    def _retrained(self, ticket: Ticket) -> Trained:
        """Train what survived, from where it started or from other values."""
        job, methods = self.job, self._without(Pruned, PEP)
        job.say(f"retraining the {ticket.num_kept:,} entries that are left")
        if self.pruned.start == "random":
            seed = job.settings.training.seed + OTHER_DRAW
            drawn = _wide(job.start(methods, seed=seed, say=_silent))
            ticket = ticket.with_start({name: full_table(drawn[name]) for name in ticket.kept})

        def build() -> nn.Module:
            model = job.start(methods, say=_silent)
            end_training_(model)
            return model

        # methods that change tables were merged; those that act around training do so now
        acting = [m for m in methods if isinstance(m, TrainingMethod)]
        trained = job.fit(masked_model(build, ticket), acting, folder=job.folder)
        self._cut(trained.model, ticket)
        return trained

    def _cut(self, model: nn.Module, ticket: Ticket) -> None:
        """Merge what was trained, and let its tables be what is left of them."""
        end_training_(model)
        last = any(method.after_training for method in self.job.settings.methods)
        # what comes after training rounds a plain table; anything else is packed
        left: Method = Masked(ticket.with_start(None)) if last else self.pruned
        apply_(model, left, where=lambda info: info.name in ticket.kept, verbose=False)
        if last:
            end_training_(model)

    def _without(self, *kinds: type[Technique]) -> list[Technique]:
        return [m for m in self.job.settings.methods if not isinstance(m, kinds)]


def _wide(model: nn.Module) -> Mapping[str, AnyTable]:
    """Return the tables wider than first-order weights."""
    return {site.info.name: site.table for site in find_sites(model) if site.info.width > 1}


def _silent(line: str) -> None:
    del line
