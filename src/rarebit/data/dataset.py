"""A click log in memory, on a device or on disk: column arrays, and batches by one index operation.

Arrays are checked once, when a data set is made: types, shapes, finite numbers, and ids that have a row.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rarebit.data.order import batch_bounds, chunk_plan, chunk_shuffled_order, shuffled_order
from rarebit.data.prepared import PreparedFolder
from rarebit.data.schema import PADDING, Field, Schema
from rarebit.errors import DataError
from rarebit.settings import suggest

if TYPE_CHECKING:
    from rarebit.data.log_schema import LogSchema, Split


_verified: set[tuple[object, ...]] = set()
"""The files of prepared logs that this process has compared with their checksums."""


def _to_tensor(name: str, values: ArrayLike | Tensor) -> Tensor:
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
    dtype = array.dtype.newbyteorder("=")
    if dtype.kind == "u" and dtype.itemsize > 1:
        dtype = np.dtype(np.int64)
    elif dtype.kind == "f" and dtype.itemsize > 8:
        dtype = np.dtype(np.float64)
    # a copy where the array is read-only, which a tensor cannot be
    return torch.from_numpy(np.require(array, dtype, ["C", "W"]))


def _to_ids(values: ArrayLike | Tensor) -> Tensor:
    """Return ids as 32-bit integers `(rows, slots)`."""
    ids = _to_tensor("ids", values)
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


def _to_floats(
    name: str, values: ArrayLike | Tensor | None, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return numbers as float32 of a shape; zeros where there are none."""
    if values is None:
        return torch.zeros(shape, device=device)
    floats = _to_tensor(name, values).to(device, torch.float32)
    if tuple(floats.shape) != shape:
        raise DataError(f"{name} must have the shape {shape}, got {tuple(floats.shape)}")
    if not bool(torch.isfinite(floats).all()):
        row = int((~torch.isfinite(floats.reshape(shape[0], -1)).all(dim=1)).nonzero()[0])
        raise DataError(
            f"{name} must be finite, got {floats[row].tolist()} in row {row}; "
            "fill or drop missing numbers first"
        )
    return floats


def _guess_fields(tensors: Mapping[str, Tensor]) -> Schema:
    """Guess the fields of columns: integers have a table, floats are numbers."""
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


def _field_columns(column: Tensor, field: Field) -> Tensor:
    """Return one field's array as `(n, slots)`; raise if its type or shape is wrong."""
    if field.kind == "numeric":
        if column.dim() != 1:
            raise DataError(
                f"{field.name!r} is numeric: one number per row, got {column.dim()} axes"
            )
        return column[:, None].to(torch.float32)
    if column.is_floating_point() or column.dtype == torch.bool:
        raise DataError(f"{field.name!r} is {field.kind}: ids are integers, got {column.dtype}")
    if field.kind == "multi":
        if column.dim() != 2 or column.shape[1] != field.max_length:
            raise DataError(
                f"{field.name!r} is multi-valued: ids (n, {field.max_length}), "
                f"got {tuple(column.shape)}; fill shorter rows with 0"
            )
        return column
    if column.dim() != 1:
        raise DataError(f"{field.name!r} is categorical: one id per row, got {tuple(column.shape)}")
    return column[:, None]


def _to_groups(values: ArrayLike | Tensor, n: int) -> Tensor:
    """Return what rows are grouped by as integers `(rows,)`."""
    groups = _to_tensor("group", values)
    if groups.is_floating_point() or groups.shape != (n,):
        raise DataError(
            f"group must be one integer per row, ({n},), got {groups.dtype} {tuple(groups.shape)}"
        )
    return groups.long()


def check_ids(schema: Schema, ids: Tensor) -> None:
    """Raise for the first id that its table has no row for. One pass, one synchronisation."""
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


