"""Techniques: named, frozen settings, with what a run, a study and the command line need to know.

    Technique               a name, its controls and knobs, and where it goes in a composition
    ├── Method              changes tables: `apply_` takes it (`tables/table.py`)
    └── TrainingMethod      acts around training: its `callback()` does the work (`callbacks.py`)

Each technique is one file in `methods/`, `pruning/` or `research/`; the file's name is the technique's name. A
package of your own offers techniques through entry points in the group `rarebit.methods`; a class that is only imported
is found by its class name.

**Order by rank.** A composition `first+then` is allowed where the rank of `first` is below that of `then`:

    sets < hashing < factors < evidence < masks < quantisation < training

Techniques that act around training go with all others, in any order. The newer file declares the few exceptions: `follows`
allows a pair of the same rank, `excludes` forbids one that the rank would allow.
"""

import dataclasses
import inspect
import itertools
import json
import re
import sys
import tomllib
import typing
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rarebit.errors import SettingsError
from rarebit.settings import (
    find_class,
    from_mapping,
    keyword_arguments,
    offered,
    require,
    require_mapping,
    suggest,
    to_mapping,
    updated,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rarebit.callbacks import Callback
    from rarebit.data.dataset import Dataset
    from rarebit.training.run import Trained, TrainingJob

__all__ = [
    "BASELINE",
    "Control",
    "Expression",
    "Rank",
    "SharedStage",
    "Technique",
    "compositions",
    "needed_modules",
    "parse_techniques",
    "refusal",
    "suggestions",
    "technique_class",
    "technique_from_mapping",
    "technique_name",
    "technique_names",
    "technique_text",
    "technique_to_mapping",
]

PACKAGES = ("rarebit.methods", "rarebit.pruning", "rarebit.research")
"""Where our techniques are, one per file."""
GROUP = "rarebit.methods"
"""The group of entry points for techniques of other packages."""
BASELINE = "baseline"
"""Plain tables and plain training: no technique at all."""

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
PIECE = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|.', re.DOTALL)
"""A quoted text as a whole, or one character."""


class Rank(IntEnum):
    """Where a technique goes in a composition: lower ranks first."""

    SETS = 0
    HASHING = 1
    FACTORS = 2
    EVIDENCE = 3
    MASKS = 4
    QUANTISATION = 5
    TRAINING = 6


@dataclass(frozen=True)
class SharedStage:
    """A first stage of training that several runs share."""

    folder: Path


@dataclass(frozen=True)
class Control:
    """A control that a technique makes for itself."""

    name: str
    """The name of the variant in tables."""
    techniques: tuple["Technique", ...]
    """All methods of the variant."""
    tuned: bool = False
    """Whether it is tuned on validation, whatever the number of trials: its knobs, and what every variant has."""


class Technique(ABC):  # noqa: B024  # every hook has a default; subclasses add what they need
    """A frozen dataclass of settings, with what others need to know about it."""

    registered_name: ClassVar[str] = ""
    """Its name, if it has neither a file of ours nor an entry point."""
    title: ClassVar[str] = ""
    """What it changes, in one line."""
    paper: ClassVar[str] = ""
    """Its source."""
    control: ClassVar[str] = BASELINE
    """The control a study compares it with: "baseline", one of the study's own ("narrow", "matched-rate", "tuned",
    "wide", "ensemble"), one that `make_control` knows, or the name of another technique."""
    cost: ClassVar[str] = ""
    """What it costs per step and in memory."""
    applies: ClassVar[str] = ""
    """When to use it and when not."""
    controls: ClassVar[tuple[str, ...]] = ()
    """The controls that `make_control` knows."""
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Settings that a study may tune on validation, with values to try, most promising first; none that only trades
    size for quality."""
    composition_rank: ClassVar[Rank | None] = None
    """Where it goes in a composition. Without a rank, only `apply_` composes it."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """Techniques it cannot be combined with in either order, and why."""
    follows: ClassVar[frozenset[str]] = frozenset()
    """Techniques of the same rank that it may follow."""
    training_only: ClassVar[bool] = False
    """Whether its tables are merged when training ends."""
    patience: ClassVar[int] = 0
    """The patience it asks for, where the settings of training name none: epochs without improvement before training
    stops. 0: it needs no more than plain training."""
    averages: ClassVar[bool] = False
    """Whether it may average weights where the settings of training name no average."""
    num_sets: int = 1
    """Embedding sets that it gives a model."""

    @property
    def after_training(self) -> bool:
        """Whether a run applies it to the trained tables instead of before training."""
        return False

    @property
    def rate_under_sgd(self) -> float:
        """How much faster SGD moves the rows of a fresh table, on average."""
        return 1.0

    @property
    def same_start(self) -> "Technique | None":
        """Plain tables that start as this technique's tables do; None where the model's own do."""
        return None

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the technique sized to keep at most a share of the weights of these tables.

        `shapes` holds rows and width of each table. A technique without a size gets its defaults.

        >>> from rarebit import Hashing
        >>> Hashing.for_share([(1000, 8), (50, 8)], share=0.1)
        Hashing(buckets=55)
        """
        del shapes, share
        return from_mapping(cls, {}, where=f"method {technique_name(cls)}")

    def shape_after(self, rows: int, width: int) -> tuple[int, int]:
        """Return the shape of table that the next technique gets."""
        return rows, width

    def callback(self) -> "Callback | None":
        """Return a callback that acts around training, or None."""
        return None

    @classmethod
    def refuses(cls, other: "type[Technique]") -> str | None:
        """Return why it cannot be combined with another technique, in either order; None where it can."""
        return cls.excludes.get(technique_name(other))

    def prepare_(self, model: "nn.Module", train: "Dataset") -> None:
        """Prepare the tables of a model for the training data, before the first step of a run."""
        del model, train

    def hint(self, techniques: Sequence["Technique"]) -> str:
        """Return a warning for a run with all these techniques, or nothing."""
        del techniques
        return ""

    @classmethod
    def suggestion(cls, counts: "Mapping[str, Tensor]") -> str:
        """Return a line for a run without methods on a log with these counts that it may help, or nothing."""
        del counts
        return ""

    def drive(self, job: "TrainingJob") -> "Trained | None":
        """Train the model of a run in another way than usual, or return None."""
        del job
        return None

    def shared_stage(self, techniques: Sequence["Technique"]) -> "tuple[Technique, ...] | None":
        """Return the techniques that a first stage, which runs may share, depends on; None without one."""
        del techniques
        return None

    def share(self, folder: Path) -> "SharedStage":
        """Return the first stage in a folder."""
        return SharedStage(folder)

    def check_beside(self, techniques: Sequence["Technique"]) -> None:
        """Raise where it cannot be part of a run with all these techniques."""
        del techniques

    def make_control(self, name: str, techniques: Sequence["Technique"]) -> Control | None:
        """Return the control of this name for a run with these techniques; None if it has no such control."""
        del name, techniques
        return None


def technique_name(technique: Technique | type[Technique]) -> str:
    """Return a technique's name as people type it, such as "low-rank"."""
    cls = technique if isinstance(technique, type) else type(technique)
    package, _, file = cls.__module__.rpartition(".")
    if package in PACKAGES:
        return file.replace("_", "-")
    for name, (module, attribute) in _foreign().items():
        # an entry point may name the package that exports a class, not the file that defines it
        if getattr(sys.modules.get(module), attribute, None) is cls:
            return name
    return cls.registered_name or cls.__name__


def technique_names() -> list[str]:
    """Return the names of all techniques on offer, with dashes: our files and the entry points."""
    return sorted([file.replace("_", "-") for file in _files()] + list(_foreign()))


def technique_class(name: str) -> type[Technique]:
    """Return the settings class of a technique by its name; dashes may stand for underscores."""
    if (file := name.replace("-", "_")) in _files():
        return find_class(_files()[file], file, Technique, what="method")
    if name in _foreign():
        module, attribute = _foreign()[name]
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"the entry point {name!r} cannot be imported: {error}") from error
        if not (isinstance(found, type) and issubclass(found, Technique)):
            raise SettingsError(f"the entry point {name!r} is {found!r}, not a method of Rarebit")
        return found
    # of a class that was defined again, as in a notebook, the newest
    known = {
        _path(cls): cls for cls in _subclasses(Technique) if hasattr(cls, "__dataclass_fields__")
    }
    imported = [cls for path, cls in known.items() if name in (path, technique_name(cls))]
    if len(imported) > 1:
        raise SettingsError(f"{name!r} names {len(imported)} methods; give each an entry point")
    if not imported:
        known_names = [BASELINE, *technique_names()]
        advice = "" if ":" in name else suggest(name.replace("_", "-"), known_names)
        if not advice.endswith("?"):  # not a slip of the pen
            advice += (
                f". A method of another package needs an entry point in the group {GROUP!r}, or its module must be "
                "imported first"
            )
        raise SettingsError(f"unknown method {name!r}{advice}")
    return imported[0]


