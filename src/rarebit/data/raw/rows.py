"""Rows of a raw log on their way: a frame of some rows, and where each of them came from.

Rows of a raw log that cannot be read: counted, kept in a file, or a reason to stop. Never lost.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Literal, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.errors import DataError

__all__ = ["BadRows", "Place", "RawChunk", "shortened"]


@dataclass(frozen=True)
class Place:
    """Where a row of a raw log is, and what stands there."""

    file: str
    """The file's name, or "" for data that is in memory."""
    number: int
    """Its line in a text file or its row in any other, from 1."""
    text: str
    """What stands there, in full."""
    unit: str = "line"
    """What is counted: "line" or "row"."""


@dataclass(frozen=True)
class RawChunk:
    """Some rows of a raw log, in order, with every column that is read.

    Columns of text files are strings, null where the value is missing; other files keep their types.
    """

    frame: pl.DataFrame
    locate: Callable[[int], Place]
    """Where a row of the frame is; only asked for bad rows, so it may be slow."""
    part: str = ""
    """Which split the file is for, where the files say so: train, valid or test."""
    number_rows: Callable[[], NDArray[np.int64]] | None = None
    """The number of every row's place at once, where that is quicker than one by one."""

    def numbers(self) -> NDArray[np.int64]:
        """Return the number of every row's place in its file."""
        if self.number_rows is not None:
            return self.number_rows()
        rows = range(self.frame.height)
        return np.array([self.locate(row).number for row in rows], dtype=np.int64)


MOST_CHARACTERS = 120
WAITING_CHARACTERS = 1 << 20


class BadRows:
    """The bad rows of one reading.

    With `keep="stop"` they are counted to the end of the log, and `raise_if_any` then says what the
    first was. With `keep="aside"` each goes to a file, with its place and the reason, as a line of
    JSON. Lines are written many at a time: the file is complete after `close`, or after a `with`.
    """

    def __init__(self, keep: Literal["stop", "aside"] = "stop", file: Path | None = None) -> None:
        self.keep, self.file = keep, file
        self.reasons: Counter[str] = Counter()
        self.first: tuple[Place, str] | None = None
        self._lock = Lock()
        self._waiting: list[str] = []
        self._waiting_characters = 0

    @property
    def count(self) -> int:
        """How many there were."""
        return self.reasons.total()

    @property
    def stops(self) -> bool:
        """Whether reading only goes on to count: the result will be an error."""
        return self.keep == "stop" and self.first is not None

    def add(self, place: Place, reason: str, detail: str = "") -> None:
        """Take a row: the reason is the same for all rows of its kind, the detail is this row's."""
        with self._lock:  # rows may be read and checked by two threads
            self._add(place, reason, detail)

    def _add(self, place: Place, reason: str, detail: str) -> None:
        self.reasons[reason] += 1
        # of one block, rows without structure come before rows with a wrong value
        if self.first is None or _stands_before(place, self.first[0]):
            self.first = (place, f"{reason}{detail}")
        if self.keep == "aside" and self.file is not None:
            line = {
                "file": place.file,
                place.unit: place.number,
                "reason": f"{reason}{detail}",
                "text": place.text,
            }
            self._wait(json.dumps(line, ensure_ascii=False) + "\n")

    def _wait(self, line: str) -> None:
        """Keep a line until there are enough to write."""
        self._waiting.append(line)
        self._waiting_characters += len(line)
        if self._waiting_characters >= WAITING_CHARACTERS:
            self.close()

    def close(self) -> None:
        """Write what still waits. More rows may follow: they are added to the file."""
        if self.file is not None and self._waiting:
            with self.file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(self._waiting)
            self._waiting, self._waiting_characters = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def raise_if_any(self) -> None:
        """Raise where a bad row is a reason to stop."""
        if not self.stops or self.first is None:
            return
        place, reason = self.first
        where = (
            f"{place.file}, {place.unit} {place.number:,}"
            if place.file
            else f"row {place.number:,}"
        )
        rest = f" {self.count:,} bad rows in all: {self.summary()}." if self.count > 1 else ""
        raise DataError(
            f"{where}: {reason}: {shortened(place.text)!r}.{rest} Mend the file, or set bad rows "
            "aside in a file of their own (--bad-rows aside)"
        )

    def summary(self) -> str:
        """Return how many there were of each kind, the most frequent first."""
        return ", ".join(f"{count:,} x {reason}" for reason, count in self.reasons.most_common())


def _stands_before(place: Place, other: Place) -> bool:
    return place.file == other.file and place.number < other.number


def shortened(text: str) -> str:
    """Return a text for people: its beginning, and how long it is, where it is long.

    >>> shortened("x" * 500)[-21:]
    'x... (500 characters)'
    """
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}... ({len(text):,} characters)"
