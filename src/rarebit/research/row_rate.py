"""Row rate: rare rows learn more slowly, and are drawn nowhere (a control; see `shrinkage`).

    e(i) = w_i u_i        u_i(0) = e(i)(0) / w_i        w_i = n_i / (n_i + c)

    n_i    `RatedTable.evidence.counts`: how often training saw the id
    c      `RowRate.c`
    u_i    `RatedTable.inner`, N x D; it gets the gradient of e(i) as it is, without the factor w_i

A step that moves u_i by so much moves e(i) by w_i times as much, whatever the optimizer makes of the
gradient: each row has w_i of the learning rate. A factor on the gradient would do that under SGD alone, for
Adam divides it out again. An id never seen has a rate of zero. Weight decay acts on u_i, so it holds rare rows
more strongly than one learning rate a row would, and as strongly as shrinkage does.

Held against this one, shrinkage shows what its prior does; this one held against plain tables shows what
slower rare rows do. Not for use by itself: it is there to be compared with.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rarebit.errors import UnsupportedTableError
from rarebit.methods._shrinkage_counts import Counts, counts_of_all, counts_of_table
from rarebit.methods._shrinkage_parts import (
    CountedStack,
    CountedTable,
    Evidence,
    counted_in,
    unknown_counts,
)
from rarebit.settings import check_types, require
from rarebit.tables.stack import Stack
from rarebit.tables.table import AnyTable, Method, Pair, Table, full_table, plain_like, wrap

__all__ = ["RatedStack", "RatedTable", "RowRate"]

ALONE = "a row's rate is one of a plain table's row; merge first, or use one of the two"
SETS = "the same rows are slow in every set"


@dataclass(frozen=True, kw_only=True)
class RowRate(Method):
    """Let a row learn at n / (n + c) of the learning rate, n being how often it was seen.

    >>> RowRate(c=30)
    RowRate(c=30.0)
    """

    title: ClassVar[str] = "rows of rare ids at a lower learning rate"
    paper: ClassVar[str] = "none: a control for shrinkage that slows rare rows and has no prior"
    control: ClassVar[str] = "baseline"
    cost: ClassVar[str] = (
        "a step looks up one number beside each row; until it is merged, a table stores one number more "
        "a row"
    )
    applies: ClassVar[str] = (
        "beside shrinkage, to tell slower rare rows from the prior they are drawn to; not by itself"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"c": (30.0, 3.0, 100.0, 10.0, 300.0)}
    training_only: ClassVar[bool] = True
    min_width: ClassVar[int] = 1
    """First-order weights are slowed as well."""
    pairs: ClassVar[Mapping[str, Pair]] = {
        **{
            name: Pair(allowed=False, words=ALONE)
            for name in (
                "low-rank",
                "masked",
                "mlet",
                "pep",
                "product-start",
                "pruned",
                "quantize",
                "row-rate",
                "shrinkage",
            )
        },
        "hashing": Pair(allowed=True, words="a bucket's rate is by the counts of all its ids"),
        "aligned-sets": Pair(allowed=True, words=SETS),
        "multi-embedding": Pair(allowed=True, words=SETS),
        "shared-sets": Pair(allowed=True, words=SETS),
    }
    pairs_before: ClassVar[Mapping[str, Pair]] = {
        **{
            name: Pair(allowed=False, words=ALONE)
            for name in (
                "aligned-sets",
                "hashing",
                "low-rank",
                "masked",
                "mlet",
                "multi-embedding",
                "pep",
                "product-start",
                "pruned",
                "shared-sets",
                "shrinkage",
            )
        },
        "quantize": Pair(
            allowed=True, words="the table is folded first, and its rows are quantised"
        ),
    }

    counts: Counts | None = field(default=None, repr=False, compare=False)
    """How often training saw each id, as in `Shrinkage`. None: `set_counts_` gives them before training."""
    c: float = 10.0
    """How often an id must be seen to have half of the learning rate."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 <= self.c < math.inf, f"c must be 0 or more and finite, got c={self.c}")
        if isinstance(self.counts, int):
            require(self.counts >= 0, f"counts must be 0 or more, got counts={self.counts}")

    def with_counts(self, counts: Counts) -> "RowRate":
        """Return the method with counts, such as those of the data it is used on: `train.counts()`."""
        return replace(self, counts=counts)

    def wrap(self, base: AnyTable) -> "RatedTable":
        """Return the table with rates for its rows; counts by name are for `apply_` on a model."""
        require(
            not isinstance(self.counts, Mapping),
            "counts by name are of several tables; use apply_ on the model",
        )
        if not isinstance(base, nn.Embedding):
            raise UnsupportedTableError(f"{self} takes a plain table, got {base}; merge it first")
        inner = plain_like(base, base.weight.detach().clone(), padding_idx=base.padding_idx)
        strength = base.weight.detach().new_full((1,), self.c)
        evidence = Evidence(unknown_counts(base), strength, is_known=False)
        table = RatedTable(replace(self, counts=None), inner, evidence)
        if self.counts is not None:
            table.set_counts_(counts_of_table("table", base.num_embeddings, self.counts))
        return table

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return each table with rates by the counts that are given under its name."""
        counts = {} if self.counts is None else counts_of_all(tables, self.counts)
        made = {name: wrap(table, replace(self, counts=None)) for name, table in tables.items()}
        for name, given in counts.items():
            for rated in counted_in(made[name]):
                rated.set_counts_(given)
        return list(made.values())

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return the tables behind one lookup of their rows and one of their counts."""
        return RatedStack(self, [t for t in tables if isinstance(t, RatedTable)], lengths)


class RatedTable(CountedTable):
    """A table whose rows learn at rates of their own."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i u_i."""
        ids = ids.long()
        return _rated(self.inner(ids), self.evidence.weights(ids, torch.zeros_like(ids)))

    @torch.no_grad()
    def set_counts_(self, counts: Tensor) -> None:
        """Replace the counts `(N,)`, in place; the rows that are handed out stay as they are."""
        assert isinstance(self.inner, nn.Embedding)
        rows = full_table(self)
        super().set_counts_(counts)
        ids = torch.arange(self.num_embeddings, device=rows.device)
        weights = self.evidence.weights(ids, torch.zeros_like(ids))  # (N, 1)
        self.inner.weight.copy_(rows / _or_one(weights))


class RatedStack(CountedStack):
    """Tables with rates for their rows behind one lookup of their rows and one of their counts."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i u_i of the rows of each field."""
        return _rated(self.inner(ids), self.weights(ids))

    def split(self) -> list[AnyTable]:
        """Return the tables one by one."""
        parts = zip(self.inner.split(), self.evidence.split(self.sizes), strict=True)
        return [RatedTable(self.method, *part) for part in parts]


class _Rated(torch.autograd.Function):
    """The product with a gradient that leaves the factor out; none where the factor is zero."""

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
    """Return the factors, one where they are zero: a row that does not move is stored as it is."""
    return torch.where(weights > 0, weights, 1.0)
