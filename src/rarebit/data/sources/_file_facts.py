"""What a set's files hold before rows are left out or added: the figures that its publisher gives."""

import numpy as np
import polars as pl

from rarebit.data.raw.coding import GrowingDictionary
from rarebit.data.raw.counting import add_counts
from rarebit.data.statistics import value_statistics

__all__ = ["FileFacts"]


class FileFacts:
    """Counts the values of some columns as the rows go by.

    >>> facts = FileFacts("ratings", ("user",))
    >>> facts.add(pl.DataFrame({"user": ["ann", "ann", "bob"]}))
    >>> facts.line()
    'The files hold 3 ratings: user 2 values, the top 20 % of them in 0.667 of the rows.'
    """

    def __init__(self, what: str, columns: tuple[str, ...]) -> None:
        self.what, self.rows = what, 0
        self.dictionaries = {name: GrowingDictionary() for name in columns}
        self.counts = {name: np.zeros(0, np.int64) for name in columns}

    def add(self, frame: pl.DataFrame) -> None:
        """Count some rows."""
        self.rows += frame.height
        for name, dictionary in self.dictionaries.items():
            codes = frame[name].drop_nulls().cast(dictionary.dtype).to_physical().to_numpy()
            missing = int(codes.max(initial=0)) + 1 - len(self.counts[name])
            if missing > 0:
                self.counts[name] = np.pad(self.counts[name], (0, missing))
            add_counts(self.counts[name], codes.astype(np.int32))

    def line(self) -> str:
        """Return them in a sentence."""
        found = {name: value_statistics(counts) for name, counts in self.counts.items()}
        first, *others = [
            f"{name} {facts['distinct']:,}{{}} {facts['top_share']:.3f}"
            for name, facts in found.items()
        ]
        parts = [first.format(" values, the top 20 % of them in") + " of the rows"]
        parts += [other.format(",") for other in others]
        return f"The files hold {self.rows:,} {self.what}: {'; '.join(parts)}."
