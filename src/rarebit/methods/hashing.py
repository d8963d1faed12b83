"""Modulo hashing: ids with the same remainder share a row (Weinberger et al., 2009).

    e(i) = W[i mod m]

    m   `Hashing.buckets`
    W   `HashedTable.inner`, m rows

The simplest way to a smaller table, and the control for all other ways. A bucket starts as the row with the same number, so
ids below `buckets` keep their rows. Apply it before other methods: they then work on the buckets.

Not for small tables: two frequent ids in one bucket hurt both.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from rarebit.methods._sizing import plain_weights, too_small
from rarebit.settings import check_types, require
from rarebit.tables.collection import Stack, stack_tables
from rarebit.tables.table import (
    AnyTable,
    Method,
    Table,
    full_table,
    grow_table,
    methods_of,
    plain_like,
    unsuited,
    wrap,
)
from rarebit.technique import Rank

__all__ = ["HashedTable", "Hashing"]


@dataclass(frozen=True, kw_only=True)
class Hashing(Method):
    """Let ids share rows by remainder: a table of `buckets` rows for any number of ids.

    >>> Hashing(buckets=1000)
    Hashing(buckets=1000)
    """

    title: ClassVar[str] = "ids with the same remainder share a row"
    paper: ClassVar[str] = (
        "Weinberger et al., Feature Hashing for Large Scale Multitask Learning, ICML 2009"
    )
    control: ClassVar[str] = "narrow"
    cost: ClassVar[str] = "one remainder per id and step; table and optimizer state shrink"
    applies: ClassVar[str] = (
        "tables with many rare ids; not small tables: frequent ids would collide"
    )
    composition_rank: ClassVar[Rank] = Rank.HASHING

    buckets: int
    """Number of rows to keep."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.buckets >= 1, f"buckets must be at least 1, got buckets={self.buckets}")

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the largest number of buckets, one for all tables, that keeps at most this share of the weights.

        >>> Hashing.for_share([(1000, 8), (50, 8)], share=0.5)
        Hashing(buckets=475)
        """
        total = plain_weights(shapes, share)

        def kept(buckets: int) -> float:
            return sum(min(buckets, rows) * width for rows, width in shapes) / total

        most = max(rows for rows, _ in shapes)
        buckets = bisect_right(range(1, most + 1), share, key=kept)
        if buckets == 0:
            raise too_small("hashing", share, least=kept(1))
        return cls(buckets=buckets)

    def wrap(self, base: AnyTable) -> "HashedTable":
        """Return a table that keeps the first `buckets` rows of `base`."""
        inner = plain_like(base, full_table(base)[: self.buckets].clone())
        return HashedTable(self, inner, base.num_embeddings, base.padding_idx)

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return hashed tables behind one lookup."""
        return HashedStack(self, tables, lengths)

    def shape_after(self, rows: int, width: int) -> tuple[int, int]:
        """The next method works on the buckets."""
        return min(self.buckets, rows), width

    def unsuited(self, rows: int, width: int) -> str | None:
        """A table with fewer rows than buckets would not become smaller."""
        del width
        return None if rows >= self.buckets else f"no more than {self.buckets} rows"


class HashedTable(Table):
    """A table whose ids share rows by remainder."""

    def __init__(
        self, method: Hashing, inner: AnyTable, num_embeddings: int, padding_idx: int | None
    ) -> None:
        super().__init__(method, inner, num_embeddings=num_embeddings, padding_idx=padding_idx)
        self.buckets = method.buckets  # m

    def rows(self, ids: Tensor) -> Tensor:
        """Return W[i mod m]."""
        rows: Tensor = self.inner(ids % self.buckets)
        return rows

    @property
    def methods(self) -> tuple[Method, ...]:
        """Hashing comes first: what is applied later works on the buckets."""
        return (self.method, *methods_of(self.inner))

    def receive(self, method: Method) -> Table:
        """Return a hashed table whose buckets have the method: hashing always comes first."""
        return self._with(wrap(self.inner, method))

    def served(self) -> "HashedTable":
        """Return a table with the same buckets for inference."""
        return self if isinstance(self.inner, nn.Embedding) else self._with(self.inner.served())

    def grown(self, start: Tensor) -> "HashedTable":
        """Return the table with more ids; they share the buckets, of which there are no more than before."""
        ids, inner = self.num_embeddings + len(start), self.inner
        missing = min(ids, self.buckets) - inner.num_embeddings
        assert isinstance(self.method, Hashing)
        if missing > 0:  # a table smaller than its buckets
            inner = grow_table(inner, start[:missing])
        return HashedTable(self.method, inner, ids, self.padding_idx)

    def _with(self, inner: AnyTable) -> "HashedTable":
        assert isinstance(self.method, Hashing)
        return HashedTable(self.method, inner, self.num_embeddings, self.padding_idx)

    def merge(self) -> nn.Embedding:
        """Return a plain table with a row per id, from the merged buckets."""
        inner = self.inner if isinstance(self.inner, nn.Embedding) else self.inner.merge()
        buckets = inner.weight.detach()
        ids = torch.arange(self.num_embeddings, device=buckets.device)
        weight = buckets.index_select(0, ids % self.buckets)  # (N, D)
        if self.padding_idx is not None:
            weight[self.padding_idx] = 0.0
        return plain_like(self, weight, padding_idx=self.padding_idx)

    def unsuited(self, method: Method) -> str | None:
        """Later methods must suit the buckets."""
        return unsuited(self.inner, method)


class HashedStack(Stack):
    """Hashed tables behind one lookup of their buckets."""

    def __init__(self, method: Hashing, tables: Sequence[Table], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.method = method
        self.shapes = [(table.num_embeddings, table.padding_idx) for table in tables]
        self.inner = stack_tables([table.inner for table in tables], lengths)

    def rows(self, ids: Tensor) -> Tensor:
        """Return W_f[i mod m] for each field f."""
        rows: Tensor = self.inner(ids % self.method.buckets)
        return rows

    def split(self) -> list[AnyTable]:
        """Return the hashed tables one by one."""
        inner = zip(self.inner.split(), self.shapes, strict=True)
        return [HashedTable(self.method, table, *shape) for table, shape in inner]
