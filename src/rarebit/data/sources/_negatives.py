"""Negative rows for a log of uses: items that the user did not use, drawn at random.

Draws that hit an item the user has used are drawn again, all of them at once, until none is left.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.counter_random import random_bits, stream_key
from rarebit.errors import DataError

__all__ = ["draw_unused", "negatives"]

Indices = NDArray[np.int64]


def draw_unused(users: Indices, used: NDArray[np.bool_], draws: int, seed: int) -> Indices:
    """Return `draws` items for each row, uniform over the items that its user has not used.

    `used` has a row a user and a column an item. A draw depends on the seed and its place only.

    >>> used = np.array([[True, False, True], [False, True, True]])
    >>> draw_unused(np.array([0, 1]), used, draws=2, seed=0).tolist()
    [[1, 1], [0, 0]]
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


def negatives(
    users: pl.Series, items: pl.Series, all_items: pl.Series, draws: int, seed: int
) -> Indices:
    """Return the items drawn for each use, `(uses, draws)`, as places in the list of all items."""
    names = users.unique(maintain_order=True)
    rows = _places(users, names)
    used = np.zeros((names.len(), all_items.len()), dtype=np.bool_)
    used[rows, _places(items, all_items)] = True
    used_all = used.all(axis=1)
    if used_all.any():
        raise DataError(
            f"user {names[int(used_all.argmax())]!r} used all {all_items.len():,} items of the log, "
            "so no negative can be drawn; use the whole log, not a small part of it"
        )
    return draw_unused(rows, used, draws, seed)


def _places(values: pl.Series, known: pl.Series) -> Indices:
    """Return where each value stands in a list of distinct values that has them all."""
    where = pl.DataFrame({"value": known}).with_row_index("place")
    found = pl.DataFrame({"value": values}).join(where, on="value", maintain_order="left")
    return found["place"].cast(pl.Int64).to_numpy()
