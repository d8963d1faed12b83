"""One well-known data set, one short file. The file's name is the set's name; machinery starts with `_`.

A source reads the files as their publisher gives them. It downloads nothing.
"""

from typing import TYPE_CHECKING

from rarebit.errors import SettingsError
from rarebit.registry import find_class, offered
from rarebit.settings import suggest

if TYPE_CHECKING:
    from rarebit.data.sources._base import Source

__all__ = ["find_source", "source_names"]


def source_names() -> list[str]:
    """Return the names of all sets: the files of this folder.

    >>> source_names()
    ['avazu', 'book-crossing', 'criteo', 'criteo-80k', 'frappe', 'ml-1m', 'ml-1m-ids']
    """
    return [name.replace("_", "-") for name in offered(__path__)]


def find_source(name: str) -> "Source":
    """Return a set by its name; reading it needs Polars, naming it does not."""
    from rarebit.data.sources._base import Source

    if name.replace("_", "-") not in source_names():
        raise SettingsError(f"unknown source {name!r}{suggest(name, source_names())}")
    found = find_class(__name__, name, Source, what="source")  # type: ignore[type-abstract]  # its files' classes are whole
    return found()
