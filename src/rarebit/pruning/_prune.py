"""Cut the tables of a model while it is trained, and take a ticket at every budget.

    Pruner           one threshold for all tables, raised on a schedule that meets the budgets
    LearnedPruner    thresholds that are learned: a budget is met once they have left so few entries

Both are called after each step with its number. At every 200th they look at the tables, more often in a
short pruning, and there they do what the number and the tables say: they remember nothing, so a run that is
taken up again goes the same way.

The schedule lets the number of entries fall by the same factor from look to look,

    k(p) = k₁ · (k₀ / k₁)^(1 - p)        p from 0 to 1 over the steps after the warm-up

from all entries k₀ to the smallest budget k₁, and the threshold is the magnitude that leaves k(p) of them.

The two stages of pruning: find which entries survive, then train what is left again.

    prune      train while entries are cut, and take a ticket at every budget
    retrain    build the model anew, hold all other entries at zero, and train the rest from where it began

With a folder, all of it survives a killed process:

    checkpoints/        of training
    start/              the values the tables started from, saved once: a ticket of all entries
    tickets/BUDGET/     which entries survived, the step, and the thresholds
    scans.jsonl         a line a look at the tables: the step, the entries left, and the share of them
                        that rows of each frequency have left
"""

import dataclasses
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from rarebit.callbacks import Callback
from rarebit.data.dataset import Dataset
from rarebit.data.order import batch_bounds
from rarebit.errors import CheckpointError, DataError, NoTableError, TrainingError
from rarebit.pruning._budget import (
    count_nonzero,
    kth_largest_magnitude,
    set_threshold_,
    take_ticket,
    threshold_parameters,
    thresholded_tables,
)
from rarebit.pruning._frequency_groups import FrequencyGroups
from rarebit.pruning._ticket import DESCRIPTION, Ticket, load_ticket, save_ticket
from rarebit.pruning.masked import Masked
from rarebit.pruning.pep import PEP
from rarebit.settings import require, updated
from rarebit.tables.apply import apply_
from rarebit.tables.table import full_table
from rarebit.training.fit import History, fit
from rarebit.training.metrics import evaluate
from rarebit.training.progress import LineProgress, Progress, Silence
from rarebit.training.settings import Training
from rarebit.training.stages import CHECKPOINTS, Trained

__all__ = [
    "EVERY",
    "TICKETS",
    "LearnedPruner",
    "Pruner",
    "PrunerOptions",
    "Pruning",
    "TablePruner",
    "TicketFolder",
    "masked_model",
    "prune",
    "pruner_of",
    "read_scans",
    "retrain",
    "usual_interval",
]

EVERY = 200
"""Steps between two looks at the tables, at most."""
LOOKS = 40
"""Looks at the tables in a pruning that is short."""
WARM_UP = 0.1
"""The share of the steps before entries are cut: what is small at first says nothing yet."""


class PrunerOptions(TypedDict, total=False):
    """How a pruner looks at tables; each may be left out."""

    every: int
    """Steps between two looks."""
    tickets: MutableMapping[int, Ticket]
    """Where tickets are kept, by their budgets: a dictionary, or a folder."""
    facts: Callable[[], Mapping[str, Any]]
    """What else to note in a ticket, asked when it is taken."""
    watch: Callable[[int, int], None]
    """Told the step and how many entries are left, at every look."""


class TablePruner(Callback, ABC):
    """A callback that ends training once there is no budget left to meet."""

    def __init__(
        self, model: nn.Module, budgets: Sequence[int], **options: Unpack[PrunerOptions]
    ) -> None:
        self.model = model
        self.every = options.get("every", EVERY)
        self.tickets = options.get("tickets", {})
        """The tickets taken so far, by their budgets."""
        self.facts, self.watch = options.get("facts", dict), options.get("watch")
        tables = thresholded_tables(model).values()
        self.total = sum(table.num_embeddings * table.embedding_dim for table in tables)
        self.budgets = sorted(set(budgets), reverse=True)
        _check(self.budgets, self.total, self.every)

    @abstractmethod
    def after_step(self, num_steps: int) -> bool:
        """Look at the tables after this step, from 1, if it is time to."""

    def _keep(self, budget: int, **facts: Any) -> None:
        found = take_ticket(self.model, budget=budget, **facts, **self.facts())
        self.tickets[budget] = Ticket(found.kept, levels=self._levels(), facts=found.facts)

    def _levels(self) -> dict[str, Tensor]:
        """Return the thresholds to keep, table by table, beyond what facts say."""
        return {}

    def _told(self, step: int, left: int) -> None:
        if self.watch is not None:
            self.watch(step, left)


