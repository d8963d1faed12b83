"""Modulo hashing: ids that leave the same remainder share a row (Weinberger et al., 2009).

    e(i) = W[i mod m]

    m   `Hashing.buckets`
    W   `HashedTable.inner`, m rows

The simplest way to a smaller table and the control for every cleverer one. A bucket starts as the
row of the same number, so the ids below `buckets` keep what they had. Apply it before other methods:
they then work on the buckets. Applied after one, it keeps rows and folds the method into them.

Not for small tables: two frequent ids in one bucket hurt both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rarebit.settings import check_types, require
from rarebit.tables.stack import Stack, stack_tables
from rarebit.tables.table import (
    AnyTable,
    Method,
    Table,
    full_table,
    methods_of,
    plain_like,
    unsuited,
    wrap,
)

__all__ = ["HashedStack", "HashedTable", "Hashing"]


@dataclass(frozen=True, kw_only=True)
class Hashing(Method):
    """Let ids share rows by remainder: a table of `buckets` rows for any number of ids.

    >>> Hashing(buckets=1000)
    Hashing(buckets=1000)
    """

    buckets: int
    """Rows that are kept."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.buckets >= 1, f"buckets must be at least 1, got buckets={self.buckets}")

    def wrap(self, base: AnyTable) -> "HashedTable":
        """Return a table that keeps the first `buckets` rows of `base`."""
        inner = plain_like(base, full_table(base)[: self.buckets].clone())
        return HashedTable(self, inner, base.num_embeddings, base.padding_idx)

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return hashed tables behind one lookup."""
        return HashedStack(self, tables, lengths)

    def unsuited(self, rows: int, width: int) -> str | None:
        """A table with fewer rows than buckets would not shrink."""
        del width
        return None if rows >= self.buckets else f"no more than {self.buckets} rows"


class HashedTable(Table):
    """A table whose ids share rows by remainder."""

    def __init__(
        self, method: Hashing, inner: AnyTable, num_embeddings: int, padding_idx: int | None
    ) -> None:
        super().__init__(
            method,
            inner,
            num_embeddings=num_embeddings,
            embedding_dim=inner.embedding_dim,
            padding_idx=padding_idx,
        )
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
        """Return a hashed table whose buckets have the method: ids are hashed before all else."""
        assert isinstance(self.method, Hashing)
        inner = wrap(self.inner, method)
        return HashedTable(self.method, inner, self.num_embeddings, self.padding_idx)

    def unsuited(self, method: Method) -> str | None:
        """What is applied later works on the buckets, so it must suit them."""
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
