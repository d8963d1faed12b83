"""What else of a model holds its tables: lists, dicts, objects, functions and optimizers that its modules keep.

    self.tables = [self.user, self.item]                   modules that `forward` uses
    self.penalties = [([self.user.weight], 0.1)]           parameters of a penalty
    self.optimizer = torch.optim.Adam(self.parameters())   built in `__init__`

Whoever replaces a table must replace it there too, or the model goes on with the old one. `find_holders` looks through the
attributes of all modules; `Swap` exchanges what it finds, or refuses it by name before anything changes:

    a module       by the new module
    a parameter    by the parameters that hold the new table's rows: stored rows and factors, no thresholds and no priors
    refused        what a function keeps, parts of a table, views of its memory, and several parameters where one fits
"""

import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.errors import UnsupportedTableError

TARGETS = (nn.Module, Tensor, Optimizer)
VALUES = {
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size),
    *(type, np.ndarray, ModuleType, weakref.ReferenceType, *weakref.ProxyTypes),
}
"""Types that hold nothing that is searched."""
KEPT = (FunctionType, MethodType, partial, deque, frozenset)
"""Types in which nothing is exchanged."""
MANY = 10_000
"""A container of more than these is searched, but not what it contains."""
ROWS = ("inner", "table", "tables", "parts", "sets", "embedding")
"""The names by which tables, bags and stacks have what they look rows up in."""
EMPTY = (dict, OrderedDict, list, tuple, set)
"""Types of which the attributes of a module have many without entries."""
OLD = "_replaced_by_rarebit"
"""The mark on a table, or a parameter of one, that another took the place of."""


@dataclass(frozen=True, eq=False)
class Holder:
    """A place that holds a value: an attribute, or an entry of a container."""

    owner: object
    key: Any
    value: object
    above: "Holder | None" = None
    """Where the owner is; None for a module of the model, whose name is the key."""

    def __str__(self) -> str:
        is_entry = isinstance(self.owner, dict | list | tuple | deque | set | frozenset)
        own = f"[{self.key!r}]" if is_entry else f".{self.key}"
        return f"{self.above or ''}{own}".lstrip(".")

    @property
    def changeable(self) -> "Holder":
        """This place, or the one of the outermost tuple around it, which is made anew."""
        place = self
        while isinstance(place.owner, tuple) and place.above is not None:
            place = place.above
        return place


def find_holders(
    model: nn.Module, wanted: Callable[[object], bool], inside: Iterable[nn.Module] = ()
) -> list[Holder]:
    """Return all places that hold something wanted, or an optimizer of it, besides the parts of modules.

    What the modules `inside` hold themselves is left out.
    """
    left_out = {id(part) for module in inside for part in module.modules()}
    found, seen = [], {id(module) for module in model.modules()}
    places = [Holder(None, name, part) for name, part in model.named_modules()]
    places = [place for place in places if id(place.value) not in left_out]
    for above in places:  # grows
        owner = above.value
        for key, value in _entries(owner):
            if above.owner is None and key in ("_modules", "_parameters"):
                continue
            here = Holder(owner, key, value, above)
            if isinstance(value, Optimizer):
                groups = value.param_groups
                if any(wanted(parameter) for group in groups for parameter in group["params"]):
                    found.append(here)
            elif wanted(value):
                found.append(here)
            elif (
                not isinstance(value, Tensor | type) and value is not None and id(value) not in seen
            ):
                if not isinstance(value, tuple):  # a tuple is made anew wherever it is
                    seen.add(id(value))
                places.append(here)
    return found


def _entries(owner: object) -> Iterator[tuple[object, object]]:
    """Yield what an object holds that may hold more, with the key or name of each."""
    if isinstance(owner, dict):
        yield from _searched((("a key", key) for key in owner), owner, limit=0)
        yield from _searched(owner.items(), owner.values())
    elif isinstance(owner, list | tuple | deque | set | frozenset):
        yield from _searched(enumerate(owner), owner)
    elif isinstance(owner, MethodType):
        yield from (("__self__", owner.__self__), ("__func__", owner.__func__))
    elif isinstance(owner, partial):
        yield from (("func", owner.func), ("args", owner.args), ("keywords", owner.keywords))
    else:
        if isinstance(owner, FunctionType):
            for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
                with suppress(ValueError):  # a variable without a value yet
                    yield name, cell.cell_contents
            yield from (("default", owner.__defaults__), ("default", owner.__kwdefaults__))
        attributes = _attributes(owner)
        yield from _searched(attributes.items(), attributes.values())


