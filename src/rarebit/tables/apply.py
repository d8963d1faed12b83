"""Find the tables of a model and change them in place: `apply_` a method, `merge_` it back to plain tables.

    find_tables    what each table looks like (`TableInfo`), and why one cannot be changed
    find_sites     the tables with the places in the model that hold them
    apply_         wrap the chosen tables by a method; all of them or, on an error, none
    merge_         turn them back into plain torch tables with the same rows

An optimizer that is passed along holds the new parameters afterwards, with the state that still fits. So does whatever else
in the model holds a table (`holders.py`).
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.errors import NoTableError, OptimizerError, UnsupportedTableError, warn
from rarebit.machine import require_memory
from rarebit.settings import suggest
from rarebit.tables.bag import Bag, bag_like, table_of_bag
from rarebit.tables.collection import Plain, RowMove, TableCollection
from rarebit.tables.holders import OLD, Swap, find_holders, memory_of
from rarebit.tables.table import (
    AnyTable,
    Method,
    Shared,
    Table,
    field_of,
    home_of,
    is_trainable,
    methods_of,
    num_weights,
    row_chunks,
    row_not_finite,
    stored_tensors,
    table_name,
    tells_ids_apart,
    unsuited,
    wrap,
)
from rarebit.technique import refusal

Kind: TypeAlias = Literal["embedding", "bag", "field"]
TableModule: TypeAlias = nn.Embedding | nn.EmbeddingBag | Table | Bag
Where: TypeAlias = Callable[["TableInfo"], bool]
MODULE_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Where a module keeps what it calls besides itself."""
STATE_STARTS = {"sum": "initial_accumulator_value", "step_size": "lr"}
"""States of torch's optimizers (Adagrad, Rprop) that do not start at zero, and the option that they start at."""
MAX_LINES = 8
EQUAL = 1e-6
"""Rows that differ by no more than this share of the largest weight before are equal."""


@dataclass(frozen=True)
class TableInfo:
    """What a table is, for choosing it: `where=lambda t: t.rows > 100 and t.field == "user"`."""

    name: str
    """Where the table is in the model, such as `backbone.tables.user`."""
    rows: int
    """How many ids it has a row for."""
    width: int
    """How long a row is."""
    kind: Kind
    """An `nn.Embedding`, an `nn.EmbeddingBag`, or one field of a stacked table."""
    methods: tuple[str, ...]
    """The methods applied to it, in order."""
    trainable: bool
    """Whether training changes it."""
    num_parameters: int
    """Weights it stores, however few bits each of them has."""
    num_bytes: int
    """Bytes of all that it stores."""
    refusal: str | None
    """Why no method can be applied to it; None when one can."""

    @property
    def field(self) -> str:
        """The last part of the name: the field or attribute it is called by."""
        return field_of(self.name)


@dataclass(frozen=True)
class ModuleSite:
    """A table that is a module of its own, and every place in the model that holds it."""

    module: TableModule
    places: list[tuple[nn.Module, str]]
    info: TableInfo
    tie: str | None = None
    """Which other part of the model uses its weight; None when no other does."""
    untied: bool = False
    """Whether another part uses its weight and may keep it: the table is a copy."""

    @property
    def table(self) -> AnyTable:
        """The table, out of its bag."""
        module = copy.deepcopy(self.module) if self.untied else self.module
        if isinstance(module, nn.EmbeddingBag | Bag):
            return table_of_bag(module)
        return module


@dataclass(frozen=True)
class FieldSite:
    """A table that is one field of a collection."""

    collection: TableCollection
    index: int
    table: AnyTable = field(repr=False)
    info: TableInfo
    tie: str | None = None
    """Which other part of the model uses a weight of the collection; None when no other does."""


Site: TypeAlias = ModuleSite | FieldSite


