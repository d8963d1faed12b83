"""Coded rows on disk between the passes: written once as they come, read again chunk by chunk.

Plain reads and writes: a memory map of gigabytes would count as memory of the process.

Which part each row belongs to: 0 train, 1 valid, 2 test.

Every split but a given one is by rank: the rows of the smallest keys are for training, the next to
choose, the last to report. The key is a random number, the row's place, its time, or a random number
of its user.

The second pass: how often each code occurs in each part, and what numbers are like in training.

Which values get an id: those seen often enough, the most frequent first.

Ids do not depend on how the log was read: values of equal count stand in the order of their text.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.counter_random import random_bits, stream_key
from rarebit.data.log_schema import SPLIT_NAMES, Column, LogSchema, Split
from rarebit.data.prepare import Progress, no_progress
from rarebit.data.raw.coding import Coded
from rarebit.data.schema import FIRST_VALUE, UNKNOWN
from rarebit.errors import DataError

__all__ = [
    "NumberSummary",
    "Spill",
    "Vocabulary",
    "add_counts",
    "count_codes",
    "digest",
    "make_vocabulary",
    "slot_columns",
    "split_rows",
    "summarise_numbers",
]


class Spill:
    """Codes and numbers of all rows, in chunks, in two files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.codes: BinaryIO = (folder / "codes.spill").open("w+b")
        self.numbers: BinaryIO = (folder / "numbers.spill").open("w+b")
        self.sizes: list[int] = []
        self.slots = self.columns = 0
        self.highest: NDArray[np.int32] = np.zeros(0, np.int32)
        """The highest code of each slot."""

    def __len__(self) -> int:
        return sum(self.sizes)

    def append(self, rows: Coded) -> None:
        """Write some rows."""
        if len(rows) == 0:
            return
        self.slots, self.columns = len(rows.codes), len(rows.numbers)
        self.codes.write(np.ascontiguousarray(rows.codes).data)
        self.numbers.write(np.ascontiguousarray(rows.numbers).data)
        self.sizes.append(len(rows))
        highest = rows.codes.max(axis=1, initial=0)
        self.highest = np.maximum(self.highest, highest) if len(self.highest) else highest

    def chunks(self) -> Iterator[tuple[slice, Coded]]:
        """Yield which rows a chunk has, and its codes and numbers."""
        self.codes.seek(0)
        self.numbers.seek(0)
        start, nothing = 0, np.empty(0)
        for rows in self.sizes:
            codes = np.frombuffer(self.codes.read(4 * self.slots * rows), np.int32)
            numbers = np.frombuffer(self.numbers.read(8 * self.columns * rows))
            yield (
                slice(start, start + rows),
                Coded(
                    codes.reshape(self.slots, rows),
                    numbers.reshape(self.columns, rows),
                    nothing.astype(np.uint8),
                    nothing,
                ),
            )
            start += rows

    def close(self) -> None:
        """Close and remove the files."""
        for file in (self.codes, self.numbers):
            file.close()
            Path(str(file.name)).unlink(missing_ok=True)


BLOCK = 1 << 20