def _searched(
    items: Iterable[tuple[object, object]], values: Collection[object], *, limit: int = MANY
) -> Iterator[tuple[object, object]]:
    """Yield the items that may hold something; of more than the limit only what may be wanted itself."""
    kinds = set(map(type, values)) - VALUES
    if len(values) > limit:
        kinds = {kind for kind in kinds if issubclass(kind, TARGETS)}
    if kinds:
        for key, value in items:
            is_empty = type(value) in EMPTY and not value
            if type(value) in kinds and not is_empty:
                yield key, value


def _attributes(owner: object) -> dict[str, object]:
    """Return the attributes of an object, without calling any of its code."""
    names = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    found: dict[str, object] = {}
    for name in ("__dict__", *names):
        with suppress(AttributeError):
            value = object.__getattribute__(owner, name)
            found |= value if name == "__dict__" and isinstance(value, dict) else {name: value}
    return found


def refuse_holders(model: nn.Module, replaced: Sequence[nn.Module], title: str) -> None:
    """Raise when something in a model holds a part of modules that are replaced as a whole."""
    old = {id(one) for module in replaced for one in (*module.modules(), *module.parameters())}
    for holder in find_holders(model, lambda value: id(value) in old, replaced):
        raise UnsupportedTableError(
            f"{title} replaces parts of the model that {str(holder)!r} would still hold; remove "
            f"{str(holder.changeable)!r} before this call, and make it again after it"
        )


