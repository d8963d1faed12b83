"""Rows of a raw log on their way: a frame of some rows, and where each of them came from."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

__all__ = ["Place", "RawChunk"]


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
