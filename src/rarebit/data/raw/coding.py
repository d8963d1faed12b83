"""Rows of a raw log as numbers: a code per value, a float per number, 0 or 1 for the label.

Codes are numbered like ids (0 padding, 1 unknown, 2 missing, 3 the first value), so with the final
vocabulary a code is the id. While the vocabulary is still unknown, a growing dictionary numbers values
in the order they appear. Rows with a wrong value go to `BadRows`.

The same value may be spelled in several ways: one program writes "15", another, whose column has gaps,
"15.0"; a frame has true where a file says "True" or "TRUE". A log keeps the spelling of its own file.
Rows encoded later are looked up as they are spelled, then in the other ways.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.log_schema import PART_NAMES, SPLIT_NAMES, Column, Comparison, LogSchema
from rarebit.data.raw.chunks import BadRows, RawChunk, shortened
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, UNKNOWN
from rarebit.errors import DataError

MAX_EXACT = 1 << 53
"""Up to here, a float tells two neighbouring whole numbers apart."""
WHOLE, WHOLE_AS_DECIMAL = r"^[+-]?\d+$", r"^([+-]?\d+)\.0+$"
TRUTHS = ("true", "false")
LOWEST_BIN, HIGHEST_BIN = -1000, 2000
"""Bounds of log-square bins: everything below -998 shares a bin; no 64-bit number lies above."""
NO_NUMBER = (MISSING - FIRST_VALUE) % (1 << 32)
"""Stands for a missing value among a growing dictionary's numbers: its code is that of missing."""
LARGEST = float(np.finfo(np.float32).max)
LARGEST_GROUP = (1 << 63) - 1
LABEL_WORDS = {"false": 0.0, "False": 0.0, "FALSE": 0.0, "true": 1.0, "True": 1.0, "TRUE": 1.0}
TIME_FORMATS = (
    *("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.fZ"),
    *("%Y-%m-%dT%H:%M:%S%.f%z", "%Y-%m-%d %H:%M:%S%.f%z"),
    *("%Y-%m-%d %H:%M:%S%.f UTC", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d"),
    *("%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d"),
    *("%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d.%m.%Y"),
    *("%d-%b-%Y %H:%M:%S", "%d-%b-%Y", "%d %b %Y %H:%M:%S", "%d %b %Y"),
    *("%d/%b/%Y:%H:%M:%S %z", "%a %b %d %H:%M:%S %z %Y"),
)
"""Not 02/03/2024: some write the day first, and others the month."""
KNOWN_TIMES = "a number, or a time such as 2024-02-29 23:30:00, 29.02.2024 23:30 or 29 Feb 2024"


def text_of(column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Return values of any type as text: a whole number has no point, whatever its type is."""
    if dtype == pl.String:
        return column
    if dtype.is_float():
        whole = (column == column.floor()) & (column.abs() <= MAX_EXACT)
        as_whole = column.cast(pl.Int64, strict=False).cast(pl.String)
        text = pl.when(whole).then(as_whole).otherwise(column.cast(pl.String))
        return pl.when(column.is_nan()).then(None).otherwise(text)
    return column.cast(pl.String)


def other_spellings(text: pl.Expr) -> list[pl.Expr]:
    """Return other texts for the same values, the likeliest first; null where there is none."""
    lower = text.str.to_lowercase()
    is_truth = lower.is_in(TRUTHS)
    return [
        text.str.extract(WHOLE_AS_DECIMAL),
        pl.when(text.str.contains(WHOLE)).then(text + ".0"),
        pl.when(is_truth & (text != lower)).then(lower),
        pl.when(is_truth).then(lower.str.to_titlecase()),
        pl.when(is_truth).then(lower.str.to_uppercase()),
    ]


def one_spelling(texts: pl.Series) -> pl.Series:
    """Return texts in the one spelling that represents all spellings of a value."""
    lower = texts.str.to_lowercase()
    whole = texts.str.replace(WHOLE_AS_DECIMAL, "$1")
    return lower.zip_with(lower.is_in(TRUTHS), whole)


class GrowingDictionary:
    """Numbers values from 0 in the order they appear; Polars keeps them for all chunks."""

    def __init__(self) -> None:
        self.dtype = pl.Categorical(pl.Categories.random())
        # Polars forgets the values when no series holds them any more
        self._anchor = pl.Series([""]).cast(self.dtype)

    def add(self, texts: pl.Series) -> NDArray[np.int64]:
        """Return the numbers of some values, which may be new."""
        return texts.cast(self.dtype).to_physical().cast(pl.Int64).to_numpy()

    def texts(self, codes: NDArray[np.int64]) -> pl.Series:
        """Return the values of some numbers."""
        return pl.Series(codes.astype(np.uint32)).cat.to(self.dtype).cast(pl.String)


@dataclass(frozen=True)
class CodedRows:
    """Some rows as numbers, one array row per column."""

    codes: NDArray[np.int32]
    """`(slots, rows)`: every column with codes; a multi-valued one has several slots."""
    numbers: NDArray[np.float64]
    """`(columns, rows)`: every column read as a number; NaN where it is missing."""
    label: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """`(rows,)`; empty where the log has no label."""
    weight: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """`(rows,)`; empty where rows have no weight."""
    group: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """`(rows,)`: the hash of what the row is grouped by, 0 for none; empty where rows are not grouped."""
    key: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    """`(rows,)`: what the split goes by; empty where it goes by nothing in the log."""
    cut: int = 0
    """Values left out because a row had more than `max_length`."""
    kept: NDArray[np.bool_] | None = None
    """Which rows of the chunk these are, where some were malformed."""

    def __len__(self) -> int:
        return int(self.codes.shape[1] if self.codes.size else self.numbers.shape[1])


class RowCheck(NamedTuple):
    """A reason to refuse a row: the column, the reason, and the rows it holds for."""

    column: str
    reason: str
    is_bad: pl.Expr
    hint: str = ""


class _Plan(NamedTuple):
    """What to compute from frames of these types, checks first. Most chunks of a log share them."""

    types: pl.Schema
    checks: list[RowCheck]
    expressions: dict[str, pl.Expr]


class RowCoder:
    """Turns chunks of a raw log into numbers.

    `dtypes` has, for each vocabulary, the Polars type that numbers its values: a growing dictionary, or
    an Enum of the final values.
    """

    def __init__(
        self,
        schema: LogSchema,
        dtypes: Mapping[str, pl.DataType],
        *,
        with_label: bool = True,
        with_key: bool = True,
    ) -> None:
        self.schema, self.dtypes = schema, dtypes
        self.with_label, self.with_key = with_label, with_key and bool(schema.split.column)
        self.others = schema.row_arrays[1:] if with_key else ()
        self._plan: _Plan | None = None

    def code(self, chunk: RawChunk, bad: BadRows) -> CodedRows:
        """Return the good rows of a chunk as numbers."""
        found, keep = self.good_rows(chunk, bad)
        names, rows = found.columns, found.height
        codes = [_as_codes(found[name]) for name in names if name.startswith("code:")]
        numbers = [found[name].to_numpy() for name in names if name.startswith("number:")]
        return CodedRows(
            codes=np.stack(codes) if codes else np.empty((0, rows), np.int32),
            numbers=np.stack(numbers) if numbers else np.empty((0, rows)),
            label=found["label"].to_numpy() if self.with_label else np.empty(0, np.uint8),
            key=found["key"].to_numpy() if self.with_key else np.empty(0),
            cut=sum(int(found[name].sum()) for name in names if name.startswith("cut:")),
            kept=keep,
            **{name: found[name].to_numpy() for name in self.others},
        )

    def good_rows(
        self, chunk: RawChunk, bad: BadRows
    ) -> tuple[pl.DataFrame, NDArray[np.bool_] | None]:
        """Return all outputs of the good rows of a chunk, and which rows these are; None for all."""
        frame = _plain_types(chunk.frame, self.schema.missing)
        if self._plan is None or self._plan.types != frame.schema:
            _refuse_types(frame.schema, self.schema)
            checks = list(self._checks(frame.schema))
            tests = {f"bad:{number}": check.is_bad for number, check in enumerate(checks)}
            self._plan = _Plan(frame.schema, checks, tests | dict(self._outputs(frame.schema)))
        _refuse_large_floats(frame, self.schema)
        checks = self._plan.checks
        found = frame.lazy().select(**self._plan.expressions).collect()
        keep = _keep_good(found[:, : len(checks)], checks, chunk, bad)
        good = found if keep is None else found.filter(pl.Series(keep))
        if self.with_label:
            label, wrong = self.schema.label, found["bad:0"]
            named = f"{label}{self.schema.positive}"
            bad.count_labels(named, good["label"].to_numpy(), frame[label].filter(wrong))
        return good, keep

    def _checks(self, types: pl.Schema) -> Iterator[RowCheck]:
        """Yield each reason to refuse a row. Manifests of prepared logs store these reasons."""
        schema = self.schema
        if self.with_label:
            label = schema.label
            is_bad = label_of(label, types[label], schema.positive).is_null()
            asked = f"a value for {schema.positive!r}" if schema.positive else "0 or 1"
            yield RowCheck(label, f"the label is not {asked}", is_bad)
        for column in schema.columns:
            name = column.name
            if column.kind != "numeric" or types[name].is_integer() or types[name] == pl.Boolean:
                continue
            number = _number(name, types[name])
            is_there = pl.col(name).is_not_null()
            if types[name] == pl.String:
                is_there &= pl.col(name).str.strip_chars() != ""
            # infinite, NaN, or too large for 32 bits: its square would overflow
            too_large = ~number.cast(pl.Float32, strict=False).is_finite()
            is_bad = (number.is_null() & is_there) | too_large
            yield RowCheck(name, f"{name} is not a number", is_bad.fill_null(value=False))
        if "weight" in self.others:
            is_weight = (
                _number(schema.weight, types[schema.weight]).cast(pl.Float32).is_between(0, LARGEST)
            )
            is_bad = ~is_weight.fill_null(value=False)
            yield RowCheck(
                schema.weight, f"the weight {schema.weight} is not a number of at least 0", is_bad
            )
        if self.with_key and schema.split.kind in ("time", "given"):
            name = schema.split.column
            wanted = "a time" if schema.split.kind == "time" else "train, valid or test"
            known = KNOWN_TIMES if schema.split.kind == "time" else ", ".join(PART_NAMES)
            hint = f"{name} may be {known}."
            yield RowCheck(name, f"{name} is not {wanted}", self._key(types).is_null(), hint)

    def _outputs(self, types: pl.Schema) -> Iterator[tuple[str, pl.Expr]]:
        """Yield everything that a row becomes, in order, by a name that tells what it is."""
        yield from self._values(types)
        if self.with_label:
            name, positive = self.schema.label, self.schema.positive
            yield "label", label_of(name, types[name], positive).fill_null(0)
        if "weight" in self.others:
            weight = _number(self.schema.weight, types[self.schema.weight])
            yield "weight", weight.cast(pl.Float32).fill_null(0.0)
        if "group" in self.others:
            yield "group", _group(text_of(pl.col(self.schema.group), types[self.schema.group]))
        if self.with_key:
            yield "key", self._key(types)

    def _values(self, types: pl.Schema) -> Iterator[tuple[str, pl.Expr]]:
        """Yield what the columns for the model become."""
        for number, column in enumerate(self.schema.columns):
            if column.kind == "numeric" and column.treatment == "log_square":
                yield f"code:{number}", self._binned(column, types[column.name])
            elif column.kind == "numeric":
                value = self._value(column.name, types[column.name])
                yield f"number:{number}", value.fill_null(np.nan)
            elif column.kind == "categorical":
                text = text_of(pl.col(column.name), types[column.name])
                dtype = None if column.buckets else self.dtypes[column.vocabulary_name]
                if dtype is None or isinstance(dtype, pl.Enum):
                    yield f"code:{number}", self._codes(column, text)
                else:  # `_as_codes` turns the numbers of a growing dictionary into codes
                    numbers = text.cast(dtype, strict=False).to_physical()
                    yield f"code:{number}", numbers.fill_null(NO_NUMBER)
            elif column.kind == "multi":
                for name, place in self._places(column, types[column.name]):
                    yield f"{name}:{number}", place

    def _codes(self, column: Column, text: pl.Expr) -> pl.Expr:
        """Return the codes of one value per row; null is missing."""
        if column.buckets is not None:
            return _hashed(text, column.buckets)
        dtype = self.dtypes[column.vocabulary_name]
        if not isinstance(dtype, pl.Enum):  # a growing dictionary has a number for every value
            number = text.cast(dtype, strict=False).to_physical()
            return (number.cast(pl.Int32) + FIRST_VALUE).fill_null(MISSING)
        spellings = [text, *other_spellings(text)]
        numbers = [spelling.cast(dtype, strict=False).to_physical() for spelling in spellings]
        code = (pl.coalesce(numbers).cast(pl.Int32) + FIRST_VALUE).fill_null(UNKNOWN)
        return pl.when(text.is_null()).then(MISSING).otherwise(code).cast(pl.Int32)

    def _places(self, column: Column, dtype: pl.DataType) -> Iterator[tuple[str, pl.Expr]]:
        """Yield the codes of each slot of a multi-valued column: values first, then padding."""
        values = pl.col(column.name)
        if isinstance(dtype, pl.List):
            values = values.list.eval(text_of(pl.element(), dtype.inner))  # type: ignore[arg-type]  # an instance here
        else:
            values = text_of(values, dtype).str.split(column.separator)
        element = pl.element()
        values = values.list.eval(element.filter(element.is_not_null() & (element != "")))
        present = values.list.len().fill_null(0)
        for place in range(column.max_length):
            code = self._codes(column, values.list.get(place, null_on_oob=True))
            empty = MISSING if place == 0 else PADDING  # a row without any value is missing
            filled = pl.when(present > place).then(code).otherwise(empty).cast(pl.Int32)
            yield f"code:{place}", filled
        yield "cut", (present.cast(pl.Int64) - column.max_length).clip(0)

    def _binned(self, column: Column, dtype: pl.DataType) -> pl.Expr:
        """Return the codes of log-square bins: floor(ln(x)^2) above 2, x - 2 up to there."""
        x = self._value(column.name, dtype)
        square = pl.when(x > 2).then(x.log().pow(2)).otherwise(x - 2).floor()
        bins = square.clip(LOWEST_BIN, HIGHEST_BIN)
        if isinstance(self.dtypes[column.vocabulary_name], pl.Enum):
            return self._codes(column, bins.cast(pl.Int32, strict=False).cast(pl.String))
        return (bins - LOWEST_BIN + FIRST_VALUE).fill_nan(None).cast(pl.Int32).fill_null(MISSING)

    def _value(self, name: str, dtype: pl.DataType) -> pl.Expr:
        """Return the numbers of a column, null for those that mean a missing value."""
        number = _number(name, dtype)
        missing = [found for found in map(as_float, self.schema.missing) if found is not None]
        return pl.when(~number.is_in(missing)).then(number) if missing else number

    def _key(self, types: pl.Schema) -> pl.Expr:
        """Return what the split goes by: seconds, the user's code, or the number of the part."""
        split = self.schema.split
        if split.kind == "time":
            return as_seconds(split.column, types[split.column])
        text = text_of(pl.col(split.column), types[split.column])
        if split.kind == "given":
            parts = {name: SPLIT_NAMES.index(part) for name, part in PART_NAMES.items()}
            name = text.str.strip_chars().str.to_lowercase()
            return name.replace_strict(parts, default=None, return_dtype=pl.UInt8)
        return text.fill_null("").hash()  # which rows are of one user is all that matters


def _as_codes(found: pl.Series) -> NDArray[np.int32]:
    """Return codes; unsigned numbers are those of a growing dictionary, from 0."""
    codes: NDArray[np.int32] = found.to_numpy().view(np.int32)
    return codes + np.int32(FIRST_VALUE) if found.dtype == pl.UInt32 else codes


def _keep_good(
    found: pl.DataFrame, checks: Sequence[RowCheck], chunk: RawChunk, bad: BadRows
) -> NDArray[np.bool_] | None:
    """Add malformed rows to `bad` and return which rows are good; None where all are."""
    failed = [(check, flags) for check, flags in zip(checks, found, strict=True) if flags.any()]
    if not failed:
        return None
    keep = np.ones(chunk.frame.height, dtype=bool)
    for row in found.select(pl.any_horizontal(pl.all())).to_series().arg_true().to_list():
        keep[row] = False
        check = next(check for check, flags in failed if flags[row])
        value = chunk.frame[check.column][row]
        shown = "nothing" if value is None else repr(shortened(str(value)))
        bad.add(chunk.locate(row), check.reason, f" (got {shown})")
        bad.hints |= {check.hint} - {""}
    return keep


def label_of(name: str, dtype: pl.DataType, positive: str = "") -> pl.Expr:
    """Return the label as 0 or 1, null for anything else: what is missing, or no number where numbers are compared."""
    number = _number(name, dtype)
    if positive:
        return _compared(pl.col(name), number, dtype, Comparison.read(positive)).cast(pl.UInt8)
    if dtype == pl.String:
        # a block of integers is read as such, so " 1" and "01" must be labels in any other, too
        words = pl.col(name).replace_strict(LABEL_WORDS, default=None, return_dtype=pl.Float64)
        number = pl.coalesce(number, words)
    return pl.when(number.is_in([0.0, 1.0])).then(number).cast(pl.UInt8)


def _compared(column: pl.Expr, number: pl.Expr, dtype: pl.DataType, asked: Comparison) -> pl.Expr:
    """Return whether a label is what counts as 1, null where that cannot be said."""
    known = pl.when(number.is_not_nan())
    match asked.operator:
        case ">":
            return known.then(number > asked.number)
        case ">=":
            return known.then(number >= asked.number)
        case "<":
            return known.then(number < asked.number)
        case "<=":
            return known.then(number <= asked.number)
    same = column.str.strip_chars() == asked.value if dtype == pl.String else pl.lit(value=False)
    if dtype == pl.Boolean:
        same = column == (asked.value.lower() in ("true", "1"))
    elif asked.number is not None:  # 4, 4.0 and " 4" are one value
        same = same | (number == asked.number).fill_null(value=False)
    there = column.is_not_null()
    if dtype == pl.String:
        there &= column.str.strip_chars() != ""
    return pl.when(there).then(same if asked.operator == "=" else ~same)


def _number(name: str, dtype: pl.DataType) -> pl.Expr:
    """Return a column as floats, null where it is missing or no number."""
    column = pl.col(name).str.strip_chars() if dtype == pl.String else pl.col(name)
    return column.cast(pl.Float64, strict=False)


def as_float(text: str) -> float | None:
    """Return the number that a text is, None where it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def as_seconds(name: str, dtype: pl.DataType) -> pl.Expr:
    """Return a time as a number that grows with it, null for what is no time."""
    column = pl.col(name)
    if dtype in (pl.Date, pl.Datetime):
        column = column.cast(pl.Datetime("us"))
    if dtype.is_temporal():
        return column.to_physical().cast(pl.Float64) / 1e6
    number = column.cast(pl.Float64, strict=False)
    number = pl.when(number.is_finite()).then(number)
    if dtype != pl.String:
        return number
    return pl.coalesce(number, column.map_batches(seconds_of, return_dtype=pl.Float64))


def seconds_of(texts: pl.Series) -> pl.Series:
    """Return written times as seconds since 1970, null for what is no time."""
    found = pl.Series(texts.name, [None], pl.Float64).extend_constant(None, len(texts) - 1)
    for spelling in TIME_FORMATS:
        times = texts.str.to_datetime(spelling, strict=False, time_unit="us")
        seconds = times.to_physical().cast(pl.Float64) / 1e6
        # 5/6/24 would be a day of the year 5
        found = found.zip_with(found.is_not_null() | (times.dt.year() < 1000), seconds)
        if not found.has_nulls():
            break
    return found


def _hashed(text: pl.Expr, buckets: int) -> pl.Expr:
    """Return the bucket of each value: CRC-32 of its UTF-8 bytes in one spelling."""

    def hash_series(series: pl.Series) -> pl.Series:
        distinct = series.drop_nulls().unique()
        hashes = [zlib.crc32(value.encode()) for value in one_spelling(distinct)]
        codes = [FIRST_VALUE + found % buckets for found in hashes]
        numbered = series.replace_strict(distinct, codes, default=MISSING, return_dtype=pl.Int32)
        return numbered.fill_null(MISSING)

    return text.map_batches(hash_series, return_dtype=pl.Int32)


def _group(text: pl.Expr) -> pl.Expr:
    """Return a number for each value, the same on every machine: 63 bits of its hash, from 1; 0 where there is none."""

    def hash_series(series: pl.Series) -> pl.Series:
        distinct = series.drop_nulls().unique()
        digests = [
            blake2b(value.encode(), digest_size=8).digest() for value in one_spelling(distinct)
        ]
        numbers = [int.from_bytes(digest, "little") % LARGEST_GROUP + 1 for digest in digests]
        return series.replace_strict(distinct, numbers, default=0, return_dtype=pl.Int64)

    return text.map_batches(hash_series, return_dtype=pl.Int64).fill_null(0)


def _plain_types(frame: pl.DataFrame, missing: Sequence[str]) -> pl.DataFrame:
    """Return categories as texts, arrays as lists, and null for numbers that mean a missing value."""
    special = (pl.Categorical, pl.Enum, pl.Array)
    if not missing and not any(isinstance(dtype, special) for dtype in frame.dtypes):
        return frame
    text = (pl.selectors.categorical() | pl.selectors.enum()).cast(pl.String)
    arrays = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.Array)]
    numbers = [
        pl.when(~text_of(pl.col(name), dtype).is_in(missing)).then(pl.col(name))
        for name, dtype in frame.schema.items()
        if missing and dtype.is_numeric()
    ]
    return frame.with_columns(
        pl.when(~text.is_in(["", *missing])).then(text), pl.col(arrays).arr.to_list(), *numbers
    )


def _refuse_types(types: pl.Schema, schema: LogSchema) -> None:
    """Raise for a column whose type does not fit the schema."""
    label = types.get(schema.label, pl.String())
    if label.is_nested() or label.is_temporal() or label == pl.Binary:
        raise DataError(f"the label {schema.label!r} holds {label}; it must be 0 or 1")
    for column in schema.columns:
        if column.name not in types or column.kind in ("time", "ignored"):
            continue
        name, dtype = column.name, types[column.name]
        is_list = isinstance(dtype, pl.List)
        if isinstance(dtype, pl.List) and dtype.inner.is_nested():
            raise DataError(
                f"the column {name!r} holds lists of {dtype.inner}; only lists of values are read"
            )
        if column.kind == "multi" and not is_list and not column.separator:
            raise DataError(
                f"the column {name!r} is multi-valued and holds {dtype}: give the separator between "
                "its values, or lists"
            )
        if (is_list and column.kind != "multi") or dtype in (pl.Object, pl.Binary):
            raise DataError(f"the column {name!r} holds {dtype}, which cannot be {column.kind}")


def _refuse_large_floats(frame: pl.DataFrame, schema: LogSchema) -> None:
    """Raise for ids stored as floats that are too large to tell apart."""
    types = frame.schema
    for column in schema.columns:
        if column.kind == "categorical" and (dtype := types[column.name]).is_float():
            largest = frame[column.name].abs().max()
            exact = 1 << 24 if dtype == pl.Float32 else MAX_EXACT
            if isinstance(largest, float) and largest > exact:
                raise DataError(
                    f"the column {column.name!r} holds ids as floats, as large as {largest:.0f}: "
                    "floats cannot tell such ids apart; write them as integers or text"
                )
