"""Guess the schema of a raw log from its first rows, with a reason for every column.

A wrong guess is cheap: the schema is shown, and written to a file to edit. The first rule that fits
a column decides:

    the name of a table's index, or no name                                  ignored
    a type that is not read (structs, bytes)                                 ignored
    no value at all                                                          ignored
    dates, or texts such as 2014-10-21 08:30:00                              time
    one value in all rows, unless the name says that it changes with time    ignored
    lists, or texts with a separator between repeated parts                  multi
    numbers from 1990 to 2040 in seconds or milliseconds, named as a time    time
    numbers that are not exact as floats, or whose name says id or code      categorical
    numbers with fractions                                                   numeric, standardised
    whole numbers, few distinct ones                                         categorical
    whole numbers whose name says amount, or most of which are small         numeric, log_square;
                                                      standardised where some are below -3
    anything else: texts, numbers with leading zeros, ids                    categorical

A categorical column is ignored where every row has its own value, and its min_count is 2 where it has
more than one value per ten rows. Both need 1,000 rows.
Words such as NULL mean a missing value where only they keep a column from being numbers.

Some columns are read as they are and reported: numbers among which are texts, and what looks like the label
or the weight of a row, by its name or because it agrees with the label.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.log_schema import Column, Comparison, LogSchema, Split
from rarebit.data.raw.chunks import shortened
from rarebit.data.raw.coding import label_of, seconds_of
from rarebit.errors import DataError
from rarebit.settings import suggest

NUMBER = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"
LEADING_ZERO = r"^[+-]?0[0-9]"
OTHER_NUMBER = r"^[+-]?[$€£]? ?[0-9]{1,3}(?:[.,' ]?[0-9]{3})*(?:[.,][0-9]+)? ?[%$€£]?$"
"""A number as people write it: 1.234,56 or 1,234.56 or 12 %."""

TIME_NAMES = "time timestamp datetime date day hour ts created"
ID_NAMES = (
    "id ids key code zip zipcode postcode isbn hash uuid guid ip user item movie book ad ads "
    "campaign advertiser publisher product sku brand category cat type device site app shop seller "
    "store city region country channel version os class group segment"
)
AMOUNT_NAMES = (
    "count counts cnt num amount price cost bid paid age total sum avg mean duration seconds "
    "minutes hours days bytes size length width height distance views clicks impressions score "
    "rate ratio revenue income salary"
)

LABEL_NAMES = "label target outcome response"
EVENT_NAMES = (
    "click clicks clicked conversion conversions converted convert purchase purchased buy bought install "
    "installed order ordered"
)
WEIGHT_NAMES = "weight weights"

SAMPLE_ROWS = 20_000
"""The first rows of a log, which the guess is from."""
ENOUGH_ROWS = 1000
"""With fewer rows, distinct values mean little."""
FEW = 20
SMALL_PART = 0.25
"""Counts crowd near zero: half of their distinct values lie in this part of the range. Ids do not."""
LOWEST_LOG_SQUARE = -3
MOST_VALUES = 50
MANY_DISTINCT = 0.1
MANY_TEXT = "; over 10 % of the rows, so values seen once are unknown"
FIRST_TIME, LAST_TIME = 631_152_000, 2_240_611_200  # 1990 and 2041 in seconds
EXACT = 1 << 53

INDEX = r"__index_level_[0-9]+__|Unnamed: [0-9]+(?:\.[0-9]+)?"
"""Names of an index that pandas wrote next to the columns."""
MISSING_WORDS = ("NULL", "Null", "null", "NaN", "nan", "NA", "N/A", "n/a", "None", "none", r"\N")
HAS_YEAR = r"^[0-9]{4}[-/]|[-./ ][0-9]{4}"
"""A sign that texts may be times."""

_Guess: TypeAlias = tuple[Column, str]


class SeenColumn:
    """A column of the sample. Costly facts are computed once, when a rule needs them."""

    def __init__(
        self, series: pl.Series, missing: tuple[str, ...] = (), *, is_named: bool = True
    ) -> None:
        if isinstance(series.dtype, pl.Array):
            series = series.arr.to_list()  # read as lists
        self.series, self.is_named = series, is_named
        """Whether the name is the column's own, not one that the reader gave it."""
        self.name, self.dtype, self.rows = series.name, series.dtype, series.len()
        found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", self.name)
        self.words: list[str] = [word.lower() for word in found]
        self.values = series.drop_nulls()
        """The values that are there."""
        self.missing_words: list[str] = []
        """The words for missing that are in it."""
        if self.dtype == pl.String and missing:
            is_word = self.values.is_in(missing)
            self.missing_words = sorted(self.values.filter(is_word).unique())
            self.values = self.values.filter(~is_word)

    @cached_property
    def distinct(self) -> int:
        """How many distinct values there are, without missing ones."""
        return self.values.n_unique()

    @property
    def distinct_text(self) -> str:
        """The number of distinct values, for people."""
        return f"{self.distinct:,} distinct in {self.rows:,} rows"

    @property
    def first_rows(self) -> str:
        """The rows of the sample, for people: the log may have more."""
        return f"the first {self.rows:,} rows" if self.rows > 1 else "the first row"

    @cached_property
    def numbers(self) -> NDArray[np.float64] | None:
        """The values as numbers; none if there is a text that is no number, or one such as 007."""
        values = self.values
        if values.dtype == pl.String:
            if (values.str.contains(LEADING_ZERO) | ~values.str.contains(NUMBER)).any():
                return None
        elif not values.dtype.is_numeric():
            return None
        numbers = values.cast(pl.Float64).to_numpy()
        finite: NDArray[np.float64] = numbers[np.isfinite(numbers)]
        too_large = values.dtype == pl.String and len(finite) < len(numbers)
        return None if too_large or not len(finite) else finite

    @property
    def name_says_time(self) -> bool:
        """Whether some word of the name is one for times: timestamp, hour_of_day."""
        return any(word in TIME_NAMES.split() for word in self.words)

    @property
    def name_says_amount(self) -> bool:
        """Whether the name begins or ends like that of an amount: num_clicks, item_price."""
        return any(word in AMOUNT_NAMES.split() for word in self.words[:1] + self.words[-1:])

    @property
    def name_says_id(self) -> bool:
        """Whether the name ends like that of an id: user_id, userid, zip."""
        last = self.words[-1] if self.words else ""
        return last in ID_NAMES.split() or (
            last.endswith("id") and last not in AMOUNT_NAMES.split()
        )