@dataclass(frozen=True)
class TableChanges:
    """What a call changed, and what it skipped and why. False when nothing changed."""

    title: str
    """The call."""
    before: tuple[TableInfo, ...]
    """The changed tables as they were."""
    after: tuple[TableInfo, ...]
    """The same tables as they are now."""
    skipped: tuple[tuple[str, str], ...]
    """The skipped tables: name and reason."""
    exchanged: tuple[str, ...] = ()
    """What else in the model held a changed table, and has the new one now: lists, optimizers and the like."""

    def __bool__(self) -> bool:
        return bool(self.after)

    def __str__(self) -> str:
        total = len(self.after) + len(self.skipped)
        if not self.after:
            return "\n".join([f"{self.title}: nothing to do in {total} tables", *self._reasons()])
        unit, old, new = self._stored()
        head = (
            f"{self.title}: {len(self.after)} of {total} tables, "
            f"{sum(old):,} -> {sum(new):,} {unit} stored{self._freezing()}"
        )
        lines = [
            f"  {info.name}  {info.rows:,}{_if_other(info.rows, grown.rows)} x {info.width}, {was:,} -> {now:,}"
            for info, grown, was, now in zip(self.before, self.after, old, new, strict=True)
        ]
        if len(lines) > MAX_LINES:
            lines[MAX_LINES - 1 :] = [f"  and {len(lines) - MAX_LINES + 1} more"]
        also = [f"  also exchanged: {place}" for place in self.exchanged]
        if len(also) > MAX_LINES:
            also[MAX_LINES - 1 :] = [f"  and {len(also) - MAX_LINES + 1} more exchanged"]
        return "\n".join([head, *lines, *also, *self._reasons()])

    def _stored(self) -> tuple[str, list[int], list[int]]:
        """Return what to count in, and how much each table stored before and stores now."""
        both = (self.before, self.after)
        bits = [
            {info.num_bytes / info.num_parameters for info in tables if info.num_parameters}
            for tables in both
        ]
        # where a weight has other bits than before, the number of weights does not show the change
        unit, name = ("weights", "num_parameters") if bits[0] == bits[1] else ("bytes", "num_bytes")
        before, after = ([getattr(info, name) for info in tables] for tables in both)
        return unit, before, after

    def _freezing(self) -> str:
        both = zip(self.before, self.after, strict=True)
        frozen = any(old.trainable and not new.trainable for old, new in both)
        return ", no longer trained" if frozen else ""

    def _reasons(self) -> list[str]:
        by_reason = defaultdict(list)
        for name, reason in self.skipped:
            by_reason[reason].append(name)
        return [
            f"  left alone, {reason}: {', '.join(names[:3])}"
            + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for reason, names in by_reason.items()
        ]


def _if_other(before: int, after: int) -> str:
    return "" if before == after else f" -> {after:,}"


def find_tables(model: nn.Module) -> list[TableInfo]:
    """Return every table of a model: each `nn.Embedding` and `nn.EmbeddingBag`, each field of a stack.

    >>> [(table.name, table.rows, table.width) for table in find_tables(nn.Sequential(nn.Embedding(9, 4)))]
    [('0', 9, 4)]
    """
    return [site.info for site in find_sites(model)]


def find_sites(model: nn.Module, *, untie: bool = False) -> list[Site]:
    """Return every table with the place it can be replaced at; tied ones as copies if they may be untied."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[_start_of(parameter)].append(name)  # more than one name means tied weights
    sites: list[Site] = []
    for names, module in _table_modules(model):
        tie = _tie_refusal(names, module, owners)
        if isinstance(module, TableCollection):
            # a collection stays where it is: its stacks are replaced
            refusal = tie or _hook_refusal(module.stacks)
            for index, table in enumerate(module.tables()):
                name = table_name(names[0], module.fields[index].name)
                info = _info(name, table, "field", refusal)
                sites.append(FieldSite(module, index, table, info, tie))
        else:
            kind: Kind = "bag" if isinstance(module, nn.EmbeddingBag | Bag) else "embedding"
            stored = module.table if isinstance(module, Bag) else module
            untied = untie and tie is not None
            tie = None if untied else tie
            info = _info(names[0], stored, kind, _refusal(names, module, tie))
            parts = [name.rpartition(".") for name in names if name]
            places = [(model.get_submodule(parent), attribute) for parent, _, attribute in parts]
            sites.append(ModuleSite(module, places, info, tie, untied))
    return sites


def table_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all tables by name, each once."""
    return {
        name: parameter
        for names, module in _table_modules(model)
        for name, parameter in module.named_parameters(prefix=names[0])
    }


def table_bytes(model: nn.Module) -> int:
    """Return the bytes of everything that a model's tables store."""
    stored = {
        id(tensor): tensor.nbytes
        for _, module in _table_modules(model)
        for tensor in stored_tensors(module)
    }
    return sum(stored.values())


