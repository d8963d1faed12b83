"""Tables that grow: `grow_` gives a table rows for new ids, and leaves the rows of old ids as they are.

    rows       ids 0 .. N - 1 keep theirs to the last bit; ids N .. start at the prior, at noise, or at given rows
    reset      rows of ids that are given to someone else start like new ones: nothing inherits a stranger's row
    state      an optimizer that is passed along keeps what it knows of old rows; that of new rows starts anew
    schema     that of a model of ours follows

How a table of a method grows is a few lines in the file of the method: `Table.grown`.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.data.schema import Schema
from rarebit.errors import DataError, NoTableError, SettingsError, UnsupportedTableError
from rarebit.machine import require_memory
from rarebit.settings import suggest
from rarebit.tables.apply import (
    FieldSite,
    Site,
    TableChanges,
    find_sites,
    put_tables,
    refuse_to_follow,
    refuse_wrapped_model,
    reported,
    restart_rows,
)
from rarebit.tables.counts import Counts, by_table_name, counts_of_table
from rarebit.tables.table import CHUNK, AnyTable, full_table, grow_table, home_of, row_chunks

NewRows: TypeAlias = Literal["prior", "noise"] | Tensor | Callable[[Tensor], Tensor]
"""How new rows start: a rule, the rows `(new, D)`, or a function from the old rows `(N, D)` to them."""


def grow_(
    model: nn.Module,
    sizes: Mapping[str, int],
    *,
    start: NewRows | Mapping[str, NewRows] = "prior",
    reset: Mapping[str, Tensor | Sequence[int]] | None = None,
    counts: Counts | None = None,
    optimizer: Optimizer | None = None,
    verbose: bool = True,
) -> TableChanges:
    """Give tables of a model more rows, in place, and return what changed. Old ids keep their rows.

    sizes      the new number of rows, by the name of the table or of its field
    start      how a new row starts: "prior", the mean of the table's rows; "noise", as torch draws `nn.Embedding`, as
               large as the table's rows; the rows themselves, `(new, D)`; or a function from the old rows `(N, D)` to
               them, for those who know more of the new ids. A mapping gives these by name
    reset      ids by name whose rows start anew, because they mean something else from now on; rows that are given, or
               that a function returns, are those of the reset ids, in their order, and then those of the new ones
    counts     how often training saw each id, by name: the mean counts each row that often
    optimizer  keeps its state of the old rows; that of new rows starts anew. Without, build a new one after this call

    Either all named tables grow or, on an error, none. Tables in a compressed form do not grow: `merge_` them first.

    >>> model = nn.ModuleDict({"item": nn.Embedding(10_000, 16)})
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> changes = grow_(model, {"item": 12_000}, optimizer=optimizer)
    grow: 1 of 1 tables, 160,000 -> 192,000 weights stored
      item  10,000 -> 12,000 x 16, 160,000 -> 192,000
    """
    refuse_wrapped_model(model, trained="grow_")
    sites = find_sites(model)
    reset = {} if reset is None else reset
    _check_names("sizes", sizes, sites)
    _check_names("reset", reset, sites)
    if isinstance(start, Mapping):
        _check_names("start", start, sites)
    changes = [_change(site, sizes, reset) for site in sites]
    rows = {one.site.info.name: one.site.info.rows + one.new for one in changes if one.new}
    schemas = _grown_schemas(model, sites, rows)
    tables, fresh = [], {}
    for site, new, again, _ in (one for one in changes if one.new or len(one.reset)):
        own = _new_rows(site, new + len(again), start, counts)
        if len(again):
            fresh[site.info.name] = again, _last_rows(site.table, own[: len(again)])
        if new:
            tables.append(grow_table(site.table, own[len(again) :]))
    if optimizer is not None and fresh:
        refuse_to_follow(optimizer, "grow")
    found = put_tables(
        model,
        "grow",
        [one.site for one in changes if one.new],
        tables,
        skipped=[(one.site.info.name, one.why_not) for one in changes if not one.new],
        optimizer=optimizer,
        grown=True,
    )
    _put_rows(model, fresh, optimizer)
    told = []
    for module, (place, schema) in schemas.items():
        if module.schema.encoder is not None:
            told.append(f"{place} (without its encoder, which does not know the new ids)")
        module.schema = schema
    return reported(replace(found, exchanged=(*found.exchanged, *told)), verbose)


class _Change(NamedTuple):
    """What happens to a table."""

    site: Site
    new: int
    """New rows."""
    reset: Tensor
    """Ids whose rows start anew."""
    why_not: str
    """Why it does not grow, for the report."""


def _change(
    site: Site, sizes: Mapping[str, int], reset: Mapping[str, Tensor | Sequence[int]]
) -> _Change:
    """Return what happens to a table, or raise where that cannot be."""
    name, wanted = site.info.name, _wanted_rows(site, sizes)
    again = _reset_ids(site, by_table_name(name, reset))
    why_not = "not named" if wanted is None else f"has {wanted:,} rows already"
    why_not = f"{len(again):,} rows start anew" if len(again) else why_not
    new = 0 if wanted is None else wanted - site.info.rows
    if site.info.refusal and (new or len(again)):
        raise UnsupportedTableError(f"{name!r} cannot grow: {site.info.refusal}")
    return _Change(site, new, again, why_not)


def _reset_ids(site: Site, given: Tensor | Sequence[int] | None) -> Tensor:
    """Return the ids of a table whose rows start anew; none where it is not named."""
    name, rows = site.info.name, site.info.rows
    ids = torch.as_tensor([] if given is None else given, device=home_of(site.table))
    if ids.dtype.is_floating_point and len(ids):
        raise DataError(f"reset: ids of {name!r} must be integers, got {ids.dtype}")
    ids = ids.reshape(-1).long()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise DataError(
            f"reset: {name!r} has the ids 0 to {rows - 1:,}, got {int(ids.min()):,} to {int(ids.max()):,}"
        )
    if len(ids.unique()) < len(ids):
        raise DataError(f"reset: an id of {name!r} is named twice")
    return ids


@torch.no_grad()
def _last_rows(table: AnyTable, start: Tensor) -> dict[str, Tensor]:
    """Return what rows that start here have in each tensor of the table, by its name."""
    grown, own = grow_table(table, start).state_dict(), table.state_dict()
    return {
        name: tensor[len(own[name]) :].clone()
        for name, tensor in grown.items()
        if tensor.shape != own[name].shape
    }


@torch.no_grad()
def _put_rows(
    model: nn.Module,
    fresh: Mapping[str, tuple[Tensor, Mapping[str, Tensor]]],
    optimizer: Optimizer | None,
) -> None:
    """Put fresh rows into tables, in place, and begin their state in the optimizer anew."""
    for site in find_sites(model) if fresh else ():
        ids, rows = fresh.get(site.info.name, (torch.empty(0), {}))
        tensors = site.table.state_dict()  # the table of a stack shares its memory
        for name, row in rows.items():
            tensors[name][ids] = row
            if optimizer is not None:
                restart_rows(optimizer, tensors[name], ids)


def _check_names(what: str, values: object, sites: Sequence[Site]) -> None:
    if not isinstance(values, Mapping):
        raise SettingsError(
            f"{what} must be given by the names of tables, such as {{'item': 12_000}}, got {values!r}"
        )
    known = {name: None for site in sites for name in (site.info.field, site.info.name)}
    for name in values:
        if name not in known:
            raise NoTableError(f"{what}: there is no table {name!r}{suggest(str(name), known)}")


def _wanted_rows(site: Site, sizes: Mapping[str, int]) -> int | None:
    """Return how many rows a table should have; None where it is not named."""
    name, given = site.info.name, by_table_name(site.info.name, sizes)
    if given is None:
        return None
    try:
        rows = operator.index(given)
    except TypeError:
        raise SettingsError(f"the rows of {name!r} must be an integer, got {given!r}") from None
    if rows < site.info.rows:
        raise SettingsError(
            f"{name!r} has {site.info.rows:,} rows and cannot grow to {rows:,}: ids would lose their rows"
        )
    return rows


def _grown_schemas(
    model: nn.Module, sites: Sequence[Site], rows: Mapping[str, int]
) -> dict[Any, tuple[str, Schema]]:
    """Return the modules of a model that keep a schema, with their places and what their schema will be."""
    found: dict[Any, tuple[str, Schema]] = {}
    for place, module in model.named_modules():
        schema = getattr(module, "schema", None)
        if not isinstance(schema, Schema):
            continue
        inside = set(module.modules())
        sizes: dict[str, dict[int, str]] = {}
        for site in sites:
            if isinstance(site, FieldSite) and site.collection in inside:
                name, field = site.info.name, site.collection.fields[site.index].name
                sizes.setdefault(field, {})[rows.get(name, site.info.rows)] = name
        for field, own in sizes.items():
            if len(own) > 1:
                raise SettingsError(
                    f"{' and '.join(map(repr, own.values()))} are tables of one field; grow them together by its "
                    f"name: {{{field!r}: {max(own)}}}"
                )
        fields = tuple(
            replace(field, rows=next(iter(sizes[field.name])), vocabulary="")
            if field.name in sizes and field.rows not in sizes[field.name]
            else field
            for field in schema.fields
        )
        if fields != schema.fields:
            path = f"{place}.schema" if place else "schema"
            found[module] = path, Schema(fields)
    return found


@torch.no_grad()
def _new_rows(
    site: Site, new: int, start: NewRows | Mapping[str, NewRows], counts: Counts | None
) -> Tensor:
    """Return how the new rows of a table start, `(new, D)`."""
    given = by_table_name(site.info.name, start) if isinstance(start, Mapping) else start
    start = "prior" if given is None else given
    seen = None
    if counts is not None and (
        not isinstance(counts, Mapping) or by_table_name(site.info.name, counts) is not None
    ):
        seen = counts_of_table(site.info.name, site.info.rows, counts)
    table, name, shape = site.table, site.info.name, (new, site.info.width)
    like = next(chain(table.parameters(), table.buffers()))
    if isinstance(start, str):
        if start not in ("prior", "noise"):
            raise SettingsError(
                f"start must be 'prior', 'noise', rows, or a function of the old rows, got {start!r}"
            )
        mean = _mean_row(table, seen)
        if not bool(mean.isfinite().all()):
            raise UnsupportedTableError(
                f"{name!r} cannot grow: it has numbers that are not finite; go back to weights from before "
                "training diverged"
            )
        if start == "prior":
            return mean.to(like.dtype).expand(shape)
        require_memory(
            new * shape[1] * like.itemsize, f"{new:,} new rows", "use fewer", like.device
        )
        return torch.randn(shape, dtype=like.dtype, device=like.device).mul_(_spread(table))
    rows: object = start(full_table(table).clone()) if callable(start) else start
    if not isinstance(rows, Tensor) or rows.shape != shape:
        came = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise DataError(f"the new rows of {name!r} must be a tensor of shape {shape}, got {came}")
    if not bool(rows.isfinite().all()):
        raise DataError(f"the new rows of {name!r} have numbers that are not finite")
    return rows.to(like)


def _mean_row(table: AnyTable, counts: Tensor | None = None) -> Tensor:
    """Return the mean of the rows without padding `(D,)`, weighted by counts where any id was seen."""
    padding, start = table.padding_idx, 0
    if counts is not None and padding is not None:
        counts = counts.index_fill(0, torch.tensor(padding), 0)
    weights = counts.double() if counts is not None and bool(counts.any()) else None
    total = torch.zeros(table.embedding_dim, dtype=torch.float64, device=home_of(table))
    for rows in _chunks(table):
        own = None if weights is None else weights[start : start + len(rows)].to(rows)
        total += rows.sum(0) if own is None else own @ rows
        start += len(rows)
    if weights is not None:
        return total / weights.sum()
    if padding is None:
        return total / max(start, 1)
    return (total - _row(table, padding)) / max(start - 1, 1)


def _spread(table: AnyTable) -> float:
    """Return the standard deviation of the entries around the mean row, without padding."""
    mean, total, num = _mean_row(table), 0.0, table.num_embeddings
    for rows in _chunks(table):
        total += float((rows - mean).square().sum())
    if table.padding_idx is not None:
        total -= float((_row(table, table.padding_idx) - mean).square().sum())
        num -= 1
    return float((max(total, 0.0) / max(num * len(mean), 1)) ** 0.5)


def _row(table: AnyTable, number: int) -> Tensor:
    row: Tensor = table(torch.tensor([number], device=home_of(table)))[0]
    return row


def _chunks(table: AnyTable) -> Iterator[Tensor]:
    """Yield the rows of a table in float32 at least; those of a plain table are not copied."""
    plain = isinstance(table, nn.Embedding)
    for rows in table.weight.split(CHUNK) if plain else row_chunks(table):
        yield rows.to(torch.promote_types(rows.dtype, torch.float32))
