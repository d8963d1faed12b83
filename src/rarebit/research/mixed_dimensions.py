"""Mixed dimensions: narrower rows in longer tables (Ginart et al., 2021).

    Mixed Dimension Embeddings, https://arxiv.org/abs/1909.11810

    e(i) = W[i] P        d = D (n / N)^a, rounded, from 1 to D

    N, D    rows and width of the table
    n       `MixedDimensions.full`: a table with so many rows or fewer keeps its width
    a       `MixedDimensions.alpha`
    W       `LowRankTable.inner`, N x d
    P       `LowRankTable.right`, d x D

A field has one value per example, so 1 / N is how popular a row of its table is on average: the width is a power of the
popularity. W starts at the first d columns of the table and P at N(0, 1 / d), so a row has the variance of the table.

Not for models whose tables have about the same number of rows: all would get the same width, as with `low-rank`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import nn

from rarebit.methods.low_rank import LowRankTable
from rarebit.research._compressors import Compressor
from rarebit.settings import check_types, require
from rarebit.tables.table import AnyTable, full_table, is_trainable, plain_like

__all__ = ["MixedDimensions"]


@dataclass(frozen=True, kw_only=True)
class MixedDimensions(Compressor):
    """Give a table a width by how popular its rows are, and project to the width of the model.

    >>> MixedDimensions(full=100)
    MixedDimensions(full=100.0, alpha=0.3)
    """

    title: ClassVar[str] = "narrower rows in longer tables"
    paper: ClassVar[str] = (
        "Ginart et al., Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation Systems, ISIT 2021"
    )
    cost: ClassVar[str] = "one small product per row and step; (N + D) d weights, not N D"
    applies: ClassVar[str] = "as a control for smaller tables of very different length in a study"
    excludes: ClassVar[Mapping[str, str]] = {
        "fresh-tables": "its factors start in their own way and would be redrawn in another; use one of them",
        "pruned": Compressor.excludes["pruned"],
    }

    full: float
    """A table with so many rows or fewer keeps its width (n). The paper takes those of the shortest table of the model."""
    alpha: float = 0.3
    """How fast the width falls with the number of rows: 0 is not at all."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.full > 0, f"full must be above 0, got full={self.full}")
        require(self.alpha > 0, f"alpha must be above 0, got alpha={self.alpha}")

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the method with the most rows of full width that keeps at most this share of the weights.

        >>> MixedDimensions.for_share([(1000, 8), (50, 8)], share=0.5)
        MixedDimensions(full=62.5, alpha=0.3)
        """
        most = max((rows for rows, _ in shapes), default=1)
        sizes = range(-400, 1)  # steps of 4 %
        return cls.largest(
            lambda step: cls(full=float(f"{most * 2 ** (step / 16):.3g}")), sizes, shapes, share
        )

    def width_of(self, rows: int, width: int) -> int:
        """Return d for a table of this shape."""
        return max(round(width * math.pow(min(self.full / rows, 1.0), self.alpha)), 1)

    def stored(self, rows: int, width: int) -> int:
        """Return the weights of W and P."""
        return (rows + width) * self.width_of(rows, width)

    def wrap(self, base: AnyTable) -> LowRankTable:
        """Return a narrower table and its projection."""
        # NOTE[DIFF]: the paper may also split a table into blocks of rows by frequency; here a table has one width
        weight = full_table(base)
        width = self.width_of(*weight.shape)
        inner = plain_like(base, weight[:, :width].clone(), padding_idx=base.padding_idx)
        right = weight.new_empty(width, base.embedding_dim).normal_(std=width**-0.5)
        return LowRankTable(self, inner, nn.Parameter(right, requires_grad=is_trainable(base)))
