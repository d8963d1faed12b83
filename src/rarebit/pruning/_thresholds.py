"""Thresholds that cut the tables of a model while it is trained, and the budgets they meet.

    set_threshold_, count_nonzero, take_ticket    what thresholds leave of the tables of a model
    Pruner           a callback: one threshold for all tables rises on a schedule that meets the budgets
    LearnedPruner    a callback: thresholds are learned, and a budget is met once they leave so few entries

Both callbacks look at the tables at every 200th step, more often in a short pruning. They act only on the number of the
step and on the tables and remember nothing, so a resumed run goes the same way. The schedule lets the number of entries fall
by the same factor from look to look,

    k(p) = k₁ · (k₀ / k₁)^(1 - p)        p from 0 to 1 over the steps after the warm-up

from all entries k₀ to the smallest budget k₁; the threshold is the magnitude that leaves k(p) of them. Everything works on
looked-up chunks on the tables' device: no copy of a table is made.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from rarebit.callbacks import Callback
from rarebit.errors import NoTableError
from rarebit.pruning._ticket import Ticket, kth_largest, row_chunks
from rarebit.pruning.pep import FieldLevels, Level, ThresholdedStack, ThresholdedTable
from rarebit.settings import require
from rarebit.tables.find import find_sites
from rarebit.tables.table import full_table

__all__ = [
    "LearnedPruner",
    "Pruner",
    "TablePruner",
    "count_nonzero",
    "kth_largest_magnitude",
    "pruner_of",
    "set_threshold_",
    "take_ticket",
    "threshold_parameters",
    "thresholded_tables",
    "usual_interval",
]

EVERY = 200
"""Steps between two looks at the tables, at most."""
LOOKS = 40
"""Looks at the tables in a pruning that is short."""
WARM_UP = 0.1
"""The share of the steps before entries are cut: what is small at first says nothing yet."""


def set_threshold_(model: nn.Module, value: float | Tensor) -> None:
    """Set the threshold of all tables that have `PEP(schedule="given")`, in place.

    A tensor on the tables' device is copied without waiting for it.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(schedule="given"), verbose=False)
    >>> set_threshold_(model, 1e9)
    >>> count_nonzero(model)
    0
    """
    if not isinstance(value, Tensor):
        require(0 <= value < math.inf, f"a threshold must be 0 or more and finite, got {value}")
    given = [
        part.levels.value
        for part in model.modules()
        if isinstance(part, ThresholdedTable | ThresholdedStack)
        and isinstance(part.levels, Level | FieldLevels)
        and not isinstance(part.levels.value, nn.Parameter)
    ]
    if not given:
        raise NoTableError(
            'no table of the model has a threshold to set; apply_ PEP(schedule="given") first'
        )
    for threshold in given:
        threshold.copy_(value) if isinstance(value, Tensor) else threshold.fill_(value)


def threshold_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the learned thresholds of a model, each once.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(granularity="dimension"), verbose=False)
    >>> [tuple(parameter.shape) for parameter in threshold_parameters(model)]
    [(8,)]
    """
    found = {
        id(parameter): parameter
        for part in model.modules()
        if isinstance(part, ThresholdedTable | ThresholdedStack)
        for parameter in part.levels.parameters()
    }
    return list(found.values())


def thresholded_tables(model: nn.Module) -> dict[str, ThresholdedTable]:
    """Return the tables of a model that have `PEP`, by name; of a hashed table, that of its buckets.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(), verbose=False)
    >>> thresholded_tables(model)["0"].levels
    Embedding(100, 8)
    """
    found = {}
    for site in find_sites(model):
        parts = [part for part in site.table.modules() if isinstance(part, ThresholdedTable)]
        if parts:
            found[site.info.name] = parts[0]
    if not found:
        raise NoTableError("no table of the model has thresholds; apply_ PEP() first")
    return found


def count_nonzero(model: nn.Module) -> int:
    """Return how many entries the thresholds have left in all tables with `PEP`.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(), verbose=False)
    >>> count_nonzero(model)
    800
    """
    counts = [
        torch.count_nonzero(rows)
        for table in thresholded_tables(model).values()
        for rows in row_chunks(table)
    ]
    return int(sum(count.item() for count in counts))


def kth_largest_magnitude(model: nn.Module, k: int) -> Tensor:
    """Return the k-th largest |V| over all tables with `PEP`, exactly, as a tensor on their device.

    Set as the threshold, it leaves the entries above it: k - 1 of them, or fewer where some are equal to
    it, as happens among millions. So a budget of k entries is met, and never missed, with the one after:
    `kth_largest_magnitude(model, k + 1)`.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding.from_pretrained(torch.tensor([[3.0, -4.0, 0.5]]), freeze=False))
    >>> changes = apply_(model, PEP(schedule="given"), verbose=False)
    >>> kth_largest_magnitude(model, 2)
    tensor(3.)
    """
    return kth_largest([table.inner for table in thresholded_tables(model).values()], k)


def take_ticket(model: nn.Module, **facts: Any) -> Ticket:
    """Return which entries the thresholds have left, table by table, with facts that JSON can hold.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(), verbose=False)
    >>> take_ticket(model, step=0)
    Ticket(1 table, 800 of 800 entries, step=0)
    """
    kept = {
        name: torch.cat([(rows != 0).cpu() for rows in row_chunks(table)])
        for name, table in thresholded_tables(model).items()
    }
    return Ticket(kept, facts=facts)


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
        self.facts = options.get("facts", dict)
        self.watch = options.get("watch")
        tables = thresholded_tables(model).values()
        self.total = sum(table.num_embeddings * table.embedding_dim for table in tables)
        self.budgets = sorted(set(budgets), reverse=True)
        require(bool(budgets), "pruning needs at least one budget: how many entries to keep")
        least, most = self.budgets[-1], self.budgets[0]
        require(least >= 1, f"a budget must be at least 1 entry, got {least}")
        require(
            most < self.total,
            f"a budget must be below the {self.total:,} entries that the tables have, got {most:,}",
        )
        require(self.every >= 1, f"every must be at least 1 step, got every={self.every}")

    @abstractmethod
    def after_step(self, num_steps: int) -> bool:
        """Look at the tables after this step, from 1, if it is time to."""

    def _keep(self, budget: int, **facts: Any) -> None:
        found = take_ticket(self.model, budget=budget, **facts, **self.facts())
        self.tickets[budget] = Ticket(found.kept, levels=self._levels(), facts=found.facts)

    def _levels(self) -> dict[str, Tensor]:
        """Return the thresholds to keep, table by table."""
        return {}


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
        if self.watch is not None:
            self.watch(step, left)
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
        if self.watch is not None:
            self.watch(step, left)
        return left <= self.budgets[-1]

    def _levels(self) -> dict[str, Tensor]:
        found = {}
        for name, table in thresholded_tables(self.model).items():
            levels: Any = table.levels  # rows of them, or one value for all
            values = full_table(levels) if isinstance(levels, nn.Embedding) else levels.value
            found[name] = values.detach().to("cpu", copy=True)  # a copy: training continues
        return found


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
