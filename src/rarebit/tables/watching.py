"""Which tables of a model have their lookups watched, and how their rows are numbered."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from torch import nn

from rarebit.errors import NoTableError, UnsupportedTableError
from rarebit.tables.bag import Bag
from rarebit.tables.find import FieldSite, ModuleSite, Site, TableInfo, find_sites, lookup_refusal
from rarebit.tables.lookups import (
    Lookable,
    Numbering,
    RowGroup,
    Watch,
    WatchedTable,
    is_watched,
)
from rarebit.tables.stack import Stack
from rarebit.tables.tied import TiedTable

__all__ = ["choose_sites", "watch_tables", "watch_tied"]

MAX_NAMES = 8


def choose_sites(
    model: nn.Module, where: Callable[[TableInfo], bool] | None, min_width: int
) -> list[Site]:
    """Return the tables to watch; raise when there are none, or one cannot be watched."""
    chosen, skipped = [], []
    for site in find_sites(model):
        info = site.info
        if info.width < min_width:
            skipped.append(f"{info.name} (narrower than min_width={min_width})")
        elif where is not None and not where(info):
            skipped.append(f"{info.name} (not chosen)")
        elif not info.trainable:
            skipped.append(f"{info.name} (frozen)")
        else:
            chosen.append(site)
    if not chosen:
        seen = ", ".join(skipped[:MAX_NAMES]) or "no nn.Embedding and no nn.EmbeddingBag"
        more = f" and {len(skipped) - MAX_NAMES} more" if len(skipped) > MAX_NAMES else ""
        raise NoTableError(f"RowGradients matched no table; the model has {seen}{more}")
    for site in chosen:
        reason = _refusal(site)
        if reason:
            raise UnsupportedTableError(
                f"{site.info.name!r} cannot have row gradients: {reason}. "
                f"Leave it out with where=lambda t: t.name != {site.info.name!r}"
            )
    return chosen


def _refusal(site: Site) -> str | None:
    module = _stack_of(site)[0] if isinstance(site, FieldSite) else _module_of(site)
    if is_watched(module):
        return "it has row gradients already: close those first"
    if isinstance(site, FieldSite):
        return site.tie
    if site.tie and not isinstance(site.module, nn.Embedding | nn.EmbeddingBag):
        return site.tie
    return lookup_refusal(site.module)


def watch_tables(watch: Watch, sites: Iterable[Site]) -> list[WatchedTable]:
    """Watch each module, and each stack with the fields that were chosen of it."""
    tables = []
    by_stack: dict[Stack, list[FieldSite]] = defaultdict(list)
    for site in sites:
        if isinstance(site, FieldSite):
            by_stack[_stack_of(site)[0]].append(site)
        elif not site.tie:
            padding = site.table.padding_idx
            numbering = Numbering(0, -1 if padding is None else padding)
            tables.append(WatchedTable(watch, _group([site]), _module_of(site), numbering))
    for stack, fields in by_stack.items():
        tables.append(WatchedTable(watch, _group(fields), stack, _numbering(stack, fields)))
    return tables


def watch_tied(watch: Watch, sites: Iterable[Site]) -> list[TiedTable]:
    """Watch each weight that a chosen table shares with another part of the model."""
    by_weight: dict[nn.Parameter, list[ModuleSite]] = defaultdict(list)
    for site in sites:
        if isinstance(site, ModuleSite) and site.tie:
            by_weight[next(site.module.parameters())].append(site)
    tied = []
    for weight, tables in by_weight.items():
        names = tuple(site.info.name for site in tables)
        group = RowGroup(names, (0,) * len(names), *weight.shape)
        tied.append(TiedTable(watch, group, weight, [site.module for site in tables]))
    return tied


def _group(sites: Sequence[Site]) -> RowGroup:
    first_rows = [0, *accumulate(site.info.rows for site in sites)]
    names = tuple(site.info.name for site in sites)
    return RowGroup(names, tuple(first_rows[:-1]), first_rows[-1], sites[0].info.width)


def _module_of(site: ModuleSite) -> Lookable:
    return site.module.table if isinstance(site.module, Bag) else site.module


def _stack_of(site: FieldSite) -> tuple[Stack, int]:
    """Return the stack a field lies in, and its place there."""
    collection = site.collection
    for members, stack in zip(collection.members, collection.stacks, strict=True):
        if site.index in members:
            assert isinstance(stack, Stack)
            return stack, members.index(site.index)
    raise AssertionError(site.info.name)


def _numbering(stack: Stack, sites: Sequence[FieldSite]) -> Numbering:
    places = [_stack_of(site)[1] for site in sites]
    first_rows = dict(zip(places, _group(sites).first_rows, strict=True))
    padding = {
        place: site.table.padding_idx
        for place, site in zip(places, sites, strict=True)
        if site.table.padding_idx is not None
    }
    fields = stack.field_of_slot.tolist()
    return Numbering(
        [first_rows.get(place, -1) for place in fields],
        [padding.get(place, -1) for place in fields],
    )
