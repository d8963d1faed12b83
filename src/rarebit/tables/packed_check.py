"""Whether the parts of a packed table fit each other: asked once, before any row is looked up.

What comes from a file may be anything. After this check no lookup reads beyond a part, and every entry
has a place of its own. It reads all parts but the values, a chunk at a time.
"""

import torch

from rarebit.tables.packed_parts import WORD, Parts, column_type, count_bits, unpack_bits

__all__ = ["problem_of"]

CHUNK = 1 << 20
"""Numbers that are looked at together."""
WIDEST = 1 << 31


def problem_of(parts: Parts, *, rows: int, width: int, padding: int | None) -> str | None:
    """Return what is wrong with the parts of a table of this shape, in words; None when nothing is.

    >>> from rarebit.tables.packed_parts import pack_rows
    >>> parts = pack_rows(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
    >>> problem_of(parts, rows=3, width=2, padding=None)
    >>> problem_of(parts, rows=2, width=2, padding=None)
    'it marks rows that the table does not have'
    >>> problem_of(parts, rows=3, width=2, padding=0)
    'its padding row 0 is not empty'
    """
    return (
        _wrong_kinds(parts, rows, width)
        or _wrong_rows(parts, rows, padding)
        or _wrong_offsets(parts)
        or (_wrong_bits(parts, width) if parts.has_bitmaps else _wrong_columns(parts, width))
    )


def _wrong_kinds(parts: Parts, rows: int, width: int) -> str | None:
    """Sizes and types come first: what follows computes with them."""
    values, columns, offsets, filled = parts
    if not 1 <= width <= WIDEST or rows < 0:
        return f"no table is {rows} x {width}"
    if values.dim() != 1 or not (values.is_floating_point() or values.dtype == torch.int8):
        return f"its values are {values.dtype} of shape {tuple(values.shape)}"
    if filled.dtype != torch.int64 or filled.shape != (-(-rows // WORD),):
        return f"its marks of filled rows are not those of {rows} rows"
    if offsets.dtype not in {torch.int32, torch.int64} or offsets.dim() != 1 or not len(offsets):
        return f"its offsets are {offsets.dtype} of shape {tuple(offsets.shape)}"
    numbers = (column_type(width), (len(values),))
    bits = (torch.uint8, (len(offsets) - 1, -(-width // 8)))
    if (columns.dtype, tuple(columns.shape)) not in {numbers, bits}:
        return f"its columns are {columns.dtype} of shape {tuple(columns.shape)}"
    return None


def _wrong_rows(parts: Parts, rows: int, padding: int | None) -> str | None:
    filled, beyond = parts.filled, -rows % WORD
    # a shift keeps the sign, so that rows beyond the last one show as any bit that is left
    if beyond and bool(filled[-1] >> (WORD - beyond)):
        return "it marks rows that the table does not have"
    marked = sum(int(count_bits(chunk).sum()) for chunk in filled.split(CHUNK))
    if marked != len(parts.offsets) - 1:
        return f"it marks {marked} filled rows and has offsets of {len(parts.offsets) - 1}"
    if padding is None:
        return None
    if not 0 <= padding < rows:
        return f"its padding row {padding} is not one of {rows} rows"
    word, bit = divmod(padding, WORD)
    return f"its padding row {padding} is not empty" if bool(filled[word] >> bit & 1) else None


def _wrong_offsets(parts: Parts) -> str | None:
    first, last = int(parts.offsets[0]), int(parts.offsets[-1])
    if first != 0 or last != len(parts.values):
        return f"its offsets go from {first} to {last}, and it has {len(parts.values)} values"
    for start in range(0, len(parts.offsets), CHUNK):
        chunk = parts.offsets[start : start + CHUNK + 1]  # the next chunk's first, too
        if bool((chunk[1:] <= chunk[:-1]).any()):
            return "its offsets do not give every filled row a value"
    return None


def _wrong_columns(parts: Parts, width: int) -> str | None:
    # Offsets are good by now. Columns grow within a row, so each drop must be where a row begins.
    columns, begins = parts.columns, parts.offsets
    for start in range(0, len(columns), CHUNK):
        chunk = columns[start : start + CHUNK + 1].long()  # the next chunk's first, too
        if bool((chunk < 0).any()) or bool((chunk >= width).any()):
            return f"it names columns beyond its width of {width}"
        drops = (chunk[1:] <= chunk[:-1]).nonzero().view(-1).add_(start + 1)
        nearest = torch.searchsorted(begins, drops.to(begins.dtype))
        if not torch.equal(begins[nearest.clamp(max=len(begins) - 1)].long(), drops):
            return "the columns of a row are not in order"
    return None


def _wrong_bits(parts: Parts, width: int) -> str | None:
    offsets, at_once = parts.offsets, max(1, CHUNK // parts.columns.shape[1])
    for start in range(0, len(parts.columns), at_once):
        kept = unpack_bits(parts.columns[start : start + at_once])
        if bool(kept[:, width:].any()):
            return f"it names columns beyond its width of {width}"
        expected = offsets[start : start + at_once + 1].diff()
        if not torch.equal(kept.sum(dim=1), expected.long()):
            return "the bits of a row are not as many as its values"
    return None
