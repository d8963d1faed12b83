"""Frozen dataclasses as settings: built from mappings (TOML, JSON), checked, written back.

Every settings class in Rarebit is a `@dataclass(frozen=True, kw_only=True)` that checks itself in
`__post_init__`. This module turns plain mappings into them and refuses what it does not know.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from rarebit.errors import SettingsError

__all__ = ["from_mapping", "read_toml", "require", "suggest", "to_mapping", "updated"]

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise `SettingsError(message)` unless the condition holds."""
    if not condition:
        raise SettingsError(message)


def suggest(name: str, known: Collection[str]) -> str:
    """Return "; did you mean 'x'?" for the closest known name, else a list of the known ones.

    >>> suggest("epoch", ["epochs", "lr"])
    "; did you mean 'epochs'?"
    """
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known)) or 'none'}"


def from_mapping(settings: type[T], values: Mapping[str, Any], *, where: str = "") -> T:
    """Build a settings object from a mapping, refusing unknown keys and wrong types.

    `where` names the place the values came from, for the message.
    """
    hints = typing.get_type_hints(settings)
    known = [field.name for field in dataclasses.fields(settings) if field.init]  # type: ignore[arg-type]  # T is a dataclass
    place = f"{where}: " if where else ""
    for key in values:
        if key not in known:
            raise SettingsError(
                f"{place}unknown setting {key!r} for {settings.__name__}{suggest(key, known)}"
            )
    converted = {
        key: _convert(value, hints[key], f"{place}{key}") for key, value in values.items()
    }
    return settings(**converted)


def updated(settings: T, overrides: Mapping[str, Any]) -> T:
    """Return a copy of the settings with some values replaced, checked like new ones."""
    if not overrides:
        return settings
    merged = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)  # type: ignore[arg-type]  # T is a dataclass
    }
    return from_mapping(type(settings), merged | dict(overrides))


def to_mapping(settings: Any) -> dict[str, Any]:
    """Return the settings as plain values that JSON and TOML can hold."""
    return {
        field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)
    }


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say in one sentence why it cannot be read."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise SettingsError(f"the settings file {str(path)!r} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{str(path)!r} is not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    return value


def _convert(value: Any, hint: Any, name: str) -> Any:
    """Return the value as the hinted type; only lossless conversions (int to float, list to tuple)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (value is None and type(None) in arguments):
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, name)
    if origin is Literal:
        require(
            any(value == choice and type(value) is type(choice) for choice in arguments),
            f"{name} must be one of {', '.join(map(repr, arguments))}, got {value!r}",
        )
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(item, arguments[0], name) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(typing.cast(type[Any], hint), value, where=name)
    expected = origin or hint
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise SettingsError(f"{name} must be {_spell(hint)}, got {value!r}")
    return value


def _convert_union(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    for choice in choices:
        try:
            return _convert(value, choice, name)
        except SettingsError:
            continue
    wanted = " or ".join(_spell(choice) for choice in choices)
    raise SettingsError(f"{name} must be {wanted}, got {value!r}")


def _spell(hint: Any) -> str:
    if hint is type(None):
        return "none"
    return getattr(hint, "__name__", str(hint))
