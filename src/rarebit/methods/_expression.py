"""Methods as one expression: `hashing:buckets=1000+low-rank`.

    expressions   baseline,low-rank,hashing+low-rank     separated by commas
    expression    hashing:buckets=1000+low-rank          applied from left to right
    part          hashing:buckets=1000                   a name and some of its settings

A part without its size is sized when the tables are known. `baseline` is no method at all.
"""

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rarebit.errors import SettingsError
from rarebit.methods import method_class, method_names
from rarebit.methods._sizing import check_share
from rarebit.methods._text import read_value, settings_text, split_outside
from rarebit.settings import from_mapping, keyword_arguments, require, suggest, updated
from rarebit.tables.table import Method, declared_pair

__all__ = ["BASELINE", "Expression", "Part", "parse_methods"]

BASELINE = "baseline"
"""Tables as they are."""


@dataclass(frozen=True)
class Part:
    """One method of an expression, with the settings that were given."""

    name: str
    """The method's name, with dashes."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Names and values, checked."""

    @property
    def method(self) -> type[Method]:
        """The class of the method."""
        return method_class(self.name)

    @property
    def is_after_training(self) -> bool:
        """Whether its settings say that it comes after training, where that is a setting."""
        return bool(dict(self.settings).get("after_training", False))

    @property
    def text(self) -> str:
        """The part as people type it."""
        return settings_text(self.method, dict(self.settings))

    @property
    def is_sized(self) -> bool:
        """Whether all that the method needs is given."""
        given = dict(self.settings)
        wanted = inspect.signature(self.method).parameters.values()
        return all(one.name in given for one in wanted if one.default is one.empty)

    def build(self) -> Method:
        """Return the method as it is given."""
        return from_mapping(self.method, dict(self.settings), where=f"method {self.name}")

    def build_sized(self, shapes: Sequence[tuple[int, int]], share: float) -> Method:
        """Return the method with the size that keeps this share of the tables, and what is given."""
        return updated(self.method.for_share(shapes, share), dict(self.settings))


@dataclass(frozen=True)
class Expression:
    """Methods to apply one after the other; none is the baseline."""

    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """The expression as people type it, in one form: dashes, declared order, no defaults.

        >>> [expression] = parse_methods(" hashing : buckets = 1_000 + low_rank ")
        >>> expression.text
        'hashing:buckets=1000+low-rank'
        """
        return "+".join(part.text for part in self.parts) or BASELINE

    def __str__(self) -> str:
        return self.text

    def methods(self, shapes: Sequence[tuple[int, int]], share: float) -> tuple[Method, ...]:
        """Return the methods for tables of these shapes (rows, width), in the order to apply them.

        Parts without their size keep the same share each of what the parts before them leave, and all
        together at most `share` of the weights.

        >>> [expression] = parse_methods("hashing+low-rank")
        >>> expression.methods([(1000, 16)], share=0.25)
        (Hashing(buckets=500), LowRank(rank=7))
        """
        check_share(share)
        num_unsized = sum(not part.is_sized for part in self.parts)
        built: list[Method] = []
        for part in self.parts:
            if part.is_sized:
                method = part.build()
            else:
                method = part.build_sized(shapes, share ** (1 / num_unsized))
            built.append(method)
            shapes = [method.shape_after(*shape) for shape in shapes]
        return tuple(built)


def parse_methods(text: str) -> tuple[Expression, ...]:
    """Read expressions of methods, separated by commas.

    >>> [expression.text for expression in parse_methods("baseline,hashing+low-rank:rank=4")]
    ['baseline', 'hashing+low-rank:rank=4']
    """
    return tuple(_parse_expression(piece) for piece in split_outside(text, ","))


def _parse_expression(text: str) -> Expression:
    require(bool(text), "expected the name of a method before and after each comma, got nothing")
    if text == BASELINE:
        return Expression()
    parts = tuple(_parse_part(piece, text) for piece in split_outside(text, "+"))
    for first, then in itertools.combinations(parts, 2):
        _refuse_ill_defined_pair(first, then)
    return Expression(parts)


def _parse_part(text: str, whole: str) -> Part:
    name, *assignments = split_outside(text, ":")
    require(name != BASELINE, f"baseline is tables as they are and stands alone, got {whole!r}")
    require(bool(name), f"expected the name of a method, as in hashing+low-rank, got {whole!r}")
    known = [file.replace("_", "-") for file in method_names()]
    if name.replace("_", "-") not in known:
        raise SettingsError(f"unknown method {name!r}{suggest(name, [BASELINE, *known])}")
    name, given = name.replace("_", "-"), {}
    for assignment in assignments:
        key, value = _parse_assignment(assignment, text)
        require(key not in given, f"{key} is given twice in {text!r}")
        given[key] = value
    settings = keyword_arguments(method_class(name), given, where=f"method {name}")
    part = Part(name, tuple(settings.items()))
    if part.is_sized:
        part.build()  # to tell what is out of range here, and not when tables are there
    return part


def _parse_assignment(text: str, part: str) -> tuple[str, Any]:
    key, _, value = (word.strip() for word in text.partition("="))
    require(bool(key and value), f"expected setting=value after each colon, got {part!r}")
    return key.replace("-", "_"), read_value(value)


def _refuse_ill_defined_pair(first: Part, then: Part) -> None:
    pair = declared_pair(first.method, then.method, after_training=then.is_after_training)
    if pair is None:
        words = "neither of them says what it means to apply both; use them apart"
    elif pair.allowed:
        return
    else:
        words = pair.words
    raise SettingsError(f"{first.name}+{then.name} is refused: {words}")
