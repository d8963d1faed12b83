"""PEP: thresholds cut single entries off a table while it is trained (Liu et al., ICLR 2021).

    V̂ = S(V, s) = sign(V) · relu(|V| - g(s))        g(s) = 1 / (1 + e⁻ˢ)                        (8)

    V    `ThresholdedTable.inner`, N x D
    s    `ThresholdedTable.levels`: one number, or one per column, row, entry or field
    V̂    what a lookup returns

    dV = dV̂ · 1{V̂ ≠ 0}        ds = -g'(s) · Σ sign(V) · dV̂ · 1{V̂ ≠ 0}                          (11)

with the sum over the entries that share s. A cut entry gets no gradient: only a falling threshold brings it back. A step
touches only the rows and thresholds of the looked-up ids.

Weight decay raises the learned thresholds: from s = -15, Adam with a decay of 1e-5 alone needs 8,600 steps to s = -7, and in
float32 g(-150) and its derivative are zero. The loss holds thresholds back only where its gradient, which has the factor g'(s),
reaches the decay's; `spread` shows whether it did. So `optimizer` puts them in a group with a separate decay. With
schedule="given" one threshold t replaces g(s), and `set_threshold_` sets it.

Two callbacks scan the tables during training and take a ticket at each budget:

    Pruner           raises one threshold for all tables on a schedule that meets the budgets
    LearnedPruner    takes a ticket once learned thresholds leave few enough entries

Both scan at every 200th step, more often in a short pruning. They depend only on the number of the step and on the tables,
and have no state, so a resumed run takes the same course. On the schedule the number of entries falls by the same factor
from scan to scan,

    k(p) = k₁ · (k₀ / k₁)^(1 - p)        p from 0 to 1 over the steps after the warm-up

from all entries k₀ to the smallest budget k₁; the threshold is the magnitude that leaves k(p) of them, and lower for a table
that would be empty: an empty table never learns. Thresholds that would cut a whole table at the start begin below its
weights, and a table that learned ones overtake later is named after the epoch. A scan looks up chunks of rows on the
tables' device and makes no copy of a table.

Not for tables that are not trained any more: there, cut the smallest entries at once (`pruned`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.optim import Optimizer

from rarebit.callbacks import Callback, TrainingData
from rarebit.errors import NoTableError, warn
from rarebit.machine import require_memory
from rarebit.pruning.masked import Ticket, find_borders, kth_largest
from rarebit.settings import check_types, require
from rarebit.tables.apply import find_sites
from rarebit.tables.collection import (
    PlainStack,
    Stack,
    find_distinct,
    gather,
    has_fixed_sizes,
    is_traced,
    stack_tables,
)
from rarebit.tables.table import (
    AnyTable,
    Method,
    Shared,
    Table,
    full_table,
    grow_table,
    is_trainable,
    plain_like,
    row_chunks,
)
from rarebit.technique import Rank, Technique, technique_text

__all__ = ["PEP"]

Granularity = Literal[
    "global", "dimension", "feature", "feature_dimension", "field", "field_dimension"
]

INIT = -15.0


@dataclass(frozen=True, kw_only=True, repr=False)
class PEP(Method):
    """Learn thresholds below which the entries of a table are zero, or set one for all tables.

    >>> PEP(granularity="dimension")
    PEP(granularity='dimension', init=-15.0)
    >>> PEP(schedule="given")
    PEP(schedule='given')
    """

    title: ClassVar[str] = "single entries cut off by thresholds while the table is trained"
    paper: ClassVar[str] = (
        "Liu et al., Learnable Embedding Sizes for Recommender Systems, ICLR 2021"
    )
    control: ClassVar[str] = "magnitude"
    cost: ClassVar[str] = (
        "a step looks up a threshold with each entry, so with one per entry a table and its optimizer state "
        "are twice as large in training; a given threshold costs one comparison per entry"
    )
    applies: ClassVar[str] = (
        "tables that must become much smaller, above all where rows differ in how much they need"
    )
    training_only: ClassVar[bool] = True
    composition_rank: ClassVar[Rank] = Rank.MASKS
    follows: ClassVar[frozenset[str]] = frozenset({"masked"})
    masks_entries: ClassVar[bool] = True

    granularity: Granularity = "feature_dimension"
    """Entries that share a learned threshold: "global" all entries of all tables, "dimension" those of a column of all
    tables, "field" and "field_dimension" the same within each table, "feature" those of a row, "feature_dimension" none."""
    init: float = INIT
    """Initial value of the learned s; g(-15) is 3e-7, so nothing is cut at first."""
    schedule: Literal["given"] | None = None
    """"given": no threshold is learned; all tables share one, which is 0 until `set_threshold_` sets it."""
    decay: float | None = None
    """Weight decay of the learned s; `threshold_weight_decay` of the optimizer if not given. A small one lets the loss hold
    thresholds back, so that they differ; a large one meets budgets soon, by nearly equal thresholds."""

    def __post_init__(self) -> None:
        check_types(self)
        given = (self.granularity, self.init, self.decay)
        require(
            self.schedule is None or given == ("feature_dimension", INIT, None),
            f"granularity, init and decay are for learned thresholds, and schedule={self.schedule!r} has none; "
            "leave them out, or leave out schedule",
        )
        require(
            self.decay is None or self.decay >= 0,
            f"decay must be 0 or more, got decay={self.decay}",
        )

    def __repr__(self) -> str:
        if self.schedule is not None:
            return f"PEP(schedule={self.schedule!r})"
        decay = "" if self.decay is None else f", decay={self.decay!r}"
        return f"PEP(granularity={self.granularity!r}, init={self.init!r}{decay})"

    def make_control(self, name: str, techniques: Sequence[Technique]) -> None:
        """Refuse pruning by magnitude without a budget."""
        require(
            name != "magnitude" or any("magnitude" in one.controls for one in techniques),
            f"pruning by magnitude needs a budget: use {technique_text(self)}+pruned:keep=10000, or name "
            "another control, such as --control baseline",
        )

    def wrap(self, base: AnyTable) -> "ThresholdedTable":
        """Return the table with its entries cut, started from its rows."""
        inner = base
        if isinstance(base, nn.Embedding):
            inner = plain_like(base, base.weight.detach(), padding_idx=base.padding_idx)
        return ThresholdedTable(self, inner, self._initial_levels(base))

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return the tables with their entries cut; thresholds that would leave nothing of a table start lower."""
        made = super().wrap_all(tables)
        cut = {
            name: found
            for name, table in zip(tables, made, strict=True)
            for found in _cut_in(table)
        }
        starts = {name: _lower_start(table) for name, table in cut.items()}
        lower = {name: start for name, start in starts.items() if start is not None}
        if self.granularity in ("global", "dimension"):  # thresholds of all tables
            lower = dict.fromkeys(lower, min(lower.values())) if len(lower) == len(cut) else {}
        for name, start in lower.items():
            nn.init.constant_(next(cut[name].levels.parameters()), start)
        if lower:
            warn(
                f"{self} would cut every entry of {', '.join(map(repr, lower))} before the first step, and what is cut "
                f"never learns; thresholds there start at {min(lower.values()):.3g} or more, below the weights. Use "
                "a lower init, or larger initial weights"
            )
        return made

    def callback(self) -> Callback | None:
        """Return what reports tables that learned thresholds leave empty."""
        return None if self.schedule is not None else _EmptyTables()

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return thresholded tables behind one lookup of their rows and one of their thresholds."""
        cut = [table for table in tables if isinstance(table, ThresholdedTable)]
        return ThresholdedStack(self, cut, lengths)

    def cut_at(self, levels: Tensor) -> Tensor:
        """Return the thresholds: g(s), or the given one."""
        return torch.sigmoid(levels) if self.schedule is None else levels

    def _initial_levels(self, base: AnyTable) -> nn.Module:
        like = next(base.parameters())
        if self.schedule is not None:
            return Level(like.new_zeros(1))
        width = base.embedding_dim if self.granularity.endswith("dimension") else 1
        if self.granularity.startswith("feature"):
            require_memory(
                base.num_embeddings * width * like.itemsize,
                f"a threshold for each of {base.num_embeddings:,} x {width} entries",
                'use granularity="field_dimension", or leave the table out with where=',
                like.device,
            )
            return plain_like(base, like.new_full((base.num_embeddings, width), self.init))
        levels = like.new_full((width,), self.init)
        value = nn.Parameter(levels, requires_grad=is_trainable(base))
        is_per_field = self.granularity.startswith("field")
        return Level(value) if is_per_field else Shared((self, width), value)


class ThresholdedTable(Table):
    """A table whose entries are soft-thresholded."""

    optimizer_groups: ClassVar[Mapping[str, str]] = {"levels": "thresholds"}

    def __init__(self, method: PEP, inner: AnyTable, levels: nn.Module) -> None:
        super().__init__(method, inner)
        self.levels = levels  # s
        self.threshold_weight_decay = method.decay

    def rows(self, ids: Tensor) -> Tensor:
        """Return S(V, s) of these rows."""
        assert isinstance(self.method, PEP)
        return soft_threshold(self.inner(ids), self.method.cut_at(self.levels(ids)))

    def grown(self, start: Tensor) -> "ThresholdedTable":
        """Return the table with more ids, longer by the thresholds that will cut them: what is cut never learns."""
        assert isinstance(self.method, PEP)
        levels = self.levels
        own = levels(torch.arange(0, device=start.device))  # thresholds of the table, or none
        if isinstance(levels, nn.Embedding):
            own = start.new_full((len(start), levels.embedding_dim), self.method.init)
            levels = grow_table(levels, own)
        longer = start + start.sign() * self.method.cut_at(own.detach())
        return ThresholdedTable(self.method, grow_table(self.inner, longer), levels)


class ThresholdedStack(Stack):
    """Thresholded tables behind one lookup of their rows and one of their thresholds."""

    optimizer_groups: ClassVar[Mapping[str, str]] = {"levels": "thresholds"}

    def __init__(
        self, method: PEP, tables: Sequence[ThresholdedTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method = method
        self.threshold_weight_decay = method.decay
        self.inner = stack_tables([table.inner for table in tables], lengths)
        levels = [table.levels for table in tables]
        rows = [level for level in levels if isinstance(level, nn.Embedding)]
        each = [level for level in levels if isinstance(level, Level)]
        if rows:
            self.levels: nn.Module = PlainStack(rows, lengths)
        else:
            self.levels = FieldLevels(each, lengths) if each else levels[0]

    def rows(self, ids: Tensor) -> Tensor:
        """Return S(V_f, s_f) of the rows of each field f."""
        inner, levels = self.inner, self.levels
        if has_fixed_sizes(ids) or not isinstance(inner, PlainStack):
            return soft_threshold(inner(ids), self.method.cut_at(levels(ids)))
        # read and cut each distinct row once
        found = find_distinct((ids + inner.offsets).reshape(-1))
        if isinstance(levels, PlainStack):
            own = gather(levels.embedding, found.ids, levels.gradient_memory)
        elif isinstance(levels, FieldLevels):
            ends = found.ids.new_tensor([*accumulate(inner.sizes)])
            own = F.embedding(torch.searchsorted(ends, found.ids, right=True), levels.value)
        else:
            assert isinstance(levels, Shared)
            own = levels.value
        rows = gather(inner.embedding, found.ids, inner.gradient_memory)  # (U, D)
        cut = soft_threshold(rows, self.method.cut_at(own))
        return F.embedding(found.slot_of, cut).view(*ids.shape, cut.shape[1])

    def split(self) -> list[AnyTable]:
        """Return the thresholded tables one by one."""
        inner = self.inner.split()
        levels = self.levels
        each = levels.split() if isinstance(levels, Stack | FieldLevels) else [levels] * len(inner)
        return [ThresholdedTable(self.method, *pair) for pair in zip(inner, each, strict=True)]


class Level(nn.Module):
    """The threshold of all rows of a table, `(1,)` or one per column `(D,)`."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        if isinstance(value, nn.Parameter):
            self.value = value
        else:
            self.register_buffer("value", value)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the threshold, whatever the ids."""
        del ids
        return self.value


class FieldLevels(Level):
    """The thresholds of F tables, `(F, 1)` or `(F, D)`, returned per slot."""

    field_of_slot: Tensor

    def __init__(self, levels: Sequence[Level], lengths: Sequence[int]) -> None:
        first = levels[0].value
        value = torch.stack([level.value.detach() for level in levels])
        if isinstance(first, nn.Parameter):
            value = nn.Parameter(value, requires_grad=first.requires_grad)
        super().__init__(value)
        field_of_slot = torch.repeat_interleave(torch.tensor(tuple(lengths)))
        self.register_buffer("field_of_slot", field_of_slot, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the thresholds of the slots, `(S, 1)` or `(S, D)`."""
        del ids
        return self.value[self.field_of_slot]

    def split(self) -> list[Level]:
        """Return the thresholds of each table; memory is shared, not copied."""
        if not isinstance(self.value, nn.Parameter):
            return [Level(row) for row in self.value]
        trained = self.value.requires_grad
        return [Level(nn.Parameter(row, requires_grad=trained)) for row in self.value.detach()]