@dataclass(frozen=True)
class Batch:
    """Some rows of a data set. A model takes a batch and returns one score per row.

    `batch["user"]` is the column of one field: ids `(B,)`, ids `(B, max_length)` for a
    multi-valued field (0 where there is no value), or numbers `(B,)`.
    """

    ids: Tensor
    """Ids of all fields with a table, per field, `(B, num_slots)`."""
    numeric: Tensor
    """Numbers of all numeric fields, `(B, number of numeric fields)`."""
    label: Tensor
    """`(B,)`: 1.0 for a click, 0.0 for none."""
    schema: Schema
    weight: Tensor | None = None
    """`(B,)`: how much each row counts in the loss; None where all count 1."""

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, name: str) -> Tensor:
        field = self.schema[name]
        if field.kind == "numeric":
            return self.numeric[:, self.schema.numeric_fields.index(field)]
        columns = self.ids[:, self.schema.slots[name]]
        return columns if field.kind == "multi" else columns[:, 0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Return the same rows on another device."""
        return self._each(lambda array: array.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the same rows in memory that a GPU can copy from in the background."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        weight = None if self.weight is None else change(self.weight)
        ids, numeric, label = map(change, (self.ids, self.numeric, self.label))
        return Batch(ids, numeric, label, self.schema, weight)


def collate(rows: "Batch | Sequence[Batch]") -> Batch:
    """Return rows as one batch, for a `DataLoader` over a `Dataset`: one index operation per batch.

    >>> from torch.utils.data import DataLoader
    >>> data = Dataset.from_columns({"user": [0, 1, 2]}, label=[0, 1, 0])
    >>> [len(batch) for batch in DataLoader(data, batch_size=2, collate_fn=collate)]
    [2, 1]
    """
    if isinstance(rows, Batch):
        return rows
    if not rows or not all(isinstance(row, Batch) for row in rows):
        raise DataError(
            "collate takes rows of a rarebit Dataset, as data[0] gives them; encode raw rows first: "
            "Dataset.from_frame"
        )
    weights = [row.weight for row in rows if row.weight is not None]
    return Batch(
        torch.cat([row.ids for row in rows]),
        torch.cat([row.numeric for row in rows]),
        torch.cat([row.label for row in rows]),
        rows[0].schema,
        torch.cat(weights) if weights else None,
    )


class Dataset:
    """A click log as three arrays: ids `(n, num_slots)`, numbers `(n, P)` and labels `(n,)`.

    Ids are checked once, when the data set is made, on whatever device they are on.

    >>> from rarebit.data import Field
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
        weight: ArrayLike | Tensor | None = None,
        group: ArrayLike | Tensor | None = None,
        probability: ArrayLike | Tensor | None = None,
    ) -> None:
        self.schema = schema
        self.ids = _to_ids(ids)
        n, device = self.ids.shape[0], self.ids.device
        self.numeric = _to_floats("numeric", numeric, (n, len(schema.numeric_fields)), device)
        self.label = _to_floats("label", label, (n,), device)
        self.weight = None if weight is None else _to_floats("weight", weight, (n,), device)
        """How much each row counts in the loss, `(n,)`; None where all count 1."""
        self.group = None if group is None else _to_groups(group, n).to(device)
        """Rows of one number compete with each other, such as those of a user, `(n,)`; 0 is no group."""
        self.probability = (
            None if probability is None else _to_floats("probability", probability, (n,), device)
        )
        """The true chance of a click, where it is known: the data was generated."""
        self.chunks: tuple[int, int] | None = None
        """Rows per chunk, and chunks shuffled at once, for data on disk that does not fit in memory."""
        self.parts: Splits | None = None
        """The splits made when the rows were prepared."""
        self.known_counts: Mapping[str, Tensor] | None = None
        """How often each id occurs, where that was counted when the rows were prepared."""
        if n == 0:
            raise DataError(
                "a data set needs at least one row, got none; is the file or filter empty?"
            )
        if self.ids.shape[1] != schema.num_slots:
            raise DataError(
                f"the schema has {schema.num_slots} slots, got ids with {self.ids.shape[1]} columns"
            )
        check_ids(schema, self.ids)
        if self.weight is not None and float(self.weight.min()) < 0:
            raise DataError(
                f"weights must be at least 0, got {float(self.weight.min()):g} in row {int(self.weight.argmin())}"
            )

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        verify: bool = True,
        memory_bytes: int | None = None,
    ) -> "Dataset":
        """Open a log prepared by `rarebit data prepare`: all of its rows, and their `splits`.

        Its files are read once and compared with their checksums, about a second per gigabyte; opening it again in the
        same process reads nothing. Without `verify` the files are mapped into memory as they are, in milliseconds. Where
        the rows take more than half of `memory_bytes` (default: the machine's memory), an epoch shuffles them in chunks
        that fit.
        """
        prepared = PreparedFolder(folder)
        files = prepared.fingerprint()
        verify = verify and files not in _verified
        if verify:
            prepared.verify()
        data = _trusted(
            prepared.schema,
            torch.from_numpy(prepared.array("ids")),
            torch.from_numpy(prepared.array("numeric")),
            torch.from_numpy(prepared.array("label")).to(torch.float32),
            *(
                torch.from_numpy(prepared.array(name)) if prepared.has(name) else None
                for name in ("weight", "group")
            ),
        )
        if verify:
            check_ids(data.schema, data.ids)
            _verified.add(files)
        fields = prepared.schema.table_fields
        counts = torch.from_numpy(prepared.array("counts")).split([field.rows for field in fields])
        data.divide(prepared.rows, {field.name: n for field, n in zip(fields, counts, strict=True)})
        # the machine's memory, not what is free now: the order must not differ between runs
        memory = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for part in (data, *data.splits):
            part.chunks = chunk_plan(len(part), part.row_bytes, memory)
        return data

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        label: str | None = None,
        *,
        schema: "LogSchema | None" = None,
        split: "Split | None" = None,
        like: "Dataset | None" = None,
    ) -> "Dataset":
        """Encode raw rows: a Polars or pandas frame, or a mapping of one array per column.

        A `schema` describes the columns; it is guessed if not given. Rows `like` those of another data
        set get the ids that it gives to the same values. Needs Polars.
        """
        from rarebit.data.raw.encode import encode_frame

        return encode_frame(frame, label, schema=schema, split=split, like=like)

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, ArrayLike | Tensor],
        label: ArrayLike | Tensor | None = None,
        *,
        schema: Schema | None = None,
    ) -> "Dataset":
        """Build a data set from one array per field.

        Without a schema, integers `(n,)` are categorical, integers `(n, length)` multi-valued with
        0 as padding, and floats `(n,)` numeric; a table has one row more than the largest id.

        >>> data = Dataset.from_columns({"user": [0, 1, 2], "price": [9.5, 1.0, 3.2]}, label=[0, 1, 0])
        >>> [(field.name, field.kind) for field in data.schema.fields]
        [('user', 'categorical'), ('price', 'numeric')]
        """
        tensors = {
            name: _to_tensor(f"the column {name!r}", column) for name, column in columns.items()
        }
        schema = schema or _guess_fields(tensors)
        names = [field.name for field in schema.fields]
        for name in names:
            if name not in tensors:
                raise DataError(f"the column {name!r} is missing{suggest(name, list(tensors))}")
        for name in tensors:
            if name not in names:
                raise DataError(f"the column {name!r} is not in the schema{suggest(name, names)}")
        for name, column in tensors.items():
            if column.dim() == 0:
                raise DataError(f"the column {name!r} needs one value per row, got a single number")
        lengths = {name: len(column) for name, column in tensors.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"all columns must have the same number of rows, got {lengths}")
        ids = [_field_columns(tensors[field.name], field) for field in schema.table_fields]
        numeric = [_field_columns(tensors[field.name], field) for field in schema.numeric_fields]
        n = len(next(iter(tensors.values())))
        return cls(
            schema,
            torch.cat(ids, dim=1) if ids else torch.zeros(n, 0, dtype=torch.int32),
            torch.cat(numeric, dim=1) if numeric else None,
            label,
        )

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, rows: Tensor | slice | int) -> Batch:
        if isinstance(rows, int):
            if not -len(self) <= rows < len(self):  # it ends a plain loop over the rows
                raise IndexError(f"row {rows} of a data set of {len(self)} rows")
            rows = slice(rows % len(self), rows % len(self) + 1)
        weight = None if self.weight is None else self.weight[rows]
        return Batch(self.ids[rows], self.numeric[rows], self.label[rows], self.schema, weight)

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        """Return a batch of rows; a DataLoader calls it."""
        return self[torch.as_tensor(rows)]

    @property
    def splits(self) -> "Splits":
        """The rows for training, validation and testing, where the log was prepared with them."""
        if self.parts is None:
            raise DataError(
                "these rows are not split; Dataset.open and Dataset.from_frame give splits"
            )
        return self.parts

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.ids.device

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = [*self.arrays(), self.probability]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        others = 4 * (self.weight is not None) + 8 * (self.group is not None)
        return 4 * (self.ids.shape[1] + self.numeric.shape[1] + 1) + others

    def to(self, device: torch.device | str) -> "Dataset":
        """Return the same data on another device, or itself if it is there already."""
        if torch.device(device) == self.device:
            return self
        moved = self.each(lambda array: array.to(device))
        moved.probability = None if self.probability is None else self.probability.to(device)
        moved.known_counts = self.known_counts
        if self.parts is not None:
            moved.divide([len(part) for part in self.parts], self.parts.train.known_counts)
        return moved

    def order(self, *, seed: int, epoch: int) -> Tensor:
        """Return the order of the rows in an epoch: a permutation, on the data's device."""
        if self.chunks is None:
            return shuffled_order(len(self), seed=seed, epoch=epoch, device=self.device)
        chunk_rows, chunks_at_once = self.chunks
        return chunk_shuffled_order(
            len(self), seed=seed, epoch=epoch, chunk_rows=chunk_rows, chunks_at_once=chunks_at_once
        )

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[Batch]:
        """Yield batches in the given order of rows, or in memory order. None is a single row."""
        for start, stop in batch_bounds(len(self), batch_size):
            yield self[slice(start, stop) if order is None else order[start:stop]]

    def counts(self) -> dict[str, Tensor]:
        """Return how often each id of each field occurs, `(rows,)` per field; padding counts zero.

        >>> data = Dataset.from_columns({"user": [0, 2, 2]}, label=[0, 1, 0])
        >>> data.counts()["user"]
        tensor([1, 0, 2])
        """
        if self.known_counts is not None:
            return {name: count.to(self.device) for name, count in self.known_counts.items()}
        counts = {}
        for field in self.schema.table_fields:
            ids = self.ids[:, self.schema.slots[field.name]].reshape(-1)
            counts[field.name] = torch.bincount(ids, minlength=field.rows)
            if field.kind == "multi":
                counts[field.name][PADDING] = 0
        return counts

    def in_memory(self, encoder: Any = None) -> "Dataset":
        """Return the same data copied into memory, so that it outlives its folder."""
        data = self.each(Tensor.clone)
        data.schema = replace(self.schema, encoder=encoder)
        if self.parts is not None:
            data.divide([len(part) for part in self.parts], self.parts.train.known_counts)
        return data

    def divide(self, rows: Sequence[int], counts: Mapping[str, Tensor] | None) -> None:
        """Take the first rows for training, the next for validation, the last for testing.

        The parts share the memory of the data set, and may be empty.
        """
        ends = list(accumulate(rows, initial=0))
        self.parts = Splits(*(_rows(self, slice(*part)) for part in pairwise(ends)))
        if counts is not None:
            self.parts.train.known_counts = {name: count.clone() for name, count in counts.items()}

    def arrays(self) -> tuple[Tensor | None, ...]:
        """Return ids, numbers, labels, and weights and groups, None where there are none."""
        return self.ids, self.numeric, self.label, self.weight, self.group

    def each(self, change: Callable[[Tensor], Tensor]) -> "Dataset":
        """Return a data set of changed arrays, without what belongs to certain rows."""
        return _trusted(
            self.schema, *(None if array is None else change(array) for array in self.arrays())
        )


