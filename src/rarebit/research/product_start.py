"""Product start: a plain table that starts where MLET starts (a control for `mlet`).

    e(i) = W[i]        W(0) = W1 W2

    W         `StartedTable.inner`, N x D
    W1, W2    the fresh factors that `MLET` would draw from the same random state

A table trained as a product differs from a plain one in its initial scale and in its updates. MLET compared with this method
shows the effect of the updates; this method compared with plain tables shows the effect of the start. Only for comparisons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rarebit.methods.mlet import MLET, fold, fresh_factors
from rarebit.settings import check_types
from rarebit.tables.collection import Stack, stack_tables
from rarebit.tables.table import AnyTable, Method, Table, grow_table, plain_like
from rarebit.technique import Rank

__all__ = ["ProductStart"]


@dataclass(frozen=True, kw_only=True)
class ProductStart(Method):
    """Start a plain table at the product of the factors that `MLET` would draw.

    >>> ProductStart(inner_dim=32)
    ProductStart(inner_dim=32, std=0.25)
    """

    title: ClassVar[str] = "a plain table started at the product of MLET's factors"
    paper: ClassVar[str] = "none: a control for MLET with the same start and plain training"
    cost: ClassVar[str] = "nothing: the same as a plain table"
    applies: ClassVar[str] = "to separate the start of MLET from its training in a study"
    training_only: ClassVar[bool] = True
    composition_rank: ClassVar[Rank] = Rank.FACTORS

    inner_dim: int = 64
    """Inner width of the factors, as in `MLET`."""
    std: float = 0.25
    """Standard deviation of the projection, as in `MLET`."""

    def __post_init__(self) -> None:
        check_types(self)
        MLET(inner_dim=self.inner_dim, std=self.std)  # has the same limits

    def wrap(self, base: AnyTable) -> "StartedTable":
        """Return a table of the same shape that starts at a product."""
        weight = fold(*fresh_factors(base, self.inner_dim, self.std))
        return StartedTable(self, plain_like(base, weight, padding_idx=base.padding_idx))

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return the tables behind one lookup."""
        return StartedStack(self, tables, lengths)


class StartedTable(Table):
    """A plain table that knows how it started."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return W[i]."""
        rows: Tensor = self.inner(ids)
        return rows

    def grown(self, start: Tensor) -> "StartedTable":
        """Return the table with more ids."""
        return StartedTable(self.method, grow_table(self.inner, start))


class StartedStack(Stack):
    """Started tables behind one lookup."""

    def __init__(
        self, method: ProductStart, tables: Sequence[Table], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method = method
        self.inner = stack_tables([table.inner for table in tables], lengths)

    def rows(self, ids: Tensor) -> Tensor:
        """Return W_f[i] for each field f."""
        rows: Tensor = self.inner(ids)
        return rows

    def split(self) -> list[AnyTable]:
        """Return the tables one by one."""
        return [StartedTable(self.method, table) for table in self.inner.split()]
