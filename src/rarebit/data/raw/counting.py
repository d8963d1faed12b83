"""The second pass: how often each code occurs in each part, and what numbers are like in training."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rarebit.data.counter_random import random_bits, stream_key
from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.prepare import Progress, no_progress
from rarebit.data.raw.spill import Spill

__all__ = ["NumberSummary", "add_counts", "count_codes", "slot_columns", "summarise_numbers"]

SAMPLE_ROWS = 1_000_000
"""Training rows that the edges of quantile bins are taken from, at most about."""
BLOCK = 1 << 16
"""Numbers that are summed at once: the same ones however the log was cut into chunks."""
SMALLEST_SPREAD = 1e-12
"""Of the mean: a spread below it is the rounding of numbers that are all the same."""


@dataclass(frozen=True)
class NumberSummary:
    """A numeric column in the training rows."""

    mean: float
    std: float
    quantiles: tuple[float, ...]
    """Distinct edges between bins of equally many rows; empty where none were asked for."""


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
            tracker.add(train + rows.start, numbers.take(train))
    return [tracker.summary() for tracker in trackers]


class _Tracker:
    """Mean and variance by merging blocks (Chan et al., 1979), and a sample for quantiles."""

    def __init__(self, column: Column, train_rows: int) -> None:
        self.column = column
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.waiting = np.empty(0)
        self.sample: list[NDArray[np.float64]] = []
        self.threshold = min(1.0, SAMPLE_ROWS / max(train_rows, 1))
        self.stream = stream_key(0, "quantiles", column.name)

    def add(self, rows: NDArray[np.int64], numbers: NDArray[np.float64]) -> None:
        present = ~np.isnan(numbers)
        rows, numbers = rows[present], numbers[present]
        self.waiting = np.concatenate([self.waiting, numbers])
        while len(self.waiting) >= BLOCK:
            self._merge(self.waiting[:BLOCK])
            self.waiting = self.waiting[BLOCK:]
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
        edges: tuple[float, ...] = ()
        if self.sample:
            inner = np.arange(1, self.column.bins) / self.column.bins
            found = np.quantile(np.concatenate(self.sample), inner, method="inverted_cdf")
            edges = tuple(np.unique(found).tolist())
        return NumberSummary(self.mean, 1.0 if is_constant else std, edges)
