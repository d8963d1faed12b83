"""Avazu's mobile ads (Kaggle, 2014): 40.4 M ads shown over ten days, clicked or not.

    click     the label
    hour      YYMMDDHH, as it is: one of about 240 values
    the rest  categories, anonymised
    id        of the row, left out

Comma-separated with a header, in the order of time.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from rarebit.data.log_schema import Column, LogSchema, Split, TextFormat
from rarebit.data.raw.chunks import BadRows, RawChunk
from rarebit.data.raw.readers import FileProgress, read_raw
from rarebit.data.sources._base import Source, with_numbers

__all__ = ["Avazu"]

FIELDS = (
    *("hour", "C1", "banner_pos", "site_id", "site_domain", "site_category"),
    *("app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model"),
    *("device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22))),
)


def _schema(min_count: int, counts: Literal["train", "all"]) -> LogSchema:
    columns = tuple(Column(name=name, min_count=min_count) for name in FIELDS)
    return LogSchema(label="click", columns=columns, counts=counts)


class Avazu(Source):
    """Avazu's mobile ads."""

    title = "Avazu mobile ads, 22 fields: an ad that was shown, clicked or not"
    publisher = "Avazu as the Kaggle click-through rate prediction challenge (train.gz)"
    files = ("train.csv or train.gz",)
    text = TextFormat()
    facts = ("The hour of the day and the day are one value, YYMMDDHH, as in the papers.",)
    remarks: ClassVar[dict[str, str]] = {
        "mlet": "The hour stays a number, standardised. The paper tests on 10 % of the rows and has no others for "
        "validation; here half of them are, by which settings are picked."
    }
    protocols: ClassVar[dict[str, LogSchema]] = {
        "clean": _schema(10, "train"),
        "pep": _schema(10, "all"),
        "me": _schema(4, "all"),
        "mlet": replace(
            with_numbers(_schema(1, "all"), "hour"),
            split=Split(shares=(0.9, 0.05, 0.05)),
            unknown_share=0.0,
        ),
    }

    def rows(
        self, folder: Path, bad: BadRows, progress: FileProgress | None = None
    ) -> Iterator[RawChunk]:
        """Yield the ads; `folder` may be the file itself."""
        path = self.only_file(folder, ("train.csv", "train.gz", "train.csv.*", "train"))
        columns = ("click", *FIELDS)
        return read_raw(
            path, columns, bad, format=TextFormat(), integers=("click",), progress=progress
        )