def apply_(
    model: nn.Module,
    method: Method,
    *,
    where: Where | None = None,
    min_width: int | None = None,
    untie: bool = False,
    optimizer: Optimizer | None = None,
    verbose: bool = True,
) -> TableChanges:
    """Apply a method to the tables of a model, in place, and return what changed.

    `where` chooses tables by name, rows or width. Tables narrower than `min_width` are skipped, as first-order weights of
    width 1 are by default. With `optimizer`, its parameters are exchanged for the new ones and the state that still fits
    is kept; without, build the optimizer after this call. A table with a method that this one must not follow is an
    error. Either all chosen tables change or, on an error, none.

    What else in the model holds a chosen table, such as a list, a penalty or an optimizer, gets the new one, and the report
    names it; what cannot be exchanged is an error.

    A table whose weight is also the weight of another layer, as in many language models, is an error too. With `untie`
    the table gets a copy of it, and the layer keeps its own; they stay two weights, also after `merge_`.

    >>> model = nn.Sequential(nn.Embedding(1000, 8))
    >>> from rarebit import Hashing
    >>> changes = apply_(model, Hashing(buckets=100))
    Hashing(buckets=100): 1 of 1 tables, 8,000 -> 800 weights stored
      0  1,000 x 8, 8,000 -> 800
    """
    refuse_wrapped_model(model)
    if not isinstance(method, Method):
        raise UnsupportedTableError(
            f"apply_ takes a method for tables, got {method}, which acts around training; pass it to fit "
            "through callbacks=, or name it among the methods of a run"
        )
    whole = method.change_model(model, where=where, optimizer=optimizer)
    if whole is not None:
        return reported(whole, verbose)
    sites = find_sites(model, untie=untie)
    least = method.min_width if min_width is None else min_width
    reasons = [_reason_to_skip(site, method, where, least) for site in sites]
    chosen = [site for site, reason in zip(sites, reasons, strict=True) if reason is None]
    skipped = [
        (site.info.name, reason)
        for site, reason in zip(sites, reasons, strict=True)
        if reason is not None
    ]
    skipped += _look_alikes(model)
    if not sites and not skipped:
        raise NoTableError(
            f"{method} matched no table: the model has no nn.Embedding and no nn.EmbeddingBag"
        )
    if not chosen:
        names = ", ".join(f"{name} ({reason})" for name, reason in skipped[:MAX_LINES])
        more = f" and {len(skipped) - MAX_LINES} more" if len(skipped) > MAX_LINES else ""
        raise NoTableError(f"{method} matched no table; the model has {names}{more}")
    for site in chosen:
        if site.info.refusal:
            may_untie = isinstance(site, ModuleSite) and site.tie is not None
            raise UnsupportedTableError(
                f"{method} cannot be applied to {site.info.name!r}: {site.info.refusal}. "
                f"{'Give it a copy with untie=True, or leave' if may_untie else 'Leave'} it out with "
                f"where=lambda t: t.name != {site.info.name!r}"
            )
        refuse_composition(site, method)
        refuse_not_finite(site, method)
    tables = method.wrap_all({site.info.name: site.table for site in chosen})
    check_rows(chosen, tables, method)
    changes = put_tables(model, str(method), chosen, tables, skipped=skipped, optimizer=optimizer)
    return reported(changes, verbose)


def merge_(
    model: nn.Module,
    *,
    where: Where | None = None,
    optimizer: Optimizer | None = None,
    verbose: bool = True,
) -> TableChanges:
    """Turn the tables made by methods back into plain torch tables with the same rows, in place.

    The report is false when there was nothing left to merge. A table that wraps another is folded with all it wraps.

    >>> from rarebit import LowRank
    >>> model = nn.Sequential(nn.Embedding(1000, 8))
    >>> changes = apply_(model, LowRank(rank=2), verbose=False)
    >>> bool(merge_(model, verbose=False)), bool(merge_(model, verbose=False))
    (True, False)
    """
    refuse_wrapped_model(model, trained="merge_")
    chosen, tables, skipped = [], [], []
    for site in find_sites(model):
        if not isinstance(site.table, Table):
            skipped.append((site.info.name, "already plain"))
        elif site.table.unmergeable:
            skipped.append((site.info.name, site.table.unmergeable))
        elif where is not None and not where(site.info):
            skipped.append((site.info.name, "not chosen"))
        elif site.info.refusal:
            raise UnsupportedTableError(f"cannot merge {site.info.name!r}: {site.info.refusal}")
        else:
            whole = site.info.rows * site.info.width * torch.get_default_dtype().itemsize
            advice = "leave the table out with where="
            require_memory(whole, f"{site.info.name!r} merged", advice, home_of(site.table))
            chosen.append(site)
            tables.append(_merged(site.table, site.table.merge()))
    changes = put_tables(model, "merge", chosen, tables, skipped=skipped, optimizer=optimizer)
    return reported(changes, verbose)


def end_training_(model: nn.Module) -> None:
    """Merge what only training needs, so that tables are as small as at inference."""
    refuse_wrapped_model(model)
    sites = [
        site
        for site in find_sites(model)
        if any(method.training_only for method in methods_of(site.table))
    ]
    tables = [site.table for site in sites if isinstance(site.table, Table)]
    put_tables(
        model, "the end of training", sites, [_merged(table, table.served()) for table in tables]
    )


