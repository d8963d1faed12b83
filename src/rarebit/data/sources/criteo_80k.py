"""Criteo-80k: the first 80,000 rows of Criteo's display ads, C1-C26 hashed to 20 bits. No benchmark.

One Parquet file with the columns of criteo.py: whole numbers throughout, null where not known.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from rarebit.data.log_schema import LogSchema
from rarebit.data.raw.readers import read_raw
from rarebit.data.raw.rows import BadRows, RawChunk
from rarebit.data.sources._base import Progress, Source
from rarebit.data.sources.criteo import BINS, NAMES, columns

__all__ = ["Criteo80k"]


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
        self, folder: Path, bad: BadRows, progress: Progress | None = None
    ) -> Iterator[RawChunk]:
        """Yield the ads; `folder` may be the file itself."""
        path = self.only_file(folder, self.files)
        return read_raw(path, NAMES, bad, progress=progress)
