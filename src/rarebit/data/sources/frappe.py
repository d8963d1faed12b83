"""Frappe (https://arxiv.org/abs/1505.03014): which app a user opened, in which situation, or did not.

Every one of the 96,203 logged uses is a positive row. Two negative rows follow each: the same user
and situation with an app drawn by `seed`, uniformly and independently, from all apps of the log that
this user never opened. That is how the often used 288,609 rows came to be (He and Chua 2017).

    cost    belongs to the app, not to the situation: a negative row has the cost of its own app

NOTE[DIFF]: the published negatives keep the cost of the use they were drawn for, so a paid app
marked "free" can only be a negative: the label leaks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.log_schema import Column, LogSchema, Split, TextFormat
from rarebit.data.order import random_bits, stream_key
from rarebit.data.raw.chunks import BadRows, Place, RawChunk
from rarebit.data.raw.readers import FileProgress, read_raw
from rarebit.data.sources._base import FileFacts, Source, skip_wrong
from rarebit.errors import DataError

__all__ = ["Frappe", "draw_unused"]

Indices = NDArray[np.int64]
NEGATIVES = 2
SITUATION = ("daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")
FIELDS = ("user", "item", *SITUATION)
COLUMNS = tuple(Column(name=name) for name in FIELDS)


class Frappe(Source):
    """Frappe, with two negatives for each use."""

    title = "Frappe, ten fields: an app that a user opened in a situation, or did not"
    publisher = "Baltrunas et al. (Telefonica Research) as frappe.zip"
    files = ("frappe.csv",)
    facts = (
        (
            "Every logged use is positive. Two negatives follow each: the same user and situation, "
            "and an app drawn uniformly from those that the user never opened."
        ),
        (
            "A negative has the cost of its own app. The negatives published elsewhere kept the cost "
            "of the use, which gives the label away."
        ),
    )
    protocols: ClassVar[dict[str, LogSchema]] = {
        "clean": LogSchema(label="label", columns=COLUMNS),
        "nfm": LogSchema(
            label="label",
            columns=COLUMNS,
            split=Split(shares=(0.7, 0.2, 0.1)),
            counts="all",
            unknown_share=0.0,
        ),
    }
    seed: ClassVar[int] = 0
    """Draws the negatives."""

    def rows(
        self, folder: Path, bad: BadRows, progress: FileProgress | None = None
    ) -> Iterator[RawChunk]:
        """Yield each use followed by its negatives."""
        path = self.only_file(folder, self.files)
        tabs = TextFormat(separator="\t", quote="")
        chunks = []
        for chunk in read_raw(path, FIELDS, bad, format=tabs, progress=progress):
            known = chunk.frame["user"].is_not_null() & chunk.frame["item"].is_not_null()
            chunks.append(skip_wrong(chunk, known, bad, "a use without user or item"))
        uses = pl.concat([chunk.frame for chunk in chunks])
        self.in_files = FileFacts("uses", FIELDS)
        self.in_files.add(uses)
        apps = uses.select("item", "cost").unique("item", keep="first", maintain_order=True)
        drawn = _negatives(uses["user"], uses["item"], apps["item"], NEGATIVES, self.seed)
        first = 0
        for chunk in chunks:
            last = first + chunk.frame.height
            yield _with_negatives(chunk, apps[drawn[first:last].ravel()])
            first = last


def _with_negatives(chunk: RawChunk, apps: pl.DataFrame) -> RawChunk:
    """Return each use followed by its negatives: the use again with other apps and their costs."""
    uses, each = chunk.frame, NEGATIVES + 1
    rows = np.arange(uses.height * each)
    positive = rows % each == 0
    frame = uses[rows // each]
    items = pl.concat([uses.select("item", "cost"), apps])
    own = rows // each
    other = uses.height + rows - own - 1  # the negatives lie behind the uses, in the same order
    frame = frame.with_columns(items[np.where(positive, own, other)])
    label = pl.Series("label", positive.astype(np.uint8))

    def locate(row: int) -> Place:
        return chunk.locate(row // each)

    return RawChunk(frame.select(label, *FIELDS), locate, chunk.part)


def _negatives(
    users: pl.Series, items: pl.Series, all_items: pl.Series, draws: int, seed: int
) -> Indices:
    """Return the items drawn for each use, `(uses, draws)`, as positions in the list of all items."""
    names = users.unique(maintain_order=True)
    rows = _positions(users, names)
    used = np.zeros((names.len(), all_items.len()), dtype=np.bool_)
    used[rows, _positions(items, all_items)] = True
    used_all = used.all(axis=1)
    if used_all.any():
        raise DataError(
            f"user {names[int(used_all.argmax())]!r} used all {all_items.len():,} items of the log, "
            "so no negative can be drawn; use the whole log, not a small part of it"
        )
    return draw_unused(rows, used, draws, seed)


def _positions(values: pl.Series, known: pl.Series) -> Indices:
    """Return where each value is in a list of distinct values that has them all."""
    where = pl.DataFrame({"value": known}).with_row_index("position")
    found = pl.DataFrame({"value": values}).join(where, on="value", maintain_order="left")
    return found["position"].cast(pl.Int64).to_numpy()


def draw_unused(users: Indices, used: NDArray[np.bool_], draws: int, seed: int) -> Indices:
    """Return `draws` items per row, uniform over the items that its user has not used.

    `used` has a row per user and a column per item. A draw depends on the seed and its position only:
    those that hit a used item are drawn again, all at once, until none is left.
    """
    places = np.arange(users.size * draws, dtype=np.uint64)
    owners = np.repeat(users, draws)
    drawn = np.empty(places.size, dtype=np.int64)
    open_places, attempt = places, 0
    while open_places.size:
        bits = random_bits(stream_key(seed, "negative", attempt), open_places)
        drawn[open_places] = bits % np.uint64(used.shape[1])
        refused = used[owners[open_places], drawn[open_places]]
        open_places, attempt = open_places[refused], attempt + 1
    return drawn.reshape(users.size, draws)
