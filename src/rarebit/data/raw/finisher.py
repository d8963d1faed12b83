"""The last step from raw rows to ids and numbers: the same when a log is prepared and when it is scored."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from rarebit.data.log_schema import LogSchema
from rarebit.data.raw.coding import Coded
from rarebit.data.schema import FIRST_VALUE, MISSING

__all__ = ["Finisher"]

LARGEST = float(np.finfo(np.float32).max)


class Finisher:
    """Makes ids and numbers, row by row as a batch takes them, of coded columns.

    `ids` has, for each slot with codes, the id of each code; None where codes are ids already.
    """

    def __init__(
        self,
        schema: LogSchema,
        ids: list[NDArray[np.int32]] | None,
        scales: Mapping[str, tuple[float, float]],
        edges: Mapping[str, tuple[float, ...]],
    ) -> None:
        self.schema, self.ids, self.scales, self.edges = schema, ids, scales, edges
        self.num_slots = sum(column.max_length for column in schema.id_columns)
        self.num_numbers = len(schema.number_columns)
        self.bin_slots = self._find_bin_slots()

    def __call__(self, coded: Coded) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids `(rows, slots)` and numbers `(rows, columns)`."""
        ids = np.empty((len(coded), self.num_slots), np.int32)
        for slot, found in enumerate(self._slots(coded)):
            ids[:, slot] = found
        numeric = np.empty((len(coded), self.num_numbers), np.float32)
        for place, (name, number) in enumerate(self._numbers(coded)):
            numeric[:, place] = _standardised(number, *self.scales[name])
        return ids, numeric

    def _slots(self, coded: Coded) -> Iterator[NDArray[np.int32]]:
        codes, numbers = iter(enumerate(coded.codes)), iter(coded.numbers)
        for column in self.schema.columns:
            if column.is_number:
                number = next(numbers)
                if column.treatment == "quantile":
                    yield _binned(number, self.edges[column.name])
            elif column.has_ids:
                for _ in range(column.max_length):
                    slot, found = next(codes)
                    yield found if self.ids is None else self.ids[slot].take(found)

    def _numbers(self, coded: Coded) -> Iterator[tuple[str, NDArray[np.float64]]]:
        columns = [column for column in self.schema.columns if column.is_number]
        for column, number in zip(columns, coded.numbers, strict=True):
            if not column.has_ids:
                yield column.name, number

    def _find_bin_slots(self) -> dict[str, int]:
        """Return the slot of each column of quantile bins."""
        slots, start = {}, 0
        for column in self.schema.id_columns:
            if column.is_number:
                slots[column.name] = start
            start += column.max_length
        return slots

    def empty_bin_counts(self) -> dict[str, NDArray[np.int64]]:
        """Return zeros to count the ids of each column of quantile bins, `(3, ids)`."""
        return {
            name: np.zeros((3, FIRST_VALUE + len(self.edges[name]) + 1), np.int64)
            for name in self.bin_slots
        }


def _standardised(number: NDArray[np.float64], mean: float, std: float) -> NDArray[np.float64]:
    """Return numbers that 32 bits hold: one far outside of the training rows must not be infinite."""
    with np.errstate(over="ignore"):
        scaled = (number - mean) / std
    scaled[np.isnan(number)] = 0.0  # missing: the mean
    return np.clip(scaled, -LARGEST, LARGEST, out=scaled)


def _binned(number: NDArray[np.float64], edges: tuple[float, ...]) -> NDArray[np.int32]:
    bins = FIRST_VALUE + np.searchsorted(np.asarray(edges), number, side="right")
    return np.where(np.isnan(number), MISSING, bins).astype(np.int32)