@dataclass(frozen=True)
class Inferred:
    """A guessed schema, and why each column is what it is."""

    schema: LogSchema
    reasons: dict[str, str]
    """For each column, a few words for people."""
    warnings: tuple[str, ...] = ()
    """What is likely a mistake, a sentence each."""

    def warn(self, stacklevel: int = 3) -> None:
        """Show all warnings, as coming from the caller of the library."""
        for text in self.warnings:
            warnings.warn(text, stacklevel=stacklevel)


def infer_schema(
    sample: pl.DataFrame,
    label: str,
    *,
    split: Split | None = None,
    weight: str = "",
    group: str = "",
    other_labels: Sequence[str] = (),
) -> Inferred:
    """Guess the schema of a log from its first rows: some 20,000 are enough.

    The label is a column, or a comparison such as "rating>=4". Other labels are columns that a model must not read.
    """
    split = split or Split()
    for name in filter(None, (weight, group, *other_labels)):
        if name not in sample.columns:
            raise DataError(f"the log has no column {name!r}{suggest(name, sample.columns)}")
    unread = dict.fromkeys(other_labels, "another label") | {weight: "the weight of a row"}
    label, positive = (label, "") if label in sample.columns else Comparison.split(label)
    _check(sample, label, split)
    asked = label_of(label, sample.schema[label], positive).alias(label)
    labels = sample.select(asked).to_series() if positive else sample[label]
    others = [series for series in sample.get_columns() if series.name != label]
    missing = _missing_words(sample.drop(label))
    unnamed = _unnamed(sample.columns)
    columns, reasons = [], {}
    doubts: list[str] = []
    for series in others:
        seen = SeenColumn(series, missing, is_named=series.name not in unnamed)
        if seen.name in unread:
            guess: _Guess = _ignored(seen, unread[seen.name])
        else:
            guess = _for_split(seen, split) or _by_rules(seen)
        column, reasons[seen.name] = guess
        if seen.name == group:
            reasons[seen.name] += "; rows are grouped by it"
        columns.append(column)
        doubts += _suspicions(seen, column, labels)
        if seen.missing_words and column.kind != "ignored":
            words = ", ".join(map(repr, seen.missing_words))
            reasons[seen.name] += f"; {words} counts as missing"
    if all(column.kind in ("time", "ignored") for column in columns):
        found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "none"
        raise DataError(
            f"no column besides the label {label!r} looks useful for a model ({found}); "
            "write the schema by hand if one is"
        )
    schema = LogSchema(
        label=label,
        columns=tuple(columns),
        split=split,
        missing=missing,
        positive=positive,
        weight=weight,
        group=group,
    )
    return Inferred(schema, reasons, tuple(doubts))


