"""What a packed table is made of, and how it is made from a dense one.

    values    (V,)              the entries that are not zero, row by row
    columns   (V,)              the column of each: a byte, or more where rows are wider than 256
              (R, ceil(D / 8))  or a bit for each column of a row that has any, whichever is smaller
    offsets   (R + 1,)          where each row that has any begins among the values
    filled    (ceil(N / 64),)   a bit for each row of the table: whether it has any

Shapes: N rows of the table, D its width, R rows that are not empty, V entries that are not zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rarebit.tables.table import CHUNK

__all__ = [
    "WORD",
    "Parts",
    "column_type",
    "count_bits",
    "pack_bits",
    "pack_rows",
    "parts_bytes",
    "rows_before",
    "unpack_bits",
]

WORD = 64
"""Bits of a word, in which filled rows are marked and counted."""
PAIRS, FOURS, BYTES = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F
ALL_BYTES = 0x0101010101010101


class Parts(NamedTuple):
    """The tensors of a packed table."""

    values: Tensor
    columns: Tensor
    offsets: Tensor
    filled: Tensor

    @property
    def has_bitmaps(self) -> bool:
        """Whether columns are bits, not numbers."""
        return self.columns.dim() == 2


def pack_rows(weight: Tensor) -> Parts:
    """Return the parts of a dense table `(N, D)`, built in chunks of bounded memory.

    >>> parts = pack_rows(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
    >>> parts.values, parts.columns.tolist(), parts.offsets.tolist(), parts.filled
    (tensor([5., 6., 7.]), [[2], [3]], [0, 1, 3], tensor([5]))
    """
    weight, width = weight.detach(), weight.shape[1]
    counts = torch.cat([(chunk != 0).sum(dim=1) for chunk in weight.split(CHUNK)])  # (N,)
    filled = counts > 0
    ends = counts[filled].cumsum(0)
    offsets = F.pad(ends, (1, 0))
    small = int(offsets[-1]) <= torch.iinfo(torch.int32).max
    as_bits = _bitmaps_are_smaller(int(offsets[-1]), len(ends), width)
    values, columns = [], []
    for chunk in weight.split(CHUNK):
        kept = chunk != 0
        values.append(chunk[kept])
        if as_bits:
            columns.append(pack_bits(kept[kept.any(dim=1)]))
        else:
            columns.append(kept.nonzero()[:, 1].to(column_type(width)))
    words = F.pad(filled, (0, -len(filled) % WORD))
    return Parts(
        torch.cat(values),
        torch.cat(columns),
        offsets.to(torch.int32 if small else torch.int64),
        pack_bits(words.view(1, -1)).view(-1).view(torch.int64),
    )


def parts_bytes(num_values: int, num_filled: int, rows: int, width: int, *, value: int = 4) -> int:
    """Return the bytes of a packed table with so many values in so many rows that are not empty.

    >>> parts_bytes(num_values=100, num_filled=50, rows=1000, width=64)
    832
    """
    numbers, bitmaps = _bytes_of_columns(num_values, num_filled, width)
    offset = 4 if num_values <= torch.iinfo(torch.int32).max else 8
    words = -(-rows // WORD)
    return value * num_values + min(numbers, bitmaps) + offset * (num_filled + 1) + 8 * words


def column_type(width: int) -> torch.dtype:
    """Return the smallest type that holds the number of any column.

    >>> column_type(256), column_type(257)
    (torch.uint8, torch.int16)
    """
    if width <= 1 << 8:
        return torch.uint8
    return torch.int16 if width <= 1 << 15 else torch.int32


def pack_bits(kept: Tensor) -> Tensor:
    """Return booleans `(R, D)` as bits, `(R, ceil(D / 8))`: the first column is the lowest bit.

    >>> pack_bits(torch.tensor([[True, False, True]]))
    tensor([[5]], dtype=torch.uint8)
    """
    padded = F.pad(kept, (0, -kept.shape[1] % 8)).view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=kept.device)
    bits = padded.view(len(kept), padded.shape[1] // 8, 8) << shifts  # (R, ceil(D / 8), 8)
    return bits.sum(dim=-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """Return bits `(R, C)` as booleans `(R, 8 C)`.

    >>> unpack_bits(torch.tensor([[5]], dtype=torch.uint8)).nonzero().tolist()
    [[0, 0], [0, 2]]
    """
    # the eight booleans of a byte are one number of eight bytes, found by one lookup
    numbers = torch.arange(256, dtype=torch.uint8, device=bits.device).unsqueeze(1)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    eights = ((numbers >> shifts) & 1).view(torch.int64).view(-1)  # (256,)
    spread = eights.index_select(0, bits.reshape(-1).int()).view(torch.bool)
    return spread.view(bits.shape[0], 8 * bits.shape[1])


def count_bits(words: Tensor) -> Tensor:
    """Return how many bits of each word are set.

    >>> count_bits(torch.tensor([0, 7, -1]))
    tensor([ 0,  3, 64])
    """
    twos = words - ((words >> 1) & PAIRS)
    fours = (twos & FOURS).add_((twos >> 2).bitwise_and_(FOURS))
    eights = fours.add_(fours >> 4).bitwise_and_(BYTES)
    return eights.mul_(ALL_BYTES).bitwise_right_shift_(56)  # all bytes added up in the highest


def rows_before(filled: Tensor) -> Tensor:
    """Return the rank directory: how many rows are filled before each word.

    >>> rows_before(torch.tensor([7, 1, 0]))
    tensor([0, 3, 4], dtype=torch.int32)
    """
    counts = count_bits(filled)
    before = counts.cumsum(0).sub_(counts)
    small = not len(before) or int(before[-1]) < torch.iinfo(torch.int32).max - WORD
    return before.to(torch.int32) if small else before


def _bitmaps_are_smaller(num_values: int, num_filled: int, width: int) -> bool:
    numbers, bitmaps = _bytes_of_columns(num_values, num_filled, width)
    return bitmaps < numbers


def _bytes_of_columns(num_values: int, num_filled: int, width: int) -> tuple[int, int]:
    """Return the bytes of columns as numbers, and as bits."""
    return num_values * column_type(width).itemsize, num_filled * -(-width // 8)