def restore_tables(
    model: nn.Module, methods: Mapping[str, Sequence[Method]], frozen: Collection[str]
) -> None:
    """Give each named table the methods it had when it was saved, and freeze what was frozen.

    The weights are loaded later, so it does not matter what the tables start from.
    """
    refuse_wrapped_model(model)
    sites = {site.info.name: site for site in find_sites(model)}
    # a tied table has no methods, so one that has them was untied when it was saved
    untied = {site.info.name: site for site in find_sites(model, untie=True)}
    for name in (*methods, *frozen):
        if name not in sites:
            raise NoTableError(f"there is no table {name!r}{suggest(name, list(sites))}")
    changed, tables = [], []
    for name, site in (sites | {name: untied[name] for name in methods}).items():
        had = methods_of(site.table)
        steps, freeze = tuple(methods.get(name, had)), name in frozen and site.info.trainable
        if steps == had and not freeze:
            continue
        if site.info.refusal:
            raise UnsupportedTableError(f"cannot change {name!r}: {site.info.refusal}")
        # a fresh model may have its sets already, and the rest is to come
        missing = steps[len(had) :] if steps[: len(had)] == had else steps
        table = reduce(wrap, missing, site.table)
        changed.append(site)
        tables.append(table.requires_grad_(requires_grad=is_trainable(table) and not freeze))
    put_tables(model, "restoring its methods", changed, tables)


def check_optimizer(model: nn.Module, *optimizers: Optimizer) -> None:
    """Raise when a trainable table parameter is in no group of the optimizer, or of any of several.

    An optimizer built before `apply_` holds the old tables: it would train nothing, silently. So does a model that still
    uses a table which was replaced, as happens when `apply_` was given only a part of it.

    >>> model = nn.Sequential(nn.Embedding(9, 4))
    >>> check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    """
    for optimizer in optimizers:
        tables = {names[0]: module for names, module in _table_modules(model)}
        _refuse_dense(optimizer, tables, _held_by(optimizer))
    held = {one for optimizer in optimizers for one in _held_by(optimizer)}
    missing = [
        name
        for name, parameter in table_parameters(model).items()
        if parameter.requires_grad and id(parameter) not in held
    ]
    if missing:
        raise OptimizerError(
            f"the optimizer does not hold {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more table parameters" if len(missing) > 3 else "")
            + ", so training would not change them. Build the optimizer after apply_ and merge_, "
            "or pass it to them as optimizer="
        )
    old = find_holders(
        model, lambda one: isinstance(one, nn.Module | nn.Parameter) and OLD in vars(one)
    )
    if old:
        raise OptimizerError(
            f"{str(old[0])!r} of the model holds a table that was replaced, so training would not change the new one there; "
            "apply_ and merge_ exchange what they see: pass them the whole model, not a part of it"
        )


def refuse_wrapped_model(model: nn.Module, *, trained: str | None = None) -> None:
    """Raise when the model is compiled, scripted or wrapped: its tables can no longer be replaced.

    `trained` is the name of a call that comes after training, when it is too late to change the tables first.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedTableError(
            f"the model must be a torch module, got a {type(model).__name__}"
        )
    for name, module in model.named_modules():
        kind, place = type(module).__name__, f"model.{name}" if name else "model"
        instead = f"call {trained} on"
        if kind == "OptimizedModule":
            reason = "is compiled, and a compiled module keeps calling its old tables"
            instead += f" {place}._orig_mod, and compile that again"
        elif getattr(module, "_compiled_call_impl", None) is not None:
            reason = "is compiled, and a compiled module keeps calling its old tables"
            instead += " copy.deepcopy(model), which is not compiled"
        elif isinstance(module, torch.jit.ScriptModule):
            reason = "is a TorchScript module, whose parts cannot be replaced"
            instead += " the model that it was made from, and script that again"
        elif kind in ("DistributedDataParallel", "DataParallel"):
            reason = f"is wrapped in {kind}, which has already registered its parameters"
            instead += f" {place}.module, and wrap that again"
        elif kind == "FullyShardedDataParallel":
            reason = f"is wrapped in {kind}, which has already registered its parameters"
            instead += " a model that is not wrapped, with the full state dict of this one"
        else:
            continue
        where = f"{name!r} in the model" if name else "the model"
        first = "change the tables first, then compile or wrap it"
        raise UnsupportedTableError(f"{where} {reason}; {instead if trained else first}")


def refuse_composition(site: Site, method: Method) -> None:
    """Raise when a table has a method that this one cannot follow."""
    for earlier in methods_of(site.table):
        reason = refusal(type(earlier), type(method), after_training=method.after_training)
        if reason is not None:
            raise UnsupportedTableError(
                f"{method} cannot be applied to {site.info.name!r} after {earlier}: {reason}"
            )


def refuse_not_finite(site: Site, method: Method) -> None:
    """Raise when a table has a row that no method could use."""
    row = row_not_finite(site.table)
    if row is not None:
        raise UnsupportedTableError(
            f"{method} cannot be applied to {site.info.name!r}: its row {row} has numbers that are not finite; go "
            "back to weights from before training diverged"
        )


def check_rows(sites: Sequence[Site], tables: Sequence[AnyTable], method: Method) -> None:
    """Warn by name of tables whose ids a method made equal: without a word, they would never learn.

    Raise where numbers overflowed.
    """
    lost = []
    for site, table in zip(sites, tables, strict=True):
        before, after = next(row_chunks(site.table)), next(row_chunks(table))
        if not bool(after.isfinite().all()):
            raise UnsupportedTableError(
                f"{method} makes rows of {site.info.name!r} that are not finite; use other settings"
            )
        if method.may_join_rows or not before.numel():
            continue
        if tells_ids_apart(table, EQUAL * float(before.abs().max())):
            continue
        empty = method.masks_entries and not any(bool(rows.any()) for rows in row_chunks(table))
        if empty or tells_ids_apart(site.table):
            lost.append(repr(site.info.name))
    if lost:
        warn(
            f"{method} makes all rows of {', '.join(lost)} equal, so lookups there no longer tell ids apart; use "
            "other settings, start from other weights, or leave such a table out with where="
        )


def _look_alikes(model: nn.Module) -> list[tuple[str, str]]:
    """Return the modules that have rows and a width, and are no tables of torch's: name and reason."""
    return [
        (name, f"{type(module).__module__}.{type(module).__name__} is no nn.Embedding")
        for name, module in model.named_modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag | Table | Bag)
        and isinstance(getattr(module, "num_embeddings", None), int)
        and isinstance(getattr(module, "embedding_dim", None), int)
    ]


