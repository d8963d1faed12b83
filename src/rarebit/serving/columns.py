"""Values of a request as the arrays that a model reads.

A value means what it means to `rarebit data prepare`: an integer is its decimal text, a whole float has no point,
and null is missing. What `prepare` refuses as a malformed row is refused here with its column and row.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rarebit.errors import RequestError

MAX_EXACT = 1 << 53
"""Up to here, a float tells two neighbouring whole numbers apart."""
SMALLEST_POSITIONAL = 1e-5
"""Polars writes smaller numbers with an exponent."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
"""What Polars strips; Python's own `strip` takes more."""
MAX_SHOWN = 60
"""Characters of a value in a message."""

Arrays: TypeAlias = dict[str, NDArray[Any]]
Place: TypeAlias = Callable[[int], str]


@dataclass(frozen=True)
class Input:
    """A column that a model reads."""

    name: str
    kind: str
    """categorical, multi or numeric."""
    separator: str = ""
    """Of a multi-valued column: what is between two values; empty where the model reads lists."""
    max_length: int = 1
    missing: tuple[str, ...] = ()
    """Texts that mean a missing value."""

    @cached_property
    def missing_numbers(self) -> list[float]:
        """The numbers among the texts that mean a missing value."""
        return [float(text) for text in self.missing if NUMBER.fullmatch(text)]

    @property
    def is_list(self) -> bool:
        """Whether the model reads lists of values, padded."""
        return self.kind == "multi" and not self.separator


def row_number(row: int) -> str:
    """Return how messages name a row."""
    return f"row {row}"


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def to_array(
    column: Input, values: Sequence[Any], place: Place = row_number, *, nan_is_missing: bool = False
) -> NDArray[Any]:
    """Return the values of a column as its model reads them.

    >>> to_array(Input("user", "categorical"), ["ann", 15, 15.0, True, None]).tolist()
    ['ann', '15', '15', 'true', '']
    >>> to_array(Input("tags", "multi", "|", 3), [["a", 1], "b|c", None]).tolist()
    ['a|1', 'b|c', '']
    >>> to_array(Input("price", "numeric"), [1, " 2.5", None]).tolist()
    [1.0, 2.5, nan]
    """
    if column.kind == "numeric":
        return _numbers(column, values, place, nan_is_missing=nan_is_missing)
    if column.kind == "multi":
        return _lists(column, values, place)
    if set(map(type, values)) == {str}:
        return np.array(values, dtype=object)
    texts = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        texts[row] = _text(column, value, row, place)
    return texts


def float_text(value: float) -> str:
    """Return the text of a float that is no whole number, as Polars writes it.

    >>> float_text(0.5), float_text(0.00002), float_text(1e-7)
    ('0.5', '0.00002', '1e-7')
    """
    text = repr(value)
    if "e" not in text:
        return text
    digits, _, exponent = text.partition("e")
    if abs(value) < SMALLEST_POSITIONAL:
        return f"{digits}e{int(exponent)}"
    sign = "-" if value < 0 else ""
    places = "0" * (-int(exponent) - 1)
    return f"{sign}0.{places}{digits.lstrip('-').replace('.', '')}"


def _text(column: Input, value: Any, row: int, place: Place) -> str:
    """Return one value as text; "" is missing."""
    kind = type(value)
    if kind is str:
        return str(value)
    if value is None:
        return ""
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    if kind is not float:
        expected = "text, a number, true, false or null"
        raise _wrong(column, place(row), expected, value)
    if value != value:  # noqa: PLR0124  # NaN
        return ""
    if abs(value) > MAX_EXACT:
        raise RequestError(
            f"{place(row)}: column {column.name!r} has the float {value:g} as an id: floats cannot "
            "tell such ids apart; send it as text"
        )
    return str(int(value)) if value == int(value) else float_text(value)


def _lists(column: Input, values: Sequence[Any], place: Place) -> NDArray[Any]:
    """Return several values per row: joined by the separator, or padded where there is none."""
    if column.is_list:
        padded = np.full((len(values), column.max_length), "", dtype=object)
        for row, value in enumerate(values):
            found = _elements(column, value, row, place)[: column.max_length]
            padded[row, : len(found)] = found
        return padded
    joined = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        if type(value) is not list:
            joined[row] = _text(column, value, row, place)
            continue
        text = column.separator.join(_elements(column, value, row, place))
        # one value that is spelled like a missing row is still a value
        joined[row] = text + column.separator if text in column.missing else text
    return joined


def _elements(column: Input, value: Any, row: int, place: Place) -> list[str]:
    """Return the texts of a list without empty ones."""
    if value is None:
        return []
    if type(value) is not list:
        raise _wrong(column, place(row), "a list of values", value)
    texts = [_text(column, element, row, place) for element in value]
    if column.separator and any(column.separator in text for text in texts):
        raise RequestError(
            f"{place(row)}: column {column.name!r} has a value with {column.separator!r} in it, "
            "which separates values; send them as several values"
        )
    return [text for text in texts if text]


def _numbers(
    column: Input, values: Sequence[Any], place: Place, *, nan_is_missing: bool
) -> NDArray[np.float64]:
    if set(map(type, values)) <= {int, float}:
        numbers = np.array(values, dtype=np.float64)
        known = ~np.isnan(numbers) if nan_is_missing else np.ones(len(numbers), dtype=bool)
    else:
        numbers, known = np.empty(len(values)), np.ones(len(values), dtype=bool)
        for row, value in enumerate(values):
            number = _number(column, value, row, place)
            numbers[row] = np.nan if number is None else number
            known[row] = number is not None
    with np.errstate(over="ignore"):
        too_large = known & ~np.isfinite(numbers.astype(np.float32))
    if too_large.any():
        row = int(too_large.argmax())
        raise _wrong(column, place(row), "a number that fits 32 bits", values[row])
    if column.missing_numbers:
        numbers[np.isin(numbers, column.missing_numbers)] = np.nan
    return numbers


def _number(column: Input, value: Any, row: int, place: Place) -> float | None:
    """Return one value as a number, or None where it is missing."""
    kind = type(value)
    if value is None:
        return None
    if kind in (int, float, bool):
        return float(value)
    if kind is str:
        text = value.strip(SPACES)
        if not text or value in column.missing:
            return None
        if NUMBER.fullmatch(text):
            return float(text)
    raise _wrong(column, place(row), "a number or null", value)


def _wrong(column: Input, where: str, expected: str, value: object) -> RequestError:
    got = {"list": "a list", "dict": "an object"}.get(type(value).__name__) or shown(value)
    return RequestError(f"{where}: column {column.name!r} must be {expected}, got {got}")


def check_lengths(columns: Mapping[str, Sequence[Any]]) -> int:
    """Return the number of rows, where all columns have the same number."""
    lengths = {name: len(values) for name, values in columns.items()}
    first = next(iter(lengths))
    for name, length in lengths.items():
        if length != lengths[first]:
            raise RequestError(
                f"columns must have the same number of values; {first!r} has {lengths[first]}, "
                f"{name!r} has {length}"
            )
    return lengths[first]
