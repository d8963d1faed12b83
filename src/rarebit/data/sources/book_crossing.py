"""Book-Crossing (Ziegler et al., WWW 2005): 433,671 explicit ratings of books, liked or not.

    label       1 for a rating of 8 to 10, 0 for 1 to 7; a rating of 0 is none: the book was only seen
    user, isbn  as in the ratings; ISBNs as readers typed them, capitals and all
    author, publisher, year    of the book, missing where the book list does not have it (11 % of rows)
    location, age              of the user, as given: an age may be 0 or 244

The files are latin-1 with `;` between values and backslashes before quotes inside of values; one
user's place goes over two lines. Values are taken as they are: "O'REILLY" and "O'Reilly" are two
publishers, as in the published counts (105,283 users, 340,556 ISBNs, 101,593 authors, 16,729
publishers, 26,111 locations), which are over all 1,149,780 ratings, those of 0 with them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import polars as pl

from rarebit.data.log_schema import Column, LogSchema, TextFormat
from rarebit.data.raw.chunks import BadRows, RawChunk
from rarebit.data.raw.readers import FileProgress, read_raw
from rarebit.data.sources._base import (
    NUMERIC_AGE,
    FileFacts,
    Source,
    keep,
    read_table,
    skip_wrong,
    with_numbers,
)

__all__ = ["BookCrossing"]

SEMICOLONS = TextFormat(separator=";", escape="\\", encoding="latin-1")
RATINGS = {"User-ID": "user", "ISBN": "isbn", "Book-Rating": "rating"}
BOOKS = {
    "ISBN": "isbn",
    "Book-Author": "author",
    "Publisher": "publisher",
    "Year-Of-Publication": "year",
}
USERS = {"User-ID": "user", "Location": "location", "Age": "age"}
FIELDS = ("user", "isbn", "author", "publisher", "year", "location", "age")
CLEAN = LogSchema(
    label="label", columns=tuple(Column(name=name) for name in FIELDS), missing=("NULL",)
)


class BookCrossing(Source):
    """Book-Crossing, explicit ratings."""

    title = "Book-Crossing, explicit ratings, seven fields: a book that a user rated, liked or not"
    publisher = "Cai-Nicolas Ziegler (University of Freiburg) as BX-CSV-Dump.zip"
    files = ("BX-Book-Ratings.csv", "BX-Books.csv", "BX-Users.csv")
    facts = (
        "Ratings of 8 to 10 are positive, 1 to 7 negative; ratings of 0 (seen, not rated) are left out.",
        "A book or user that is not in its list has missing values.",
    )
    remarks: ClassVar[dict[str, str]] = {"mlet": NUMERIC_AGE}
    protocols: ClassVar[dict[str, LogSchema]] = {
        "clean": CLEAN,
        "mlet": with_numbers(CLEAN, "age"),
    }

    def rows(
        self, folder: Path, bad: BadRows, progress: FileProgress | None = None
    ) -> Iterator[RawChunk]:
        """Yield the explicit ratings."""
        self.in_files = FileFacts("ratings, those of 0 among them", FIELDS)
        for chunk in all_ratings(self.paths(folder), bad, progress):
            self.in_files.add(chunk.frame)
            explicit = keep(chunk, chunk.frame["rating"] > 0)
            label = (pl.col("rating") >= 8).cast(pl.UInt8).alias("label")
            yield replace(explicit, frame=explicit.frame.select(label, *FIELDS))


def all_ratings(
    paths: list[Path], bad: BadRows, progress: FileProgress | None = None
) -> Iterator[RawChunk]:
    """Yield all ratings, 0 to 10, with the columns of the book and the user."""
    ratings, books, users = paths
    known_books = read_table(_named(books, BOOKS, bad), "isbn", bad)
    known_users = read_table(_named(users, USERS, bad), "user", bad)
    for chunk in _named(ratings, RATINGS, bad, progress):
        frame = chunk.frame.with_columns(pl.col("rating").cast(pl.Int64, strict=False))
        frame = frame.join(known_books, on="isbn", how="left", maintain_order="left")
        frame = frame.join(known_users, on="user", how="left", maintain_order="left")
        right = frame["rating"].is_between(0, 10)
        yield skip_wrong(replace(chunk, frame=frame), right, bad, "not a rating from 0 to 10")


def _named(
    path: Path, names: dict[str, str], bad: BadRows, progress: FileProgress | None = None
) -> Iterator[RawChunk]:
    for chunk in read_raw(
        path, tuple(names), bad, format=SEMICOLONS, missing=("NULL",), progress=progress
    ):
        yield replace(chunk, frame=chunk.frame.rename(names))
