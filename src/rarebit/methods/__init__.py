"""One technique, one file. The file's name is the method's name on disk and on the command line."""

import dataclasses
import itertools
import typing
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rarebit.errors import SettingsError
from rarebit.methods._text import method_text
from rarebit.registry import find_class, offered
from rarebit.settings import from_mapping, suggest, to_mapping
from rarebit.tables.table import Method, Pair, declared_pair, method_name

__all__ = [
    "method_class",
    "method_from_mapping",
    "method_name",
    "method_names",
    "method_pairs",
    "method_text",
    "method_to_mapping",
]


PACKAGES = ("rarebit.methods", "rarebit.pruning", "rarebit.research")
"""Where methods lie, one a file."""


def method_names() -> list[str]:
    """Return the names of all methods: the files of this folder.

    >>> "hashing" in method_names()
    True
    """
    return sorted(name for package in PACKAGES for name in offered(import_module(package).__path__))


def method_class(name: str) -> type[Method]:
    """Return the settings class of a method by its name."""
    packages = {
        file: package for package in PACKAGES for file in offered(import_module(package).__path__)
    }
    file = name.replace("-", "_")
    if file not in packages:
        raise SettingsError(f"unknown method {name!r}{suggest(name, list(packages))}")
    return find_class(packages[file], name, Method, what="method")  # type: ignore[type-abstract]  # only its subclasses are found


def method_pairs() -> dict[tuple[str, str], Pair]:
    """Return what it means to apply a method after another, or why that is refused.

    The keys are the method applied first and the one applied then.

    >>> method_pairs()["hashing", "low-rank"]
    Pair(allowed=True, words='low rank of the buckets')
    """
    classes = [method_class(name) for name in method_names()]
    pairs = {}
    for first, then in itertools.product(classes, repeat=2):
        pair = declared_pair(first, then)
        if pair is not None:
            pairs[method_name(first), method_name(then)] = pair
    return pairs


def method_from_mapping(values: Mapping[str, Any]) -> Method:
    """Build a method from plain values: `method = "hashing"` and its settings.

    >>> method_from_mapping({"method": "hashing", "buckets": 100})
    Hashing(buckets=100)
    """
    values = dict(values)
    name = values.pop("method", None)
    if not isinstance(name, str):
        raise SettingsError(f'a method is named by the key "method", got {sorted(values)}')
    method = method_class(name)
    known = {field.name for field in dataclasses.fields(typing.cast(Any, method))}
    # older versions stored settings that no longer exist; with null they had no effect
    values = {key: value for key, value in values.items() if key in known or value is not None}
    return from_mapping(method, values, where=f"method {name}")


def method_to_mapping(method: Method) -> dict[str, Any]:
    """Return a method as plain values, to be read back by `method_from_mapping`."""
    return {"method": type(method).__module__.rpartition(".")[2], **to_mapping(method)}
