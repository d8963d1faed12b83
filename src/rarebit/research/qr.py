r"""QR: two small tables, by quotient and by remainder, for one large one (Shi et al., 2020).

    Compositional Embeddings Using Complementary Partitions, https://arxiv.org/abs/1909.02107

    e(i) = R[i mod m] ∘ Q[i \ m]        ∘ is a product or a sum, entry by entry

    m    `QR.buckets`
    R    `PartedTable.inner`, m x D
    Q    `PartedTable.more[0]`, ceil(N / m) x D; i \ m is the whole part of i / m

No two ids have both the same quotient and the same remainder, so each has a row of its own, unlike in `hashing`. Rows are
combined id by id, before a bag pools them.

Not for tables of a few hundred rows: Q is then a large part of what is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, sqrt
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from rarebit.methods._sizing import plain_weights
from rarebit.research._compressors import PartedCompressor, PartedTable
from rarebit.settings import check_types, require
from rarebit.tables.table import AnyTable, full_table

__all__ = ["QR"]


@dataclass(frozen=True, kw_only=True)
class QR(PartedCompressor):
    """Combine a row for the remainder of an id with a row for its quotient.

    >>> QR(buckets=1000)
    QR(buckets=1000, combine='mult')
    """

    title: ClassVar[str] = "a row for the remainder times a row for the quotient"
    paper: ClassVar[str] = (
        "Shi et al., Compositional Embeddings Using Complementary Partitions, KDD 2020"
    )
    cost: ClassVar[str] = "two lookups and a product per row; m + N / m rows are stored, not N"
    applies: ClassVar[str] = "as a control for smaller tables in a study; not tables of a few rows"

    buckets: int
    """Number of remainders (m)."""
    combine: Literal["mult", "add"] = "mult"
    """How the two rows are combined: their product or their sum."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.buckets >= 1, f"buckets must be at least 1, got buckets={self.buckets}")

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the largest number of buckets, one for all tables, that keeps at most this share of the weights.

        >>> QR.for_share([(1000, 8), (50, 8)], share=0.5)
        QR(buckets=472, combine='mult')
        """
        plain_weights(shapes, share)
        most = max(rows for rows, _ in shapes)
        # fewest weights are stored at about the square root of the rows; from there on, more buckets store more
        few = range(1, isqrt(most) + 2)
        least = min(few, key=lambda size: cls(buckets=size).kept(shapes))
        return cls.largest(lambda size: cls(buckets=size), range(least, most + 1), shapes, share)

    def stored(self, rows: int, width: int) -> int:
        """Return the weights of both tables."""
        return (self.buckets + -(-rows // self.buckets)) * width

    def wrap(self, base: AnyTable) -> PartedTable:
        """Return two small tables whose rows combine to numbers of the variance of `base`."""
        weight = full_table(base)
        num_quotients = -(-len(weight) // self.buckets)
        remainders = weight[torch.arange(self.buckets, device=weight.device) % len(weight)]
        if self.combine == "mult":
            # NOTE[DIFF]: the authors' code draws both factors like a table, so that the product is close to zero;
            # here Q starts at one, and ids below m keep their rows
            return self.of_parts(base, remainders, torch.ones_like(weight[:num_quotients]))
        # two independent halves of the variance; the last rows are not among the first m of a table that shrinks
        quotients = weight[-num_quotients:].flip(0)
        return self.of_parts(base, remainders / sqrt(2), quotients / sqrt(2))

    def compute(
        self, ids: Tensor, parts: Sequence[nn.Module], width: int, sizes: Sequence[int | Tensor]
    ) -> Tensor:
        """Return R[i mod m] ∘ Q[i // m]."""
        del width, sizes
        low, high = parts[0](ids % self.buckets), parts[1](ids // self.buckets)
        rows: Tensor = low * high if self.combine == "mult" else low + high
        return rows