def _reason_to_skip(site: Site, method: Method, where: Where | None, min_width: int) -> str | None:
    if site.info.width < min_width:
        return f"narrower than min_width={min_width}"
    if where is not None and not where(site.info):
        return "not chosen"
    return unsuited(site.table, method)


def _merged(old: Table, new: AnyTable) -> AnyTable:
    for method in old.methods:
        new = method.after_merge(new)
    return new


def reported(changes: TableChanges, verbose: bool) -> TableChanges:
    """Print the changes if wanted, and return them."""
    if verbose:
        print(changes)  # noqa: T201  # the caller wants to see what changed
    return changes


def put_tables(
    model: nn.Module,
    title: str,
    sites: Sequence[Site],
    tables: Sequence[AnyTable],
    *,
    skipped: Sequence[tuple[str, str]] = (),
    optimizer: Optimizer | None = None,
    grown: bool = False,
) -> TableChanges:
    """Put the new tables where the old ones were, also where else the model holds them, and in optimizers.

    With `grown` they are the old ones with more rows: all rows that were there keep their state.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"optimizer= takes a torch optimizer, got a {type(optimizer).__name__}"
        )
    _share(model, tables)
    changes = _replacements(sites, tables)
    swap = Swap(model, [change.old for change in changes])
    for change in changes:
        swap.note(change.name, change.old, change.new)
    held = swap.find(title)
    optimizers = list(dict.fromkeys([*held, *([] if optimizer is None else [optimizer])]))
    for one in optimizers:
        for change in changes:
            if _held_by(one) & {id(p) for p in change.old.parameters()}:
                _refuse_dense(one, change.tables)
                if grown:
                    refuse_to_follow(one, title)

    # nothing has changed so far, and from here on nothing is refused
    exchanges = []
    for change in changes:
        were = change.parts(change.old) if grown else []
        moves = change.put()
        swap.note(change.name, change.old, change.new)
        new = [] if change.new is None else list(change.new.parameters())
        old = list(change.old.parameters())
        if grown:
            moves = _moves(were, old, change.parts(change.new), new)
        exchanges.append(Exchange(old, new, moves, grown))
    for one in optimizers:
        exchange_parameters(one, exchanges, model)
    exchanged = [
        *swap.exchange(),
        *(f"{place} ({type(one).__name__})" for one, place in held.items()),
    ]
    now = {info.name: info for info in find_tables(model)}
    before, after = (site.info for site in sites), (now[site.info.name] for site in sites)
    return TableChanges(title, tuple(before), tuple(after), tuple(skipped), tuple(exchanged))


@dataclass
class Replacement:
    """A module that is replaced, by another one or, where it holds the stacks of a collection, in its way."""

    name: str
    """The first table in it."""
    old: nn.Module
    new: nn.Module | None
    """None until the stacks are made."""
    tables: dict[str, AnyTable]
    """The new tables in it, by name."""
    site: Site
    by_field: dict[int, AnyTable] = field(default_factory=dict)

    def put(self) -> list[RowMove]:
        """Put the new module into the model; return the plain rows that moved."""
        if isinstance(self.site, FieldSite):
            moves = self.site.collection.replace(self.by_field)
            self.new = self.site.collection.stacks
            return moves
        for parent, attribute in self.site.places:
            setattr(parent, attribute, self.new)
        return []

    def parts(self, now: nn.Module | None) -> list[dict[str, nn.Parameter]]:
        """Return the parameters of each table by name, which share the memory of the module that is there now."""
        tables = self.site.collection.tables() if isinstance(self.site, FieldSite) else [now]
        return [dict(table.named_parameters()) for table in tables if table is not None]


def _replacements(sites: Sequence[Site], tables: Sequence[AnyTable]) -> list[Replacement]:
    found: dict[nn.Module, Replacement] = {}
    for site, table in zip(sites, tables, strict=True):
        name = site.info.name
        if isinstance(site, FieldSite):
            old = site.collection.stacks
            change = found.setdefault(old, Replacement(name, old, None, {}, site))
            change.by_field[site.index] = table
        else:
            new = _module_like(site.module, table)
            change = found[site.module] = Replacement(name, site.module, new, {}, site)
        change.tables[name] = table
    return list(found.values())


def _share(model: nn.Module, tables: Iterable[AnyTable]) -> None:
    """Let new tables have together, with each other and with the model's, what methods share."""
    held: dict[tuple[object, ...], Shared] = {}
    for part in (part for whole in (model, *tables) for part in whole.modules()):
        for name, child in part.named_children():
            if isinstance(child, Shared):
                key = (child.key, child.value.requires_grad)  # what is frozen is apart
                setattr(part, name, held.setdefault(key, child))