def _check(sample: pl.DataFrame, label: str, split: Split) -> None:
    names = sample.columns
    if label not in names:
        raise DataError(f"the log has no column {label!r} for the label{suggest(label, names)}")
    if not sample.height:
        raise DataError("the log has no rows, so its schema cannot be guessed")
    if "" in names:
        raise DataError(
            f"column {names.index('') + 1} of the log has no name; every column needs one"
        )
    if split.column and (split.column not in names or split.column == label):
        others = [name for name in names if name != label]
        raise DataError(
            f"a split by {split.kind} needs the column {split.column!r}, and the log has none besides "
            f"its label{suggest(split.column, others)}"
        )


def is_row(names: list[str], sample: pl.DataFrame) -> bool:
    """Whether the names of columns look like a row of a file without a header: values that come again.

    Unnamed columns that pandas wrote are called 0, 1, 2 and so on.
    """
    if names in ([str(number + first) for number in range(len(names))] for first in (0, 1)):
        return False
    again = [name for name in names if (sample[name].cast(pl.String, strict=False) == name).any()]
    return 2 * len(again) >= len(names) and any(re.match(NUMBER, name) for name in again)


def _unnamed(names: list[str]) -> set[str]:
    """Return the names that readers gave to columns without one, where others do have one."""
    given = {f"column_{place}" for place in range(1, len(names) + 1)}
    found = {name for place, name in enumerate(names, start=1) if name == f"column_{place}"}
    return set() if set(names) <= given else found


def _missing_words(sample: pl.DataFrame) -> tuple[str, ...]:
    """Return the words that are all that keeps some column from being numbers."""
    found: set[str] = set()
    has_word = sample.select(pl.col(pl.String).is_in(MISSING_WORDS).any())
    for series in has_word:
        if not series.item():
            continue
        values = sample[series.name].drop_nulls()
        no_numbers = values.filter(~values.str.contains(NUMBER))
        words = set(no_numbers.head(ENOUGH_ROWS).unique())
        if words <= set(MISSING_WORDS) and 0 < no_numbers.len() < values.len():
            words = set(no_numbers.unique())
            found |= words if words <= set(MISSING_WORDS) else set()
    return tuple(sorted(found))


