"""What a packed table is made of, and how rows come out of it without unpacking.

    values    (V,)              the entries that are not zero, row by row
    columns   (V,)              the column of each: a byte, or more where rows are wider than 256
              (R, ceil(D / 8))  or a bit for each column of a row that has any, whichever is smaller
    offsets   (R + 1,)          where each row that has any begins among the values
    filled    (ceil(N / 64),)   a bit for each row of the table: whether it has any

A lookup touches only the entries of its rows:

    id ─► word of `filled` ─► its bit, and the bits below it + rank directory ─► row ─► offsets ─► run

A run is the part of `values` that belongs to an id; an empty row has an empty run. The runs of a batch are
laid end to end, and each entry has two numbers: its position in `values`, and its place in the rows that
are returned.

On the CPU, where nothing is trained, a small C++ kernel (`packed_kernel.cpp`, compiled on first use by
`tables/compiler.py`) finds the runs in the same way and writes the rows in one pass, without a list of all
entries. The rows are the same to the last bit. Where it cannot be compiled, a warning is logged once and plain
torch does the same, slower.

Shapes: N rows of the table, D its width, R rows that are not empty, V entries that are not zero, U ids,
E entries of their rows.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Mapping
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rarebit.tables.compiler import is_plain, is_switched_off, load_compiled
from rarebit.tables.table import CHUNK

__all__ = [
    "WORD",
    "PackedKernel",
    "Parts",
    "column_type",
    "count_bits",
    "find_entries",
    "find_runs",
    "load_packed_kernel",
    "pack_bits",
    "pack_rows",
    "packed_kernel",
    "pick",
    "rows_before",
    "unpack_bits",
]

WORD = 64
"""Bits of a word that marks filled rows."""
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
    """Return the parts of a dense table `(N, D)`, built in chunks of bounded memory."""
    weight, width = weight.detach(), weight.shape[1]
    counts = torch.cat([(chunk != 0).sum(dim=1) for chunk in weight.split(CHUNK)])  # (N,)
    filled = counts > 0
    ends = counts[filled].cumsum(0)
    offsets = F.pad(ends, (1, 0))
    small = int(offsets[-1]) <= torch.iinfo(torch.int32).max
    numbers = int(offsets[-1]) * column_type(width).itemsize  # bytes of columns as numbers
    bitmaps = len(ends) * -(-width // 8)  # and as bits
    values, columns = [], []
    for chunk in weight.split(CHUNK):
        kept = chunk != 0
        values.append(chunk[kept])
        if bitmaps < numbers:
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


def column_type(width: int) -> torch.dtype:
    """Return the smallest type that holds any column number."""
    if width <= 1 << 8:
        return torch.uint8
    return torch.int16 if width <= 1 << 15 else torch.int32


def pack_bits(kept: Tensor) -> Tensor:
    """Return booleans `(R, D)` as bits, `(R, ceil(D / 8))`: the first column is the lowest bit."""
    padded = F.pad(kept, (0, -kept.shape[1] % 8)).view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=kept.device)
    bits = padded.view(len(kept), padded.shape[1] // 8, 8) << shifts  # (R, ceil(D / 8), 8)
    return bits.sum(dim=-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """Return bits `(R, C)` as booleans `(R, 8 C)`."""
    # the eight booleans of a byte are one number of eight bytes, found by one lookup
    numbers = torch.arange(256, dtype=torch.uint8, device=bits.device).unsqueeze(1)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    eights = ((numbers >> shifts) & 1).view(torch.int64).view(-1)  # (256,)
    spread = eights.index_select(0, bits.reshape(-1).int()).view(torch.bool)
    return spread.view(bits.shape[0], 8 * bits.shape[1])


def count_bits(words: Tensor) -> Tensor:
    """Return the number of bits set in each word."""
    twos = words - ((words >> 1) & PAIRS)
    fours = (twos & FOURS).add_((twos >> 2).bitwise_and_(FOURS))
    eights = fours.add_(fours >> 4).bitwise_and_(BYTES)
    return eights.mul_(ALL_BYTES).bitwise_right_shift_(56)  # all bytes added up in the highest


def rows_before(filled: Tensor) -> Tensor:
    """Return the rank directory: the number of filled rows before each word."""
    counts = count_bits(filled)
    before = counts.cumsum(0).sub_(counts)
    small = not len(before) or int(before[-1]) < torch.iinfo(torch.int32).max - WORD
    return before.to(torch.int32) if small else before


SOURCE = Path(__file__).with_name("packed_kernel.cpp")
_log = logging.getLogger(__name__)


@functools.cache
def packed_kernel() -> "PackedKernel | None":
    """Return the kernel, compiled and loaded at the first call; None where that is not possible."""
    kernel = load_packed_kernel(os.environ)
    if kernel is None and not is_switched_off(os.environ):
        _log.warning(
            "no C++ compiler made a kernel for packed tables, so lookups take up to four times as long; "
            "install g++ or clang++, or set RAREBIT_COMPILE=0 to run without it"
        )
    return kernel


class PackedKernel:
    """The compiled function."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._fill = library.rarebit_packed_rows
        self._fill.restype = c_int64
        self._fill.argtypes = (
            *(c_void_p, c_int64, c_int, c_void_p),  # ids, their number, threads, rows to write
            *(c_int64, c_int64, c_int64, c_int64),  # rows, those not empty, values, width
            *(c_void_p, c_void_p, c_void_p),  # filled, rank directory, offsets
            *(c_void_p, c_int, c_void_p, c_int),  # columns and values, and the bytes of each
            c_float,  # scale
        )

    def rows(
        self,
        ids: Tensor,
        parts: Parts,
        before: Tensor,
        shape: tuple[int, int],
        scale: Tensor | None = None,
    ) -> Tensor | None:
        """Return the rows `(U, D)` of these ids `(U,)`, out of a table of this shape.

        None where the kernel cannot read the tensors, where an id has no row, and where the parts do not
        fit each other: plain torch then does it, or raises.
        """
        if not _suits(ids, parts, before, shape, scale):
            return None
        rows = torch.empty(len(ids), shape[1], dtype=torch.float32, device="cpu")
        # In some modes torch makes tensors without storage: there is nothing to write to.
        if not is_plain(rows, torch.float32):
            return None
        values, columns, offsets, filled = parts
        done = self._fill(
            *(ids.data_ptr(), len(ids), torch.get_num_threads(), rows.data_ptr()),
            *(shape[0], len(offsets) - 1, len(values), shape[1]),
            *(filled.data_ptr(), before.data_ptr(), offsets.data_ptr()),
            *(columns.data_ptr(), 0 if parts.has_bitmaps else columns.itemsize),
            *(values.data_ptr(), values.itemsize),
            1.0 if scale is None else float(scale),
        )
        return rows if done == len(ids) else None


