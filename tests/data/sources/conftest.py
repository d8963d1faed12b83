"""How the tests of the sources read a set."""

import pytest


class Reading:
    """All rows of a set as one frame, where each came from, and its bad rows."""

    def __init__(self, name, place, keep="stop"):
        import polars as pl

        from rarebit.data.raw.chunks import BadRows
        from rarebit.data.sources import find_source

        self.bad = BadRows(keep)
        self.chunks = list(find_source(name).rows(place, self.bad))
        self.frame = pl.concat([chunk.frame for chunk in self.chunks])

    @property
    def rows(self):
        return self.frame.rows()

    def column(self, name):
        return self.frame[name].to_list()

    def lines(self):
        chunks = [(chunk.locate, range(chunk.frame.height)) for chunk in self.chunks]
        return [locate(row).number for locate, rows in chunks for row in rows]

    def distinct(self, *names):
        return [self.frame[name].drop_nulls().n_unique() for name in names]


@pytest.fixture
def read():
    """Return a function that reads a set."""
    return Reading
