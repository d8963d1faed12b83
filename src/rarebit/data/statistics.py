"""What a prepared data set looks like: rows, label rates, and how long the tail of each field is.

    top_share    share of the rows whose value is among the top fifth of the distinct values, the
                 number of values rounded up: of 7 values, the 2 most frequent
    rare_share   share of the rows whose value was seen fewer than 10 times
    tail         counts of the values at about 24 ranks, each a fixed factor after the one before

They are of all splits together and of the raw values: before any is folded into unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rarebit.settings import check_types, from_mapping, require, to_mapping

__all__ = ["DataStatistics", "FieldStatistics", "tail_ranks", "value_statistics"]

RARE_BELOW = 10
TAIL_POINTS = 24


@dataclass(frozen=True, kw_only=True)
class FieldStatistics:
    """One field of a prepared data set."""

    name: str
    """The field's name."""
    kind: str
    """What it holds: categorical, multi or numeric."""
    distinct: int
    """Distinct raw values over all splits, without missing."""
    rows: int
    """Rows of its table; zero where it has none."""
    top_share: float
    """Share of the rows whose value is among the top fifth of the values."""
    rare_share: float
    """Share of the rows whose value was seen fewer than 10 times."""
    missing_share: float
    """Share of all rows that have no value."""
    unknown_shares: tuple[float, ...]
    """Share of the rows of train, valid and test whose value has no id of its own."""
    tail: tuple[int, ...]
    """Counts of the values at the ranks `tail_ranks(distinct)`, the most frequent first."""

    def __post_init__(self) -> None:
        check_types(self, where=str(self.name))
        ranks = len(tail_ranks(self.distinct))
        require(
            len(self.tail) in (0, ranks),
            f"{self.name}: {self.distinct} distinct values have a tail of {ranks} counts, "
            f"got {len(self.tail)}",
        )


@dataclass(frozen=True, kw_only=True)
class DataStatistics:
    """A prepared data set.

    >>> seen = DataStatistics(rows=(8, 1, 1), label_rates=(0.25, 0.0, 1.0), bad_rows=0, fields=())
    >>> DataStatistics.from_mapping(seen.to_mapping()) == seen
    True
    """

    rows: tuple[int, ...]
    """Rows of train, valid and test."""
    label_rates: tuple[float, ...]
    """Share of the rows of train, valid and test whose label is 1; zero where there are no rows."""
    bad_rows: int
    """Rows that could not be read and were set aside."""
    fields: tuple[FieldStatistics, ...]
    """The fields, in order."""

    def __post_init__(self) -> None:
        check_types(self, where="statistics")
        require(
            len(self.rows) == len(self.label_rates),
            f"statistics: every split has rows and a label rate, "
            f"got {len(self.rows)} and {len(self.label_rates)}",
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the statistics as plain values."""
        return to_mapping(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "DataStatistics":
        """Read statistics back from plain values."""
        return from_mapping(cls, values, where="statistics")


def tail_ranks(distinct: int) -> list[int]:
    """Return the ranks at which a tail is kept: from 1 to the last, evenly on a log scale.

    >>> tail_ranks(1_000_000)[::4]
    [1, 11, 122, 1350, 14925, 164965]
    >>> tail_ranks(4)
    [1, 2, 3, 4]
    """
    if distinct < 1:
        return []
    return sorted({round(distinct ** (i / (TAIL_POINTS - 1))) for i in range(TAIL_POINTS)})


def value_statistics(counts: NDArray[np.int64]) -> dict[str, Any]:
    """Return distinct, top_share, rare_share and tail of a field from the counts of its values.

    >>> value_statistics(np.array([1, 0, 12, 3]))
    {'distinct': 3, 'top_share': 0.75, 'rare_share': 0.25, 'tail': (12, 3, 1)}
    """
    ordered = np.sort(counts[counts > 0])[::-1]
    distinct, rows = len(ordered), int(ordered.sum())
    top = -(-distinct // 5)
    return {
        "distinct": distinct,
        "top_share": _share(ordered[:top], rows),
        "rare_share": _share(ordered[ordered < RARE_BELOW], rows),
        "tail": tuple(int(ordered[rank - 1]) for rank in tail_ranks(distinct)),
    }


def _share(counts: NDArray[np.int64], rows: int) -> float:
    return int(counts.sum()) / rows if rows else 0.0
