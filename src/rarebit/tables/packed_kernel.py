"""Rows out of a packed table in one pass over the ids: a small C++ kernel, compiled on first use.

It finds the run of each id as `packed_lookup.py` does, and writes the rows at once, where torch would make
a list of all entries first. The rows are the same to the last bit. How it is compiled is told in
`compiled.py`; where it cannot be, that is said once, and plain torch does the same, slower.

Shapes: U ids, D the width of the table.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Mapping
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from rarebit.tables.compiled import is_plain, is_switched_off, load_compiled
from rarebit.tables.packed_parts import WORD, Parts, column_type, pack_rows, rows_before

__all__ = ["PackedKernel", "load_packed_kernel", "packed_kernel"]

SOURCE = Path(__file__).with_suffix(".cpp")
IDS = (c_void_p, c_int64, c_int, c_void_p)
"""ids, their number, threads, rows to be written"""
SIZES = (c_int64, c_int64, c_int64, c_int64)
"""rows of the table, those that are not empty, values, width"""
PARTS = (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_int, c_float)
"""filled, rank directory, offsets, columns, bytes of a column, values, bytes of a value, scale"""

_log = logging.getLogger(__name__)


@functools.cache
def packed_kernel() -> "PackedKernel | None":
    """Return the kernel, compiled and loaded at the first call; None where that is not possible.

    >>> kernel, weight = packed_kernel(), torch.tensor([[0.0, 5.0], [0.0, 0.0]])
    >>> parts, ids = pack_rows(weight), torch.tensor([1, 0])
    >>> rows = kernel and kernel.rows(ids, parts, rows_before(parts.filled), (2, 2))
    >>> rows is None or torch.equal(rows, weight[ids])
    True
    """
    kernel = load_packed_kernel(os.environ)
    if kernel is None and not is_switched_off(os.environ):
        _log.warning(
            "no C++ compiler made a kernel for packed tables, so a lookup takes up to four times as long; "
            "install g++ or clang++, or set RAREBIT_COMPILE=0 to do without"
        )
    return kernel


class PackedKernel:
    """The compiled function."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._fill = library.rarebit_packed_rows
        self._fill.argtypes = (*IDS, *SIZES, *PARTS)
        self._fill.restype = c_int64

    def rows(
        self,
        ids: Tensor,
        parts: Parts,
        before: Tensor,
        shape: tuple[int, int],
        scale: Tensor | None = None,
    ) -> Tensor | None:
        """Return the rows `(U, D)` of these ids `(U,)`, out of a table of this shape.

        None where the tensors are of another form than the kernel reads, where an id has no row, and
        where the parts do not fit each other: plain torch then does it, or says what is wrong.
        """
        if not _suits(ids, parts, before, shape, scale):
            return None
        rows = torch.empty(len(ids), shape[1], dtype=torch.float32, device="cpu")
        # Told to, torch makes tensors that have no numbers: there is nothing to write to.
        if not is_plain(rows, torch.float32):
            return None
        values, columns, offsets, filled = parts
        done = self._fill(
            *(ids.data_ptr(), len(ids), torch.get_num_threads(), rows.data_ptr()),
            *(shape[0], len(offsets) - 1, len(values), shape[1]),
            *(filled.data_ptr(), before.data_ptr(), offsets.data_ptr()),
            *(columns.data_ptr(), 0 if parts.has_bitmaps else columns.itemsize),
            *(values.data_ptr(), values.itemsize, 1.0 if scale is None else float(scale)),
        )
        return rows if done == len(ids) else None


def _suits(
    ids: Tensor, parts: Parts, before: Tensor, shape: tuple[int, int], scale: Tensor | None
) -> bool:
    """Return whether the kernel can read these: their types, and that each is as long as it must be."""
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
    """Return a kernel from the cache or the compiler that an environment names; None without one.

    >>> load_packed_kernel({"RAREBIT_COMPILE": "0"}) is None
    True
    """
    return load_compiled(SOURCE, _tried, environment)


def _tried(library: ctypes.CDLL) -> PackedKernel | None:
    kernel = PackedKernel(library)
    return kernel if _is_right(kernel) else None


def _is_right(kernel: PackedKernel) -> bool:
    """Return whether rows of two small tables are found, of each form one, and an id beyond is refused."""
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
