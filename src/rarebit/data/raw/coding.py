"""Rows of a raw log as numbers: a code for every value, a float for every number, 0 or 1 for the label.

Codes have the places of ids (0 padding, 1 unknown, 2 missing, 3 the first value), so that with the
final vocabulary a code is the id. Where the vocabulary is still being found, a growing dictionary
numbers the values as they come. Rows that cannot be read go to `BadRows`.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.log_schema import SPLIT_NAMES, Column, LogSchema
from rarebit.data.raw.bad_rows import BadRows
from rarebit.data.raw.chunk import RawChunk
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, UNKNOWN
from rarebit.errors import DataError

__all__ = ["HIGHEST_BIN", "LOWEST_BIN", "Coded", "GrowingDictionary", "RowCoder"]

LOWEST_BIN, HIGHEST_BIN = -1000, 2000
"""Bounds of log-square bins: everything below -998 shares a bin; no 64-bit number lies above."""

LABEL_WORDS = {"false": 0.0, "true": 1.0, "False": 0.0, "True": 1.0}
TIME_FORMATS = (
    *("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.fZ"),
    *("%Y-%m-%dT%H:%M:%S%.f%z", "%Y-%m-%d %H:%M:%S%.f%z"),
    *("%Y-%m-%d %H:%M", "%Y-%m-%d", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d"),
)
MAX_EXACT = 1 << 53
"""Up to here, a float tells two neighbouring ids apart."""


class GrowingDictionary:
    """Values numbered from 0 in the order they come; kept by Polars, in one place for all chunks."""

    def __init__(self) -> None:
        self.dtype = pl.Categorical(pl.Categories.random())
        # Polars forgets the values when no series holds them any more
        self._anchor = pl.Series([""]).cast(self.dtype)

    def texts(self, codes: NDArray[np.int64]) -> pl.Series:
        """Return the values of some numbers."""
        return pl.Series(codes.astype(np.uint32)).cat.to(self.dtype).cast(pl.String)


@dataclass(frozen=True)
class Coded:
    """Some rows as numbers, a line a column."""

    codes: NDArray[np.int32]
    """`(slots, rows)`: of every column with codes; of multi-valued ones, each place."""
    numbers: NDArray[np.float64]
    """`(columns, rows)`: of every column read as a number; not a number where it is missing."""
    label: NDArray[np.uint8]
    """`(rows,)`; empty where the log has no label."""
    key: NDArray[Any]
    """`(rows,)`: what the split goes by; empty where it goes by nothing in the log."""
    cut: int = 0
    """Values left out because a row had more than `max_length`."""
    kept: NDArray[np.bool_] | None = None
    """Which rows of the chunk these are, where some were bad."""

    def __len__(self) -> int:
        return int(self.codes.shape[1] if self.codes.size else self.numbers.shape[1])


@dataclass(frozen=True)
class _Check:
    """A reason to refuse a row: the column it lies in, in words, and which rows it is true for."""

    column: str
    reason: str
    is_bad: pl.Expr


class RowCoder:
    """Turns chunks of a raw log into numbers.

    `dtypes` has, for each vocabulary, the Polars type that numbers its values: that of a growing
    dictionary, or an Enum of the final ones.
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

    def code(self, chunk: RawChunk, bad: BadRows) -> Coded:
        """Return the good rows of a chunk as numbers."""
        frame = _plain_types(chunk.frame, self.schema.missing)
        _refuse_types(frame, self.schema)
        checks = list(self._checks(frame.schema))
        tests = {f"bad:{number}": check.is_bad for number, check in enumerate(checks)}
        outputs = dict(self._outputs(frame.schema))
        found = frame.lazy().select(**tests, **outputs).collect()
        keep = _keep_good(found.select(tests.keys()), checks, chunk, bad)
        if keep is not None:
            found = found.filter(pl.Series(keep))
        return self._coded(found, keep)

    def _coded(self, found: pl.DataFrame, keep: NDArray[np.bool_] | None) -> Coded:
        names = found.columns
        rows = found.height
        codes = [found[name].to_numpy() for name in names if name.startswith("code:")]
        numbers = [found[name].to_numpy() for name in names if name.startswith("number:")]
        return Coded(
            codes=np.stack(codes) if codes else np.empty((0, rows), np.int32),
            numbers=np.stack(numbers) if numbers else np.empty((0, rows)),
            label=found["label"].to_numpy() if self.with_label else np.empty(0, np.uint8),
            key=found["key"].to_numpy() if self.with_key else np.empty(0),
            cut=sum(int(found[name].sum()) for name in names if name.startswith("cut:")),
            kept=keep,
        )

    def _checks(self, types: pl.Schema) -> Iterator[_Check]:
        """Yield each reason to refuse a row."""
        schema = self.schema
        if self.with_label:
            label = schema.label
            yield _Check(label, "the label is not 0 or 1", _label(label, types[label]).is_null())
        for column in schema.columns:
            if column.kind == "numeric":
                name = column.name
                if types[name].is_integer() or types[name] == pl.Boolean:
                    continue  # always a number
                number = _number(name, types[name])
                is_bad = (number.is_null() & pl.col(name).is_not_null()) | _is_too_large(number)
                yield _Check(name, f"{name} is not a number", is_bad.fill_null(value=False))
        if self.with_key and schema.split.kind in ("time", "given"):
            name = schema.split.column
            wanted = "a time" if schema.split.kind == "time" else "train, valid or test"
            yield _Check(name, f"{name} is not {wanted}", self._key(types).is_null())

    def _outputs(self, types: pl.Schema) -> Iterator[tuple[str, pl.Expr]]:
        """Yield everything that a row becomes, in order, by a name that says what it is."""
        for number, column in enumerate(self.schema.columns):
            if column.kind == "numeric" and column.treatment == "log_square":
                yield f"code:{number}", self._binned(column, types[column.name])
            elif column.kind == "numeric":
                value = _number(column.name, types[column.name])
                yield f"number:{number}", value.fill_null(np.nan)
            elif column.kind == "categorical":
                text = _text(pl.col(column.name), types[column.name])
                yield f"code:{number}", self._codes(column, text)
            elif column.kind == "multi":
                for name, place in self._places(column, types[column.name]):
                    yield f"{name}:{number}", place
        if self.with_label:
            yield "label", _label(self.schema.label, types[self.schema.label]).fill_null(0)
        if self.with_key:
            yield "key", self._key(types)

    def _codes(self, column: Column, text: pl.Expr) -> pl.Expr:
        """Return the codes of one value a row, where a null is missing."""
        if column.buckets is not None:
            return _hashed(text, column.buckets)
        dtype = self.dtypes[column.vocabulary_name]
        # an Enum has no number for a value outside of it, a growing dictionary for every value
        code = text.cast(dtype, strict=False).to_physical().cast(pl.Int32) + FIRST_VALUE
        if not isinstance(dtype, pl.Enum):
            return code.fill_null(MISSING)
        return (
            pl.when(text.is_null()).then(MISSING).otherwise(code.fill_null(UNKNOWN)).cast(pl.Int32)
        )

    def _places(self, column: Column, dtype: pl.DataType) -> Iterator[tuple[str, pl.Expr]]:
        """Yield the codes of each place of a multi-valued column: values first, then padding."""
        values = _list_of_texts(column, dtype)
        present = values.list.len().fill_null(0)
        for place in range(column.max_length):
            code = self._codes(column, values.list.get(place, null_on_oob=True))
            empty = MISSING if place == 0 else PADDING  # a row without any value is missing
            filled = pl.when(present > place).then(code).otherwise(empty).cast(pl.Int32)
            yield f"code:{place}", filled
        yield "cut", (present.cast(pl.Int64) - column.max_length).clip(0)

    def _binned(self, column: Column, dtype: pl.DataType) -> pl.Expr:
        """Return the codes of log-square bins: floor(ln(x)^2) above 2, x - 2 up to there."""
        x = _number(column.name, dtype)
        square = pl.when(x > 2).then(x.log() * x.log()).otherwise(x - 2).floor()
        bins = square.clip(LOWEST_BIN, HIGHEST_BIN)
        final = self.dtypes[column.vocabulary_name]
        if isinstance(final, pl.Enum):
            return self._codes(column, bins.cast(pl.Int32, strict=False).cast(pl.String))
        return (bins - LOWEST_BIN + FIRST_VALUE).fill_nan(None).cast(pl.Int32).fill_null(MISSING)

    def _key(self, types: pl.Schema) -> pl.Expr:
        """Return what the split goes by: seconds, the user's code, or the number of the part."""
        split = self.schema.split
        if split.kind == "time":
            return _seconds(split.column, types[split.column])
        text = _text(pl.col(split.column), types[split.column])
        if split.kind == "given":
            parts = {name: number for number, name in enumerate(SPLIT_NAMES)}
            return text.replace_strict(parts, default=None, return_dtype=pl.UInt8)
        return self._codes(self.schema[split.column], text)


