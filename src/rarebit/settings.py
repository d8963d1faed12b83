"""Settings as frozen dataclasses, and classes found by the name of their file.

Every settings class is a `@dataclass(frozen=True, kw_only=True)` that checks itself in `__post_init__`. This module turns
plain mappings (TOML, JSON) into them, refuses what it does not know, and writes them back.

One method, one model, one file: the file's name is its registry entry (`find_class`). Files whose name starts with `_` are
not listed.
"""

import dataclasses
import difflib
import functools
import importlib.util
import inspect
import math
import pkgutil
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar

from rarebit.errors import SettingsError


def size(num_bytes: float) -> str:
    """Return bytes in the unit that fits, such as 3.4 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


T = TypeVar("T")

MAX_EXACT = 1 << 53
"""Up to here, every whole number is a float."""
MAX_SHOWN = 200
"""Characters of a value in a message."""
MAX_NAMES = 60
"""Names in a message: a log may have thousands of columns."""
MAX_BITS = 64
"""Of a whole number, as seeds have them."""


def require(condition: bool, message: str) -> None:
    """Raise `SettingsError(message)` unless the condition holds."""
    if not condition:
        raise SettingsError(message)


def require_number(name: str, value: Any, *, least: float = -math.inf) -> None:
    """Raise `SettingsError` unless the value is a finite number, or a tensor of one, and no less than `least`."""
    try:
        good = not isinstance(value, bool) and math.isfinite(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        good = False
    require(good, f"{name} must be a finite number, got {name}={value!r}")
    require(float(value) >= least, f"{name} must be {least:g} or more, got {name}={value}")


def require_mapping(values: object, name: str) -> None:
    """Raise `SettingsError` unless values go by name: a file may hold anything."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{name} must be settings by name, got {shown(values)}")


def suggest(name: str, known: Collection[str]) -> str:
    """Return "; did you mean 'x'?" for the closest known name, else a list of the known ones."""
    known = list(map(str, known))  # keys of someone's own may be anything
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    more = f" and {len(known) - MAX_NAMES:,} more" if len(known) > MAX_NAMES else ""
    return f"; known: {', '.join(sorted(known)[:MAX_NAMES]) or 'none'}{more}"


def from_mapping(settings: type[T], values: Mapping[str, Any], *, where: str = "") -> T:
    """Build a settings object from a mapping, refusing unknown keys and wrong types.

    `where` names the place the values came from, for the message.
    """
    require_mapping(values, where or settings.__name__)
    hints = _hints(typing.cast(Any, settings))
    known = [field.name for field in dataclasses.fields(settings) if field.init]  # type: ignore[arg-type]  # T is a dataclass
    converted = _checked(values, {name: hints[name] for name in known}, settings.__name__, where)
    missing = [
        field.name
        for field in dataclasses.fields(settings)  # type: ignore[arg-type]  # T is a dataclass
        if field.init and field.name not in converted
        if field.default is dataclasses.MISSING is field.default_factory
    ]
    place = f"{where}: " if where else ""
    require(not missing, f"{place}{settings.__name__} needs {', '.join(missing)}")
    return settings(**converted)


def check_number(name: str, value: object) -> None:
    """Raise for a number that no setting can be: not finite, or of more than 64 bits."""
    if isinstance(value, Integral):
        bits = int(value).bit_length()  # Python does not even print numbers of many digits
        require(bits <= MAX_BITS, f"{name} must fit in 64 bits, got a whole number of {bits} bits")
    if isinstance(value, float):
        require(math.isfinite(value), f"{name} must be finite, got {value}")


def check_types(settings: Any, *, where: str = "") -> None:
    """Raise when a value is not of its annotated type: the first line of a `__post_init__`.

    What can be converted without loss (a list to a tuple, a whole number to a float) is converted.
    """
    place = f"{where}: " if where else ""
    hints = _hints(typing.cast(Any, type(settings)))
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if type(value) is not hint:
            value = _convert(value, hint, f"{place}{field.name}")
            object.__setattr__(settings, field.name, value)
        elif hint in (int, float):
            check_number(f"{place}{field.name}", value)


