"""The schema of a raw log: its columns, its text format and its split. Written as TOML, to be edited.

categorical   one value per row; every value seen often enough in training gets an id
multi         several values per row with a separator between them
numeric       a number: standardised, or cut into bins that are ids like any other
time          when it happened: for a split by time, not for the model
ignored       not read
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rarebit.errors import DataError, SettingsError
from rarebit.settings import check_types, from_mapping, read_toml, require, suggest, to_mapping


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """The format of a text file. The default is a CSV file of RFC 4180 with a header.

    >>> TextFormat(separator=";", escape=chr(92), encoding="latin-1").header
    True
    """

    separator: str = ","
    """The character between two values: one ASCII character."""
    quote: str = '"'
    """The character around a value that has a separator, a quote or a line end in it. Empty for none."""
    escape: str = ""
    """The character before a quote inside a quoted value. Empty if such a quote is written twice."""
    encoding: Literal["utf-8", "latin-1"] = "utf-8"
    """The character encoding."""
    header: bool = True
    """Whether the first record has the names of the columns."""
    names: tuple[str, ...] = ()
    """Names of the columns of a file without a header; column_1, column_2 and so on if empty."""

    def __post_init__(self) -> None:
        check_types(self, where="format")
        for name, least in (("separator", 1), ("quote", 0), ("escape", 0)):
            text = getattr(self, name)
            require(
                least <= len(text) <= 1 and text.isascii() and text not in ("\n", "\r", "\0"),
                f"format: {name} must be one ASCII character, got {text!r}",
            )
        marks = [mark for mark in (self.separator, self.quote, self.escape) if mark]
        require(
            len(set(marks)) == len(marks),
            f"format: separator, quote and escape must differ, got {', '.join(map(repr, marks))}",
        )
        require(
            not self.escape or bool(self.quote),
            "format: an escape stands before a quote, so it needs one; got quote=''",
        )
        require(
            not (self.names and self.header),
            "format: names are for a file without a header; give header=False with them",
        )


FORMAT = 1
ROW_ARRAYS: dict[str, type] = {"label": np.uint8, "weight": np.float32, "group": np.int64}
"""What a row has besides ids and numbers, and the type of each. A group is a hash of its value, 0 where there is none."""
MOST_BUCKETS, MOST_VALUES = 100_000_000, 1000
LEAK = "Values are counted over all rows: training knows the values of the test rows."
NEW_USERS = (
    "The split is by {0!r}, so every {0!r} of a test row is unknown, and its table is never tested; "
    'kind = "ignored" leaves it out of the model.'
)
SPLIT_NAMES = ("train", "valid", "test")
PART_NAMES = {name: name for name in SPLIT_NAMES} | {"training": "train", "testing": "test"}
PART_NAMES |= dict.fromkeys(("validation", "val", "dev", "eval"), "valid")
"""The parts of a log by the names that people give them."""

ColumnKind = Literal["categorical", "multi", "numeric", "time", "ignored"]
Treatment = Literal["standardised", "log_square", "quantile"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a raw log.

    >>> Column(name="price", kind="numeric", treatment="quantile", bins=10).has_ids
    True
    """

    name: str
    """The column's name in the log."""
    kind: ColumnKind = "categorical"
    """What it holds."""
    min_count: int = 1
    """Values seen fewer times in training share the row of unknown values."""
    buckets: int | None = None
    """Hash the values to this many ids without a vocabulary, for columns of very many values."""
    vocabulary: str = ""
    """Columns of the same vocabulary share values and counts. Empty: a separate vocabulary."""
    separator: str = ""
    """For kind "multi": the separator between two values. Empty if the file has lists."""
    max_length: int = 1
    """For kind "multi": the maximum number of values per row; the rest are dropped and counted."""
    pooling: Literal["mean", "sum"] = "mean"
    """For kind "multi": how to pool the embeddings of the values."""
    treatment: Treatment = "standardised"
    """For kind "numeric": (x - mean) / std as a float; floor(ln(x)^2) as a category, x - 2 up to 2;
    or bins of equally many rows as categories."""
    bins: int = 20
    """For treatment "quantile": the number of bins."""

    def __post_init__(self) -> None:
        check_types(self, where=str(self.name))
        require(bool(self.name), "a column needs a name, got name=''")
        require(
            self.min_count >= 1,
            f"{self.name}: min_count must be at least 1, got min_count={self.min_count}",
        )
        require(
            self.buckets is None or 1 <= self.buckets <= MOST_BUCKETS,
            f"{self.name}: buckets must lie in [1, {MOST_BUCKETS:,}], got buckets={self.buckets}",
        )
        require(
            self.buckets is None or self.kind in ("categorical", "multi"),
            f"{self.name}: buckets are for categorical and multi columns, got kind={self.kind!r}",
        )
        require(
            self.buckets is None or not self.vocabulary,
            f"{self.name}: a hashed column has no vocabulary to share; leave out one of the two",
        )
        require(
            self.max_length >= 1 and (self.kind == "multi" or self.max_length == 1),
            f"{self.name}: max_length must be 1, or at least 1 for kind='multi', "
            f"got kind={self.kind!r}, max_length={self.max_length}",
        )
        require(
            self.max_length <= MOST_VALUES,
            f"{self.name}: max_length must be at most {MOST_VALUES}, got {self.max_length}",
        )
        require(
            not self.separator or self.kind == "multi",
            f"{self.name}: a separator is for kind='multi', got kind={self.kind!r}",
        )
        require(self.bins >= 2, f"{self.name}: bins must be at least 2, got bins={self.bins}")

    @property
    def has_ids(self) -> bool:
        """Whether the model looks its values up in a table."""
        return self.kind in ("categorical", "multi") or (
            self.kind == "numeric" and self.treatment != "standardised"
        )

    @property
    def is_number(self) -> bool:
        """Whether it is read as a float: standardised, or cut at quantiles that are found later."""
        return self.kind == "numeric" and self.treatment != "log_square"

    @property
    def vocabulary_name(self) -> str:
        """The name of its vocabulary: the shared one's, or its own."""
        return self.vocabulary or self.name


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which rows are for training, validation and testing.

    >>> Split(kind="time", column="timestamp").shares
    (0.8, 0.1, 0.1)
    """

    kind: Literal["random", "order", "time", "user", "given"] = "random"
    """Random rows; in file order; by a time column; all rows of a user in one part; or given by a
    column (or by the files): train, valid, test."""
    shares: tuple[float, ...] = (0.8, 0.1, 0.1)
    """Shares of the rows for train, valid and test; of the users, for kind "user"."""
    seed: int = 0
    """Random seed for the rows or the users."""
    column: str = ""
    """The column of the time, the user, or the given part."""

    def __post_init__(self) -> None:
        check_types(self, where="split")
        require(
            len(self.shares) == 3 and min(self.shares) >= 0 and abs(sum(self.shares) - 1) < 1e-9,
            f"split: shares must be three parts that add up to 1, got {self.shares}",
        )
        require(self.shares[0] > 0, "split: the share for training must be above 0")
        require(
            bool(self.column) or self.kind not in ("time", "user"),
            f"split: kind={self.kind!r} needs the name of its column",
        )
        require(
            not self.column or self.kind not in ("random", "order"),
            f"split: kind={self.kind!r} goes by no column, got column={self.column!r}",
        )


@dataclass(frozen=True)
class Comparison:
    """Which values of a label count as 1.

    >>> Comparison.split("rating>=4"), Comparison.split("income=>50K"), Comparison.split("click")
    (('rating', '>=4'), ('income', '=>50K'), ('click', ''))
    """

    operator: str
    value: str

    @property
    def number(self) -> float | None:
        """The value as a number, if it is one."""
        try:
            return float(self.value)
        except ValueError:
            return None

    @classmethod
    def split(cls, text: str) -> tuple[str, str]:
        """Return the name of a label's column, and the comparison after it; none where there is none."""
        found = re.search("[<>=!]", text)
        if found is None or not found.start():
            return text, ""
        name, comparison = text[: found.start()].rstrip(), text[found.start() :].strip()
        cls.read(comparison)
        return name, comparison

    @classmethod
    def read(cls, text: str) -> "Comparison":
        """Read a comparison such as ">=4"."""
        for operator in ("==", "!=", ">=", "<=", "=", ">", "<"):
            if text.startswith(operator):
                value = text.removeprefix(operator).strip()
                found = cls("=" if operator == "==" else operator, value)
                require(
                    bool(value),
                    f"the label is compared with nothing: {text!r}; give a value after {operator!r}",
                )
                require(
                    operator in ("==", "!=", "=") or found.number is not None,
                    f"{operator} compares numbers, got {value!r}; for a text, use = or !=",
                )
                return found
        raise SettingsError(f"a comparison of a label is like >=4 or =yes, got {text!r}")