class Splits(NamedTuple):
    """Three data sets of one schema: for training, validation and testing."""

    train: Dataset
    valid: Dataset
    test: Dataset

    def in_one_pass(self) -> "Splits":
        """Return all rows in their order for training in one pass, and its halves for validation and testing.

        >>> data = Dataset.from_columns({"user": [0, 1, 2, 3]}, label=[0, 1, 0, 1])
        >>> data.divide([2, 1, 1], None)
        >>> [len(part) for part in data.splits.in_one_pass()]
        [4, 2, 2]
        """
        arrays = zip(*(part.arrays() for part in self), strict=True)
        whole = _trusted(
            self.train.schema,
            *(None if found[0] is None else torch.cat(found) for found in arrays),
        )
        chances = [part.probability for part in self if part.probability is not None]
        whole.probability = torch.cat(chances) if len(chances) == len(self) else None
        half = len(whole) // 2
        return Splits(whole, *(_rows(whole, rows) for rows in (slice(half), slice(half, None))))


def _rows(data: Dataset, rows: slice) -> Dataset:
    """Return some rows in the memory of a data set."""
    found = data.each(lambda array: array[rows])
    found.probability = None if data.probability is None else data.probability[rows]
    return found


def _trusted(schema: Schema, *arrays: Tensor | None) -> Dataset:
    """Return a data set of arrays that were checked before: ids, numbers, labels, and weights and groups if there are."""
    data = object.__new__(Dataset)
    data.schema = schema
    names = ("ids", "numeric", "label", "weight", "group")
    for name, array in zip_longest(names, arrays):
        setattr(data, name, array)
    data.probability = data.chunks = data.parts = data.known_counts = None
    return data