def keyword_arguments(
    function: Callable[..., Any], values: Mapping[str, Any], *, where: str
) -> dict[str, Any]:
    """Return the values as keyword arguments of a function, refusing unknown ones and wrong types."""
    hints = typing.get_type_hints(function)
    known = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            known[parameter.name] = hints[parameter.name]
        elif parameter.kind is parameter.VAR_KEYWORD:  # **options: Unpack[SomeTypedDict]
            [options] = typing.get_args(hints[parameter.name])
            known |= typing.get_type_hints(options)
    return _checked(values, known, "", where)


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
    """Read a TOML file; raise with the reason if that is not possible."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise SettingsError(f"the settings file {str(path)!r} does not exist") from None
    except RecursionError:
        raise SettingsError(f"{str(path)!r} is nested too deeply") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise SettingsError(f"{str(path)!r} is not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(f"cannot read {str(path)!r}: {error.strerror}") from None


@functools.cache
def _hints(settings: type[Any]) -> dict[str, Any]:
    """Return the types of a class's settings, which take a while to find."""
    return typing.get_type_hints(settings)


def _checked(
    values: Mapping[str, Any], known: Mapping[str, Any], owner: str, where: str
) -> dict[str, Any]:
    """Return the values converted to the known names' types."""
    place = f"{where}: " if where else ""
    for key in values:
        if key not in known:
            whose = f" for {owner}" if owner else ""
            raise SettingsError(f"{place}unknown setting {key!r}{whose}{suggest(key, known)}")
    return {key: _convert(value, known[key], f"{place}{key}") for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    return value


def _convert(value: Any, hint: Any, name: str) -> Any:
    """Return the value as the hinted type; only lossless conversions (int to float, list to tuple)."""
    check_number(name, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (value is None and type(None) in arguments):
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, name)
    if origin is Literal:
        require(
            any(value == choice and type(value) is type(choice) for choice in arguments),
            f"{name} must be one of {', '.join(map(repr, arguments))}, got {shown(value)}",
        )
        return value
    if origin in (tuple, Sequence):
        require(isinstance(value, list | tuple), f"{name} must be a list, got {shown(value)}")
        return tuple(_convert(item, arguments[0], name) for item in value)
    if not isinstance(value, bool) and isinstance(value, Integral):  # numpy's integers, too
        whole = int(value)
        if hint is int:
            return whole
        if hint is float and abs(whole) <= MAX_EXACT:
            return float(whole)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(typing.cast(type[Any], hint), value, where=name)
    expected = origin or hint
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise SettingsError(f"{name} must be {_spell(hint)}, got {shown(value)}")
    return value


def _convert_union(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    settings = [choice for choice in choices if dataclasses.is_dataclass(choice)]
    if isinstance(value, Mapping) and len(settings) == 1:
        return _convert(value, settings[0], name)  # reports what is wrong in it
    for choice in choices:
        try:
            return _convert(value, choice, name)
        except SettingsError:
            continue
    wanted = " or ".join(_spell(choice) for choice in choices)
    raise SettingsError(f"{name} must be {wanted}, got {shown(value)}")


def shown(value: object) -> str:
    """Return a value as a message shows it, however long it is."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # deep, or a number of thousands of digits
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _spell(hint: Any) -> str:
    if hint is type(None):
        return "none"
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return getattr(hint, "__name__", str(hint))


def offered(package: str) -> list[str]:
    """Return the names of the files of a package, without machinery; the package is not imported."""
    folder = importlib.util.find_spec(package)
    assert folder is not None, package
    found = [module.name for module in pkgutil.iter_modules(folder.submodule_search_locations)]
    return sorted(name for name in found if not name.startswith("_"))


def find_class(package: str, name: str, base: type[T], *, what: str) -> type[T]:
    """Return the class of this kind in the file of this name; dashes may stand for underscores."""
    names, file = offered(package), name.replace("-", "_")
    if file not in names:
        raise SettingsError(f"unknown {what} {name!r}{suggest(name, names)}")
    module = importlib.import_module(f"{package}.{file}")
    for attribute in module.__all__:
        found = getattr(module, attribute)
        if isinstance(found, type) and issubclass(found, base):
            return found
    raise AssertionError(f"{what}s/{file}.py lists no {base.__name__} in __all__")