def suggestions(counts: "Mapping[str, Tensor]") -> list[str]:
    """Return what the techniques on offer suggest for a log with these counts."""
    lines = [technique_class(name).suggestion(counts) for name in technique_names()]
    return [line for line in lines if line]


def needed_modules(techniques: Iterable[Technique]) -> list[str]:
    """Return the modules that another process must import to find these techniques by name.

    Our techniques and those of entry points need none.
    """
    needed = set()
    for technique in techniques:
        cls, name = type(technique), technique_name(technique)
        if name.replace("-", "_") in _files() or name in _foreign():
            continue
        require(
            cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__,
            f"other processes cannot import {cls.__name__}, which is defined in a script, a notebook or a "
            "function; define it in a module and import it from there",
        )
        needed.add(cls.__module__)
    return sorted(needed)


def technique_from_mapping(values: Mapping[str, Any]) -> Technique:
    """Build a technique from plain values: `method = "hashing"` and its settings."""
    require_mapping(values, "a method")
    values = dict(values)
    name = values.pop("method", None)
    if not isinstance(name, str):
        raise SettingsError(f'a method is named by the key "method", got {sorted(values)}')
    technique = technique_class(name)
    known = {field.name for field in _fields(technique)}
    # older versions stored settings that no longer exist; with null they had no effect
    values = {key: value for key, value in values.items() if key in known or value is not None}
    return from_mapping(technique, values, where=f"method {name}")


