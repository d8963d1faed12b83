"""Rows out of a packed table, without unpacking it: what is touched are the entries of these rows.

    id ─► word of `filled` ─► its bit, and the bits below it + rank directory ─► row ─► offsets ─► run

A run is the part of `values` that belongs to an id; an empty row has a run of no length. All runs of a
batch are laid end to end, and each entry knows two numbers: its position in `values`, and its place in
the rows that are returned.

Shapes: U ids, E entries of their rows, D the width of the table.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rarebit.tables.packed_parts import WORD, Parts, count_bits, unpack_bits

__all__ = ["Entries", "Runs", "find_entries", "find_runs", "pick"]

LANES = 4
"""Parts of a list that are picked at once: torch picks one list with one thread."""


class Runs(NamedTuple):
    """Where the entries of each id lie, `(U,)` each."""

    row: Tensor
    """How many rows that are not empty come before it: its number among them, if it is one."""
    here: Tensor
    """1 where the row is not empty, else 0."""
    start: Tensor
    """The position of its first value."""
    length: Tensor
    """How many values it has."""


class Entries(NamedTuple):
    """All entries of a batch of ids, `(E,)` each."""

    position: Tensor
    """Where the entry is in `values`."""
    place: Tensor
    """Where it goes in the flat rows `(U * D,)`."""


def find_runs(ids: Tensor, parts: Parts, before: Tensor) -> Runs:
    """Return where the entries of these int64 ids `(U,)` are; `before` is the rank directory.

    >>> from rarebit.tables.packed_parts import pack_rows, rows_before
    >>> parts = pack_rows(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
    >>> runs = find_runs(torch.tensor([2, 1]), parts, rows_before(parts.filled))
    >>> runs.start.tolist(), runs.length.tolist()
    ([1, 1], [2, 0])
    """
    block, bit = ids >> 6, ids & (WORD - 1)
    word = parts.filled.index_select(0, block)
    here = (word >> bit).bitwise_and_(1)
    below = word.bitwise_and_((1 << bit).sub_(1))
    row = count_bits(below).add_(before.index_select(0, block))
    start = parts.offsets.index_select(0, row).long()
    # an empty row ends where it starts, so that it needs no case of its own
    end = parts.offsets.index_select(0, row + here)
    return Runs(row, here, start, end - start)


def find_entries(ids: Tensor, parts: Parts, before: Tensor, width: int) -> Entries:
    """Return the entries of the rows of these int64 ids `(U,)`.

    >>> from rarebit.tables.packed_parts import pack_rows, rows_before
    >>> parts = pack_rows(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
    >>> entries = find_entries(torch.tensor([0, 1, 0]), parts, rows_before(parts.filled), width=2)
    >>> entries.position.tolist(), entries.place.tolist()
    ([0, 0], [1, 5])
    """
    runs = find_runs(ids, parts, before)
    ends = runs.length.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    owner = torch.repeat_interleave(runs.length, output_size=total)  # which id an entry is of
    shift = runs.start - (ends - runs.length)
    position = torch.arange(total, device=ids.device).add_(pick(shift, owner))
    column = _columns_of_bits(runs, parts) if parts.has_bitmaps else pick(parts.columns, position)
    return Entries(position, owner.mul_(width).add_(column))


def pick(source: Tensor, positions: Tensor) -> Tensor:
    """Return the numbers at these positions, `(E,)`, without a gradient.

    >>> pick(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([2, 0]))
    tensor([7., 5.])
    """
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
