"""The schema of encoded data: fields, their kinds, and their columns in a batch.

Ids are integers, counted from 0 in every field. Encoded logs reserve the first three ids of each field:

    0  PADDING      fills the unused slots of a multi-valued field; its row is always zero
    1  UNKNOWN      a value not seen often enough in training; a trained row like any other
    2  MISSING      the log had no value here
    3  FIRST_VALUE  the first real value
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rarebit.errors import DataError
from rarebit.settings import check_types, from_mapping, require, suggest, to_mapping

PADDING, UNKNOWN, MISSING, FIRST_VALUE = range(4)

Kind = Literal["categorical", "multi", "numeric"]


@dataclass(frozen=True, kw_only=True)
class Field:
    """One column of a click log.

    >>> Field(name="user", rows=5003)
    Field(name='user', kind='categorical', rows=5003, max_length=1, pooling='mean', vocabulary='')
    """

    name: str
    """The column's name."""
    kind: Kind = "categorical"
    """One id per row ("categorical"), several ("multi"), or a number ("numeric")."""
    rows: int = 0
    """Rows of its table: ids lie in [0, rows). Zero for a numeric field, which has no table."""
    max_length: int = 1
    """Maximum number of ids per row of the log; above 1 for multi-valued fields only."""
    pooling: Literal["mean", "sum"] = "mean"
    """How to pool the embeddings of a multi-valued field."""
    vocabulary: str = ""
    """Checksum of the raw values behind its ids; empty if unknown. Fields with different checksums give
    different ids to the same value, so a model of one must not score rows of the other."""

    def __post_init__(self) -> None:
        check_types(self, where=str(self.name))
        require(bool(self.name), "a field needs a name, got name=''")
        if self.kind == "numeric":
            require(
                self.rows == 0, f"{self.name}: a numeric field has no table, got rows={self.rows}"
            )
        else:
            require(self.rows >= 1, f"{self.name}: rows must be at least 1, got rows={self.rows}")
        require(
            self.max_length >= 1 and (self.kind == "multi" or self.max_length == 1),
            f"{self.name}: max_length must be 1, or at least 1 for kind='multi', "
            f"got kind={self.kind!r}, max_length={self.max_length}",
        )


@dataclass(frozen=True)
class Schema:
    """The fields of a data set, in order. A batch of ids has one column per slot.

    A categorical field takes one slot, a multi-valued field `max_length` of them.

    >>> schema = Schema((Field(name="user", rows=9), Field(name="tags", kind="multi", rows=5, max_length=3)))
    >>> schema.slots["tags"]
    slice(1, 4, None)
    """

    fields: tuple[Field, ...]
    encoder: Any = dataclasses.field(default=None, compare=False, repr=False)
    """What turned raw rows into these ids, saved with a model by `save(folder)`; None if unknown."""

    def __post_init__(self) -> None:
        check_types(self)
        require(len(self.fields) > 0, "a schema needs at least one field, got none")
        repeated = [name for name, n in Counter(self.names).items() if n > 1]
        require(not repeated, f"field names must be distinct, got {repeated} more than once")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(field.name for field in self.fields)

    @cached_property
    def table_fields(self) -> tuple[Field, ...]:
        """The fields that have a table: categorical and multi-valued ones."""
        return tuple(field for field in self.fields if field.kind != "numeric")

    @cached_property
    def numeric_fields(self) -> tuple[Field, ...]:
        """The fields that hold a number."""
        return tuple(field for field in self.fields if field.kind == "numeric")

    @cached_property
    def slots(self) -> dict[str, slice]:
        """For each field with a table, the columns of the ids that belong to it."""
        slots, start = {}, 0
        for field in self.table_fields:
            slots[field.name] = slice(start, start + field.max_length)
            start += field.max_length
        return slots

    @property
    def num_slots(self) -> int:
        """Columns of the ids: the lookups of one row."""
        return sum(field.max_length for field in self.table_fields)

    def __getitem__(self, name: str) -> Field:
        if name not in self._by_name:
            raise DataError(f"no field {name!r}{suggest(name, self.names)}")
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Field]:
        return {field.name: field for field in self.fields}

    def to_mapping(self) -> dict[str, Any]:
        """Return the schema as plain values, without the encoder."""
        return {"fields": [to_mapping(field) for field in self.fields]}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Schema":
        """Read a schema back from plain values."""
        fields: Sequence[Mapping[str, Any]] = values.get("fields", ())
        return cls(tuple(from_mapping(Field, field, where="schema") for field in fields))