def _suspicions(seen: SeenColumn, column: Column, label: pl.Series) -> Iterator[str]:
    """Yield what is likely wrong with a column, which is used as it is."""
    if seen.dtype == pl.String and column.kind != "time" and seen.numbers is None:
        yield from _almost_numbers(seen)
    if column.kind in ("time", "ignored"):
        return
    leave_out = f'leave it out: kind = "ignored" for {seen.name!r} in the schema'
    last = (seen.words or [""])[-1]
    if last in WEIGHT_NAMES.split() and seen.numbers is not None:
        yield f"{seen.name!r} is a feature; if it is the weight of a row, say so: --weight {seen.name}"
    is_event = seen.distinct <= 2 and any(word in EVENT_NAMES.split() for word in seen.words)
    if is_event or last in LABEL_NAMES.split():
        yield (
            f"{seen.name!r} is a feature, and its name is like a label's; if it is one, keep it out of the model: "
            f"--label {label.name} --label {seen.name}"
        )
    elif seen.rows >= ENOUGH_ROWS and _tells(seen, label):
        yield (
            f"{seen.name!r} is a feature, and it tells the label {label.name!r} almost perfectly; if it is only "
            f"known after the event, {leave_out}"
        )


def _almost_numbers(seen: SeenColumn) -> Iterator[str]:
    """Yield a warning about texts most of which are numbers, or all of which are in another spelling."""
    values = seen.values
    if seen.name_says_id or 2 * values.str.contains("^.{0,2}[0-9]").sum() < values.len():
        return
    is_number = values.str.contains(NUMBER)
    is_number &= values.cast(pl.Float64, strict=False).is_finite().fill_null(value=False)
    if is_number.all():
        return
    spelled = is_number | (values.str.contains(OTHER_NUMBER) & ~values.str.contains(NUMBER))
    others = values.filter(~spelled)
    words = [shortened(word) for word in sorted(others.unique())]
    if 2 * others.len() > values.len() or (len(words) > 3 and 10 * others.len() > values.len()):
        return
    cleaned = values.str.replace(r"[.,]([0-9]+)[^0-9]*$", "#$1").str.replace_all("[^0-9#+-]", "")
    numbers = values.zip_with(is_number, cleaned.str.replace("#", ".", literal=True))
    guess = _number(SeenColumn(numbers.filter(spelled)))
    if guess is None or guess[0].kind != "numeric":
        return
    advice = "write them as 1234.56"
    if words:
        advice = (
            f'kind = "numeric" and missing = {words[:3]} in a schema take them for missing values'
        )
    example = words[0] if words else values.filter(~is_number)[0]
    yield (
        f"{seen.name!r} is not numeric, because {(~is_number).sum():,} of {values.len():,} values are not "
        f"written as numbers, such as {example!r}; {advice}"
    )


def _tells(seen: SeenColumn, label: pl.Series) -> bool:
    """Whether a column says what the label is: by one of few values, by being there, or by not being 0."""
    value, positive = pl.col("value"), pl.col("label").cast(pl.Float64, strict=False) > 0
    if seen.distinct > FEW:
        if seen.numbers is None:
            return False
        value = value.cast(pl.Float64, strict=False) == 0
    frame = pl.DataFrame({"value": seen.series, "label": label})
    ones, zeros = positive.sum().alias("ones"), (~positive).sum().alias("zeros")
    counts = frame.group_by(value).agg(ones, zeros).select("ones", "zeros").to_numpy()
    rarer = int(counts.sum(axis=0).min())
    return rarer >= FEW and int(counts.min(axis=1).sum()) <= 0.02 * rarer


def _for_split(seen: SeenColumn, split: Split) -> _Guess | None:
    """A column that the split needs is what it needs."""
    if seen.name != split.column:
        return None
    if split.kind == "time":
        return Column(name=seen.name, kind="time"), "the split is by this time"
    if split.kind == "user":
        return _ignored(seen, "the split is by it: no value of a test row is known in training")
    if split.kind == "given":
        return Column(name=seen.name, kind="ignored"), "says which split a row is for"
    return None