def row_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that hold rows: of tables and of what they look rows up in, not of what else they have."""
    inside = (part for name, part in module.named_children() if name in ROWS or name.isdigit())
    found = chain(module.parameters(recurse=False), *map(row_parameters, inside))
    return list({id(parameter): parameter for parameter in found}.values())


class Instead(NamedTuple):
    """An old module or parameter of a table, and what takes its place."""

    old: nn.Module | nn.Parameter
    table: str
    new: Sequence[object] | None
    """None for a part of a table, which has no successor."""
    alone: bool
    """Whether exactly one takes the place of exactly one."""


class Swap:
    """What takes the place of the tables of a model, and who else holds them.

    `note` each table with its successor, `find` who holds it, then put the new tables into the model, and
    `exchange` the others.
    """

    def __init__(self, model: nn.Module, replaced: Sequence[nn.Module]) -> None:
        self._model, self._replaced = model, replaced
        inside = {id(part) for module in replaced for part in module.modules()}
        others = [part for part in model.modules() if id(part) not in inside]
        self._outside = {id(p) for part in others for p in part.parameters(recurse=False)}
        self._instead: dict[int, Instead] = {}
        self._found: list[Holder] = []

    def note(self, table: str, old: nn.Module, new: nn.Module | None) -> None:
        """Note what takes the place of a module; None where it is not made yet: then call it again."""
        parts = () if new is None else (*new.modules(), *new.parameters())
        now, had = {id(part) for part in parts}, {id(p) for p in old.parameters()}
        made = [] if new is None else [p for p in row_parameters(new) if id(p) not in had]
        rows = {id(p) for p in row_parameters(old)}
        for part in old.modules():
            if part is old:
                self._instead[id(old)] = Instead(old, table, None if new is None else [new], True)
            elif id(part) not in now:
                self._instead[id(part)] = Instead(part, table, None, False)
            else:
                self._instead.pop(id(part), None)
        for parameter in old.parameters():
            stays = id(parameter) in now
            kept: list[object] = [parameter] if stays or id(parameter) in self._outside else []
            heirs = [] if stays or id(parameter) not in rows else made
            before = self._instead.get(id(parameter))
            if before is not None and before.table != table:  # two tables had this one weight
                kept = list(before.new or ())
            heirs = [one for one in heirs if all(one is not other for other in kept)]
            alone = new is not None and len(rows - now) == len(heirs) == 1 and not kept
            self._instead[id(parameter)] = Instead(parameter, table, [*kept, *heirs], alone)

    def find(self, title: str) -> dict[Optimizer, str]:
        """Find who holds something old; raise where it cannot be exchanged. Returns the optimizers and their places."""
        self._ranges = [
            (*memory_of(one.old), one.table)
            for one in self._instead.values()
            if isinstance(one.old, nn.Parameter)
        ]
        found = find_holders(self._model, self._is_old, self._replaced)
        self._found = [one for one in found if not isinstance(one.value, Optimizer)]
        for holder in self._found:
            refusal = self._refusal(holder)
            if refusal is not None:
                raise UnsupportedTableError(
                    f"{title} would leave an old table in {str(holder)!r} of the model, which {refusal}; "
                    f"remove {str(holder.changeable)!r} before this call, and make it again after it"
                )
        optimizers: dict[Optimizer, str] = {}
        for holder in found:
            if isinstance(holder.value, Optimizer):
                optimizers.setdefault(holder.value, str(holder))
        return optimizers

    def exchange(self) -> list[str]:
        """Exchange what was found, and return the places with what is there now."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        told = []
        for holder in self._found:
            if not self._is_old(holder.value):
                continue
            place = holder.changeable
            owner, key = place.owner, place.key
            if isinstance(owner, list):
                owner[:] = self._renewed_all(owner)
            elif isinstance(owner, set):
                owner.remove(place.value)
                owner.update(self._renewed(place.value))
            elif isinstance(owner, dict):
                (owner[key],) = self._renewed(owner[key])
            else:
                (new,) = self._renewed(place.value)
                attributes = vars(owner) if hasattr(owner, "__dict__") else {}
                if key in attributes:
                    attributes[key] = new
                else:
                    object.__setattr__(owner, key, new)
            told.append(f"{holder}{self._now(holder.value, names)}")
        for one in self._instead.values():
            if one.new is None or all(new is not one.old for new in one.new):
                setattr(one.old, OLD, one.table)
        return told

    def _is_old(self, value: object) -> bool:
        one = self._instead.get(id(value))
        if one is not None:
            return one.new is None or len(one.new) != 1 or one.new[0] is not value
        return isinstance(value, Tensor) and self._shares_memory(value)

    def _shares_memory(self, tensor: Tensor) -> bool:
        start, end = memory_of(tensor)
        return any(start < last and first < end for first, last, _ in self._ranges)

    def _refusal(self, holder: Holder) -> str | None:
        """Return what a holder is that cannot be exchanged; None when it can."""
        one, place = self._instead.get(id(holder.value)), holder.changeable
        if one is None:
            return "shares memory with the weight of one"
        if one.new is None:
            return f"is a part of {one.table!r}"
        if getattr(place.owner, "keeps_shapes", False):
            return "an average follows"
        if isinstance(place.owner, KEPT):
            return f"a {type(place.owner).__name__} keeps"
        if isinstance(place.owner, dict) and place.owner.get(place.key) is not place.value:
            return "is a key"
        if isinstance(one.old, nn.Module) or one.alone:
            is_part = holder.above is not None and holder.above.key == "_parameters"
            return "is a parameter of a module outside the model" if is_part else None
        in_list = isinstance(holder.owner, list | set)
        if in_list or (type(holder.owner) is tuple and _is_all(holder.owner, Tensor)):
            return None
        return f"has room for one parameter, and the new table {one.table!r} has not exactly one"

    def _renewed(self, value: object) -> list[object]:
        """Return what takes the place of a value: itself where it is not old."""
        one = self._instead.get(id(value))
        if one is not None and one.new is not None:
            return list(one.new)
        if not isinstance(value, tuple):
            return [value]
        items = self._renewed_all(value)
        if len(items) == len(value) and all(map(operator.is_, items, value)):
            return [value]
        make = getattr(type(value), "_make", type(value))  # of a named tuple
        return [make(items)]

    def _renewed_all(self, values: Sequence[object]) -> list[object]:
        """Return the values of a sequence; what takes the place of several comes once."""
        items: list[object] = []
        for value in values:
            for new in self._renewed(value):
                if new is value or all(new is not one for one in (*items, *values)):
                    items.append(new)
        return items

    def _now(self, old: object, names: Mapping[int, str]) -> str:
        if not isinstance(old, nn.Parameter):
            return ""
        new = [names[id(p)] for p in self._instead[id(old)].new or () if id(p) in names]
        return f" (now {', '.join(new)})" if new else " (removed: nothing of the table is trained)"


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return where the memory of an ordinary tensor begins and ends; nothing for any other."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_meta or not tensor.numel():
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.itemsize


def _is_all(values: Iterable[object], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)