def _suits(
    ids: Tensor, parts: Parts, before: Tensor, shape: tuple[int, int], scale: Tensor | None
) -> bool:
    """Return whether the kernel can read these: types and lengths."""
    values, columns, offsets, filled = parts
    rows, width = shape
    lengths = [len(offsets) - 1, -(-width // 8)] if parts.has_bitmaps else [len(values)]
    return (
        is_plain(ids, torch.int64)
        and is_plain(values, torch.float32 if scale is None else torch.int8)
        and is_plain(columns, torch.uint8 if parts.has_bitmaps else column_type(width))
        and is_plain(offsets, torch.int32)
        and is_plain(filled, torch.int64)
        and is_plain(before, torch.int32)
        and (scale is None or is_plain(scale, torch.float32))
        and list(columns.shape) == lengths
        and len(filled) == len(before) == -(-rows // WORD)
    )


def load_packed_kernel(environment: Mapping[str, str]) -> PackedKernel | None:
    """Return a kernel from the cache or the compiler of an environment; None without one."""

    def tried(library: ctypes.CDLL) -> PackedKernel | None:
        kernel = PackedKernel(library)
        return kernel if _is_right(kernel) else None

    return load_compiled(SOURCE, tried, environment)


def _is_right(kernel: PackedKernel) -> bool:
    """Return whether a kernel finds the rows of two small tables, one per form, and refuses an id beyond."""
    bits = torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]], dtype=torch.float32, device="cpu")
    numbers = torch.eye(3, 20, dtype=torch.float32, device="cpu")
    ids = torch.tensor([2, 1, 0, 2], device="cpu")
    for weight in (bits, numbers):
        parts, shape = pack_rows(weight), (weight.shape[0], weight.shape[1])
        before = rows_before(parts.filled)
        rows = kernel.rows(ids, parts, before, shape)
        if rows is None or not torch.equal(rows, weight[ids]):
            return False
        if kernel.rows(ids + 1, parts, before, shape) is not None:
            return False
    return True


