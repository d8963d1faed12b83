"""TT-Rec: a table as a train of three small tensors (Yin et al., 2021).

    TT-Rec: Tensor Train Compression for Deep Learning Recommendation Models, https://arxiv.org/abs/2101.11714

    e(i) = G1[i1] G2[i2] G3[i3]        i = (i1 n2 + i2) n3 + i3

    G1      `PartedTable.inner`, n1 x d1 R
    G2      `PartedTable.more[0]`, n2 x R d2 R
    G3      `PartedTable.more[1]`, n3 x R d3
    R       `TTRec.rank`
    n, d    the factors of rows and width: n1 n2 n3 >= N and d1 d2 d3 = D, as equal as can be

Only the rows of the ids asked for are computed. Every number of a core is N(0, σ²) with (σ³ R)² the mean square of the table,
so the product of the cores has that of the table.

Not where a step must be fast: two small products per row take longer than a lookup. Ids that share two digits share most of their row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import ClassVar, Self

from torch import Tensor, nn

from rarebit.research._compressors import PartedCompressor, PartedTable
from rarebit.settings import check_types, require
from rarebit.tables.table import AnyTable, full_table

__all__ = ["TTRec"]


@dataclass(frozen=True, kw_only=True)
class TTRec(PartedCompressor):
    """Compute rows as products of three small matrices.

    >>> TTRec(rank=8)
    TTRec(rank=8)
    """

    title: ClassVar[str] = "a table as a train of three small tensors"
    paper: ClassVar[str] = (
        "Yin et al., TT-Rec: Tensor Train Compression for Deep Learning Recommendation Models, MLSys 2021"
    )
    cost: ClassVar[str] = (
        "three lookups and two small products per row; about 3 N^(1/3) D^(1/3) R^2 weights, not N D"
    )
    applies: ClassVar[str] = "as a control for very small tables in a study; not for a fast step"

    rank: int
    """Width of the train (R)."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.rank >= 1, f"rank must be at least 1, got rank={self.rank}")

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the largest rank, one for all tables, that keeps at most this share of the weights.

        >>> TTRec.for_share([(1000, 8), (50, 8)], share=0.5)
        TTRec(rank=12)
        """
        most = max((rows * width for rows, width in shapes), default=1)
        return cls.largest(lambda rank: cls(rank=rank), range(1, most + 1), shapes, share)

    def stored(self, rows: int, width: int) -> int:
        """Return the weights of the cores."""
        (n1, n2, n3), (d1, d2, d3) = row_factors(rows), width_factors(width)
        return n1 * d1 * self.rank + n2 * d2 * self.rank**2 + n3 * d3 * self.rank

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return n2 and n3."""
        return row_factors(rows)[1:]

    def wrap(self, base: AnyTable) -> PartedTable:
        """Return random cores whose product has the mean square of `base`."""
        weight, r = full_table(base), self.rank
        rows, (d1, d2, d3) = row_factors(len(weight)), width_factors(base.embedding_dim)
        # NOTE[DIFF]: the paper draws normal numbers again where they are close to zero, to make the product less heavy in
        # its tails; here they are plain ones
        scale = (weight.double().square().mean().sqrt() / r) ** (1 / 3)
        widths = (d1 * r, r * d2 * r, r * d3)
        shapes = zip(rows, widths, strict=True)
        cores = (weight.new_empty(shape).normal_() for shape in shapes)
        return self.of_parts(base, *(core * scale.to(weight.dtype) for core in cores))

    def compute(
        self, ids: Tensor, parts: Sequence[nn.Module], width: int, sizes: Sequence[int | Tensor]
    ) -> Tensor:
        """Return G1[i1] G2[i2] G3[i3]."""
        del width
        n2, n3 = sizes
        g1 = parts[0](ids // (n2 * n3)).unflatten(-1, (-1, self.rank))  # (..., d1, R)
        g2 = parts[1](ids // n3 % n2).unflatten(-1, (self.rank, -1))  # (..., R, d2 R)
        g3 = parts[2](ids % n3).unflatten(-1, (self.rank, -1))  # (..., R, d3)
        left = (g1 @ g2).unflatten(-1, (-1, self.rank)).flatten(-3, -2)  # (..., d1 d2, R)
        rows: Tensor = (left @ g3).flatten(-2)
        return rows


def row_factors(rows: int) -> tuple[int, int, int]:
    """Return three numbers with a product of at least `rows`, the smallest in the middle, where it costs most.

    >>> row_factors(1000), row_factors(11)
    ((10, 10, 10), (2, 2, 3))
    """
    most = ceil(round(rows ** (1 / 3), 9))
    middle = ceil(round(sqrt(rows / most), 9))
    least = -(-rows // (most * middle))
    return middle, least, most


def width_factors(width: int) -> tuple[int, int, int]:
    """Return three numbers with a product of `width`, the smallest in the middle.

    >>> width_factors(16), width_factors(7)
    ((2, 2, 4), (1, 1, 7))
    """
    most = next(d for d in range(1, width + 1) if width % d == 0 and d**3 >= width)
    rest = width // most
    middle = next(d for d in range(1, rest + 1) if rest % d == 0 and d * d >= rest)
    low, middle, most = sorted((rest // middle, middle, most))
    return middle, low, most
