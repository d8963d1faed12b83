"""CAFE: own rows for hot ids, shared rows for all others (Zhang et al., 2024).

    CAFE: Towards Compact, Adaptive, and Fast Embedding, https://arxiv.org/abs/2312.03256

    e(i) = W[i]                          i < h, a hot id
    e(i) = W[h + (i - h) mod (m - h)]    all others

    m    `CAFE.buckets`, the rows of W
    h    `CAFE.hot` of them, rounded down
    W    `PartedTable.inner`, m x D

NOTE[DIFF]: in the paper a sketch finds hot ids in training, by the norms of their gradients, and a row moves when its id becomes hot
or cold. Here hot ids are the lowest ones: encoded and generated logs number values from the most frequent one on, by their training
counts. So this is CAFE with the right answer of its sketch for data that does not drift, and without the cost of the sketch.

Not for ids in another order, nor for a log that drifts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from rarebit.research._compressors import PartedCompressor, PartedTable
from rarebit.settings import check_types, require
from rarebit.tables.table import AnyTable, full_table

__all__ = ["CAFE"]


@dataclass(frozen=True, kw_only=True)
class CAFE(PartedCompressor):
    """Give frequent ids a row of their own, and let all others share the remaining rows.

    >>> CAFE(buckets=1000)
    CAFE(buckets=1000, hot=0.7)
    """

    title: ClassVar[str] = "own rows for frequent ids, shared rows for all others"
    paper: ClassVar[str] = (
        "Zhang et al., CAFE: Towards Compact, Adaptive, and Fast Embedding for Large-scale Recommendation Models, SIGMOD 2024"
    )
    cost: ClassVar[str] = "one remainder per id and step; table and optimizer state shrink"
    applies: ClassVar[str] = (
        "as a control for smaller tables in a study; ids must be numbered from the most frequent one on"
    )

    buckets: int
    """Number of rows to keep, of hot ids and shared ones (m)."""
    hot: float = 0.7
    """Share of these rows that belong to hot ids, one each."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.buckets >= 1, f"buckets must be at least 1, got buckets={self.buckets}")
        require(0 <= self.hot < 1, f"hot must be from 0 to less than 1, got hot={self.hot}")

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the largest number of rows, one for all tables, that keeps at most this share of the weights.

        >>> CAFE.for_share([(1000, 8), (50, 8)], share=0.5)
        CAFE(buckets=475, hot=0.7)
        """
        sizes = range(1, max((rows for rows, _ in shapes), default=1) + 1)
        return cls.largest(lambda size: cls(buckets=size), sizes, shapes, share)

    def stored(self, rows: int, width: int) -> int:
        """Return the weights of the rows that are kept."""
        del rows
        return self.buckets * width

    def wrap(self, base: AnyTable) -> PartedTable:
        """Return a table that keeps the first `buckets` rows of `base`."""
        return self.of_parts(base, full_table(base)[: self.buckets].clone())

    def compute(
        self, ids: Tensor, parts: Sequence[nn.Module], width: int, sizes: Sequence[int | Tensor]
    ) -> Tensor:
        """Return W[i] of hot ids, and the shared rows of all others."""
        del width, sizes
        num_hot = int(self.buckets * self.hot)
        shared = num_hot + (ids - num_hot) % (self.buckets - num_hot)
        rows: Tensor = parts[0](torch.where(ids < num_hot, ids, shared))
        return rows