LANES = 4
"""Parts of a list that are gathered at once: torch gathers one list with one thread."""


class Runs(NamedTuple):
    """Where the entries of each id lie, `(U,)` each."""

    row: Tensor
    """The number of rows before it that are not empty."""
    here: Tensor
    """1 where the row is not empty, else 0."""
    start: Tensor
    """The position of its first value."""
    length: Tensor
    """Its number of values."""


class Entries(NamedTuple):
    """All entries of a batch of ids, `(E,)` each."""

    position: Tensor
    """Where the entry is in `values`."""
    place: Tensor
    """Where it goes in the flat rows `(U * D,)`."""


def find_runs(ids: Tensor, parts: Parts, before: Tensor) -> Runs:
    """Return where the entries of int64 ids `(U,)` are; `before` is the rank directory."""
    block, bit = ids >> 6, ids & (WORD - 1)
    word = parts.filled.index_select(0, block)
    here = (word >> bit).bitwise_and_(1)
    below = word.bitwise_and_((1 << bit).sub_(1))
    row = count_bits(below).add_(before.index_select(0, block))
    start = parts.offsets.index_select(0, row).long()
    # an empty row ends where it starts, so that it needs no special case
    end = parts.offsets.index_select(0, row + here)
    return Runs(row, here, start, end - start)


def find_entries(ids: Tensor, parts: Parts, before: Tensor, width: int) -> Entries:
    """Return the entries of the rows of these int64 ids `(U,)`."""
    runs = find_runs(ids, parts, before)
    ends = runs.length.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    owner = torch.repeat_interleave(runs.length, output_size=total)  # the id of each entry
    shift = runs.start - (ends - runs.length)
    position = torch.arange(total, device=ids.device).add_(pick(shift, owner))
    column = _columns_of_bits(runs, parts) if parts.has_bitmaps else pick(parts.columns, position)
    return Entries(position, owner.mul_(width).add_(column))


def pick(source: Tensor, positions: Tensor) -> Tensor:
    """Return the numbers at these positions, `(E,)`, without a gradient."""
    if source.device.type != "cpu":
        return source.index_select(0, positions)
    picked = torch.empty(len(positions), dtype=source.dtype)
    even = len(positions) // LANES * LANES
    lanes, rest = (LANES, even // LANES), slice(even, None)
    torch.gather(
        source.expand(LANES, -1), 1, positions[:even].view(lanes), out=picked[:even].view(lanes)
    )
    torch.gather(source, 0, positions[rest], out=picked[rest])
    return picked


def _columns_of_bits(runs: Runs, parts: Parts) -> Tensor:
    """Return the column of each entry, from the bits of the rows that are not empty."""
    found = runs.here.nonzero().view(-1)
    rows = runs.row.index_select(0, found)
    kept = unpack_bits(parts.columns.index_select(0, rows))  # (rows found, 8 C)
    owner = torch.repeat_interleave(runs.length.index_select(0, found))
    return kept.view(-1).nonzero().view(-1).sub_(owner.mul_(kept.shape[1]))
