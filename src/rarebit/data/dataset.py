"""A click log in memory or on a device: column arrays, and batches by one index operation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rarebit.data.schema import PADDING, Field, Schema
from rarebit.errors import DataError
from rarebit.settings import require, suggest

__all__ = ["Batch", "Dataset", "Splits", "batch_bounds", "shuffled_order"]


@dataclass(frozen=True)
class Batch:
    """Some rows of a data set. A model takes a batch and returns one score a row.

    `batch["user"]` is the column of one field: ids `(B,)`, ids `(B, max_length)` for a
    multi-valued field (0 where there is no value), or numbers `(B,)`.
    """

    ids: Tensor
    """Ids of all fields with a table, per field, `(B, num_slots)`."""
    numeric: Tensor
    """Numbers of all numeric fields, `(B, number of numeric fields)`."""
    label: Tensor
    """What happened, `(B,)`: 1.0 for a click."""
    schema: Schema

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, name: str) -> Tensor:
        field = self.schema[name]
        if field.kind == "numeric":
            return self.numeric[:, self.schema.numeric_fields.index(field)]
        columns = self.ids[:, self.schema.slots[name]]
        return columns if field.kind == "multi" else columns[:, 0]


class Dataset:
    """A click log as three arrays: ids `(n, num_slots)`, numbers `(n, P)` and labels `(n,)`.

    Ids are checked once, when the data set is made, on whatever device they are on.

    >>> schema = Schema((Field(name="user", rows=4), Field(name="age", kind="numeric")))
    >>> data = Dataset(schema, ids=[[1], [3]], numeric=[[0.5], [-1.0]], label=[0, 1])
    >>> data[torch.tensor([1])]["user"]
    tensor([3], dtype=torch.int32)
    """

    def __init__(
        self,
        schema: Schema,
        ids: ArrayLike | Tensor,
        numeric: ArrayLike | Tensor | None = None,
        label: ArrayLike | Tensor | None = None,
        *,
        probability: ArrayLike | Tensor | None = None,
    ) -> None:
        self.schema = schema
        self.ids = _ids(ids)
        n, device = self.ids.shape[0], self.ids.device
        self.numeric = _floats("numeric", numeric, (n, len(schema.numeric_fields)), device)
        self.label = _floats("label", label, (n,), device)
        self.probability = (
            None if probability is None else _floats("probability", probability, (n,), device)
        )
        """The true chance of a click, where it is known: the data was generated."""
        _check_not_empty(self)
        _check_range(self)

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, ArrayLike | Tensor],
        label: ArrayLike | Tensor | None = None,
        *,
        schema: Schema | None = None,
    ) -> "Dataset":
        """Build a data set from one array a field.

        Without a schema, integers `(n,)` are categorical, integers `(n, length)` multi-valued with
        0 as padding, and floats `(n,)` numeric; a table has one row more than the largest id.

        >>> data = Dataset.from_columns({"user": [0, 1, 2], "price": [9.5, 1.0, 3.2]}, label=[0, 1, 0])
        >>> [(field.name, field.kind) for field in data.schema.fields]
        [('user', 'categorical'), ('price', 'numeric')]
        """
        tensors = {
            name: _tensor(f"the column {name!r}", column) for name, column in columns.items()
        }
        schema = schema or _infer_schema(tensors)
        names = [field.name for field in schema.fields]
        for name in names:
            if name not in tensors:
                raise DataError(f"the column {name!r} is missing{suggest(name, list(tensors))}")
        for name in tensors:
            if name not in names:
                raise DataError(f"the column {name!r} is not in the schema{suggest(name, names)}")
        _check_same_length(tensors)
        ids = [_columns(tensors[field.name], field) for field in schema.table_fields]
        numeric = [_columns(tensors[field.name], field) for field in schema.numeric_fields]
        n = len(next(iter(tensors.values())))
        return cls(
            schema,
            torch.cat(ids, dim=1) if ids else torch.zeros(n, 0, dtype=torch.int32),
            torch.cat(numeric, dim=1) if numeric else None,
            label,
        )

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        return Batch(self.ids[rows], self.numeric[rows], self.label[rows], self.schema)

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.ids.device

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = [self.ids, self.numeric, self.label, self.probability]
        return sum(array.nbytes for array in arrays if array is not None)

    def to(self, device: torch.device | str) -> "Dataset":
        """Return the same data on another device; itself where it already is."""
        if torch.device(device) == self.device:
            return self
        moved = object.__new__(Dataset)  # checked already
        moved.schema = self.schema
        moved.ids, moved.numeric = self.ids.to(device), self.numeric.to(device)
        moved.label = self.label.to(device)
        moved.probability = None if self.probability is None else self.probability.to(device)
        return moved

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[Batch]:
        """Yield batches in the given order of rows, or as they lie. The last is never a single row."""
        for start, stop in batch_bounds(len(self), batch_size):
            yield self[slice(start, stop) if order is None else order[start:stop]]

    def counts(self) -> dict[str, Tensor]:
        """Return how often each id of each field occurs, `(rows,)` a field; padding counts zero.

        >>> data = Dataset.from_columns({"user": [0, 2, 2]}, label=[0, 1, 0])
        >>> data.counts()["user"]
        tensor([1, 0, 2])
        """
        counts = {}
        for field in self.schema.table_fields:
            ids = self.ids[:, self.schema.slots[field.name]].reshape(-1)
            counts[field.name] = torch.bincount(ids, minlength=field.rows)
            if field.kind == "multi":
                counts[field.name][PADDING] = 0
        return counts


class Splits(NamedTuple):
    """Three data sets of one schema: train to learn, valid to choose, test to report."""

    train: Dataset
    valid: Dataset
    test: Dataset


def batch_bounds(num_rows: int, batch_size: int) -> list[tuple[int, int]]:
    """Return where each batch starts and stops. A single last row joins the batch before it.

    Batch normalisation has no variance on one row, so no batch is ever one row by accident.

    >>> batch_bounds(9, 4)
    [(0, 4), (4, 9)]
    """
    require(batch_size >= 1, f"batch_size must be at least 1, got batch_size={batch_size}")
    bounds = [
        (start, min(start + batch_size, num_rows)) for start in range(0, num_rows, batch_size)
    ]
    if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] == 1:
        last = bounds.pop()
        bounds[-1] = (bounds[-1][0], last[1])
    return bounds


def shuffled_order(
    num_rows: int, *, seed: int, epoch: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the order of the rows in one epoch: a permutation that seed and epoch decide.

    It is drawn on the device, whose kind has its own random numbers.
    """
    # torch's generator looks at 32 bits of its seed only, so seed and epoch are mixed into them
    mixed = np.random.SeedSequence([seed, epoch]).generate_state(1)
    generator = torch.Generator(device).manual_seed(int(mixed[0]))
    return torch.randperm(num_rows, generator=generator, device=device)