def _cut(rows: Tensor, thresholds: Tensor) -> Tensor:
    return rows - torch.clamp(rows, -thresholds, thresholds)


class _SoftThreshold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, thresholds: Tensor) -> Tensor:
        cut = _cut(rows, thresholds)
        ctx.save_for_backward(cut)
        ctx.shape = thresholds.shape
        return cut

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        (cut,) = ctx.saved_tensors
        of_thresholds = None
        if ctx.needs_input_grad[1]:
            of_thresholds = (cut.sign() * gradient).neg_().sum_to_size(ctx.shape)
        return gradient * (cut != 0), of_thresholds


def soft_threshold(rows: Tensor, thresholds: Tensor) -> Tensor:
    """Return sign(V) · relu(|V| - t), with the gradients of equation 11; t must not be negative."""
    if is_traced(rows):
        # the same gradients; the compiler keeps no more than it needs
        return _cut(rows, thresholds)
    cut: Tensor = _SoftThreshold.apply(rows, thresholds)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return cut


SCAN_INTERVAL = 200
"""Steps between two scans, at most."""
SCANS = 40
"""Scans in a short pruning."""
WARM_UP = 0.1
"""The share of the steps before entries are cut: small entries say nothing yet."""


def set_threshold_(model: nn.Module, value: float | Tensor) -> None:
    """Set the threshold of all tables that have `PEP(schedule="given")`, in place.

    A tensor on the tables' device is copied without a sync.

    >>> from rarebit import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(schedule="given"), verbose=False)
    >>> set_threshold_(model, 1e9)
    >>> int(torch.count_nonzero(model[0].weight))
    0
    """
    if not isinstance(value, Tensor):
        require(0 <= value < math.inf, f"a threshold must be 0 or more and finite, got {value}")
    given = [
        part.levels.value
        for part in model.modules()
        if isinstance(part, ThresholdedTable | ThresholdedStack)
        and isinstance(part.levels, Level)
        and not isinstance(part.levels.value, nn.Parameter)
    ]
    if not given:
        raise NoTableError(
            'no table of the model has a threshold to set; apply_ PEP(schedule="given") first'
        )
    for threshold in given:
        threshold.copy_(value) if isinstance(value, Tensor) else threshold.fill_(value)


