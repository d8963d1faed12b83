"""Preparing a raw log in Criteo's format as people write it with pandas: read, count, map, save.

It runs in a process of its own, and imports nothing of ours: what `import rarebit` needs is not in its
memory.
"""

from pathlib import Path
from typing import Any

import numpy as np

INTEGERS = [f"I{number}" for number in range(1, 14)]
TEXTS = [f"C{number}" for number in range(1, 27)]
MIN_COUNT = 10
UNKNOWN, MISSING, FIRST_VALUE = 1, 2, 3


def prepare(log: Path, folder: Path) -> None:
    """Write `ids.npy` and `label.npy` of a log; values seen fewer than 10 times share an id."""
    import pandas as pd  # type: ignore[import-untyped]  # it comes without types

    names = ["label", *INTEGERS, *TEXTS]
    types = dict.fromkeys(TEXTS, "str")
    frame = pd.read_csv(log, sep="\t", header=None, names=names, dtype=types)
    ids = np.empty((len(frame), len(names) - 1), dtype=np.int32)
    for place, name in enumerate(names[1:]):
        values = log_square(frame[name]) if name in INTEGERS else frame[name]
        counts = values.value_counts()
        frequent = counts.index[counts >= MIN_COUNT]
        numbers = pd.Series(np.arange(FIRST_VALUE, FIRST_VALUE + len(frequent)), index=frequent)
        known = values.map(numbers).fillna(UNKNOWN)
        ids[:, place] = np.where(values.isna(), MISSING, known)
    folder.mkdir()
    np.save(folder / "ids.npy", ids)
    np.save(folder / "label.npy", frame["label"].to_numpy(dtype=np.uint8))


def log_square(values: Any) -> Any:
    """Return the bin of each number: floor(ln(x)^2), x - 2 up to 2, and none for none."""
    large = values > 2
    return (values - 2).mask(large, np.floor(np.log(values.where(large)) ** 2))
