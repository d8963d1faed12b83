"""Arrays that people bring, as the tensors of a data set, or a sentence that says what is wrong."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rarebit.data.schema import Field, Schema
from rarebit.errors import DataError

__all__ = [
    "check_ids",
    "check_same_length",
    "field_columns",
    "infer_schema",
    "to_floats",
    "to_ids",
    "to_tensor",
]


def to_tensor(name: str, values: ArrayLike | Tensor) -> Tensor:
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


def to_ids(values: ArrayLike | Tensor) -> Tensor:
    """Return ids as 32-bit integers `(rows, slots)`."""
    ids = to_tensor("ids", values)
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


def to_floats(
    name: str, values: ArrayLike | Tensor | None, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return numbers as floats of a shape; zeros where there are none."""
    if values is None:
        return torch.zeros(shape, device=device)
    floats = to_tensor(name, values).to(device, torch.float32)
    if tuple(floats.shape) != shape:
        raise DataError(f"{name} must have the shape {shape}, got {tuple(floats.shape)}")
    if not bool(torch.isfinite(floats).all()):
        row = int((~torch.isfinite(floats.reshape(shape[0], -1)).all(dim=1)).nonzero()[0])
        raise DataError(
            f"{name} must be finite, got {floats[row].tolist()} in row {row}; "
            "fill or drop missing numbers first"
        )
    return floats


def infer_schema(tensors: Mapping[str, Tensor]) -> Schema:
    """Return what the columns seem to be: integers have a table, floats are numbers."""
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


def field_columns(column: Tensor, field: Field) -> Tensor:
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


def check_same_length(tensors: Mapping[str, Tensor]) -> None:
    """Raise when columns have other numbers of rows."""
    for name, column in tensors.items():
        if column.dim() == 0:
            raise DataError(f"the column {name!r} needs one value a row, got a single number")
    lengths = {name: len(column) for name, column in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"all columns must have the same number of rows, got {lengths}")


def check_ids(schema: Schema, ids: Tensor) -> None:
    """Name the first id that no table has a row for. One pass, one synchronisation."""
    if schema.num_slots == 0:
        return
    lowest, highest = torch.aminmax(ids, dim=0)
    extremes = torch.stack([lowest, highest]).tolist()
    for field in schema.table_fields:
        for column in range(schema.slots[field.name].start, schema.slots[field.name].stop):
            if extremes[0][column] < 0 or extremes[1][column] >= field.rows:
                found = ids[:, column]
                row = int(((found < 0) | (found >= field.rows)).nonzero()[0])
                raise DataError(
                    f"field {field.name!r} has a table of {field.rows} rows, so ids lie in "
                    f"[0, {field.rows - 1}]; row {row} holds {int(found[row])}. Map unseen values to "
                    "the unknown id, or give the field more rows"
                )