def split_rows(split: Split, num_rows: int, key: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the part of each row; `key` is what the split goes by, one a row.

    >>> split_rows(Split(kind="order"), 10, np.empty(0)).tolist()
    [0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    """
    if split.kind == "given":
        parts = key.astype(np.uint8)
    elif split.kind == "user":
        # numbered as they come: the codes of a vocabulary shared with other columns depend on chunks
        _, first, of_row = np.unique(key, return_index=True, return_inverse=True)
        of_user = _by_rank(_random_keys(split.seed, len(first)), split.shares)
        parts = of_user[np.argsort(np.argsort(first))][of_row]
    elif split.kind == "time":
        parts = _by_rank(key, split.shares)
    elif split.kind == "order":
        parts = _by_rank(np.arange(num_rows), split.shares)
    else:
        parts = _by_rank(_random_keys(split.seed, num_rows), split.shares)
    _check_parts(split, parts)
    return parts


def _random_keys(seed: int, num_rows: int) -> NDArray[np.uint32]:
    """Return 32 random bits a row, drawn in blocks: 64 at once would be the peak of the memory."""
    keys = np.empty(num_rows, np.uint32)
    stream = stream_key(seed, "split")
    for start in range(0, num_rows, BLOCK):
        stop = min(start + BLOCK, num_rows)
        bits = random_bits(stream, np.arange(start, stop, dtype=np.uint64))
        keys[start:stop] = bits >> np.uint64(32)
    return keys


def _by_rank(keys: NDArray[Any], shares: tuple[float, ...]) -> NDArray[np.uint8]:
    first, second = round(len(keys) * shares[0]), round(len(keys) * (shares[0] + shares[1]))
    parts = np.full(len(keys), 2, np.uint8)
    parts[_smallest(keys, second)] = 1
    parts[_smallest(keys, first)] = 0
    return parts


def _smallest(keys: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """Return which rows have the k smallest keys; of equal ones, the first rows."""
    if k in (0, len(keys)):
        return np.full(len(keys), k > 0)
    bound = np.partition(keys, k - 1)[k - 1]
    chosen: NDArray[np.bool_] = keys < bound
    equal = np.flatnonzero(keys == bound)
    chosen[equal[: k - int(chosen.sum())]] = True
    return chosen


def _check_parts(split: Split, parts: NDArray[np.uint8]) -> None:
    """Raise when nothing is left to train on, or a part that was asked for is empty."""
    rows = np.bincount(parts, minlength=3)
    wanted = (
        [True, False, False] if split.kind == "given" else [share > 0 for share in split.shares]
    )
    for name, count, needed in zip(SPLIT_NAMES, rows.tolist(), wanted, strict=True):
        if needed and count == 0:
            raise DataError(
                f"the split leaves no row for {name}: {len(parts):,} rows are too few for "
                f"kind={split.kind!r} with shares {split.shares}"
            )


SAMPLE_ROWS = 1_000_000
"""Training rows that the edges of quantile bins are taken from, at most about."""
COUNTING_BLOCK = 1 << 16
"""Numbers that are summed at once: the same ones however the log was cut into chunks."""
SMALLEST_SPREAD = 1e-12
"""Of the mean: a spread below it is the rounding of numbers that are all the same."""


@dataclass(frozen=True)
class NumberSummary:
    """A numeric column in the training rows."""

    mean: float
    std: float
    quantiles: tuple[float, ...]
    """Distinct edges between bins of equally many rows; empty where none were asked for.

    No bin is empty: where half of the values are the smallest one, they are the first bin together.
    """
    missing: int
    """Rows of all parts without a number."""


def slot_columns(schema: LogSchema) -> list[Column]:
    """Return for each slot with codes the column it belongs to, in order."""
    return [
        column
        for column in schema.columns
        if column.has_ids and not column.is_number
        for _ in range(column.max_length)
    ]


def count_codes(
    spill: Spill,
    parts: NDArray[np.uint8],
    schema: LogSchema,
    sizes: dict[str, int],
    progress: Progress = no_progress,
) -> dict[str, NDArray[np.int64]]:
    """Return for each column with codes how often each occurs, `(3, size)`: in train, valid, test."""
    slots = slot_columns(schema)
    counts = {column.name: np.zeros((3, sizes[column.name]), np.int64) for column in slots}
    for rows, coded in spill.chunks():
        rows_of = [np.flatnonzero(parts[rows] == part) for part in range(3)]
        for column, codes in zip(slots, coded.codes, strict=True):
            for part, chosen in enumerate(rows_of):
                add_counts(counts[column.name][part], codes.take(chosen))
        progress("counting", rows.stop, len(spill))
    return counts


def add_counts(counts: NDArray[np.int64], codes: NDArray[np.int32]) -> None:
    """Add how often each code occurs to the counts."""
    if len(counts) < 4 * len(codes):
        counts += np.bincount(codes, minlength=len(counts))
    else:
        np.add.at(counts, codes, 1)  # no array as long as a large vocabulary for every chunk


def summarise_numbers(
    spill: Spill, parts: NDArray[np.uint8], columns: list[Column]
) -> list[NumberSummary]:
    """Return mean, spread and quantiles of each numeric column over the training rows."""
    trackers = [_Tracker(column, int((parts == 0).sum())) for column in columns]
    for rows, coded in spill.chunks():
        train = np.flatnonzero(parts[rows] == 0)
        for tracker, numbers in zip(trackers, coded.numbers, strict=True):
            tracker.missing += int(np.isnan(numbers).sum())
            tracker.add(train + rows.start, numbers.take(train))
    return [tracker.summary() for tracker in trackers]


class _Tracker:
    """Mean and variance by merging blocks (Chan et al., 1979), and a sample for quantiles."""

    def __init__(self, column: Column, train_rows: int) -> None:
        self.column = column
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.missing, self.lowest = 0, np.inf
        self.waiting = np.empty(0)
        self.sample: list[NDArray[np.float64]] = []
        self.threshold = min(1.0, SAMPLE_ROWS / max(train_rows, 1))
        self.stream = stream_key(0, "quantiles", column.name)

    def add(self, rows: NDArray[np.int64], numbers: NDArray[np.float64]) -> None:
        present = ~np.isnan(numbers)
        rows, numbers = rows[present], numbers[present]
        self.lowest = min(self.lowest, float(numbers.min(initial=np.inf)))
        self.waiting = np.concatenate([self.waiting, numbers])
        while len(self.waiting) >= COUNTING_BLOCK:
            self._merge(self.waiting[:COUNTING_BLOCK])
            self.waiting = self.waiting[COUNTING_BLOCK:]
        if self.column.treatment == "quantile":
            bits = random_bits(self.stream, rows.astype(np.uint64)) >> np.uint64(11)
            self.sample.append(numbers[bits < self.threshold * 2.0**53])

    def _merge(self, numbers: NDArray[np.float64]) -> None:
        count, mean = len(numbers), float(numbers.mean())
        total, delta = self.count + count, mean - self.mean
        self.squares += float(((numbers - mean) ** 2).sum())
        self.squares += delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    def summary(self) -> NumberSummary:
        if len(self.waiting):
            self._merge(self.waiting)
            self.waiting = np.empty(0)
        std = float(np.sqrt(self.squares / self.count)) if self.count else 0.0
        is_constant = std <= SMALLEST_SPREAD * abs(self.mean)
        return NumberSummary(
            self.mean, 1.0 if is_constant else std, tuple(self._edges()), self.missing
        )

    def _edges(self) -> list[float]:
        sample = np.concatenate([np.empty(0), *self.sample])
        if not len(sample):
            return []
        inner = np.arange(1, self.column.bins) / self.column.bins
        found = np.unique(np.quantile(sample, inner, method="inverted_cdf"))
        # nothing lies below the smallest value: a bin there would have an id that nobody trains
        edges: list[float] = found[found > self.lowest].tolist()
        return edges


PIECE = 1 << 20


@dataclass(frozen=True)
class Vocabulary:
    """The values of one or more columns, in the order of their ids from `FIRST_VALUE` on."""

    values: pl.Series
    ids: NDArray[np.int32]
    """For each code of the log, its id; unknown for a value that has none."""


def make_vocabulary(
    counts: NDArray[np.int64],
    texts: Callable[[NDArray[np.int64]], pl.Series],
    *,
    min_count: int = 1,
    unknown_share: float = 0.0,
    stream: str = "",
    seed: int = 0,
) -> Vocabulary:
    """Give an id to every value counted at least `min_count` times; `texts` are the values of codes.

    Where that is once, a share of the values counted once is left without, drawn by the seed.

    >>> colours = pl.Series(["green", "red", "blue"])
    >>> make_vocabulary(np.array([1, 0, 2]), colours.gather).values.to_list()
    ['blue', 'green']
    """
    codes = np.flatnonzero(counts >= max(min_count, 1))
    kept = pl.DataFrame({"value": texts(codes), "count": counts[codes], "code": codes})
    kept = kept.sort("count", "value", descending=[True, False])
    if min_count == 1 and unknown_share > 0:
        kept = _without_some_singles(kept, unknown_share, stream_key(seed, "unknown", stream))
    ids = np.full(FIRST_VALUE + len(counts), UNKNOWN, np.int32)
    ids[:FIRST_VALUE] = np.arange(FIRST_VALUE)
    ids[FIRST_VALUE + kept["code"].to_numpy()] = FIRST_VALUE + np.arange(kept.height)
    return Vocabulary(kept["value"].rechunk(), ids)


def _without_some_singles(kept: pl.DataFrame, share: float, stream: int) -> pl.DataFrame:
    """Leave out a share of the values seen once, which stand last: at least one, where there is one."""
    singles = int((kept["count"] == 1).sum())
    chosen = int(np.ceil(singles * share))
    bits = random_bits(stream, np.arange(singles, dtype=np.uint64))
    left_out = kept.height - singles + np.argsort(bits, kind="stable")[:chosen]
    keep = np.ones(kept.height, dtype=bool)
    keep[left_out] = False
    return kept.filter(pl.Series(keep))


def digest(values: pl.Series) -> str:
    """Return a checksum of the values and their order.

    >>> digest(pl.Series(["a", "bc"])) == digest(pl.Series(["ab", "c"]))
    False
    """
    found = hashlib.sha256()
    texts = values.cast(pl.String)
    for start in range(0, len(texts), PIECE):
        piece = texts.slice(start, PIECE)
        found.update(piece.str.len_bytes().to_numpy().astype("<u4").tobytes())
        found.update(piece.str.join("").item().encode())
    return found.hexdigest()
