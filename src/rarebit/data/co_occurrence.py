"""Count how often each item co-occurs with the most frequent ones, in a click log or in a text.

    s_i    counts of item i with each of the top 1,000 items of all fields, by training count

Two values co-occur where one record holds both, of whatever fields; two tokens where they are at most
two positions apart. An item does not co-occur with itself. Padding and numbers are no items.

The log is read in chunks. One pass counts a block of rows x top items, which bounds the memory; a log
of more values is read again for the rest. The result is sparse.

Shapes: N rows of a field, T top items, R positions of a chunk, S other positions per position.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rarebit.data.dataset import Dataset
from rarebit.data.schema import PADDING
from rarebit.errors import DataError
from rarebit.settings import suggest

MEMORY = 1 << 30
"""Bytes of counts in one pass."""
CHUNK = 1 << 18
"""Positions of the log read at once."""
BLOCK = 1 << 11
"""Positions that a thread counts at once: their counts fit in the processor's cache."""
ROWS = 1 << 14
"""Rows made sparse at once."""
DISTANCES = (-2, -1, 1, 2)
"""Distances of the other tokens in a window of three."""
MOST_TOP_ITEMS = torch.iinfo(torch.int16).max


@dataclass(frozen=True)
class SparseCounts:
    """The counts of one field's items with the top items, row after row, without zeros."""

    offsets: Tensor
    """Where the counts of each row begin, and where the last end, `(N + 1,)`."""
    columns: Tensor
    """The top item of each count, ascending within a row."""
    values: Tensor
    """The counts, 1 or more."""
    width: int
    """The number of top items."""

    def dense(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the counts of some rows with zeros, `(len(rows), T)`."""
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        place = torch.arange(len(rows)).repeat_interleave(lengths)
        within = torch.arange(len(place)) - (lengths.cumsum(0) - lengths)[place]
        source = starts[place] + within
        found = torch.zeros(len(rows), self.width, dtype=dtype)
        found[place, self.columns[source].long()] = self.values[source].to(dtype)
        return found


@dataclass(frozen=True)
class CoOccurrences:
    """How often the items of each field co-occur with the top items of all fields."""

    top_items: tuple[tuple[str, int], ...]
    """Field and id of each top item, the most frequent first: the columns of the counts."""
    fields: Mapping[str, SparseCounts]
    """The counts of each field's items, by its name."""


_Chunk = tuple[dict[str, Tensor], Tensor]
"""Some positions of a log: the ids of each field, `(R, slots of the field)`, and the columns of the top items
at the other positions, `(R, S)`; T where there is none."""


class _Records:
    """A click log: all values of a record co-occur."""

    def __init__(self, data: Dataset) -> None:
        fields = data.schema.table_fields
        self.data = data
        self.rows = {field.name: field.rows for field in fields}
        self.padding = {field.name: PADDING for field in fields if field.kind == "multi"}
        self.most = len(data) * max((field.max_length for field in fields), default=1) ** 2
        """No two items can co-occur more often."""

    def chunks(self, columns: Mapping[str, Tensor], none: int) -> Iterator[_Chunk]:  # noqa: ARG002  # all values of a record are there
        """Yield chunks; `columns` has the column of each id as a top item, `(N,)` per field."""
        for start in range(0, len(self.data), CHUNK):
            ids = self.data.ids[start : start + CHUNK].cpu()  # (R, S)
            by_field = {name: ids[:, slots] for name, slots in self.data.schema.slots.items()}
            tops = torch.empty(ids.shape, dtype=torch.int16)
            for name, slots in self.data.schema.slots.items():
                tops[:, slots] = _looked_up(columns[name], by_field[name])
            yield by_field, tops


class _Text:
    """Texts `(texts, length)` of tokens: those near each other co-occur."""

    def __init__(self, tokens: Tensor, name: str, rows: int, padding: int | None) -> None:
        self.tokens, self.name = tokens, name
        self.rows = {name: rows}
        self.padding = {} if padding is None else {name: padding}
        self.most = tokens.numel() * len(DISTANCES)

    def chunks(self, columns: Mapping[str, Tensor], none: int) -> Iterator[_Chunk]:
        """Yield chunks as a click log does; `none` marks positions outside of the text."""
        flat, length = self.tokens.reshape(-1), self.tokens.shape[1]
        for start in range(0, len(flat), CHUNK):
            ids = flat[start : start + CHUNK].cpu()
            places = torch.arange(start, start + len(ids))
            tops = torch.full((len(ids), len(DISTANCES)), none, dtype=torch.int16)  # (R, S)
            for slot, distance in enumerate(DISTANCES):
                within = places % length + distance
                here = ((within >= 0) & (within < length)).nonzero()[:, 0]
                others = flat[(places[here] + distance).to(flat.device)].cpu()
                tops[here, slot] = _looked_up(columns[self.name], others)
            yield {self.name: ids[:, None]}, tops


def count_in_records(
    data: Dataset,
    counts: Mapping[str, Tensor],
    *,
    top_items: int = 1000,
    fields: Sequence[str] | None = None,
) -> CoOccurrences:
    """Count how often the values of some fields, or of all, co-occur with the top items in a log.

    The top items are those of the largest `counts`, which `data.counts()` returns for all fields.
    """
    log = _Records(data)
    for name in fields or ():
        if name not in log.rows:
            raise DataError(f"no field {name!r} has a table{suggest(name, list(log.rows))}")
    return _count(log, counts, top_items, list(log.rows) if fields is None else fields)


def count_in_text(
    tokens: Tensor,
    counts: Mapping[str, Tensor],
    *,
    top_items: int = 1000,
    padding: int | None = None,
) -> CoOccurrences:
    """Count how often tokens are at most two positions from the top ones.

    `tokens` are the ids of one text `(n,)`, or of separate texts `(texts, length)`; `counts` are those of
    their one table, by its name.
    """
    if len(counts) != 1:
        raise DataError(f"a text needs the counts of one table, got those of {', '.join(counts)}")
    [(name, count)] = counts.items()
    log = _Text(_texts(tokens, len(count)), name, len(count), padding)
    return _count(log, counts, top_items, [name])


def find_top_items(counts: Mapping[str, Tensor], number: int) -> list[tuple[str, int]]:
    """Return field and id of the most frequent items of all fields; equal ones keep their order."""
    sizes = torch.tensor([len(count) for count in counts.values()])
    every = torch.cat([count.cpu() for count in counts.values()])
    order = torch.argsort(every, descending=True, stable=True)[:number]
    order = order[every[order] > 0]
    ends = sizes.cumsum(0)
    field = torch.searchsorted(ends, order, right=True)
    names = list(counts)
    ids = (order - (ends - sizes)[field]).tolist()
    return [(names[place], row) for place, row in zip(field.tolist(), ids, strict=True)]


def _count(
    log: _Records | _Text, counts: Mapping[str, Tensor], top_items: int, names: Sequence[str]
) -> CoOccurrences:
    if not 1 <= top_items <= MOST_TOP_ITEMS:
        raise DataError(f"top_items must be from 1 to {MOST_TOP_ITEMS}, got {top_items}")
    top = find_top_items(_item_counts(log, counts), top_items)
    columns = {
        name: torch.full((rows,), len(top), dtype=torch.int16) for name, rows in log.rows.items()
    }
    for column, (name, row) in enumerate(top):
        columns[name][row] = column
    dtype = torch.int32 if log.most <= torch.iinfo(torch.int32).max else torch.int64
    limit = max(MEMORY // ((len(top) + 1) * dtype.itemsize), 1)
    found: dict[str, list[SparseCounts]] = {name: [] for name in names}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for spans in _passes({name: log.rows[name] for name in names}, limit):
            bands = [
                _Band(name, start, torch.zeros(stop - start, len(top) + 1, dtype=dtype))
                for name, start, stop in spans
            ]
            for chunk in log.chunks(columns, len(top)):
                _add(chunk, bands, pool)
            for band in bands:
                found[band.name].append(band.sparse(columns[band.name], log.padding.get(band.name)))
    # Popped, so that of one field at a time there are two copies.
    return CoOccurrences(tuple(top), {name: _joined(found.pop(name)) for name in list(found)})


@dataclass(frozen=True)
class _Band:
    """Neighbouring rows of a field that are counted in one pass."""

    name: str
    start: int
    counts: Tensor
    """`(rows, T + 1)`: the last column takes what is no top item."""

    @property
    def stop(self) -> int:
        return self.start + len(self.counts)

    def pieces(self, ids: Tensor, number: int) -> "Iterator[_Piece]":
        """Yield the positions of the field's ids `(R, slots)` that are counted here, in pieces."""
        slots, (flat, order) = ids.shape[1], ids.reshape(-1).sort()
        first, last = torch.searchsorted(flat, flat.new_tensor([self.start, self.stop])).tolist()
        flat, order = flat[first:last], order[first:last]
        if len(flat) == 0:
            return
        # Each cut is at the first position of a row: two threads must not count the same row.
        marks = flat[:: -(-len(flat) // number)].contiguous()
        cuts = [*torch.searchsorted(flat, marks).unique().tolist(), len(flat)]
        for start, stop in itertools.pairwise(cuts):
            yield _Piece(self, flat[start:stop], order[start:stop] // slots)

    def sparse(self, columns: Tensor, padding: int | None) -> SparseCounts:
        """Return the counts without zeros, padding, and items that co-occur with themselves."""
        width = self.counts.shape[1] - 1
        own = columns[self.start : self.stop].long()
        rows = (own < width).nonzero()[:, 0]
        self.counts[rows, own[rows]] = 0
        if padding is not None and self.start <= padding < self.stop:
            self.counts[padding - self.start] = 0
        return _joined([_sparse(block[:, :width]) for block in self.counts.split(ROWS)])


class _Piece(NamedTuple):
    """Positions of a chunk whose rows no other piece counts."""

    band: _Band
    ids: Tensor
    """The ids at these positions, ascending, `(P,)`."""
    places: Tensor
    """The positions, `(P,)`."""


def _add(chunk: _Chunk, bands: list[_Band], pool: ThreadPoolExecutor) -> None:
    """Count a chunk. Sorted ids touch the counts in memory order: a 3x speedup."""
    (ids, tops), threads = chunk, torch.get_num_threads()
    cut = pool.map(lambda band: list(band.pieces(ids[band.name], threads)), bands)
    pieces = [piece for pieces in cut for piece in pieces]
    list(pool.map(lambda piece: _add_piece(piece, tops), pieces))


def _add_piece(piece: _Piece, tops: Tensor) -> None:
    counts, start = piece.band.counts, piece.band.start
    ones = torch.ones(BLOCK * tops.shape[1], dtype=counts.dtype)
    for ids, places in zip(piece.ids.split(BLOCK), piece.places.split(BLOCK), strict=True):
        first = (ids.long() - start) * counts.shape[1]
        index = (first[:, None] + tops.index_select(0, places)).reshape(-1)  # (P * S,)
        counts.view(-1).scatter_add_(0, index, ones[: len(index)])


def _passes(rows: Mapping[str, int], limit: int) -> list[list[tuple[str, int, int]]]:
    """Return which rows of which fields each pass counts: at most `limit` rows per pass."""
    passes: list[list[tuple[str, int, int]]] = [[]]
    room = limit
    for name, end in rows.items():
        start = 0
        while start < end:
            if room == 0:
                passes.append([])
                room = limit
            stop = min(start + room, end)
            passes[-1].append((name, start, stop))
            room -= stop - start
            start = stop
    return passes


def _sparse(counts: Tensor) -> SparseCounts:
    """Return dense counts `(rows, T)` without zeros."""
    rows, columns = counts.nonzero(as_tuple=True)
    offsets = torch.bincount(rows + 1, minlength=len(counts) + 1).cumsum(0)
    return SparseCounts(offsets, columns.to(torch.int16), counts[rows, columns], counts.shape[1])


def _joined(parts: list[SparseCounts]) -> SparseCounts:
    """Return the counts of consecutive rows as one."""
    if len(parts) == 1:
        return parts[0]
    lengths = torch.cat([part.offsets.diff() for part in parts])
    return SparseCounts(
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        torch.cat([part.columns for part in parts]),
        torch.cat([part.values for part in parts]),
        width=parts[0].width,
    )


def _looked_up(columns: Tensor, ids: Tensor) -> Tensor:
    return columns.index_select(0, ids.reshape(-1)).reshape(ids.shape)


def _item_counts(log: _Records | _Text, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the counts of all fields, checked, with zero for padding."""
    found = {}
    if not log.rows:
        raise DataError("co-occurrence is of ids, but no field has a table; add one that does")
    for name, rows in log.rows.items():
        if name not in counts:
            raise DataError(
                f"there are no counts of {name!r}; give those of all fields, as data.counts() does"
            )
        if tuple(counts[name].shape) != (rows,):
            raise DataError(
                f"{name!r} has {rows} rows, but its counts have the shape "
                f"{tuple(counts[name].shape)}; give those of the same data"
            )
        found[name] = counts[name].cpu().clone()
        if name in log.padding:
            found[name][log.padding[name]] = 0
    return found


def _texts(tokens: Tensor, rows: int) -> Tensor:
    """Return the tokens as texts `(texts, length)`; raise if they are wrong."""
    if tokens.dim() not in (1, 2) or tokens.dtype not in (torch.int32, torch.int64):
        raise DataError(
            "tokens must be whole numbers (n,) or (texts, length), got "
            f"{tuple(tokens.shape)} of {tokens.dtype}"
        )
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < rows:
        raise DataError(
            f"tokens must be from 0 to {rows - 1}, as there are counts of {rows}, got "
            f"{int(tokens.min())} to {int(tokens.max())}"
        )
    return tokens if tokens.dim() == 2 else tokens[None]
