"""Raw click logs in Criteo's format, of any length and in the memory of some rows.

    label, 13 integers, 26 texts of 8 hexadecimal digits      tab-separated, one field of ten empty

Value v of a column with D values is drawn as floor(D u^3), u uniform in [0, 1): a few often, most
hardly ever. For a column of integers, the D values are bins of floor(ln(x)^2) (and x - 2 up to 2), and
each bin has several integers.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_INTEGERS, NUM_TEXTS = 13, 26
NAMES = (
    "label",
    *(f"I{number}" for number in range(1, NUM_INTEGERS + 1)),
    *(f"C{number}" for number in range(1, NUM_TEXTS + 1)),
)
# fmt: off
NUM_VALUES = (
    43, 98, 121, 41, 219, 111, 79, 68, 91, 5, 26, 36, 70,
    1441, 553, 175782, 128509, 302, 19, 11887, 630, 3, 49223, 5194, 174835, 3176, 27, 11070, 148912, 10,
    4540, 2009, 4, 154563, 17, 16, 53030, 81, 40954,
)
# fmt: on
"""Values of each column after the label, as in the whole of Criteo's log."""
EMPTY_SHARE, CLICK_SHARE = 0.1, 0.25
INTEGERS_OF_A_BIN = 64
CHUNK = 50_000
"""Rows that are drawn and written at once: about 20 MB."""

Texts = NDArray[np.bytes_]


def write_raw_log(path: Path, rows: int, *, seed: int = 0) -> int:
    """Write a log of so many rows, and return how many distinct texts its columns hold together.

    The seed decides every row: a shorter log is the beginning of a longer one.
    """
    tables = _tables()
    seen = [np.zeros(len(table), dtype=np.bool_) for table in tables]
    chance = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, rows, CHUNK):
            # all of a chunk is drawn even if it is cut, so that its rows do not depend on the cut
            drawn = [_draw(chance, len(table)) for table in tables]
            stop = min(CHUNK, rows - start)
            for column, places in zip(seen, drawn, strict=True):
                column[places[:stop]] = True
            file.write(_lines(tables, [places[:stop] for places in drawn]))
    return sum(int(column[1:].sum()) for column in seen[-NUM_TEXTS:])


def _draw(chance: np.random.Generator, num_texts: int) -> NDArray[np.int64]:
    """Return the place of each row's text in the table of a column; the empty one is in front."""
    if num_texts == 2:
        return (chance.random(CHUNK) < CLICK_SHARE).astype(np.int64)
    values = chance.random(CHUNK)
    places = 1 + ((num_texts - 1) * (values * values * values)).astype(np.int64)
    places[chance.random(CHUNK) < EMPTY_SHARE] = 0
    return places


def _lines(tables: list[Texts], places: list[NDArray[np.int64]]) -> bytes:
    """Return rows as lines: fields of fixed width side by side, then without what fills them up."""
    fields: list[Any] = [(f"{number}", table.dtype) for number, table in enumerate(tables)]
    records = np.empty(len(places[0]), dtype=fields)
    for (name, _), table, column in zip(fields, tables, places, strict=True):
        records[name] = table[column]
    return records.tobytes().translate(None, b"\0")


def _tables() -> list[Texts]:
    """Return the texts of each column, each with the character after it."""
    ends = [b"\t"] * (len(NUM_VALUES) - 1) + [b"\n"]
    tables = [np.array([b"0\t", b"1\t"])]
    for number, (num_values, end) in enumerate(zip(NUM_VALUES, ends, strict=True)):
        is_integer = number < NUM_INTEGERS
        texts = _integers(num_values) if is_integer else _hexadecimal(num_values, number)
        tables.append(np.concatenate([[end], np.char.add(texts, end)]))
    return tables


def _integers(num_bins: int) -> Texts:
    """Return integers of the first bins, equally many of each: 0, 1, 2, then from 3 on."""
    bins = np.arange(num_bins)
    edges = np.ceil(np.exp(np.sqrt(np.arange(1, num_bins + 1)))).astype(np.int64)
    lows = np.concatenate([bins[:3], edges])[:num_bins, None]
    widths = np.concatenate([np.ones(3, dtype=np.int64), np.diff(edges)])[:num_bins, None]
    steps = np.arange(INTEGERS_OF_A_BIN)
    return (lows + widths * steps // INTEGERS_OF_A_BIN).reshape(-1).astype(np.bytes_)


def _hexadecimal(num_values: int, column: int) -> Texts:
    """Return distinct texts of 8 hexadecimal digits that do not come in order."""
    # an odd factor takes no two numbers of 32 bits to the same
    numbers = np.arange(num_values, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(column)
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    shifts = np.arange(28, -4, -4, dtype=np.uint32)
    spelled: Texts = digits[(numbers[:, None] >> shifts) & np.uint32(15)].view("S8")
    return spelled.reshape(-1)