def _module_like(old: nn.Module, table: AnyTable) -> nn.Module:
    """Return a table as a module that does what the old one did: a bag around it, or itself."""
    new = bag_like(old, table) if isinstance(old, nn.EmbeddingBag | Bag) else table
    return new.train(old.training)


def _held_by(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _refuse_dense(
    optimizer: Optimizer, tables: Mapping[str, nn.Module], held: Collection[int] | None = None
) -> None:
    """Raise when SparseAdam would get a dense gradient of a table, which it refuses in its first step."""
    parts = (part for table in tables.values() for part in table.modules())
    by_rows = {id(part.weight) for part in parts if isinstance(part, Plain)}
    dense = [
        name
        for place, table in tables.items()
        for name, p in table.named_parameters(prefix=place)
        if p.requires_grad and id(p) not in by_rows and (held is None or id(p) in held)
    ]
    if dense and isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError(
            f"SparseAdam takes gradients by rows only, and {dense[0]!r} has a dense one; give it to another optimizer, such as "
            "torch.optim.Adam, or train the whole model with rb.optimizer(model, tables='rowwise')"
        )


def refuse_to_follow(optimizer: Optimizer, title: str) -> None:
    """Raise where an optimizer, or an average that follows it, cannot follow tables that grow."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            f"{title}: LBFGS remembers all parameters as one vector, which cannot grow; build a new one afterwards"
        )
    for hook in optimizer._optimizer_step_pre_hooks.values():  # noqa: SLF001  # torch has no other list of them
        if getattr(getattr(hook, "__self__", None), "keeps_shapes", False):
            raise OptimizerError(
                f"{title}: an EMA averages the tables of this optimizer and cannot grow; close() it before this call, and "
                "make a new one after it"
            )


class Exchange(NamedTuple):
    """Old parameters, the new ones in their place, and plain rows that moved between them."""

    old: Sequence[nn.Parameter]
    new: Sequence[nn.Parameter]
    moves: Sequence[RowMove]
    grown: bool = False
    """Whether rows that came from nowhere are new, and start as those of a new optimizer."""


def exchange_parameters(
    optimizer: Optimizer, exchanges: Iterable[Exchange], model: nn.Module
) -> None:
    """Replace old table parameters by new ones in the optimizer's groups.

    State is kept for a parameter that stayed, and for one all of whose rows came from parameters
    with state (a stack that was split); every other new parameter starts fresh.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # as it was before any exchange: two tables that were tied both had the one weight
    homes = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for given in exchanges:
        stay = {id(p) for p in given.new}
        # old parameters that other tables of the model still have are no part of the exchange
        exchange = given._replace(old=[p for p in given.old if id(p) in stay or id(p) not in names])
        gone = [p for p in exchange.old if id(p) not in stay]
        # a weight that another layer keeps is no part of the exchange, but shows the group
        wanted = gone or exchange.old or given.old
        group = next((homes[id(p)] for p in wanted if id(p) in homes), None)
        if group is None:
            continue
        held = {id(p) for g in optimizer.param_groups for p in g["params"]}
        arrived = [p for p in exchange.new if id(p) not in held]
        # a grown parameter stays in the group of the one it was: thresholds have their own
        sources = {id(move.target): homes.get(id(move.source)) for move in exchange.moves}
        homes |= {id(p): (exchange.grown and sources.get(id(p))) or group for p in arrived}
        for parameter in arrived:
            fresh = homes[id(parameter)] if exchange.grown else None
            state = _carried_state(optimizer, parameter, exchange.moves, fresh)
            if not state and isinstance(optimizer, torch.optim.Adagrad):
                # torch makes this state with the optimizer, not later
                options = {key: group[key] for key in optimizer.defaults}
                state = dict(torch.optim.Adagrad([parameter], **options).state[parameter])
            if state:
                optimizer.state[parameter] = state
        for parameter in gone:
            optimizer.state.pop(parameter, None)
        for other in optimizer.param_groups:
            own = [p for p in arrived if homes[id(p)] is other]
            _exchange_in(other, exchange, own, names)


def _exchange_in(
    group: dict[str, Any],
    exchange: Exchange,
    arrived: Sequence[nn.Parameter],
    names: Mapping[int, str],
) -> None:
    """Put the new parameters where the old ones stood, in the model's order.

    A saved state goes by position: in another order it would be read into other parameters.
    """
    old = list(group["params"])
    ours = {id(p) for p in (*exchange.old, *exchange.new)}
    here = {id(p) for p in (*old, *arrived)}
    new = [p for p in exchange.new if id(p) in here]
    others = [p for p in old if id(p) not in ours]
    place = next((index for index, p in enumerate(old) if id(p) in ours), 0)
    # in place: an optimizer may hold on to the list itself, as LBFGS does
    group["params"][:] = [*others[:place], *new, *others[place:]]
    if "param_names" in group:
        known = dict(zip(map(id, old), group["param_names"], strict=True))
        known |= {id(p): names[id(p)] for p in new}
        group["param_names"] = [known[id(p)] for p in group["params"]]


def _carried_state(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    moves: Sequence[RowMove],
    fresh: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state of rows that moved into this parameter, empty unless it covers all of them.

    Where the group of the parameter is given as `fresh`, rows that did not move start as in a new optimizer.
    """
    moves = [move for move in moves if move.target is parameter]
    moves = [move for move in moves if optimizer.state.get(move.source)]
    moved = sum(move.target_rows.stop - move.target_rows.start for move in moves)
    if not moves or (fresh is None and moved != len(parameter)):
        return {}
    state: dict[str, Any] = {}
    for key, value in optimizer.state[moves[0].source].items():
        if isinstance(value, Tensor) and value.shape[:1] == moves[0].source.shape[:1]:
            state[key] = value.new_empty(len(parameter), *value.shape[1:])
            for move in moves:
                state[key][move.target_rows] = optimizer.state[move.source][key][move.source_rows]
            if fresh is not None:
                start = float(fresh.get(STATE_STARTS.get(key, ""), 0.0))
                for rows in _gaps([move.target_rows for move in moves], len(parameter)):
                    state[key][rows] = start
        else:
            state[key] = value.clone() if isinstance(value, Tensor) else value
    return state


def restart_rows(optimizer: Optimizer, part: Tensor, rows: Tensor) -> None:
    """Begin the state of some rows of a table's parameter anew, in place; a stack may hold the parameter."""
    for group in optimizer.param_groups:
        found = _place(part, group["params"])
        if found is None:
            continue
        owner, place = found
        for key, value in optimizer.state.get(owner, {}).items():
            if isinstance(value, Tensor) and value.shape[:1] == owner.shape[:1]:
                value[place.start + rows] = float(group.get(STATE_STARTS.get(key, ""), 0.0))


def _gaps(covered: Sequence[slice], end: int) -> Iterator[slice]:
    """Yield the rows from 0 to the end that are not covered."""
    place = 0
    for rows in sorted(covered, key=lambda rows: rows.start):
        yield slice(place, rows.start)
        place = rows.stop
    yield slice(place, end)


def _moves(
    before: Sequence[Mapping[str, nn.Parameter]],
    old: Sequence[nn.Parameter],
    after: Sequence[Mapping[str, nn.Parameter]],
    new: Sequence[nn.Parameter],
) -> list[RowMove]:
    """Return where the rows of grown tables went, from their parameters by name before and after.

    A stack holds the parameters of its tables in its own way, so they are found there by their memory.
    """
    moves = []
    for was, now in zip(before, after, strict=True):
        for name in was.keys() & now.keys():
            source, target = _place(was[name], old), _place(now[name], new)
            if source and target and source[0] is not target[0]:
                rows = target[1].start, target[1].start + source[1].stop - source[1].start
                moves.append(RowMove(*source, target[0], slice(*rows)))
    return moves


def _place(part: Tensor, owners: Iterable[nn.Parameter]) -> tuple[nn.Parameter, slice] | None:
    """Return the parameter whose memory this one shares, and which of its rows; None where there are none."""
    start, end = memory_of(part)
    for owner in owners:
        first, last = memory_of(owner)
        if first <= start < end <= last and owner.dim():
            row = (start - first) // (owner.stride(0) * owner.itemsize)
            # a stack has rows of all tables one after the other, or all of a table's numbers as one row
            num = len(part) if part.dim() == owner.dim() else 1
            return owner, slice(row, row + num)
    return None


def _table_modules(
    model: nn.Module,
) -> Iterator[tuple[list[str], TableModule | TableCollection]]:
    """Yield each table or collection once, with all its names; never what lies inside one."""
    names: dict[nn.Module, list[str]] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if inside and name.startswith(inside):
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | Table | Bag | TableCollection):
            names.setdefault(module, []).append(name)
            inside = (*inside, f"{name}." if name else "")
    for module, found in names.items():
        assert isinstance(module, nn.Embedding | nn.EmbeddingBag | Table | Bag | TableCollection)
        yield found, module


def _info(
    name: str, table: AnyTable | nn.EmbeddingBag, kind: Kind, refusal: str | None
) -> TableInfo:
    methods = () if isinstance(table, nn.EmbeddingBag) else methods_of(table)
    return TableInfo(
        name=name,
        rows=table.num_embeddings,
        width=table.embedding_dim,
        kind=kind,
        methods=tuple(map(str, methods)),
        trainable=is_trainable(table),
        num_parameters=num_weights(table),
        num_bytes=sum(tensor.nbytes for tensor in stored_tensors(table)),
        refusal=refusal,
    )


def _refusal(names: list[str], module: TableModule, tie: str | None) -> str | None:
    """Return why this table cannot be changed; None when it can."""
    if names == [""]:
        return "it is the whole model, so there is nothing to replace it in: put it in a module"
    reason = lookup_refusal(module) or tie or _hook_refusal(module)
    # a bag leaves padding out, whatever its row holds; an embedding hands the row out
    padding = module.padding_idx if isinstance(module, nn.Embedding) else None
    if reason is None and padding is not None and bool(module.weight[padding].any()):
        return f"its padding row {padding} is not zero; set it to zero first"
    return reason


def lookup_refusal(module: TableModule) -> str | None:
    """Return what this table does besides looking rows up; None when nothing."""
    if isinstance(module, Table | Bag):
        return None
    exact = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    if type(module) is not exact:
        return (
            f"it is a {type(module).__name__}, a subclass of nn.{exact.__name__} "
            "that may look rows up in its own way"
        )
    if module.max_norm is not None:
        return f"max_norm={module.max_norm:g} rewrites rows at every lookup"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True rescales the gradient of a plain table only"
    weight = module.weight
    if type(weight) is not nn.Parameter or weight.is_meta:
        return f"its weight is a {type(weight).__name__} on {weight.device}, no ordinary parameter"
    if not weight.is_floating_point():
        return f"its weight holds {weight.dtype}, which no method can train or round"
    return None


def _tie_refusal(names: list[str], module: nn.Module, owners: dict[int, list[str]]) -> str | None:
    own = tuple(f"{name}." if name else "" for name in names)
    shared = {id(part.value) for part in module.modules() if isinstance(part, Shared)}
    for parameter in module.parameters():
        for name in owners[_start_of(parameter)]:
            if id(parameter) not in shared and not name.startswith(own):
                return f"its weight is tied to {name!r}, which would keep the old one"
    return None


def _start_of(parameter: nn.Parameter) -> int:
    """Return where the memory of a parameter begins: two parameters over one memory are tied, too."""
    return memory_of(parameter)[0] or -id(parameter)


def _hook_refusal(module: nn.Module) -> str | None:
    if any(getattr(part, kind, None) for part in module.modules() for kind in MODULE_HOOKS):
        return "it has hooks, which a replacement would not run: remove them first"
    if any("forward" in vars(part) for part in module.modules()):
        return "its forward was replaced by another function, which a new table would not call"
    gradients = ("_backward_hooks", "_post_accumulate_grad_hooks")
    for parameter in module.parameters():
        if any(getattr(parameter, kind, None) for kind in gradients):
            return "its weight has gradient hooks, which a replacement would not run"
    return None