def _tensor(name: str, values: ArrayLike | Tensor) -> Tensor:
    """Return the values as a tensor of a type that torch can compute with."""
    if isinstance(values, Tensor):
        if values.is_complex():
            raise DataError(f"{name} must hold integers or floats, got {values.dtype}")
        is_wide = values.dtype in (torch.uint16, torch.uint32, torch.uint64)
        return values.long() if is_wide else values
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name} must hold integers or floats, got {array.dtype}; encode strings as ids first"
        )
    # a copy where the array is read-only, which a tensor cannot be
    return torch.from_numpy(np.require(array, _torch_dtype(array.dtype), ["C", "W"]))


def _torch_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the closest type that torch can compute with, in this machine's byte order."""
    if dtype.kind == "u" and dtype.itemsize > 1:
        return np.dtype(np.int64)
    if dtype.kind == "f" and dtype.itemsize > 8:
        return np.dtype(np.float64)
    return dtype.newbyteorder("=")


def _ids(values: ArrayLike | Tensor) -> Tensor:
    ids = _tensor("ids", values)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise DataError(
            f"ids must be integers, got {ids.dtype}; floats cannot hold large ids exactly"
        )
    if ids.dim() != 2:
        raise DataError(f"ids must be (rows, slots), got the shape {tuple(ids.shape)}")
    if ids.numel() and ids.dtype != torch.int32:
        for extreme in (int(bound) for bound in ids.aminmax()):
            if not -(1 << 31) <= extreme < 1 << 31:
                raise DataError(f"ids must fit 32 bits, got {extreme}")
    return ids.to(torch.int32)


