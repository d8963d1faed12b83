"""Which values get an id: those seen often enough, the most frequent first.

Ids do not depend on how the log was read: values of equal count stand in the order of their text.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.counter_random import random_bits, stream_key
from rarebit.data.schema import FIRST_VALUE, UNKNOWN

__all__ = ["Vocabulary", "digest", "make_vocabulary"]

PIECE = 1 << 20


@dataclass(frozen=True)
class Vocabulary:
    """The values of one or more columns, in the order of their ids from `FIRST_VALUE` on."""

    values: pl.Series
    ids: NDArray[np.int32]
    """For each code of the log, its id; unknown for a value that has none."""


def make_vocabulary(
    counts: NDArray[np.int64],
    texts: Callable[[NDArray[np.int64]], pl.Series],
    *,
    min_count: int = 1,
    unknown_share: float = 0.0,
    stream: str = "",
    seed: int = 0,
) -> Vocabulary:
    """Give an id to every value counted at least `min_count` times; `texts` are the values of codes.

    Where that is once, a share of the values counted once is left without, drawn by the seed.

    >>> colours = pl.Series(["green", "red", "blue"])
    >>> make_vocabulary(np.array([1, 0, 2]), colours.gather).values.to_list()
    ['blue', 'green']
    """
    codes = np.flatnonzero(counts >= max(min_count, 1))
    kept = pl.DataFrame({"value": texts(codes), "count": counts[codes], "code": codes})
    kept = kept.sort("count", "value", descending=[True, False])
    if min_count == 1 and unknown_share > 0:
        kept = _without_some_singles(kept, unknown_share, stream_key(seed, "unknown", stream))
    ids = np.full(FIRST_VALUE + len(counts), UNKNOWN, np.int32)
    ids[:FIRST_VALUE] = np.arange(FIRST_VALUE)
    ids[FIRST_VALUE + kept["code"].to_numpy()] = FIRST_VALUE + np.arange(kept.height)
    return Vocabulary(kept["value"].rechunk(), ids)


def _without_some_singles(kept: pl.DataFrame, share: float, stream: int) -> pl.DataFrame:
    """Leave out a share of the values seen once, which stand last: at least one, where there is one."""
    singles = int((kept["count"] == 1).sum())
    chosen = int(np.ceil(singles * share))
    bits = random_bits(stream, np.arange(singles, dtype=np.uint64))
    left_out = kept.height - singles + np.argsort(bits, kind="stable")[:chosen]
    keep = np.ones(kept.height, dtype=bool)
    keep[left_out] = False
    return kept.filter(pl.Series(keep))


def digest(values: pl.Series) -> str:
    """Return a checksum of the values and their order.

    >>> digest(pl.Series(["a", "bc"])) == digest(pl.Series(["ab", "c"]))
    False
    """
    found = hashlib.sha256()
    texts = values.cast(pl.String)
    for start in range(0, len(texts), PIECE):
        piece = texts.slice(start, PIECE)
        found.update(piece.str.len_bytes().to_numpy().astype("<u4").tobytes())
        found.update(piece.str.join("").item().encode())
    return found.hexdigest()