def _cut_in(table: nn.Module) -> list[ThresholdedTable]:
    """Return the thresholded tables inside a table: one at most, under its buckets."""
    return [part for part in table.modules() if isinstance(part, ThresholdedTable)]


def _lower_start(table: ThresholdedTable) -> float | None:
    """Return an s that leaves a tenth of the entries at least, where the thresholds leave none and one would."""
    assert isinstance(table.method, PEP)
    if table.method.schedule is not None or any(bool(rows.any()) for rows in row_chunks(table)):
        return None
    there = sum(int(torch.count_nonzero(rows)) for rows in row_chunks(table.inner))
    if not there:
        return None  # nothing to cut: `apply_` warns
    below = float(kth_largest([table.inner], -(-there // 10))) / 2
    return math.log(below) - math.log1p(-below)


def empty_tables(model: nn.Module) -> list[str]:
    """Return the names of tables that thresholds leave without an entry."""
    tables = thresholded_tables(model).items()
    return [name for name, table in tables if not any(bool(r.any()) for r in row_chunks(table))]


class _EmptyTables(Callback):
    """Looks after each epoch for tables that learned thresholds have cut off as a whole, and reports them."""

    def start(self, model: nn.Module, data: TrainingData) -> None:
        del data
        self.model, self.warned = model, set[str]()

    def between_epochs(self, epoch: int, optimizer: Optimizer) -> None:
        del optimizer
        empty = [name for name in empty_tables(self.model) if name not in self.warned]
        self.warned.update(empty)
        if empty:
            warn(
                f"the thresholds of PEP leave no entry of {', '.join(map(repr, empty))} after epoch {epoch}, so it no "
                "longer learns; use a lower init or less weight decay of the thresholds, or leave the table out"
            )

    def report(self) -> dict[str, Any]:
        empty = empty_tables(self.model)
        return {"empty_tables": empty} if empty else {}


def threshold_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the learned thresholds of a model, each once."""
    found = {
        id(parameter): parameter
        for part in model.modules()
        if isinstance(part, ThresholdedTable | ThresholdedStack)
        for parameter in part.levels.parameters()
    }
    return list(found.values())


def thresholded_tables(model: nn.Module) -> dict[str, ThresholdedTable]:
    """Return the tables of a model that have `PEP`, by name; for a hashed table, that of its buckets."""
    found = {}
    for site in find_sites(model):
        for part in _cut_in(site.table):
            found[site.info.name] = part
    if not found:
        raise NoTableError("no table of the model has thresholds; apply_ PEP() first")
    return found


def count_nonzero(model: nn.Module) -> int:
    """Return how many entries the thresholds leave in all tables with `PEP`."""
    tables = thresholded_tables(model).values()
    counts = [torch.count_nonzero(rows) for table in tables for rows in row_chunks(table)]
    return int(sum(count.item() for count in counts))


def kth_largest_magnitude(model: nn.Module, k: int) -> Tensor:
    """Return the k-th largest |V| over all tables with `PEP`, exactly, as a tensor on their device.

    As the threshold it leaves k - 1 entries, or fewer where some are equal to it. So the value for k + 1 meets a
    budget of k entries.
    """
    return kth_largest([table.inner for table in thresholded_tables(model).values()], k)


def take_ticket(model: nn.Module, **facts: Any) -> Ticket:
    """Return the entries that the thresholds leave in each table, with facts that JSON can hold.

    >>> from rarebit import apply_
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


def check_budgets(budgets: Sequence[int], total: int) -> list[int]:
    """Return the distinct budgets, the largest first, or raise unless all are below the entries of the tables."""
    require(bool(budgets), "pruning needs at least one budget: how many entries to keep")
    least, most = min(budgets), max(budgets)
    require(least >= 1, f"a budget must be at least 1 entry, got {least}")
    require(
        most < total,
        f"a budget must be below the {total:,} entries that the tables have, got {most:,}",
    )
    return sorted(set(budgets), reverse=True)


class TablePruner(Callback, ABC):
    """A callback that scans tables every few steps, takes tickets, and ends training after the last budget.

    steps      how long pruning takes; `LearnedPruner` needs it only for the default of `every`
    every      steps between two scans
    tickets    where to keep tickets, by budget
    facts      what else to store in a ticket, called when it is taken
    watch      called with the step and the entries left, at every scan
    """

    def __init__(
        self,
        model: nn.Module,
        budgets: Sequence[int],
        *,
        steps: int | None = None,
        every: int | None = None,
        tickets: dict[int, Ticket] | None = None,
        facts: Callable[[], Mapping[str, Any]] = dict,
        watch: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        usual = SCAN_INTERVAL if steps is None else max(min(SCAN_INTERVAL, steps // SCANS), 1)
        self.model, self.facts, self.watch = model, facts, watch
        self.every = usual if every is None else every
        self.tickets = {} if tickets is None else tickets
        """The tickets taken so far, by budget."""
        tables = thresholded_tables(model).values()
        self.total = sum(table.num_embeddings * table.embedding_dim for table in tables)
        self.budgets = check_budgets(budgets, self.total)
        require(self.every >= 1, f"every must be at least 1 step, got every={self.every}")

    @abstractmethod
    def after_step(self, num_steps: int) -> bool:
        """Scan the tables after this step, from 1, if it is time to."""


class Pruner(TablePruner):
    """Raises the threshold of `PEP(schedule="given")` so that the last step meets the last budget.

    >>> from rarebit import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(schedule="given"), verbose=False)
    >>> pruner = Pruner(model, [400, 100], steps=1000)
    >>> [pruner.after_step(step) for step in range(1, 1001)][-1], count_nonzero(model)
    (True, 100)
    >>> pruner.tickets[400].facts["step"]
    400
    """

    def __init__(
        self, model: nn.Module, budgets: Sequence[int], *, steps: int, **options: Any
    ) -> None:
        super().__init__(model, budgets, steps=steps, **options)
        require(steps >= 1, f"pruning needs at least one step, got steps={steps}")
        self.steps = steps

    def entries_after(self, step: int) -> int:
        """Return how many entries the schedule leaves after this step."""
        begin, last = WARM_UP * self.steps, self.budgets[-1]
        done = min(max((step - begin) / (self.steps - begin), 0.0), 1.0)
        return round(last * math.pow(self.total / last, 1.0 - done))

    def after_step(self, num_steps: int) -> bool:
        """Cut to each budget that the schedule has passed since the last scan, then to the schedule."""
        if num_steps > self.steps:
            return True
        if num_steps % self.every and num_steps != self.steps:
            return False
        left = self.entries_after(num_steps)
        before = self.entries_after((num_steps - 1) // self.every * self.every)
        met = [budget for budget in self.budgets if left <= budget < before]
        for budget in met:
            facts = {"budget": budget, "step": num_steps, "threshold": float(self._cut(budget))}
            self.tickets[budget] = take_ticket(self.model, **facts, **self.facts())
        if left not in met:
            self._cut(left)
        self.watch(num_steps, left)
        return num_steps >= self.steps

    def _cut(self, left: int) -> Tensor:
        """Set the thresholds that leave so many entries, of each table at least one, or fewer where some are equal."""
        tables = list(thresholded_tables(self.model).values())
        threshold, others = find_borders([table.inner for table in tables], left)
        set_threshold_(self.model, threshold)
        for index, lower in others.items():
            next(tables[index].levels.buffers()).copy_(lower)
        return threshold


class LearnedPruner(TablePruner):
    """Counts the entries that learned thresholds leave, and takes a ticket once a budget is met.

    >>> from rarebit import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(init=0.0), verbose=False)
    >>> pruner = LearnedPruner(model, [700, 600])
    >>> pruner.after_step(200), sorted(pruner.tickets)
    (True, [600, 700])
    """

    def after_step(self, num_steps: int) -> bool:
        """Count, and take the tickets of the budgets that are met."""
        if num_steps % self.every:
            return False
        left = count_nonzero(self.model)
        for budget in self.budgets:
            if left <= budget and budget not in self.tickets:
                levels = self._levels()
                facts = {"budget": budget, "step": num_steps, **spread(levels)}
                found = take_ticket(self.model, **facts, **self.facts())
                found.levels = levels
                self.tickets[budget] = found
        self.watch(num_steps, left)
        return left <= self.budgets[-1]

    def _levels(self) -> dict[str, Tensor]:
        """Return a copy of the thresholds of each table: training continues."""
        found = {}
        for name, table in thresholded_tables(self.model).items():
            levels: Any = table.levels  # a row per id, or one value for all
            values = full_table(levels) if isinstance(levels, nn.Embedding) else levels.value
            found[name] = values.detach().to("cpu", copy=True)
        return found


def spread(levels: Mapping[str, Tensor]) -> dict[str, float]:
    """Return mean and standard deviation of learned s, and of the thresholds g(s): a spread near 0 is one threshold.

    >>> spread({"user": torch.tensor([[-1.0], [1.0]])})["std_s"]
    1.0
    """
    found: dict[str, float] = {}
    values = torch.cat([level.reshape(-1).double() for level in levels.values()])
    for name, each in (("s", values), ("threshold", torch.sigmoid(values))):
        std, mean = torch.std_mean(each, correction=0)
        found |= {f"mean_{name}": float(mean), f"std_{name}": float(std)}
    return found


def pruner_of(model: nn.Module, budgets: Sequence[int], **options: Any) -> TablePruner:
    """Return the pruner for the thresholds that the tables of a model have."""
    kind = LearnedPruner if threshold_parameters(model) else Pruner
    return kind(model, budgets, **options)