def _floats(
    name: str, values: ArrayLike | Tensor | None, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    if values is None:
        return torch.zeros(shape, device=device)
    floats = _tensor(name, values).to(device, torch.float32)
    if tuple(floats.shape) != shape:
        raise DataError(f"{name} must have the shape {shape}, got {tuple(floats.shape)}")
    if not bool(torch.isfinite(floats).all()):
        row = int((~torch.isfinite(floats.reshape(shape[0], -1)).all(dim=1)).nonzero()[0])
        raise DataError(
            f"{name} must be finite, got {floats[row].tolist()} in row {row}; "
            "fill or drop missing numbers first"
        )
    return floats


def _infer_schema(tensors: Mapping[str, Tensor]) -> Schema:
    fields = []
    for name, column in tensors.items():
        if column.is_floating_point():
            fields.append(Field(name=name, kind="numeric"))
            continue
        rows = max(int(column.max()), 0) + 1 if column.numel() else 1
        if column.dim() == 2:
            length = column.shape[1]
            fields.append(Field(name=name, kind="multi", rows=rows, max_length=length))
        else:
            fields.append(Field(name=name, rows=rows))
    return Schema(tuple(fields))


def _columns(column: Tensor, field: Field) -> Tensor:
    """Return one field's array as `(n, slots)`, or say what is wrong with it."""
    is_float = column.is_floating_point()
    if field.kind == "numeric":
        if column.dim() != 1:
            raise DataError(f"{field.name!r} is numeric: one number a row, got {column.dim()} axes")
        return column[:, None].to(torch.float32)
    if is_float or column.dtype == torch.bool:
        raise DataError(f"{field.name!r} is {field.kind}: ids are integers, got {column.dtype}")
    if field.kind == "multi":
        if column.dim() != 2 or column.shape[1] != field.max_length:
            raise DataError(
                f"{field.name!r} is multi-valued: ids (n, {field.max_length}), "
                f"got {tuple(column.shape)}; fill shorter rows with 0"
            )
        return column
    if column.dim() != 1:
        raise DataError(f"{field.name!r} is categorical: one id a row, got {tuple(column.shape)}")
    return column[:, None]


def _check_same_length(tensors: Mapping[str, Tensor]) -> None:
    for name, column in tensors.items():
        if column.dim() == 0:
            raise DataError(f"the column {name!r} needs one value a row, got a single number")
    lengths = {name: len(column) for name, column in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"all columns must have the same number of rows, got {lengths}")


def _check_not_empty(data: Dataset) -> None:
    if len(data) == 0:
        raise DataError("a data set needs at least one row, got none; is the file or filter empty?")
    if data.ids.shape[1] != data.schema.num_slots:
        raise DataError(
            f"the schema has {data.schema.num_slots} slots, got ids with {data.ids.shape[1]} columns"
        )


def _check_range(data: Dataset) -> None:
    """Name the first id that no table has a row for. One pass, one synchronisation."""
    if data.schema.num_slots == 0:
        return
    lowest, highest = torch.aminmax(data.ids, dim=0)
    extremes = torch.stack([lowest, highest]).tolist()
    for field in data.schema.table_fields:
        for column in range(
            data.schema.slots[field.name].start, data.schema.slots[field.name].stop
        ):
            if extremes[0][column] < 0 or extremes[1][column] >= field.rows:
                ids = data.ids[:, column]
                row = int(((ids < 0) | (ids >= field.rows)).nonzero()[0])
                raise DataError(
                    f"field {field.name!r} has a table of {field.rows} rows, so ids lie in "
                    f"[0, {field.rows - 1}]; row {row} holds {int(ids[row])}. Map unseen values to "
                    "the unknown id, or give the field more rows"
                )
