"""Rows of a raw log and where each came from; malformed rows are counted, and stop or go to a file."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.errors import DataError

MOST_CHARACTERS = 120
WAITING_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a row of a raw log is, and its text."""

    file: str
    """The file's name, or "" for data in memory."""
    number: int
    """Its line in a text file, or its row in any other, from 1."""
    text: str
    unit: Literal["line", "row"] = "line"


@dataclass(frozen=True)
class RawChunk:
    """Some rows of a raw log, in order, with every column that is read.

    Columns of text files are strings, null where the value is missing; other files keep their types.
    """

    frame: pl.DataFrame
    locate: Callable[[int], Place]
    """Returns the place of a row of the frame; only called for malformed rows, so it may be slow."""
    part: str = ""
    """The split the file is for, where the files are split already: train, valid or test."""
    number_rows: Callable[[], NDArray[np.int64]] | None = None
    """Returns the numbers of all places at once, where that is faster than one by one."""

    def numbers(self) -> NDArray[np.int64]:
        """Return the number of every row's place in its file."""
        if self.number_rows is not None:
            return self.number_rows()
        rows = range(self.frame.height)
        return np.array([self.locate(row).number for row in rows], dtype=np.int64)


class BadRows:
    """The malformed rows of one reading.

    With `keep="stop"` they are counted to the end of the log, and `raise_if_any` reports the first.
    With `keep="aside"` they are skipped and written to a file: one line of JSON per row, with its
    place, the reason and its text. The file is complete after `close`.
    """

    def __init__(self, keep: Literal["stop", "aside"] = "stop", file: Path | None = None) -> None:
        self.keep, self.file = keep, file
        self.reasons: Counter[str] = Counter()
        self.first: tuple[Place, str] | None = None
        self._lock = Lock()  # one thread reads rows while another checks their values
        self._waiting: list[str] = []
        self._waiting_characters = 0

    @property
    def count(self) -> int:
        """The number of malformed rows so far."""
        return self.reasons.total()

    @property
    def stops(self) -> bool:
        """Whether the result is an error already, and reading only continues to count."""
        return self.keep == "stop" and self.first is not None

    def add(self, place: Place, reason: str, detail: str = "") -> None:
        """Add a row: all rows of a kind share the reason, the detail is this row's."""
        with self._lock:
            self.reasons[reason] += 1
            # within a block, rows without structure come before rows with a wrong value
            known = self.first[0] if self.first else None
            if known is None or (place.file == known.file and place.number < known.number):
                self.first = (place, f"{reason}{detail}")
            if self.keep != "aside" or self.file is None:
                return
            found = {"file": place.file, place.unit: place.number}
            found |= {"reason": f"{reason}{detail}", "text": place.text}
            self._waiting.append(json.dumps(found, ensure_ascii=False) + "\n")
            self._waiting_characters += len(self._waiting[-1])
            if self._waiting_characters >= WAITING_CHARACTERS:
                self.close()

    def close(self) -> None:
        """Write rows to the file. More rows may follow."""
        if self.file is not None and self._waiting:
            with self.file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(self._waiting)
            self._waiting, self._waiting_characters = [], 0

    def raise_if_any(self) -> None:
        """Raise for the first malformed row, unless they are skipped."""
        if not self.stops or self.first is None:
            return
        place, reason = self.first
        where = f"{place.file}, {place.unit}" if place.file else "row"
        more = f" {self.count:,} malformed rows in total: {self.summary()}."
        rest = more if self.count > 1 else ""
        raise DataError(
            f"{where} {place.number:,}: {reason}: {shortened(place.text)!r}.{rest} Fix the file, or "
            "skip malformed rows and write them to a file (--bad-rows aside)"
        )

    def summary(self) -> str:
        """Return how many rows there are of each kind, the most frequent first."""
        return ", ".join(f"{count:,} x {reason}" for reason, count in self.reasons.most_common())


def shortened(text: str) -> str:
    """Return the beginning of a long text, and its length."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}... ({len(text):,} characters)"