def _by_rules(seen: SeenColumn) -> _Guess:
    rules = (_no_use, _time, _constant, _list, _separated, _epoch, _number)
    for rule in rules:
        guess: _Guess | None = rule(seen)
        if guess is not None:
            return guess
    what = "texts" if seen.dtype == pl.String else _type(seen.dtype)
    return _categorical(seen, f"{what}, {seen.distinct_text}")


def _no_use(seen: SeenColumn) -> _Guess | None:
    if re.fullmatch(INDEX, seen.name):
        return _ignored(seen, "the index of a table by its name: the number of the row")
    if not seen.is_named:
        return _ignored(seen, "it has no name in the file; often the number of the row")
    if seen.dtype != pl.Null and not _is_read(seen.dtype):
        return _ignored(seen, f"of type {_type(seen.dtype)}, which is not read")
    if not seen.values.len():
        return _ignored(seen, f"no value in {seen.first_rows}")
    return None


def _time(seen: SeenColumn) -> _Guess | None:
    if isinstance(seen.dtype, pl.Date | pl.Datetime):
        return Column(name=seen.name, kind="time"), f"of type {_type(seen.dtype)}"
    if seen.dtype != pl.String or not re.search(HAS_YEAR, str(seen.values[0])):
        return None
    if seconds_of(seen.values).has_nulls():
        return None
    return Column(name=seen.name, kind="time"), f"dates such as {seen.values[0]}"


def _constant(seen: SeenColumn) -> _Guess | None:
    if seen.rows == 1 or seen.values.len() < seen.rows or seen.distinct > 1:
        return None
    if seen.name_says_time:
        return Column(name=seen.name), f"one value in {seen.rows:,} rows, but times change later on"
    return _ignored(seen, f"the same value in {seen.first_rows}")


def _list(seen: SeenColumn) -> _Guess | None:
    if not isinstance(seen.dtype, pl.List):
        return None
    longest = int(seen.values.list.len().to_numpy().max())
    parts = seen.values.explode().drop_nulls().n_unique()
    return _multi(seen, "lists", parts, longest, "")


def _separated(seen: SeenColumn) -> _Guess | None:
    """Texts that are several values: split, they give fewer distinct ones, which come again."""
    if seen.dtype != pl.String or seen.numbers is not None:
        return None
    if not seen.values.str.contains("[|;^, ]").any():
        return None  # the common case, in a single pass
    wholes = seen.values.unique()
    if wholes.str.contains(r"^[\[{]").any():
        return None  # lists as JSON: splitting would leave the brackets in the values
    for sign, strict in (("|", False), (";", False), ("^", False), (",", True), (" ", True)):
        num_signs = wholes.str.count_matches(sign, literal=True).to_numpy()
        # a comma or a space must not be in every text equally often, nor in prose
        varies = num_signs.min() < num_signs.max() and num_signs.mean() <= 100
        if not (varies if strict else (num_signs > 0).mean() >= 0.1):
            continue
        followed = wholes.str.count_matches(f"{sign} ", literal=True).to_numpy()
        spaced = sign != " " and bool((followed == num_signs).all())
        separator = f"{sign} " if spaced else sign
        parts = wholes.str.split(separator).explode()
        parts = parts.filter(parts != "")
        num_parts = parts.n_unique()
        fewer = 4 * num_parts <= wholes.len() if strict else num_parts < wholes.len()
        if fewer and 2 * num_parts <= parts.len():
            what, longest = f"texts with {separator!r} in them", int(num_signs.max()) + 1
            return _multi(seen, what, num_parts, longest, separator)
    return None


def _epoch(seen: SeenColumn) -> _Guess | None:
    if seen.numbers is None or seen.name_says_id:
        return None
    all_differ = seen.rows >= ENOUGH_ROWS and seen.distinct >= 0.9 * seen.rows
    if not (seen.name_says_time or all_differ):
        return None
    for unit, factor in (("seconds", 1), ("milliseconds", 1000)):
        times = seen.numbers / factor
        if times.min() >= FIRST_TIME and times.max() < LAST_TIME:
            return Column(name=seen.name, kind="time"), f"numbers like {unit} since 1970"
    return None


