"""Row rate: rows of rare ids learn more slowly, without a prior (a control for `shrinkage`).

    e(i) = w_i u_i        u_i(0) = e(i)(0) / w_i        w_i = n_i / (n_i + c)

    n_i    `RatedTable.evidence.counts`: how often training saw the id
    c      `RowRate.c`
    u_i    `RatedTable.inner`, N x D; it gets the gradient of e(i) without the factor w_i

A step that moves u_i moves e(i) by w_i times as much, whatever the optimizer: each row has w_i of the learning rate. A factor
on the gradient would do so under SGD only: Adam divides it out again. An id never seen has a rate of zero. Weight decay acts
on u_i, so it decays rare rows more strongly than a learning rate per row would, and as strongly as shrinkage does.

A learning rate by frequency is also what Qiu et al. (https://arxiv.org/abs/2505.05605) use against overfitting in later epochs.
NOTE[DIFF]: their rate has another form, which their abstract does not give; here it is the weight of shrinkage, for the comparison.

Shrinkage compared with this method shows the effect of its prior; this method compared with plain tables shows that of slower
rare rows. Only for comparisons.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rarebit.errors import UnsupportedTableError
from rarebit.methods._counts import CountedMethod, CountedStack, CountedTable, Evidence
from rarebit.settings import require
from rarebit.tables.collection import Stack
from rarebit.tables.table import AnyTable, Table, full_table, grow_table, plain_like
from rarebit.technique import Rank

__all__ = ["RatedTable", "RowRate"]


@dataclass(frozen=True, kw_only=True)
class RowRate(CountedMethod):
    """Train each row at n / (n + c) of the learning rate; n is how often training saw the id.

    >>> RowRate(c=30)
    RowRate(c=30.0)
    """

    title: ClassVar[str] = "rows of rare ids at a lower learning rate"
    paper: ClassVar[str] = "none: a control for shrinkage that slows rare rows and has no prior"
    cost: ClassVar[str] = (
        "one more lookup per row and step; one more stored number per row until merged"
    )
    applies: ClassVar[str] = "to separate slower rare rows from the prior of shrinkage in a study"
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"c": (30.0, 3.0, 100.0, 10.0, 300.0)}
    composition_rank: ClassVar[Rank] = Rank.FACTORS
    excludes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("shrinkage", "masked", "pep", "pruned"),
        "a row rate is for the rows of a plain table; merge first, or use one of the two",
    )

    c: float = 10.0
    """How often training must see an id to give it half of the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.c < math.inf, f"c must be 0 or more and finite, got c={self.c}")

    def strength_of(self, name: str) -> float:
        """Return c, the same for all tables."""
        del name
        return self.c

    def wrap(self, base: AnyTable) -> "RatedTable":
        """Return the table with a rate per row; counts by name need `apply_` on a model."""
        if not isinstance(base, nn.Embedding):
            raise UnsupportedTableError(f"{self} takes a plain table, got {base}; merge it first")
        inner = plain_like(base, base.weight.detach().clone(), padding_idx=base.padding_idx)
        table = RatedTable(replace(self, counts=None), inner, Evidence.unknown(base, self.c))
        self._set_own_counts_(table)
        return table

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return the tables behind one lookup of their rows and one of their counts."""
        return RatedStack(self, [t for t in tables if isinstance(t, RatedTable)], lengths)


class RatedTable(CountedTable):
    """A table with a learning rate per row."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i u_i."""
        ids = ids.long()
        return _rated(self.inner(ids), self.weights(ids))

    def grown(self, start: Tensor) -> "RatedTable":
        """Return the table with more ids; their count is 0, so they learn once `set_counts_` says otherwise."""
        inner, evidence = grow_table(self.inner, start), self.evidence.grown(len(start))
        return RatedTable(self.method, inner, evidence)

    @torch.no_grad()
    def set_counts_(self, counts: Tensor) -> None:
        """Replace the counts `(N,)`, in place; lookups return the same rows as before."""
        assert isinstance(self.inner, nn.Embedding)
        rows = full_table(self)
        super().set_counts_(counts)
        ids = torch.arange(self.num_embeddings, device=rows.device)
        self.inner.weight.copy_(rows / _or_one(self.weights(ids)))


class RatedStack(CountedStack):
    """Rated tables behind one lookup of their rows and one of their counts."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i u_i of the rows of each field."""
        return _rated(self.inner(ids), self.weights(ids))

    def split(self) -> list[AnyTable]:
        """Return the tables one by one."""
        parts = zip(self.inner.split(), self.evidence.split(self.sizes), strict=True)
        return [RatedTable(self.method, *part) for part in parts]


class _Rated(torch.autograd.Function):
    """The product, with a gradient without the factor; zero where the factor is zero."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights > 0)
        return own * _or_one(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (moves,) = ctx.saved_tensors
        return gradient * moves, None


def _rated(own: Tensor, weights: Tensor) -> Tensor:
    rows: Tensor = _Rated.apply(own, weights)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return rows


def _or_one(weights: Tensor) -> Tensor:
    """Return the factors, with one in place of zero: a row that never moves is stored unchanged."""
    return torch.where(weights > 0, weights, 1.0)
