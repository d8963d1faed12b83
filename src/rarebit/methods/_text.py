"""A method as people type it: `low-rank:rank=4`. Values are TOML, or a word."""

import dataclasses
import json
import re
import tomllib
import typing
from collections.abc import Mapping
from typing import Any

from rarebit.errors import SettingsError
from rarebit.tables.table import Method, method_name

__all__ = ["method_text", "read_value", "settings_text", "split_outside"]

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
PIECE = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|.', re.DOTALL)
"""A quoted text as a whole, else one character."""


def method_text(method: Method) -> str:
    """Return a method as people type it: settings in declared order, defaults left out.

    >>> from rarebit import LowRank
    >>> method_text(LowRank(rank=4))
    'low-rank:rank=4'
    """
    values = {field.name: getattr(method, field.name) for field in _fields(type(method))}
    return settings_text(type(method), values)


def settings_text(method: type[Method], values: Mapping[str, Any]) -> str:
    """Return a method with some of its settings, in declared order, defaults left out.

    >>> from rarebit import LowRank
    >>> settings_text(LowRank, {})
    'low-rank'
    """
    words = [
        f"{field.name}={_value_text(values[field.name])}"
        for field in _fields(method)
        if field.name in values and values[field.name] != _default(field)
    ]
    return ":".join([method_name(method), *words])


def read_value(text: str) -> Any:
    """Read a value: TOML, or a word.

    >>> read_value("4"), read_value("[0.5, 1]"), read_value("feature")
    (4, [0.5, 1], 'feature')
    """
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return read["value"] if len(read) == 1 else text


def split_outside(text: str, mark: str) -> list[str]:
    """Split a text at a mark, but not inside of quotes and lists.

    >>> split_outside("a=[1,2],b='x,y'", ",")
    ['a=[1,2]', "b='x,y'"]
    """
    parts, depth = [""], 0
    for piece in PIECE.findall(text):
        depth += (piece == "[") - (piece == "]")
        if piece == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts]


def _fields(method: type[Method]) -> tuple["dataclasses.Field[Any]", ...]:
    fields = dataclasses.fields(typing.cast(Any, method))  # all settings are dataclasses
    return tuple(field for field in fields if field.init)


def _default(field: "dataclasses.Field[Any]") -> Any:
    make = field.default_factory
    return field.default if make is dataclasses.MISSING else make()


def _value_text(value: Any, *, in_list: bool = False) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value).replace("e+", "e")  # a plus would end the method
    if isinstance(value, str):
        is_word = WORD.fullmatch(value) and read_value(value) == value
        return value if is_word and not in_list else _quoted(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(_value_text(item, in_list=True) for item in value)}]"
    raise SettingsError(f"{value!r} cannot be typed as a value; use a settings file")


def _quoted(value: str) -> str:
    # JSON's text is TOML's, but for one character that TOML wants escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
