"""MovieLens-1M as in PEP (https://arxiv.org/abs/2101.07577): who liked which kind of film, without ids.

    label     1 for a rating above 3, 0 below; ratings of 3 are left out
    time      floor(ln(t - first)^2), t - first - 2 up to 2; t in seconds, first over all ratings
    year      of the film's release: the last four digits of its title
    genres    the film's genres as one value, such as "Comedy|Drama"

The files are latin-1 with `::` between values.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import polars as pl

from rarebit.data.log_schema import Column, LogSchema, Split
from rarebit.data.raw.chunks import BadRows, RawChunk
from rarebit.data.raw.readers import FileProgress
from rarebit.data.sources._base import (
    NUMERIC_AGE,
    FileFacts,
    Source,
    keep,
    read_table,
    skip_wrong,
    split_lines,
    with_numbers,
)

__all__ = ["ML1M", "ML1MWithIds"]

FIELDS = ("time", "gender", "age", "occupation", "zip", "year", "genres")
COLUMNS = tuple(Column(name=name) for name in FIELDS)
WITH_IDS = LogSchema(label="label", columns=(Column(name="user"), Column(name="movie"), *COLUMNS))


class ML1M(Source):
    """MovieLens-1M, PEP's seven fields."""

    title = "MovieLens-1M, seven fields as in PEP: a film that a user rated, liked or not"
    publisher = "GroupLens (grouplens.org) as ml-1m.zip"
    files = ("ratings.dat", "users.dat", "movies.dat")
    facts = (
        "Ratings above 3 are positive, below 3 negative; ratings of 3 are left out.",
        "The film's genres are one value, such as Comedy|Drama; user and film ids are not used.",
    )
    protocols: ClassVar[dict[str, LogSchema]] = {
        "pep": LogSchema(label="label", columns=COLUMNS, counts="all", unknown_share=0.0),
        "clean": LogSchema(label="label", columns=COLUMNS),
    }

    def rows(
        self, folder: Path, bad: BadRows, progress: FileProgress | None = None
    ) -> Iterator[RawChunk]:
        """Yield the ratings with what is known of the user and the film."""
        ratings, users, movies = self.paths(folder)
        of_user = ("user", "gender", "age", "occupation", "zip")
        known_users = read_table(split_lines(users, of_user, bad), "user", bad)
        of_movie = ("movie", "title", "genres")
        known_movies = read_table(split_lines(movies, of_movie, bad), "movie", bad)
        year = pl.col("title").str.extract(r"\((\d{4})\)\s*$")
        known_movies = known_movies.with_columns(year=year)
        chunks = list(_ratings(ratings, bad, progress))
        times = [chunk.frame["time"].to_numpy() for chunk in chunks]
        first = min((int(t.min()) for t in times if t.size), default=0)
        self.in_files = FileFacts("ratings, those of 3 among them", ("user", "movie", "zip"))
        for chunk in chunks:
            frame = (
                chunk.frame.with_columns(
                    label=(pl.col("rating") > 3).cast(pl.UInt8), time=_bins(pl.col("time") - first)
                )
                .join(known_users, on="user", how="left", maintain_order="left")
                .join(known_movies, on="movie", how="left", maintain_order="left")
            )
            self.in_files.add(frame)
            kept = keep(replace(chunk, frame=frame), frame["rating"] != 3)
            yield replace(kept, frame=kept.frame.select(self.schema().columns_read))


class ML1MWithIds(ML1M):
    """MovieLens-1M, nine fields: the ids of users and films, and PEP's seven fields."""

    title = "MovieLens-1M with ids, nine fields: a film that a user rated, liked or not"
    facts = (
        "Ratings above 3 are positive, below 3 negative; ratings of 3 are left out.",
        "User and film ids are used beside the seven fields of PEP.",
    )
    remarks: ClassVar[dict[str, str]] = {"mlet": NUMERIC_AGE}
    protocols: ClassVar[dict[str, LogSchema]] = {
        "clean": WITH_IDS,
        "mlet": with_numbers(WITH_IDS, "age"),
        "in-order": replace(WITH_IDS, split=Split(kind="order")),
    }


def _ratings(path: Path, bad: BadRows, progress: FileProgress | None) -> Iterator[RawChunk]:
    for chunk in split_lines(path, ("user", "movie", "rating", "time"), bad, progress):
        numbers = chunk.frame.with_columns(pl.col("rating", "time").cast(pl.Int64, strict=False))
        right = numbers["rating"].is_between(1, 5) & numbers["time"].is_not_null()
        reason = "not a rating from 1 to 5 with a time in seconds"
        yield skip_wrong(replace(chunk, frame=numbers), right, bad, reason)


def _bins(seconds: pl.Expr) -> pl.Expr:
    """Return PEP's bins of the time since the first rating, as text."""
    bins = pl.when(seconds > 2).then((seconds.log() ** 2).floor()).otherwise(seconds - 2)
    return bins.cast(pl.Int64).cast(pl.String)
