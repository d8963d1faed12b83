"""Cut the tables of a model while it is trained, and take a ticket at every budget.

    Pruner           one threshold for all tables, raised on a schedule that meets the budgets
    LearnedPruner    thresholds that are learned: a budget is met once they have left so few entries

Both are called after each step with its number. At every 200th they look at the tables, more often in a
short pruning, and there they do what the number and the tables say: they remember nothing, so a run that is
taken up again goes the same way.

The schedule lets the number of entries fall by the same factor from look to look,

    k(p) = k₁ · (k₀ / k₁)^(1 - p)        p from 0 to 1 over the steps after the warm-up

from all entries k₀ to the smallest budget k₁, and the threshold is the magnitude that leaves k(p) of them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from rarebit.methods._budget import (
    count_nonzero,
    kth_largest_magnitude,
    set_threshold_,
    take_ticket,
    threshold_parameters,
    thresholded_tables,
)
from rarebit.settings import require
from rarebit.tables.table import full_table
from rarebit.tables.ticket import Ticket

__all__ = [
    "EVERY",
    "LearnedPruner",
    "Pruner",
    "PrunerOptions",
    "TablePruner",
    "pruner_of",
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


class TablePruner(ABC):
    """What a loop calls after each step; true once there is no budget left to meet."""

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
    def __call__(self, step: int) -> bool:
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

    >>> from rarebit.methods.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(schedule="given"), verbose=False)
    >>> pruner = Pruner(model, [400, 100], steps=1000)
    >>> [pruner(step) for step in range(1, 1001)][-1], count_nonzero(model)
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

    def __call__(self, step: int) -> bool:
        """Cut to what the schedule says, and to each budget that was passed since the last look."""
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

    >>> from rarebit.methods.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(init=0.0), verbose=False)
    >>> pruner = LearnedPruner(model, [700, 600])
    >>> pruner(200), sorted(pruner.tickets)
    (True, [600, 700])
    """

    def __call__(self, step: int) -> bool:
        """Count, and take the tickets of the budgets that are met."""
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
