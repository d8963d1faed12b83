"""The file's name is the registry: what a folder offers is what lies in it.

One method, one model, one file. Nothing has to be listed anywhere else; files whose name starts
with `_` are machinery.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TypeVar

from rarebit.errors import SettingsError
from rarebit.settings import suggest

__all__ = ["find_class", "offered"]

T = TypeVar("T")


def offered(path: Iterable[str]) -> list[str]:
    """Return the names of the files in a package's folder, without machinery.

    >>> import rarebit.models
    >>> "deepfm" in offered(rarebit.models.__path__)
    True
    """
    found = [module.name for module in pkgutil.iter_modules(path)]
    return sorted(name for name in found if not name.startswith("_"))


def find_class(package: str, name: str, base: type[T], *, what: str) -> type[T]:
    """Return the class of this kind in the file of this name; dashes may stand for underscores."""
    folder = importlib.import_module(package)
    names, file = offered(folder.__path__), name.replace("-", "_")
    if file not in names:
        raise SettingsError(f"unknown {what} {name!r}{suggest(name, names)}")
    module = importlib.import_module(f"{package}.{file}")
    for attribute in module.__all__:
        found = getattr(module, attribute)
        if isinstance(found, type) and issubclass(found, base):
            return found
    raise AssertionError(f"{what}s/{file}.py lists no {base.__name__} in __all__")