def technique_to_mapping(technique: Technique) -> dict[str, Any]:
    """Return a technique as plain values that `technique_from_mapping` reads.

    A class without an entry point is stored by module and name, which must be imported to read it.
    """
    name = technique_name(technique)
    file = name.replace("-", "_")
    if file not in _files() and name not in _foreign() and not technique.registered_name:
        file = _path(type(technique))
    elif file not in _files():
        file = name
    return {"method": file, **to_mapping(technique)}


def technique_text(technique: Technique) -> str:
    """Return a technique as people type it: settings in declared order, without defaults.

    >>> from rarebit import LowRank
    >>> technique_text(LowRank(rank=4))
    'low-rank:rank=4'
    """
    values = {field.name: getattr(technique, field.name) for field in _fields(type(technique))}
    return _text(type(technique), values)


def refusal(
    first: type[Technique], then: type[Technique], *, after_training: bool = False
) -> str | None:
    """Return why one technique cannot follow another, None where it can.

    >>> from rarebit import Hashing, LowRank
    >>> refusal(Hashing, LowRank)
    >>> refusal(LowRank, Hashing)
    'hashing goes before low-rank: write hashing+low-rank, or merge first'
    """
    if after_training and first.training_only:
        return None  # its tables are merged before the second one is applied
    name, other = technique_name(first), technique_name(then)
    declared = first.refuses(then) or then.refuses(first)
    if declared is not None:
        return declared
    if first.composition_rank is None or then.composition_rank is None:
        return None
    if first is then:
        return f"{name} is there twice; use one"
    if (
        Rank.TRAINING in (first.composition_rank, then.composition_rank)
        or first.composition_rank < then.composition_rank
        or name in then.follows
    ):
        return None
    if first.composition_rank == then.composition_rank:
        return f"both are {first.composition_rank.name.lower()}; use one of them, or merge first"
    return f"{other} goes before {name}: write {other}+{name}, or merge first"


def compositions() -> dict[tuple[str, str], str | None]:
    """Return for each ordered pair of techniques on offer why it is refused, None where it is allowed."""
    classes = {name: technique_class(name) for name in technique_names()}
    return {
        (first, then): refusal(classes[first], classes[then])
        for first, then in itertools.product(classes, repeat=2)
    }


@dataclass(frozen=True)
class Part:
    """One technique of an expression, with the settings that were given."""

    name: str
    """Its name, with dashes."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Names and values, checked."""

    @property
    def technique(self) -> type[Technique]:
        """Its class."""
        return technique_class(self.name)

    @property
    def text(self) -> str:
        """The part as people type it."""
        return _text(self.technique, dict(self.settings))

    @property
    def is_sized(self) -> bool:
        """Whether every setting without a default is given."""
        given = dict(self.settings)
        wanted = inspect.signature(self.technique).parameters.values()
        return all(one.name in given for one in wanted if one.default is one.empty)

    def build(self) -> Technique:
        """Return the technique with the settings given."""
        return from_mapping(self.technique, dict(self.settings), where=f"method {self.name}")


