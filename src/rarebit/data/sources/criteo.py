"""Criteo's display ads (Kaggle, 2014), raw: 45,840,617 ads shown over seven days, clicked or not.

    label     1 for a click
    I1-I13    whole numbers, mostly counts; empty where not known
    C1-C26    categories as 32-bit hashes in hexadecimal; empty where not known

Tab-separated, no header, no quotes, in the order of time.

Criteo-80k is the first 80,000 rows as one Parquet file, with C1-C26 hashed to 20 bits: whole numbers
throughout, null where not known. It is no benchmark.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from rarebit.data.log_schema import Column, LogSchema, Split, TextFormat
from rarebit.data.raw.chunks import BadRows, RawChunk
from rarebit.data.raw.readers import FileProgress, read_raw
from rarebit.data.sources._base import Source

__all__ = ["Criteo", "Criteo80k"]

NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
NAMES = ("label", *NUMBERS, *CATEGORIES)
TABS = TextFormat(separator="\t", quote="", header=False, names=NAMES)
BINS = "Numbers become categories: floor(ln(x)^2) above 2, x - 2 up to 2."
# The file has no days; its seven days have about as many rows each.
SIX_DAYS_OF_SEVEN = Split(kind="order", shares=(6 / 7, 1 / 14, 1 / 14))


def columns(min_count: int) -> tuple[Column, ...]:
    """Return all columns as categories: the numbers in bins of their squared logarithm."""
    numbers = (
        Column(name=name, kind="numeric", treatment="log_square", min_count=min_count)
        for name in NUMBERS
    )
    return (*numbers, *(Column(name=name, min_count=min_count) for name in CATEGORIES))


class Criteo(Source):
    """Criteo's display ads, raw."""

    title = "Criteo display ads, 39 fields: an ad that was shown, clicked or not"
    publisher = "Criteo AI Lab as the Kaggle display advertising challenge (dac.tar.gz)"
    files = ("train.txt",)
    text = TABS
    facts = ("Values seen fewer than 10 times share one id; mlet keeps all.",)
    remarks: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("clean", "pep", "me"), BINS),
        "mlet": "Numbers stay numbers, standardised: the paper does not say how it scales them.",
    }
    protocols: ClassVar[dict[str, LogSchema]] = {
        "clean": LogSchema(label="label", columns=columns(10)),
        "pep": LogSchema(label="label", columns=columns(10), counts="all"),
        "me": LogSchema(label="label", columns=columns(10), counts="all"),
        "mlet": LogSchema(
            label="label",
            columns=tuple(
                Column(name=name, kind="numeric" if name in NUMBERS else "categorical")
                for name in (*NUMBERS, *CATEGORIES)
            ),
            split=SIX_DAYS_OF_SEVEN,
            counts="all",
            unknown_share=0.0,
        ),
    }

    def rows(
        self, folder: Path, bad: BadRows, progress: FileProgress | None = None
    ) -> Iterator[RawChunk]:
        """Yield the ads; `folder` may be the file itself, such as a sample of the first rows."""
        patterns = ("train.txt", "train.txt.*", "dac_sample.txt", "*train*.txt", "*train*.txt.*")
        path = self.only_file(folder, patterns)
        return read_raw(
            path, NAMES, bad, format=TABS, integers=("label", *NUMBERS), progress=progress
        )


class Criteo80k(Source):
    """The first 80,000 rows of Criteo's display ads, hashed."""

    title = "Criteo-80k, 39 fields: an ad that was shown, clicked or not"
    publisher = "its makers, from Criteo AI Lab's display ads"
    files = ("criteo_dac80k_hashed.parquet",)
    facts = (
        "Criteo-80k is a small, hashed part of the Criteo set: its results are not Criteo's.",
        BINS,
    )
    protocols: ClassVar[dict[str, LogSchema]] = {
        "clean": LogSchema(label="label", columns=columns(1)),
    }

    def rows(
        self, folder: Path, bad: BadRows, progress: FileProgress | None = None
    ) -> Iterator[RawChunk]:
        """Yield the ads; `folder` may be the file itself."""
        return read_raw(self.only_file(folder, self.files), NAMES, bad, progress=progress)