def _keep_good(
    found: pl.DataFrame, checks: Sequence[_Check], chunk: RawChunk, bad: BadRows
) -> NDArray[np.bool_] | None:
    """Hand bad rows over and return which rows are good; None where all are."""
    failed = [(check, flags) for check, flags in zip(checks, found, strict=True) if flags.any()]
    if not failed:
        return None
    keep = np.ones(chunk.frame.height, dtype=bool)
    for row in found.select(pl.any_horizontal(pl.all())).to_series().arg_true().to_list():
        keep[row] = False
        check = next(check for check, flags in failed if flags[row])
        value = chunk.frame[check.column][row]
        bad.add(chunk.locate(row), check.reason, f" (got {_shown(value)})")
    return keep


def _shown(value: object) -> str:
    from rarebit.data.raw.bad_rows import shortened

    return "nothing" if value is None else repr(shortened(str(value)))


def _label(name: str, dtype: pl.DataType) -> pl.Expr:
    """Return the label as 0 or 1, null for anything else."""
    number = _number(name, dtype)
    if dtype == pl.String:
        # a block of integers is read as such, so " 1" and "01" must be labels in any other, too
        words = pl.col(name).replace_strict(LABEL_WORDS, default=None, return_dtype=pl.Float64)
        number = pl.coalesce(number, words)
    return pl.when(number.is_in([0.0, 1.0])).then(number).cast(pl.UInt8)