@dataclass(frozen=True)
class Expression:
    """Techniques to apply from left to right, such as `hashing:buckets=1000+low-rank`."""

    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """The expression as people type it: dashes, settings in declared order, no defaults."""
        return "+".join(part.text for part in self.parts) or BASELINE

    def __str__(self) -> str:
        return self.text

    def build(self, shapes: Sequence[tuple[int, int]], share: float) -> tuple[Technique, ...]:
        """Return the techniques for tables of these shapes (rows, width).

        Parts without a size keep equal shares of what the parts before them leave, and all together at most
        `share` of the weights.

        >>> [expression] = parse_techniques("hashing+low-rank")
        >>> expression.build([(1000, 16)], share=0.25)
        (Hashing(buckets=500), LowRank(rank=7))
        """
        require(0 < share <= 1, f"share must be above 0 and at most 1, got share={share}")
        num_unsized = sum(not part.is_sized for part in self.parts)
        built: list[Technique] = []
        for part in self.parts:
            if part.is_sized:
                technique = part.build()
            else:
                sized = part.technique.for_share(shapes, share ** (1 / num_unsized))
                technique = updated(sized, dict(part.settings))
            built.append(technique)
            shapes = [technique.shape_after(*shape) for shape in shapes]
        return tuple(built)


def parse_techniques(text: str) -> tuple[Expression, ...]:
    """Read expressions separated by commas; a part without its size is sized when the tables are known.

    >>> [expression.text for expression in parse_techniques("baseline,hashing+low-rank:rank=4")]
    ['baseline', 'hashing+low-rank:rank=4']
    """
    return tuple(_parse_expression(piece) for piece in split_text(text, ","))


def read_value(text: str) -> Any:
    """Read a value as TOML, or as a plain word."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (RecursionError, ValueError):
        return text
    return read["value"] if len(read) == 1 else text


def _parse_expression(text: str) -> Expression:
    require(bool(text), "expected the name of a method before and after each comma, got nothing")
    if text == BASELINE:
        return Expression()
    parts = tuple(_parse_part(piece, text) for piece in split_text(text, "+"))
    for first, then in itertools.combinations(parts, 2):
        for part in (first, then):
            require(
                part.technique.composition_rank is not None,
                f"{first.name}+{then.name} is refused: {part.name} declares no rank",
            )
        late = bool(dict(then.settings).get("after_training", False))
        reason = refusal(first.technique, then.technique, after_training=late)
        require(reason is None, f"{first.name}+{then.name} is refused: {reason}")
    return Expression(parts)


def _parse_part(text: str, whole: str) -> Part:
    name, *assignments = split_text(text, ":")
    require(name != BASELINE, f"baseline means plain tables and stands alone, got {whole!r}")
    require(bool(name), f"expected the name of a method, as in hashing+low-rank, got {whole!r}")
    technique = technique_class(name)
    name, given = technique_name(technique), {}
    for assignment in assignments:
        key, _, value = (word.strip() for word in assignment.partition("="))
        require(bool(key and value), f"expected setting=value after each colon, got {text!r}")
        key = key.replace("-", "_")
        require(key not in given, f"{key} is given twice in {text!r}")
        given[key] = read_value(value)
    settings = keyword_arguments(technique, given, where=f"method {name}")
    part = Part(name, tuple(settings.items()))
    if part.is_sized:
        part.build()  # reports settings out of range here, before tables exist
    return part


def _text(technique: type[Technique], values: Mapping[str, Any]) -> str:
    parts = [technique_name(technique)]
    for field in _fields(technique):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if field.name in values and values[field.name] != default:
            parts.append(f"{field.name}={value_text(values[field.name])}")
    return ":".join(parts)


def value_text(value: Any, *, in_list: bool = False) -> str:
    """Return a value as one types it in a method or after `--set`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value).replace("e+", "e")  # a plus would end the method
    if isinstance(value, str):
        is_word = WORD.fullmatch(value) and read_value(value) == value and not in_list
        # JSON's text is TOML's, except for one character that TOML wants escaped
        quoted = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return value if is_word else quoted
    if isinstance(value, list | tuple):
        return f"[{','.join(value_text(item, in_list=True) for item in value)}]"
    raise SettingsError(f"{value!r} cannot be typed as a value; use a settings file")


def split_text(text: str, mark: str) -> list[str]:
    """Split a text at a mark, but not inside quotes and lists."""
    parts, depth = [""], 0
    for piece in PIECE.findall(text):
        depth += (piece == "[") - (piece == "]")
        if piece == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts]


def _fields(technique: type[Technique]) -> tuple["dataclasses.Field[Any]", ...]:
    fields = dataclasses.fields(typing.cast(Any, technique))  # all settings are dataclasses
    return tuple(field for field in fields if field.init)


def _files() -> dict[str, str]:
    """Return the package of each of our techniques, by file name."""
    return {file: package for package in PACKAGES for file in offered(package)}


@cache
def _foreign() -> dict[str, tuple[str, str]]:
    """Return module and class of each technique that another package offers, by name."""
    return {
        point.name: (point.module, point.attr)
        for point in entry_points(group=GROUP)
        if point.name.replace("-", "_") not in _files()
    }


def _path(cls: type[Technique]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _subclasses(cls: type[Technique]) -> Iterator[type[Technique]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
