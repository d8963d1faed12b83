"""Rows out of coded and packed tables on a GPU: one kernel finds, decodes and writes the rows of a lookup.

The same rows as those of plain torch, to the last bit: sums in the order of the directions, multiply first and then add.
Plain torch takes some forty kernels for them, and their memory traffic. An id without a row is not read; it ends the process's
work on the GPU by an assertion, as in `F.embedding`, so that nothing waits for the device. Triton comes with torch's CUDA builds;
without it, `suits` is false and plain torch does the work.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rarebit.codes.coded import Decoder
    from rarebit.codes.packed import Parts

try:
    import triton
    from triton import language as tl
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=None)

ROWS, NUMBERS = 64, 1024
"""The most rows, and about the most numbers of them, that one program of a kernel takes."""
NO_ROW = "an id has no row in its coded or packed table"


def suits(*tensors: Tensor) -> bool:
    """Return whether the kernels can take these: plain and contiguous, on a GPU that Triton knows."""
    return triton is not None and all(
        type(tensor) in {Tensor, nn.Parameter} and tensor.is_cuda and tensor.is_contiguous()
        for tensor in tensors
    )


def coded_rows(ids: Tensor, blob: Tensor, decoder: "Decoder", tables: Tensor) -> Tensor:
    """Return the rows `(..., S, D)` of these ids `(..., S)`, with the tables of the slots."""
    rows = torch.empty(*ids.shape, decoder.width, device=ids.device)
    by_row, num_runs = bool(len(decoder.row_class)), decoder.run_rows.shape[1]
    _launch(
        _coded,
        *(ids, ids.numel(), rows, decoder.width),
        *(blob, len(blob), tables, len(tables), decoder.num_rows),
        *(decoder.run_rows, decoder.run_class, decoder.run_bit, num_runs),
        *(decoder.row_class, decoder.row_bit, decoder.block_bit, decoder.first_row),
        *(decoder.bits_of_row, decoder.bits, decoder.before, decoder.middle),
        *(decoder.terms, decoder.base, decoder.num_directions),
        BY_ROW=by_row,
        HALVINGS=0 if by_row else num_runs.bit_length() - 1,
    )
    return rows


def packed_rows(
    ids: Tensor,
    parts: "Parts",
    before: Tensor,
    shape: tuple[int, int],
    longest: int,
    scale: Tensor | None = None,
) -> Tensor:
    """Return the rows `(U, D)` of these ids `(U,)`, out of a table of this shape whose longest row has so many entries."""
    values, columns, offsets, filled = parts
    dtype = values.dtype if scale is None else scale.dtype
    rows = torch.empty(len(ids), shape[1], dtype=dtype, device=ids.device)
    _launch(
        _packed,
        *(ids, len(ids), rows, shape[1], shape[0]),
        *(filled, before, offsets, columns, values, values if scale is None else scale),
        *(longest, -(-shape[1] // 8)),
        BITMAPS=parts.has_bitmaps,
        SCALED=scale is not None,
    )
    return rows


def _launch(
    kernel: Any,
    ids: Tensor,
    count: int,
    rows: Tensor,
    width: int,
    *arguments: Any,
    **constants: Any,
) -> None:
    """Run a kernel over the ids, and assert on the device that all of them have rows."""
    if not count:
        return
    wrong = torch.zeros(1, dtype=torch.int32, device=ids.device)
    block = triton.next_power_of_2(width)
    num_rows = max(min(ROWS, NUMBERS // block), 1)
    with torch.cuda.device_of(ids):
        kernel[(triton.cdiv(count, num_rows),)](
            *(ids, count, rows, width, wrong, *arguments),
            ROWS=num_rows,
            BLOCK=block,
            **constants,
            enable_fp_fusion=False,  # one rounding in place of two would give other bits
        )
    torch._assert_async(wrong == 0, NO_ROW)  # noqa: SLF001  # it has no other name


def _jit(function: Any) -> Any:
    return function if triton is None else triton.jit(function)


# Triton's own language from here on. A kernel's first arguments are those of `_launch`.


@_jit
def _coded(  # type: ignore[no-untyped-def]  # types of its own
    ids,
    count,
    rows,
    width,
    wrong,
    blob,
    num_bytes,
    tables,
    num_slots,
    num_rows,
    run_rows,
    run_class,
    run_bit,
    num_runs,
    row_class,
    row_bit,
    block_bit,
    first_row,
    bits_of_row,
    bits,
    before,
    middle,
    terms,
    base,
    num_directions,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = slot < count
    table = tl.load(tables + slot % num_slots)
    row_id = tl.load(ids + slot, mask=there, other=0)
    known = (row_id >= 0) & (row_id < tl.load(num_rows + table))
    tl.store(wrong + tl.zeros_like(slot), 1, mask=there & ~known)
    there = there & known
    row_id = tl.where(there, row_id, 0)
    if BY_ROW:
        row = tl.load(first_row + table) + row_id
        kind = tl.load(row_class + row, mask=there, other=0).to(tl.int64)
        bit = tl.load(block_bit + row // 64, mask=there, other=0)
        bit += tl.load(row_bit + row, mask=there, other=0)
    else:
        # the last run that begins at the id or before; the number of runs is a power of two
        run = table * num_runs
        for halving in tl.static_range(HALVINGS):
            step = num_runs >> (halving + 1)
            run += tl.where(row_id >= tl.load(run_rows + run + step), step, 0)
        kind = tl.load(run_class + run)
        bit = tl.load(run_bit + run)
        bit += (row_id - tl.load(run_rows + run)) * tl.load(bits_of_row + kind)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    sums = tl.load(base + kind[:, None] * width + column, mask=inside, other=0.0)
    for direction in range(num_directions):
        at = kind * num_directions + direction
        number = tl.load(bits + at)
        used = there & (number > 0)
        place = bit + tl.load(before + at)
        byte = place >> 3
        low = tl.load(blob + byte, mask=used & (byte < num_bytes), other=0).to(tl.int32)
        high = tl.load(blob + byte + 1, mask=used & (byte + 1 < num_bytes), other=0).to(tl.int32)
        code = ((low | (high << 8)) >> (place & 7).to(tl.int32)) & ((1 << number.to(tl.int32)) - 1)
        value = code.to(tl.float32) - tl.load(middle + at)
        term = tl.load(terms + at[:, None] * width + column, mask=inside & used[:, None], other=0.0)
        sums = sums + value[:, None] * term
    tl.store(rows + slot[:, None] * width + column, sums, mask=inside & there[:, None])


@_jit
def _packed(  # type: ignore[no-untyped-def]  # types of its own
    ids,
    count,
    rows,
    width,
    wrong,
    num_rows,
    filled,
    rank,
    offsets,
    columns,
    values,
    scale,
    longest,
    bytes_of_bitmap,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BITMAPS: tl.constexpr,
    SCALED: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = slot < count
    row_id = tl.load(ids + slot, mask=there, other=0)
    known = (row_id >= 0) & (row_id < num_rows)
    tl.store(wrong + tl.zeros_like(slot), 1, mask=there & ~known)
    there = there & known
    row_id = tl.where(there, row_id, 0)
    word = tl.load(filled + (row_id >> 6), mask=there, other=0)
    bit = row_id & 63
    full = there & (((word >> bit) & 1) == 1)
    # the bits below it, counted in pairs, fours and bytes; without its sign a word has no bits to spare
    below = word & ((tl.full((ROWS,), 1, tl.int64) << bit) - 1)
    below = below - ((below >> 1) & 0x5555555555555555)
    below = (below & 0x3333333333333333) + ((below >> 2) & 0x3333333333333333)
    below = (below + (below >> 4)) & 0x0F0F0F0F0F0F0F0F
    below = ((below * 0x0101010101010101) >> 56) & 0xFF
    row = tl.load(rank + (row_id >> 6), mask=there, other=0).to(tl.int64) + below
    start = tl.load(offsets + row, mask=full, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (column < width) & there[:, None]
    found = tl.zeros((ROWS, BLOCK), rows.dtype.element_ty)
    if SCALED:
        factor = tl.load(scale)
    if BITMAPS:
        place = columns + row[:, None] * bytes_of_bitmap + column // 8
        byte = tl.load(place, mask=inside & full[:, None], other=0).to(tl.int32)
        kept = (byte >> (column % 8)) & 1
        number = tl.cumsum(kept, axis=1) - kept
        value = tl.load(values + start[:, None] + number, mask=kept == 1, other=0)
        value = value.to(found.dtype)
        if SCALED:
            value = value * factor
        found = tl.where(kept == 1, value, found)
    else:
        length = tl.load(offsets + row + 1, mask=full, other=0).to(tl.int64) - start
        for entry in range(longest):
            more = full & (entry < length)
            at = tl.load(columns + start + entry, mask=more, other=0).to(tl.int32)
            value = tl.load(values + start + entry, mask=more, other=0).to(found.dtype)
            if SCALED:
                value = value * factor
            found = tl.where((column == at[:, None]) & more[:, None], value[:, None], found)
    tl.store(rows + slot[:, None] * width + column, found, mask=inside)