@dataclass(frozen=True, kw_only=True)
class LogSchema:
    """The columns of a raw log, its split, and the counting of values.

    >>> schema = LogSchema(label="click", columns=(Column(name="user"),))
    >>> LogSchema.from_mapping(schema.to_mapping()) == schema
    True
    """

    label: str
    """The column that is 1 for a click and 0 for none, or whatever `positive` says."""
    columns: tuple[Column, ...]
    """Every other column, in order; a column that is not listed is not read."""
    split: Split = Split()
    """How rows are split."""
    missing: tuple[str, ...] = ()
    """Texts that mean a missing value, besides the empty one, such as "NULL"."""
    counts: Literal["train", "all"] = "train"
    """Rows that decide which values get an id. "all", as in some papers, leaks the vocabulary of the
    test rows into training."""
    text: TextFormat | None = None
    """The format of the text files; guessed if not given."""
    positive: str = ""
    """Values of the label that count as 1, all others as 0: a comparison such as ">=4" or "=>50K". Empty: the label is 0 or
    1 itself."""
    weight: str = ""
    """The column that says how much a row counts in the loss: a number of at least 0. Empty: all rows count 1."""
    group: str = ""
    """The column of rows that compete with each other, such as a user or a session, for the grouped AUC. Empty: none."""
    unknown_share: float = 0.05
    """Share of the values seen once that become unknown where min_count is 1, so that the row of
    unknown values is trained."""

    def __post_init__(self) -> None:
        check_types(self, where="schema")
        require(bool(self.label), "a schema needs the name of the label column, got label=''")
        if self.positive:
            Comparison.read(self.positive)
        names = [self.label, *(column.name for column in self.columns)]
        repeated = [name for name, n in Counter(names).items() if n > 1]
        require(not repeated, f"column names must be distinct, got {repeated} more than once")
        require(
            self.weight != self.label and self._is_unused(self.weight),
            f"the weight {self.weight!r} must be a column that the model does not read: leave it out, or kind='ignored'",
        )
        require(self.group != self.label, f"rows cannot be grouped by their label {self.label!r}")
        require(
            any(column.kind not in ("time", "ignored") for column in self.columns),
            "a schema needs at least one column for the model, got none",
        )
        require(
            0 <= self.unknown_share < 1,
            f"unknown_share must be in [0, 1), got {self.unknown_share}",
        )
        if self.split.kind in ("time", "user"):
            wanted = ("time",) if self.split.kind == "time" else ("ignored", "categorical")
            column = self[self.split.column]
            require(
                column.kind in wanted,
                f"a split by {self.split.kind} needs a column of kind {' or '.join(wanted)}; "
                f"{column.name!r} is kind={column.kind!r}",
            )
        for name, columns in self.vocabularies.items():
            kinds, min_counts = {c.kind for c in columns}, {c.min_count for c in columns}
            require(
                len(columns) == 1 or (len(min_counts) == 1 and "numeric" not in kinds),
                f"{' and '.join(repr(c.name) for c in columns)} share the vocabulary {name!r}, so "
                "they need the same min_count, and none of them may be numeric",
            )

    def __getitem__(self, name: str) -> Column:
        if name not in self._by_name:
            raise DataError(f"no column {name!r}{suggest(name, list(self._by_name))}")
        return self._by_name[name]

    def _is_unused(self, name: str) -> bool:
        return name not in self._by_name or self._by_name[name].kind == "ignored"

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    @property
    def id_columns(self) -> tuple[Column, ...]:
        """The columns that become ids, in order."""
        return tuple(column for column in self.columns if column.has_ids)

    @property
    def vocabularies(self) -> dict[str, list[Column]]:
        """The columns of each vocabulary; hashed columns and quantile bins have none."""
        found: dict[str, list[Column]] = {}
        for column in self.id_columns:
            is_quantile = column.kind == "numeric" and column.treatment == "quantile"
            if column.buckets is None and not is_quantile:
                found.setdefault(column.vocabulary_name, []).append(column)
        return found

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The names of the columns that are read from a log, in order: all that are used."""
        used = [column.name for column in self.columns if column.kind not in ("time", "ignored")]
        others = [name for name in (self.split.column, self.weight, self.group) if name]
        return tuple(dict.fromkeys([self.label, *used, *others]))

    @property
    def row_arrays(self) -> tuple[str, ...]:
        """What is stored of a row besides what a model reads: names of `ROW_ARRAYS`."""
        return tuple(name for name in ROW_ARRAYS if getattr(self, name))

    def notes(self) -> tuple[str, ...]:
        """Return what users of the data should know, a line each."""
        notes = [LEAK] if self.counts == "all" else []
        name = self.split.column
        if self.split.kind == "user" and self[name].kind == "categorical":
            notes.append(NEW_USERS.format(name))
        return tuple(notes)

    def to_mapping(self) -> dict[str, Any]:
        """Return the schema as plain values."""
        values = to_mapping(self)
        for name in ("weight", "group"):  # logs without them have the schema that they always had
            values = {key: value for key, value in values.items() if key != name or value}
        return {"format": FORMAT, **values}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "LogSchema":
        """Read a schema back from plain values."""
        values = dict(values)
        version = values.pop("format", FORMAT)
        if not isinstance(version, int) or version > FORMAT:
            raise DataError(
                f"the schema is of format {version!r}; this version reads up to {FORMAT}: upgrade it"
            )
        return from_mapping(cls, values, where="schema")

    @classmethod
    def read(cls, path: Path) -> "LogSchema":
        """Read a schema from a TOML file."""
        return cls.from_mapping(read_toml(path))

    def to_toml(self) -> str:
        """Return the schema as a TOML file to edit, without most settings that have their default."""
        usual = LogSchema(label="-", columns=(Column(name="--"),))
        lines = [f"format = {FORMAT}", *_changed(self, usual, "label")]
        lines += ["", "[split]", *_changed(self.split, Split(), "kind", "shares", "seed")]
        if self.text is not None:
            always = ("separator", "quote", "encoding")
            lines += ["", "[text]", *_changed(self.text, TextFormat(), *always)]
        for column in self.columns:
            lines += ["", "[[columns]]", *_changed(column, Column(name="-"), "name", "kind")]
        return "\n".join(lines) + "\n"


def check_arguments(
    label: object = None, schema: object = None, split: object = None, format: object = None
) -> None:
    """Raise for an argument of another type than functions that read a log take."""
    found = {"label": label, "schema": schema, "split": split, "format": format}
    wanted = {"label": str, "schema": LogSchema, "split": Split, "format": TextFormat}
    for name, value in found.items():
        require(
            value is None or isinstance(value, wanted[name]),
            f"{name} must be of type {wanted[name].__name__}, got {value!r}",
        )


def _changed(settings: Any, default: Any, *always: str) -> list[str]:
    """Return lines for the settings that differ from the default; tables have their own section."""
    usual = to_mapping(default)
    return [
        f"{key} = {_toml(value)}"
        for key, value in to_mapping(settings).items()
        if key in always or (value != usual[key] and key not in ("columns", "split", "text"))
    ]


def _toml(value: Any) -> str:
    """Return a plain value as TOML; a JSON string is a TOML string."""
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # DEL is the one character that JSON leaves as it is and TOML does not allow
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
