r"""ROBE: one small array of weights, from which a hash takes the blocks of each row (Desai et al., 2022).

    Random Offset Block Embedding Array, https://arxiv.org/abs/2108.02191

    e(i)[d] = g(i, b) M[h(i, b)][d mod Z]        b = d \ Z, the block of entry d
    h(i, b) = ((A i + B b + C) mod P) mod (|M| / Z)

    |M|    `ROBE.size`
    Z      `ROBE.block`
    M      `PartedTable.inner`, |M| / Z blocks of Z numbers
    g      a sign, +1 or -1, from another hash of the same form

Blocks that collide are shared with either sign, so that on average they add nothing to an inner product. A block starts as the
one of the lowest id that has it, which is the most frequent one in encoded logs.

Not for tables that are small already: collisions of frequent ids hurt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.research._compressors import PartedCompressor, PartedTable
from rarebit.settings import check_types, require
from rarebit.tables.table import AnyTable, full_table

__all__ = ["ROBE"]

P = 2**31 - 1
"""A prime above all ids; products of two numbers below it are exact integers."""
PLACE = (1_103_515_245, 1_566_083_941, 12_345)
SIGN = (1_664_525_003, 1_013_904_223, 69_069)
"""A, B and C of the two hashes."""


@dataclass(frozen=True, kw_only=True)
class ROBE(PartedCompressor):
    """Take the blocks of each row from one array of `size` weights.

    >>> ROBE(size=8000)
    ROBE(size=8000, block=8)
    """

    title: ClassVar[str] = "rows as hashed blocks of one small array"
    paper: ClassVar[str] = (
        "Desai et al., Random Offset Block Embedding Array (ROBE) for CriteoTB Benchmark MLPerf DLRM Model, MLSys 2022"
    )
    cost: ClassVar[str] = "two hashes and a lookup per block of a row; any number of weights"
    applies: ClassVar[str] = "as a control for smaller tables in a study; not small tables"

    size: int
    """Weights of the array of a table (|M|)."""
    block: int = 8
    """Weights of a block (Z). Of a block wider than a row, only the beginning is used."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.block >= 1, f"block must be at least 1, got block={self.block}")
        require(
            self.size >= self.block,
            f"size must be at least that of a block, {self.block}, got size={self.size}",
        )

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the largest array, one size for all tables, that keeps at most this share of the weights.

        >>> ROBE.for_share([(1000, 8), (50, 8)], share=0.5)
        ROBE(size=3800, block=8)
        """
        most = max((rows * width for rows, width in shapes), default=1)
        blocks = range(1, most // cls.block + 1)
        return cls.largest(lambda num: cls(size=num * cls.block), blocks, shapes, share)

    def stored(self, rows: int, width: int) -> int:
        """Return the weights of the array, in whole blocks."""
        del rows, width
        return self.size // self.block * self.block

    def wrap(self, base: AnyTable) -> PartedTable:
        """Return an array with the numbers of `base`, so of its variance."""
        # NOTE[DIFF]: the paper has one array for all tables, and blocks at any offset; here each table has its own array,
        # as methods go table by table, and blocks do not overlap, so that a step touches whole blocks only
        weight, num_slots = full_table(base), self.size // self.block
        num_blocks = -(-base.embedding_dim // self.block)
        slots, signs = self.locate(torch.arange(len(weight), device=weight.device), num_blocks)
        padded = F.pad(weight, (0, num_blocks * self.block - base.embedding_dim))
        blocks = padded.unflatten(1, (num_blocks, -1)).transpose(0, 1) * signs  # (blocks, N, Z)
        place = torch.arange(slots.numel(), device=weight.device).view_as(slots.T).T  # by id first
        first = place.new_full((num_slots,), slots.numel() - 1)
        first.scatter_reduce_(0, slots.flatten(), place.flatten(), "amin")
        return self.of_parts(base, blocks.transpose(0, 1).flatten(0, 1)[first])

    def locate(self, ids: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return where the blocks of these ids are, `(blocks, ...)`, and their signs, `(blocks, ..., 1)`."""
        block = torch.arange(num_blocks, device=ids.device).view(-1, *[1] * ids.dim())
        slots, odd = (
            (a * ids.long() + b * block + c) % P % many
            for (a, b, c), many in ((PLACE, self.size // self.block), (SIGN, 2))
        )
        return slots, (1 - 2 * odd).unsqueeze(-1)

    def compute(
        self, ids: Tensor, parts: Sequence[nn.Module], width: int, sizes: Sequence[int | Tensor]
    ) -> Tensor:
        """Return the blocks g M[h] side by side, cut to the width."""
        del sizes
        slots, signs = self.locate(ids, -(-width // self.block))
        rows: Tensor = parts[0](slots) * signs  # (blocks, ..., Z)
        return rows.movedim(0, -2).flatten(-2)[..., :width]