class Pruner(TablePruner):
    """Raises the threshold of `PEP(schedule="given")` so that the last budget is met at the last step.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(schedule="given"), verbose=False)
    >>> pruner = Pruner(model, [400, 100], steps=1000)
    >>> [pruner.after_step(step) for step in range(1, 1001)][-1], count_nonzero(model)
    (True, 100)
    >>> pruner.tickets[400].facts["step"]
    400
    """

    def __init__(
        self,
        model: nn.Module,
        budgets: Sequence[int],
        *,
        steps: int,
        **options: Unpack[PrunerOptions],
    ) -> None:
        options.setdefault("every", usual_interval(steps))
        super().__init__(model, budgets, **options)
        require(steps >= 1, f"pruning needs at least one step, got steps={steps}")
        self.steps = steps

    def entries_after(self, step: int) -> int:
        """Return how many entries the schedule leaves after this step."""
        begin, last = WARM_UP * self.steps, self.budgets[-1]
        done = min(max((step - begin) / (self.steps - begin), 0.0), 1.0)
        return round(last * math.pow(self.total / last, 1.0 - done))

    def after_step(self, num_steps: int) -> bool:
        """Cut to what the schedule says, and to each budget that was passed since the last look."""
        step = num_steps
        if step > self.steps:
            return True
        if step % self.every and step != self.steps:
            return False
        left = self.entries_after(step)
        before = self.entries_after((step - 1) // self.every * self.every)
        met = [budget for budget in self.budgets if left <= budget < before]
        for budget in met:
            self._keep(budget, step=step, threshold=float(self._cut(budget)))
        if left not in met:
            self._cut(left)
        self._told(step, left)
        return step >= self.steps

    def _cut(self, left: int) -> Tensor:
        """Set the threshold that leaves so many entries, or fewer where some are equal."""
        if left >= self.total:
            threshold = torch.zeros(())
        else:
            threshold = kth_largest_magnitude(self.model, left + 1)
        set_threshold_(self.model, threshold)
        return threshold


class LearnedPruner(TablePruner):
    """Counts what learned thresholds have left, and takes a ticket when that is no more than a budget.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(init=0.0), verbose=False)
    >>> pruner = LearnedPruner(model, [700, 600])
    >>> pruner.after_step(200), sorted(pruner.tickets)
    (True, [600, 700])
    """

    def after_step(self, num_steps: int) -> bool:
        """Count, and take the tickets of the budgets that are met."""
        step = num_steps
        if step % self.every:
            return False
        left = count_nonzero(self.model)
        for budget in self.budgets:
            if left <= budget and budget not in self.tickets:
                self._keep(budget, step=step)
        self._told(step, left)
        return left <= self.budgets[-1]

    def _levels(self) -> dict[str, Tensor]:
        tables = thresholded_tables(self.model)
        # a copy: training goes on
        return {
            name: _level_values(table.levels).to("cpu", copy=True) for name, table in tables.items()
        }


def pruner_of(
    model: nn.Module,
    budgets: Sequence[int],
    *,
    steps: int,
    **options: Unpack[PrunerOptions],
) -> TablePruner:
    """Return the pruner for the thresholds that the tables of a model have."""
    if threshold_parameters(model):
        return LearnedPruner(model, budgets, **options)
    return Pruner(model, budgets, steps=steps, **options)


def usual_interval(steps: int) -> int:
    """Return the steps between two looks at the tables in a pruning of so many steps.

    >>> usual_interval(100_000), usual_interval(80), usual_interval(7)
    (200, 2, 1)
    """
    return max(min(EVERY, steps // LOOKS), 1)


def _level_values(levels: nn.Module) -> Tensor:
    """Return the learned s of a table: a row of them for each of its rows, or one for all."""
    if isinstance(levels, nn.Embedding):
        return full_table(levels)
    value: Tensor = levels.value  # type: ignore[assignment]  # a module's attribute may be anything
    return value.detach()


def _check(budgets: Sequence[int], total: int, every: int) -> None:
    require(bool(budgets), "pruning needs at least one budget: how many entries are to be left")
    require(budgets[-1] >= 1, f"a budget must be at least 1 entry, got {budgets[-1]}")
    require(
        budgets[0] < total,
        f"a budget must be below the {total:,} entries that the tables have, got {budgets[0]:,}",
    )
    require(every >= 1, f"every must be at least 1 step, got every={every}")


START, TICKETS, SCANS = "start", "tickets", "scans.jsonl"
TELL_BELOW = 0.8
"""How many of the entries told last are left when it is told again."""


@dataclass(frozen=True)
class Pruning:
    """What pruning a model gave."""

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

    The budgets are numbers of entries left over all tables. Where the model has thresholds (`PEP`), those
    cut; else one is put on all its tables, which rises so that the smallest budget is met with the last
    step. Learned thresholds take as long as they take: what they have not met after all epochs is an
    error, and `resume=True` with more epochs goes on.

    By rows, which is the default, weight decay reaches the rows of a step only: a row that is never seen
    does not vanish by it. Validation rows only measure the tickets; nothing is picked.

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
    _put_thresholds(model, Silence() if resume else tell)
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
        facts=lambda: _measured(model, valid),
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
        raise TrainingError(_missed(missing[0], pruner, settings.epochs))
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

    The surviving entries start where they started before pruning (the winning ticket), or with
    start="build" where `build` has drawn them; all other weights are those of `build`. Everything else
    is as in `fit`.

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
    """Build a model and hold the entries that a ticket cuts at zero; the others start where it says.

    >>> ticket = Ticket({"0": torch.eye(3).bool()})
    >>> masked_model(lambda: nn.Sequential(nn.Embedding(3, 3)), ticket)(torch.tensor(1)).count_nonzero()
    tensor(1)
    """
    model = build()
    apply_(model, Masked(ticket), where=lambda info: info.name in ticket.kept, verbose=False)
    return model


def read_scans(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return what a pruning in a folder saw of its tables, look by look, in the order of the steps."""
    found: dict[int, dict[str, Any]] = {}
    path = Path(folder) / SCANS
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # a line that a killed process left half written
            scan = json.loads(line)
            found[scan["step"]] = scan  # a step that was made again has a second line
    return [found[step] for step in sorted(found)]


class TicketFolder(MutableMapping[int, Ticket]):
    """Tickets by their budgets, a folder each; one is there as a whole or not at all."""

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
    """Writes every look at the tables down, and tells how many entries are left."""

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
        self.last_told = float("inf")

    def __call__(self, step: int, left: int) -> None:
        scan: dict[str, Any] = {"step": step, "kept": left}
        if self.groups is not None:
            scan["by_frequency"] = self.groups.shares(thresholded_tables(self.model))
        self.seen.append(scan)
        if self.folder is not None:
            with (self.folder / SCANS).open("a", encoding="utf-8") as file:
                # the newline first: a killed process may have left half a line
                file.write("\n" + json.dumps(self.seen[-1]))
        if left <= TELL_BELOW * self.last_told:
            self.last_told = left
            missing = [f"{budget:,}" for budget in self.budgets if budget < left]
            to_go = f", next budget {missing[-1]}" if missing else ", all budgets met"
            self.tell.say(f"step {step:,}: {left:,} entries left{to_go}")


def _put_thresholds(model: nn.Module, tell: Progress) -> None:
    """Let one threshold cut all tables of a model that has none."""
    try:
        thresholded_tables(model)
    except NoTableError:
        tell.say(str(apply_(model, PEP(schedule="given"), verbose=False)))


def _start_values(model: nn.Module, place: Path | None, *, resume: bool) -> dict[str, Tensor]:
    """Return what the tables start from; with a folder it is saved there before anything is trained."""
    # a process may have been killed while it wrote them
    if place is not None and resume and (place / START / DESCRIPTION).exists():
        return load_ticket(place / START).start
    tables = thresholded_tables(model)
    start = {name: full_table(table.inner).cpu().clone() for name, table in tables.items()}
    if place is not None:
        if not resume and place.exists() and any(place.iterdir()):
            raise CheckpointError(
                f"{str(place)!r} holds a pruning already; go on with it by resume=True, or choose another "
                "folder"
            )
        every = {name: torch.ones_like(values, dtype=torch.bool) for name, values in start.items()}
        save_ticket(Ticket(every, start=start), place / START)
    return start


def _missed(budget: int, pruner: TablePruner, epochs: int) -> str:
    if isinstance(pruner, LearnedPruner):
        return (
            f"the learned thresholds have not met the budget of {budget:,} entries in {epochs} epochs; go "
            "on with more of them, or start higher, as with PEP(init=-8.0)"
        )
    return (
        f"the pruning in the folder has gone past the budget of {budget:,} entries, which it was not asked "
        "for at first; prune anew in another folder"
    )


def _measured(model: nn.Module, valid: Dataset | None) -> dict[str, Any]:
    """Return what the model is worth on validation rows at this moment, before it is trained again."""
    return {} if valid is None else {"valid_auc": evaluate(model, valid).auc}
