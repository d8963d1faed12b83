"""Which part each row belongs to: 0 train, 1 valid, 2 test.

Every split but a given one is by rank: the rows of the smallest keys are for training, the next to
choose, the last to report. The key is a random number, the row's place, its time, or a random number
of its user.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rarebit.data.counter_random import random_bits, stream_key
from rarebit.data.log_schema import SPLIT_NAMES, Split
from rarebit.errors import DataError

__all__ = ["split_rows"]

BLOCK = 1 << 20


def split_rows(split: Split, num_rows: int, key: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the part of each row; `key` is what the split goes by, one a row.

    >>> split_rows(Split(kind="order"), 10, np.empty(0)).tolist()
    [0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    """
    if split.kind == "given":
        parts = key.astype(np.uint8)
    elif split.kind == "user":
        # numbered as they come: the codes of a vocabulary shared with other columns depend on chunks
        _, first, of_row = np.unique(key, return_index=True, return_inverse=True)
        of_user = _by_rank(_random_keys(split.seed, len(first)), split.shares)
        parts = of_user[np.argsort(np.argsort(first))][of_row]
    elif split.kind == "time":
        parts = _by_rank(key, split.shares)
    elif split.kind == "order":
        parts = _by_rank(np.arange(num_rows), split.shares)
    else:
        parts = _by_rank(_random_keys(split.seed, num_rows), split.shares)
    _check_parts(split, parts)
    return parts


def _random_keys(seed: int, num_rows: int) -> NDArray[np.uint32]:
    """Return 32 random bits a row, drawn in blocks: 64 at once would be the peak of the memory."""
    keys = np.empty(num_rows, np.uint32)
    stream = stream_key(seed, "split")
    for start in range(0, num_rows, BLOCK):
        stop = min(start + BLOCK, num_rows)
        bits = random_bits(stream, np.arange(start, stop, dtype=np.uint64))
        keys[start:stop] = bits >> np.uint64(32)
    return keys


def _by_rank(keys: NDArray[Any], shares: tuple[float, ...]) -> NDArray[np.uint8]:
    first, second = round(len(keys) * shares[0]), round(len(keys) * (shares[0] + shares[1]))
    parts = np.full(len(keys), 2, np.uint8)
    parts[_smallest(keys, second)] = 1
    parts[_smallest(keys, first)] = 0
    return parts


def _smallest(keys: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """Return which rows have the k smallest keys; of equal ones, the first rows."""
    if k in (0, len(keys)):
        return np.full(len(keys), k > 0)
    bound = np.partition(keys, k - 1)[k - 1]
    chosen: NDArray[np.bool_] = keys < bound
    equal = np.flatnonzero(keys == bound)
    chosen[equal[: k - int(chosen.sum())]] = True
    return chosen


def _check_parts(split: Split, parts: NDArray[np.uint8]) -> None:
    """Raise when nothing is left to train on, or a part that was asked for is empty."""
    rows = np.bincount(parts, minlength=3)
    wanted = (
        [True, False, False] if split.kind == "given" else [share > 0 for share in split.shares]
    )
    for name, count, needed in zip(SPLIT_NAMES, rows.tolist(), wanted, strict=True):
        if needed and count == 0:
            raise DataError(
                f"the split leaves no row for {name}: {len(parts):,} rows are too few for "
                f"kind={split.kind!r} with shares {split.shares}"
            )
