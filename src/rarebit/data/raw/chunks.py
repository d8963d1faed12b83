"""Rows of a raw log and where each came from; malformed rows are counted, and stop or go to a file."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.errors import DataError, SettingsError

MOST_CHARACTERS = 120
WAITING_CHARACTERS = 1 << 20
MOST_LABELS, LABELS_SHOWN = 1000, 6


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
        if keep not in ("stop", "aside"):
            raise SettingsError(f"bad_rows must be 'stop' or 'aside', got {keep!r}")
        self.keep, self.file = keep, file
        self.reasons: Counter[str] = Counter()
        self.first: tuple[Place, str] | None = None
        self.hints: set[str] = set()
        """What values should be, for people."""
        self.label, self.classes = "", np.zeros(2, np.int64)
        """The label's column, and how many rows of 0 and of 1 it has."""
        self.wrong_labels: Counter[str | None] = Counter()
        """How often other values of the label occur; None is a missing one."""
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

    def count_labels(self, name: str, good: NDArray[np.uint8], wrong: pl.Series) -> None:
        """Count the labels of some rows: 0 and 1, and values that are neither."""
        self.label = name
        self.classes += np.bincount(good, minlength=2)
        for value, count in wrong.value_counts().iter_rows():
            known = value is None or shortened(str(value)) in self.wrong_labels
            if known or len(self.wrong_labels) < MOST_LABELS:
                self.wrong_labels[None if value is None else shortened(str(value))] += count

    def counted(self) -> dict[str, Any]:
        """Return all counts as plain values, for `add_counted`."""
        return {
            "reasons": dict(self.reasons),
            "label": self.label,
            "classes": self.classes.tolist(),
            "wrong_labels": list(self.wrong_labels.items()),
        }

    def add_counted(self, counts: Mapping[str, Any]) -> None:
        """Add the counts of the next part of the log."""
        self.reasons.update(counts["reasons"])
        self.label = counts["label"] or self.label
        self.classes += counts["classes"]
        self.wrong_labels.update(dict(counts["wrong_labels"]))

    def close(self) -> None:
        """Write rows to the file. More rows may follow."""
        if self.file is not None and self._waiting:
            with self.file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(self._waiting)
            self._waiting, self._waiting_characters = [], 0

    def raise_if_any(self) -> None:
        """Raise for the first malformed row, unless they are skipped; for most of the labels even then."""
        self._refuse_labels()
        if not self.stops or self.first is None:
            return
        place, reason = self.first
        where = f"{place.file}, {place.unit}" if place.file else "row"
        more = f" {self.count:,} malformed rows in total: {self.summary()}."
        rest = more if self.count > 1 else ""
        hints = "".join(f" {hint}" for hint in sorted(self.hints))
        skip = ", or skip malformed rows and write them to a file (--bad-rows aside)"
        raise DataError(
            f"{where} {place.number:,}: {reason}: {shortened(place.text)!r}.{rest}{hints} Fix the file"
            f"{skip if self.count <= self.classes.sum() else ''}"
        )

    def _refuse_labels(self) -> None:
        """Raise where to skip wrong labels would skip most rows, or all rows of a class."""
        wrong = self.wrong_labels.total()
        rows = wrong + int(self.classes.sum())
        if not wrong or (self.classes.all() and 2 * wrong <= rows):
            return
        if self.count > 2 * wrong:
            return  # most rows are malformed for another reason
        seen = Counter({str(n): count for n, count in enumerate(self.classes.tolist()) if count})
        seen += Counter({value: count for value, count in self.wrong_labels.items() if value})
        shown = sorted(seen.items(), key=lambda item: (-item[1], item[0]))
        listed = [f"{value!r} ({count:,})" for value, count in shown[:LABELS_SHOWN]]
        listed += [f"{len(seen) - LABELS_SHOWN:,} others"] if len(seen) > LABELS_SHOWN else []
        listed += [f"missing ({self.wrong_labels[None]:,})"] if self.wrong_labels[None] else []
        advice = "Leave rows without a label out of the log"
        if len(seen) > self.classes.astype(bool).sum():
            positive = _positive(seen)
            advice = (
                f'If it is the label, say what counts as 1, for example --label "{self.label}{positive}" '
                f'(in a schema: positive = "{positive}")'
            )
        raise DataError(
            f"the label {self.label!r} must be 0 or 1, but {wrong:,} of {rows:,} rows have another value. "
            f"Its values (rows): {', '.join(listed)}. {advice}"
        )

    def summary(self) -> str:
        """Return how many rows there are of each kind, the most frequent first."""
        return ", ".join(f"{count:,} x {reason}" for reason, count in self.reasons.most_common())


def _positive(labels: Counter[str]) -> str:
    """Return a comparison that may tell positive labels: the upper half of numbers, or the rarest text."""
    try:
        numbers = sorted(labels, key=float)
    except ValueError:
        return f"={labels.most_common()[-1][0]}"
    upper = numbers[min((len(numbers) + 1) // 2, len(numbers) - 1)]
    return f"={upper}" if len(numbers) == 2 else f">={upper}"


def shortened(text: str) -> str:
    """Return the beginning of a long text, and its length."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}... ({len(text):,} characters)"
