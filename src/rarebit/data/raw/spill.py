"""Coded rows on disk between the passes: written once as they come, read again chunk by chunk.

Plain reads and writes: a memory map of gigabytes would count as memory of the process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from rarebit.data.raw.coding import Coded

__all__ = ["Spill"]


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
