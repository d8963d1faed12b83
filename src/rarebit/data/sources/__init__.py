"""Well-known data sets. A source reads the files as their publisher offers them; it downloads nothing."""

import importlib
from typing import TYPE_CHECKING

from rarebit.errors import SettingsError
from rarebit.settings import suggest

if TYPE_CHECKING:
    from rarebit.data.sources._base import Source

__all__ = ["find_source", "source_names"]

SOURCES = {
    "avazu": "avazu.Avazu",
    "book-crossing": "book_crossing.BookCrossing",
    "criteo": "criteo.Criteo",
    "criteo-80k": "criteo.Criteo80k",
    "frappe": "frappe.Frappe",
    "ml-1m": "ml_1m.ML1M",
    "ml-1m-ids": "ml_1m.ML1MWithIds",
}
"""File and class by name: listing the names must not import Polars."""


def source_names() -> list[str]:
    """Return the names of all data sets."""
    return sorted(SOURCES)


def find_source(name: str) -> "Source":
    """Return a data set by its name."""
    known = name.replace("_", "-")
    if known not in SOURCES:
        raise SettingsError(f"unknown source {name!r}{suggest(name, source_names())}")
    importlib.import_module("rarebit.data.raw")  # reports packages that are missing
    file, _, kind = SOURCES[known].partition(".")
    found: Source = getattr(importlib.import_module(f"{__name__}.{file}"), kind)()
    return found
