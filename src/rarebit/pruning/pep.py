"""PEP: thresholds cut single entries off a table while it is trained (Liu et al., ICLR 2021).

    V̂ = S(V, s) = sign(V) · relu(|V| - g(s))        g(s) = 1 / (1 + e⁻ˢ)                        (8)

    V    `ThresholdedTable.inner`, N x D
    s    `ThresholdedTable.levels`: one number, or one for each column, row, entry or field
    V̂    what a lookup hands out

    dV = dV̂ · 1{V̂ ≠ 0}        ds = -g'(s) · Σ sign(V) · dV̂ · 1{V̂ ≠ 0}                          (11)

with the sum over the entries that share s. An entry that is cut gets no gradient: only a threshold that
falls brings it back. Rows and thresholds of the looked-up ids are touched, no others.

Weight decay, not the loss, moves the learned thresholds: from s = -15, Adam with a decay of 1e-5 needs 8,600
steps to s = -7 on its own, and in float32 g(-150) and its derivative are zero. So `optimizer` gives them a
group of their own with its own decay. With schedule="given" there is one threshold t in place of g(s), which
whoever trains sets by `set_threshold_`.

Not for tables that are looked up once and never trained again: there, cut the smallest entries at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rarebit.settings import check_types, require
from rarebit.tables.distinct import find_distinct
from rarebit.tables.stack import PlainStack, Stack, gather, stack_tables
from rarebit.tables.table import (
    AnyTable,
    Method,
    Shared,
    Table,
    is_trainable,
    plain_like,
)
from rarebit.technique import Rank, Technique, technique_text

__all__ = [
    "PEP",
    "FieldLevels",
    "Granularity",
    "Level",
    "ThresholdedStack",
    "ThresholdedTable",
    "soft_threshold",
]

Granularity = Literal[
    "global", "dimension", "feature", "feature_dimension", "field", "field_dimension"
]

INIT = -15.0


@dataclass(frozen=True, kw_only=True, repr=False)
class PEP(Method):
    """Learn thresholds below which the entries of a table are zero, or cut by one that is given.

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
        "a step looks up a threshold beside each entry, so with one for each entry a table and its "
        "optimizer state are twice as large in training; a given threshold costs one comparison an entry"
    )
    applies: ClassVar[str] = (
        "tables that must end with few numbers, above all where rows differ in how much they need; not "
        "where zeros save nothing, as in a table that is stored whole"
    )
    training_only: ClassVar[bool] = True
    composition_rank: ClassVar[Rank] = Rank.MASKS
    follows: ClassVar[frozenset[str]] = frozenset({"masked"})
    masks_entries: ClassVar[bool] = True

    granularity: Granularity = "feature_dimension"
    """Entries that share a learned threshold: "global" all entries of all tables, "dimension" those of a
    column of all tables, "field" and "field_dimension" the same within each table, "feature" those of a
    row, "feature_dimension" none."""
    init: float = INIT
    """Where the learned s start; g(-15) is 3e-7, so that nothing is cut at first."""
    schedule: Literal["given"] | None = None
    """"given": no threshold is learned; there is one for all tables, 0 until `set_threshold_` sets it."""

    def __post_init__(self) -> None:
        check_types(self)
        require(math.isfinite(self.init), f"init must be finite, got init={self.init}")
        learned = (self.granularity, self.init) != ("feature_dimension", INIT)
        require(
            self.schedule is None or not learned,
            f"granularity and init are of learned thresholds, and schedule={self.schedule!r} has none; "
            "leave them out, or leave out schedule",
        )

    def __repr__(self) -> str:
        if self.schedule is not None:
            return f"PEP(schedule={self.schedule!r})"
        return f"PEP(granularity={self.granularity!r}, init={self.init!r})"

    def make_control(self, name: str, techniques: Sequence[Technique]) -> None:
        """Refuse a control that needs a budget, where there is none."""
        require(
            name != "magnitude" or any("magnitude" in one.controls for one in techniques),
            f"pruning by magnitude needs a budget: use {technique_text(self)}+pruned:keep=10000, or name "
            "another control, such as --control baseline",
        )

    def wrap(self, base: AnyTable) -> "ThresholdedTable":
        """Return the table with its entries cut, started from the rows it has."""
        inner = base
        if isinstance(base, nn.Embedding):
            inner = plain_like(base, base.weight.detach(), padding_idx=base.padding_idx)
        return ThresholdedTable(self, inner, self._first_levels(base))

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return thresholded tables behind one lookup of their rows and one of their thresholds."""
        cut = [table for table in tables if isinstance(table, ThresholdedTable)]
        return ThresholdedStack(self, cut, lengths)

    def cut_at(self, levels: Tensor) -> Tensor:
        """Return the thresholds: g(s), or what is given."""
        return torch.sigmoid(levels) if self.schedule is None else levels

    def _first_levels(self, base: AnyTable) -> nn.Module:
        like, trained = next(base.parameters()), is_trainable(base)
        if self.schedule is not None:
            return Level(like.new_zeros(1))
        width = base.embedding_dim if self.granularity.endswith("dimension") else 1
        if self.granularity.startswith("feature"):
            levels = like.new_full((base.num_embeddings, width), self.init)
            return plain_like(base, levels)
        value = nn.Parameter(like.new_full((width,), self.init), requires_grad=trained)
        return (
            Level(value) if self.granularity.startswith("field") else Shared((self, width), value)
        )


class ThresholdedTable(Table):
    """A table whose entries are drawn towards zero by thresholds, and are zero below them."""

    optimizer_groups: ClassVar[Mapping[str, str]] = {"levels": "thresholds"}

    def __init__(self, method: PEP, inner: AnyTable, levels: nn.Module) -> None:
        super().__init__(
            method,
            inner,
            num_embeddings=inner.num_embeddings,
            embedding_dim=inner.embedding_dim,
            padding_idx=inner.padding_idx,
        )
        self.levels = levels  # s

    def rows(self, ids: Tensor) -> Tensor:
        """Return S(V, s) of these rows."""
        assert isinstance(self.method, PEP)
        return soft_threshold(self.inner(ids), self.method.cut_at(self.levels(ids)))


class ThresholdedStack(Stack):
    """Thresholded tables behind one lookup of their rows and one of their thresholds."""

    optimizer_groups: ClassVar[Mapping[str, str]] = {"levels": "thresholds"}

    def __init__(
        self, method: PEP, tables: Sequence[ThresholdedTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method = method
        self.inner = stack_tables([table.inner for table in tables], lengths)
        self.levels = _stack_levels([table.levels for table in tables], lengths)

    def rows(self, ids: Tensor) -> Tensor:
        """Return S(V_f, s_f) of the rows of each field f."""
        fixed_sizes = ids.device.type != "cpu" or torch.compiler.is_compiling()
        if isinstance(self.inner, PlainStack) and not fixed_sizes:
            return self._rows_of_distinct(ids, self.inner)
        return soft_threshold(self.inner(ids), self.method.cut_at(self.levels(ids)))

    def _rows_of_distinct(self, ids: Tensor, inner: PlainStack) -> Tensor:
        """Return the same, with each row that is looked up several times read and cut once."""
        found = find_distinct((ids + inner.offsets).reshape(-1))
        levels = self._levels_of_distinct(found.ids, inner)
        rows = gather(inner.embedding, found.ids, inner.gradient_memory)  # (U, D)
        cut = soft_threshold(rows, self.method.cut_at(levels))
        return F.embedding(found.slot_of, cut).view(*ids.shape, cut.shape[1])

    def _levels_of_distinct(self, ids: Tensor, inner: PlainStack) -> Tensor:
        """Return the thresholds of rows of the stack, `(U,)` to `(U, 1)` or `(U, D)`, or of all."""
        levels = self.levels
        if isinstance(levels, PlainStack):
            return gather(levels.embedding, ids, levels.gradient_memory)
        if isinstance(levels, FieldLevels):
            ends = ids.new_tensor([*accumulate(inner.sizes)])
            return F.embedding(torch.searchsorted(ends, ids, right=True), levels.value)
        assert isinstance(levels, Shared)
        return levels.value

    def split(self) -> list[AnyTable]:
        """Return the thresholded tables one by one."""
        inner = self.inner.split()
        levels = self.levels
        each = levels.split() if isinstance(levels, Stack | FieldLevels) else [levels] * len(inner)
        return [ThresholdedTable(self.method, *pair) for pair in zip(inner, each, strict=True)]


class Level(nn.Module):
    """The threshold of all rows of a table, `(1,)` or one for each column `(D,)`."""

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


class FieldLevels(nn.Module):
    """The thresholds of several tables, `(F, 1)` or `(F, D)`, handed out for each slot."""

    value: Tensor
    field_of_slot: Tensor

    def __init__(self, levels: Sequence[Level], lengths: Sequence[int]) -> None:
        super().__init__()
        first = levels[0].value
        value = torch.stack([level.value.detach() for level in levels])
        if isinstance(first, nn.Parameter):
            self.value = nn.Parameter(value, requires_grad=first.requires_grad)
        else:
            self.register_buffer("value", value)
        field_of_slot = torch.repeat_interleave(torch.tensor(tuple(lengths)))
        self.register_buffer("field_of_slot", field_of_slot, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the thresholds of the slots, `(S, 1)` or `(S, D)`."""
        del ids
        return self.value[self.field_of_slot]

    def split(self) -> list[Level]:
        """Return the thresholds table by table."""
        if isinstance(self.value, nn.Parameter):
            trained = self.value.requires_grad
            rows = self.value.detach()
            return [Level(nn.Parameter(row, requires_grad=trained)) for row in rows]
        return [Level(row) for row in self.value]


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
    """Return sign(V) · relu(|V| - t), with the gradients of equation 11; t must not be negative.

    >>> soft_threshold(torch.tensor([0.5, -2.0, 1.0]), torch.tensor(1.0))
    tensor([ 0., -1.,  0.])
    """
    if torch.compiler.is_compiling():
        # the same gradients; the compiler keeps no more than it needs
        return _cut(rows, thresholds)
    cut: Tensor = _SoftThreshold.apply(rows, thresholds)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return cut


def _stack_levels(levels: Sequence[nn.Module], lengths: Sequence[int]) -> nn.Module:
    rows = [level for level in levels if isinstance(level, nn.Embedding)]
    if rows:
        return PlainStack(rows, lengths)
    each = [level for level in levels if isinstance(level, Level)]
    return FieldLevels(each, lengths) if each else levels[0]