def _number(name: str, dtype: pl.DataType) -> pl.Expr:
    """Return a column as floats, null where it is missing or no number."""
    column = pl.col(name).str.strip_chars() if dtype == pl.String else pl.col(name)
    return column.cast(pl.Float64, strict=False)


def _is_too_large(number: pl.Expr) -> pl.Expr:
    """Return where a number is infinite, none, or more than 32 bits hold: its square would overflow."""
    return ~number.cast(pl.Float32, strict=False).is_finite()


def _seconds(name: str, dtype: pl.DataType) -> pl.Expr:
    """Return a time as a number that grows with it, null for what is no time."""
    column = pl.col(name)
    if dtype in (pl.Date, pl.Datetime):
        column = column.cast(pl.Datetime("us"))
    if dtype.is_temporal():
        return column.to_physical().cast(pl.Float64)
    number = column.cast(pl.Float64, strict=False)
    number = pl.when(number.is_finite()).then(number)
    if dtype != pl.String:
        return number
    times = [column.str.to_datetime(text, strict=False, time_unit="us") for text in TIME_FORMATS]
    return pl.coalesce(number, *(time.to_physical().cast(pl.Float64) / 1e6 for time in times))


def _text(column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Return values as text, so that 5, 5.0 and "5" are one value whatever file they come from."""
    if dtype == pl.String:
        return column
    if dtype.is_float():
        whole = (column == column.floor()) & (column.abs() <= MAX_EXACT)
        as_whole = column.cast(pl.Int64, strict=False).cast(pl.String)
        text = pl.when(whole).then(as_whole).otherwise(column.cast(pl.String))
        return pl.when(column.is_nan()).then(None).otherwise(text)
    return column.cast(pl.String)


def _list_of_texts(column: Column, dtype: pl.DataType) -> pl.Expr:
    """Return the values of a multi-valued column without empty ones."""
    values = pl.col(column.name)
    if isinstance(dtype, pl.List):
        values = values.list.eval(_text(pl.element(), dtype.inner))  # type: ignore[arg-type]  # an instance here
    else:
        values = _text(values, dtype).str.split(column.separator)
    element = pl.element()
    return values.list.eval(element.filter(element.is_not_null() & (element != "")))


def _hashed(text: pl.Expr, buckets: int) -> pl.Expr:
    """Return the bucket of each value: CRC-32 of its UTF-8 bytes, the same on every machine."""

    def hash_series(series: pl.Series) -> pl.Series:
        distinct = series.drop_nulls().unique()
        codes = [FIRST_VALUE + zlib.crc32(value.encode()) % buckets for value in distinct]
        numbered = series.replace_strict(distinct, codes, default=MISSING, return_dtype=pl.Int32)
        return numbered.fill_null(MISSING)

    return text.map_batches(hash_series, return_dtype=pl.Int32)


def _plain_types(frame: pl.DataFrame, missing: Sequence[str]) -> pl.DataFrame:
    """Return categories as the texts they stand for, and arrays of equal length as lists."""
    texts = pl.selectors.categorical() | pl.selectors.enum()
    text = texts.cast(pl.String)
    arrays = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.Array)]
    return frame.with_columns(
        pl.when(~text.is_in(["", *missing])).then(text), pl.col(arrays).arr.to_list()
    )


def _refuse_types(frame: pl.DataFrame, schema: LogSchema) -> None:
    """Raise for a column whose type cannot be what the schema says."""
    for column in schema.columns:
        if column.name not in frame.columns or column.kind in ("time", "ignored"):
            continue
        dtype = frame.schema[column.name]
        is_list = isinstance(dtype, pl.List)
        if column.kind == "multi" and not is_list and not column.separator:
            raise DataError(
                f"the column {column.name!r} is multi-valued and holds {dtype}: "
                "give the separator between its values, or lists"
            )
        if is_list != (column.kind == "multi" and is_list) or dtype in (pl.Object, pl.Binary):
            raise DataError(
                f"the column {column.name!r} holds {dtype}, which cannot be {column.kind}"
            )
        if column.kind == "categorical" and dtype.is_float():
            largest = frame[column.name].abs().max()
            exact = 1 << 24 if dtype == pl.Float32 else MAX_EXACT
            if isinstance(largest, float) and largest > exact:
                raise DataError(
                    f"the column {column.name!r} holds ids as floats, as large as {largest:.0f}: "
                    "floats cannot tell such ids apart; write them as integers or text"
                )
