"""A column of a log's first rows, and what the rules that guess a schema ask about it."""

import re
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

__all__ = ["NUMBER", "SeenColumn"]

NUMBER = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"
LEADING_ZERO = r"^[+-]?0[0-9]"

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


class SeenColumn:
    """A column of the sample. What is costly to know is found once, when a rule asks for it.

    >>> seen = SeenColumn(pl.Series("user_age", ["31", None, "NULL", "31"]), missing=("NULL",))
    >>> seen.values.to_list(), seen.distinct, seen.numbers.tolist(), seen.name_says_amount
    (['31', '31'], 1, [31.0, 31.0], True)
    """

    def __init__(
        self, series: pl.Series, missing: tuple[str, ...] = (), *, is_named: bool = True
    ) -> None:
        if isinstance(series.dtype, pl.Array):
            series = series.arr.to_list()  # read as lists
        self.is_named = is_named
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
        """The same, for people."""
        return f"{self.distinct:,} distinct in {self.rows:,} rows"

    @property
    def first_rows(self) -> str:
        """The rows that were looked at, for people: the log may have more."""
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
