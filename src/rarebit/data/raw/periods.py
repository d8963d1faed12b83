"""A raw log in order of time, cut into periods: days, weeks, months, or equally many rows.

    day, month    of the calendar
    week          seven days, counted from the day of the first row
    20            twenty parts with equally many rows

Periods without rows are left out. One from which nothing can be learned, because all its rows have one label, is joined with
the next one.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.log_schema import TextFormat
from rarebit.data.raw.chunks import BadRows
from rarebit.data.raw.coding import KNOWN_TIMES, as_seconds
from rarebit.data.raw.readers import FileProgress, read_raw
from rarebit.errors import DataError
from rarebit.settings import require

By = Literal["day", "week", "month"] | int
"""How a log is cut: by the calendar, or into so many parts."""

DAY = 86_400.0
LATEST = 1e11
"""Seconds since 1970 in the year 5138: larger numbers are milliseconds, microseconds or nanoseconds."""


class RawPeriod(NamedTuple):
    """The rows of a period."""

    start: str
    """Time of its first row, or the number that the log has for it."""
    rows: pl.DataFrame


@dataclass(frozen=True)
class SortedLog:
    """A raw log in order of time."""

    rows: pl.DataFrame
    seconds: NDArray[np.float64]
    """Time of each row, in seconds."""

    @classmethod
    def read(
        cls,
        log: Path,
        time: str,
        columns: Sequence[str],
        *,
        format: TextFormat | None = None,
        missing: Sequence[str] = (),
        progress: FileProgress | None = None,
    ) -> "SortedLog":
        """Read the columns of a log and sort its rows by their time; rows of one time keep their order."""
        bad = BadRows()
        wanted = list(dict.fromkeys([*columns, time]))
        chunks = read_raw(log, wanted, bad, format=format, missing=missing, progress=progress)
        frame = pl.concat([chunk.frame for chunk in chunks], how="vertical_relaxed")
        bad.raise_if_any()
        found = frame.select(as_seconds(time, frame.schema[time])).to_series()
        if found.null_count():
            row = int(found.is_null().arg_max() or 0)
            raise DataError(
                f"{found.null_count():,} rows have no time in {time!r}, row {row + 1:,} the first "
                f"({frame[time][row]!r}): it may be {KNOWN_TIMES}"
            )
        seconds = found.to_numpy()
        while len(seconds) and seconds.max() >= LATEST:
            seconds = seconds / 1000.0
        order = np.argsort(seconds, kind="stable")
        return cls(frame[order], seconds[order])

    def cut(self, by: By, label: str, *, warm_up: int = 1) -> list[RawPeriod]:
        """Return the periods of the log; the first of them has the rows of `warm_up` periods."""
        require(warm_up >= 1, f"warm_up must be at least 1, got warm_up={warm_up}")
        _, number = np.unique(_numbers(self.seconds, by), return_inverse=True)
        number = np.maximum(number - (warm_up - 1), 0)
        bounds = [*np.flatnonzero(np.diff(number, prepend=-1)), len(number)]
        parts = list(itertools.pairwise(bounds))
        parts = list(_with_both_classes(self.rows[label], parts))
        if len(parts) < 2:
            first, last = (_written(time) for time in (self.seconds[0], self.seconds[-1]))
            parted = f"by {by}" if isinstance(by, str) else f"in {by} parts"
            raise DataError(
                f"a backtest needs a period with both labels after the warm-up, and the log from {first} to {last} has none "
                f"{parted} with warm_up={warm_up}: use shorter periods, such as --by day or --by 20"
            )
        return [
            RawPeriod(_written(self.seconds[start]), self.rows[int(start) : int(stop)])
            for start, stop in parts
        ]


def _numbers(seconds: NDArray[np.float64], by: By) -> NDArray[np.int64]:
    """Return a number for the period of each row."""
    if isinstance(by, int):
        require(2 <= by <= len(seconds), f"a log of {len(seconds):,} rows has no {by} parts")
        return np.arange(len(seconds)) * by // len(seconds)
    days = np.floor(seconds / DAY).astype(np.int64)
    if by == "month":
        numbers: NDArray[np.int64] = days.astype("datetime64[D]").astype("datetime64[M]").view("i8")
    else:
        numbers = (days - days[0]) // {"day": 1, "week": 7}[by]
    return numbers


def _with_both_classes(
    labels: pl.Series, parts: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield the parts, each joined with those after it until it has two labels, the last ones with the one before."""
    begin, before = 0, None
    for _, stop in parts:
        if labels[int(begin) : int(stop)].n_unique() > 1:
            if before is not None:
                yield before
            before, begin = (begin, stop), stop
    if before is not None:
        yield before[0], parts[-1][1]


def _written(seconds: float) -> str:
    """Return a time as people write it; a number where it is none of our calendar."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g}"