def _number(seen: SeenColumn) -> _Guess | None:
    numbers = seen.numbers
    if numbers is None:
        return None
    whole = bool((numbers == np.floor(numbers)).all())
    text = f"{'integers' if whole else 'numbers with fractions'}, {seen.distinct_text}"
    if seen.name_says_id:
        return _categorical(seen, f"{text}: an id by its name")
    if not whole:
        return Column(name=seen.name, kind="numeric"), text
    if (np.abs(numbers) > EXACT).any():
        return _categorical(seen, f"{text}: too long for amounts, taken for an id")
    if seen.distinct <= min(FEW, seen.rows // 10):
        return _categorical(seen, f"{text}: few")
    if seen.name_says_amount:
        return _amount(seen, f"{text}: an amount by its name")
    sizes = np.unique(np.abs(numbers))
    sizes -= sizes[0]
    crowd_near_zero = len(sizes) > 1 and np.median(sizes) <= SMALL_PART * sizes[-1]
    low, high = numbers.min(), numbers.max()
    # without large gaps, which hashes have
    spread_around_zero = (
        low < LOWEST_LOG_SQUARE and high > 0 and 4 * len(np.unique(numbers)) >= high - low
    )
    if crowd_near_zero or spread_around_zero:
        return _amount(seen, f"{text}, mostly small: taken for amounts")
    return _categorical(seen, f"{text}: taken for an id")


def _amount(seen: SeenColumn, reason: str) -> _Guess:
    assert seen.numbers is not None
    if (seen.numbers < LOWEST_LOG_SQUARE).any():
        return Column(name=seen.name, kind="numeric"), f"{reason}, some negative"
    return Column(name=seen.name, kind="numeric", treatment="log_square"), reason


def _categorical(seen: SeenColumn, reason: str) -> _Guess:
    if seen.distinct == seen.values.len() and seen.rows >= ENOUGH_ROWS and seen.distinct > FEW:
        return _ignored(seen, "every row has its own value")
    min_count = _min_count(seen, seen.distinct)
    many = MANY_TEXT if min_count > 1 else ""
    return Column(name=seen.name, min_count=min_count), reason + many


def _multi(seen: SeenColumn, what: str, parts: int, longest: int, separator: str) -> _Guess:
    column = Column(
        name=seen.name,
        kind="multi",
        separator=separator,
        max_length=max(1, min(longest, MOST_VALUES)),
        min_count=_min_count(seen, parts),
    )
    cut = f", of which {MOST_VALUES} are kept" if longest > MOST_VALUES else ""
    many = MANY_TEXT if column.min_count > 1 else ""
    return column, f"{what}, {parts:,} distinct values, up to {longest} a row{cut}{many}"


def _min_count(seen: SeenColumn, distinct: int) -> int:
    return 2 if seen.rows >= ENOUGH_ROWS and distinct > MANY_DISTINCT * seen.rows else 1


def _ignored(seen: SeenColumn, reason: str) -> _Guess:
    return Column(name=seen.name, kind="ignored"), reason


def _is_read(dtype: pl.DataType) -> bool:
    texts = pl.String | pl.Boolean | pl.Categorical | pl.Enum
    if isinstance(dtype, pl.List):
        inner = pl.Series(dtype=dtype.inner).dtype  # a type may stand in it as its bare class
        return (
            inner == pl.Null or isinstance(inner, texts) or inner.is_integer() or inner.is_decimal()
        )
    return isinstance(dtype, texts | pl.Date | pl.Datetime) or dtype.is_numeric()


def _type(dtype: pl.DataType) -> str:
    """Return the name of a type without its settings, which may be long."""
    return str(dtype).split("(", maxsplit=1)[0]
