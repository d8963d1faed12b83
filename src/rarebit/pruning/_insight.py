"""Insight into what pruning kept: by row frequency, by table, and between fields (Liu et al., ICLR 2021).

    scans           share of the entries kept in each frequency group, along training (figure 6 b)
    heat map        how many entries the rows of each frequency group keep (figure 6 c)
    tables          how many entries the rows of each table keep: the width that was learned for them
    interactions    mean of |e_i · e_j| over all rows i and j of two fields, before and after (figure 5)

Frequency groups: rows that training never saw, then ten groups of equally many rows over all tables, ordered by count (ties
by position), the rarest first. Groups without rows are left out, and so are padding rows where they are known.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.errors import DataError, ModelFileError, NoTableError, SettingsError
from rarebit.methods.hashing import HashedTable
from rarebit.pruning.masked import Ticket, row_chunks
from rarebit.pruning.pep import ThresholdedTable, thresholded_tables
from rarebit.settings import check_types, from_mapping, to_mapping
from rarebit.storage.files import write_files
from rarebit.tables.find import FieldSite, Site, find_sites
from rarebit.tables.table import CHUNK, AnyTable, home_of

__all__ = [
    "FieldInteractions",
    "FrequencyGroup",
    "FrequencyGroups",
    "HeatMap",
    "PruningInsight",
    "PruningScan",
    "TableWidths",
    "TicketInsight",
    "Widths",
    "pruning_insight",
    "write_insight",
]

DECILES = 10


@dataclass(frozen=True, kw_only=True)
class FrequencyGroup:
    """Rows that training saw about equally often."""

    least: int
    """They were seen at least so often."""
    most: int
    """And at most so often; 0 where they were never seen."""
    rows: int
    """How many rows these are."""


class FrequencyGroups:
    """The rows of tables in groups by training count, from rows never seen to the most frequent tenth.

    counts     how often training saw each id, `(rows,)`, by the name of the table or its last part: the field
    names      the tables, by the names they have in their model
    padding    the padding rows of tables that have one, which belong to no group
    """

    def __init__(
        self,
        counts: Mapping[str, Tensor],
        names: Iterable[str],
        *,
        padding: Mapping[str, int] | None = None,
    ) -> None:
        self.counts = {name: _counts_of(name, counts) for name in names}
        """How often each row was seen, `(N,)` on the CPU, by the name of the table."""
        if not self.counts:
            raise DataError("frequency groups are of the rows of tables, got the name of none")
        sizes = [len(count) for count in self.counts.values()]
        seen = torch.cat([*self.counts.values()])
        counted = torch.ones(len(seen), dtype=torch.bool)
        starts = dict(zip(self.counts, torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
        for name, row in (padding or {}).items():
            if name in starts:
                counted[starts[name] + row] = False
        place, self.groups = _grouped(seen, counted)
        self.of_row = dict(zip(self.counts, place.split(sizes), strict=True))
        """The group of each row, `(N,)` of int8, by the name of the table; of padding, one past the last."""
        self._rows = {name: self._count(rows) for name, rows in self.of_row.items()}

    @classmethod
    def of(cls, model: nn.Module, counts: Mapping[str, Tensor]) -> "FrequencyGroups":
        """Return the groups of the tables of a model that have `PEP`; of a hashed one, those of its buckets."""
        chosen = thresholded_tables(model)
        sites = {site.info.name: site.table for site in find_sites(model)}
        by_table = {name: _stored_counts(sites[name], _counts_of(name, counts)) for name in chosen}
        padding = {
            name: table.padding_idx
            for name, table in chosen.items()
            if table.padding_idx is not None
        }
        return cls(by_table, chosen, padding=padding)

    def shares(self, tables: Mapping[str, AnyTable | Tensor]) -> list[float]:
        """Return the share of the entries of each group that are not zero.

        Tables are modules, whose rows are looked up some at a time on their device, or the masks or values
        of all their rows `(N, D)`.
        """
        self.check(tables)
        kept = torch.zeros(len(self.groups) + 1, dtype=torch.int64)
        entries = torch.zeros_like(kept)
        for name, table in tables.items():
            kept += self._kept(self.of_row[name], table)
            entries += self._rows[name] * _shape(table)[1]
        shares: list[float] = (kept[:-1].double() / entries[:-1].clamp(min=1)).tolist()
        return shares

    def check(self, tables: Mapping[str, AnyTable | Tensor]) -> None:
        """Raise unless these are the tables of the groups, with as many rows."""
        if set(tables) != set(self.counts):
            raise DataError(
                f"the frequency groups are of the tables {', '.join(self.counts)}, got "
                f"{', '.join(tables) or 'none'}; give all of them and no others"
            )
        for name, table in tables.items():
            rows, counted = _shape(table)[0], len(self.counts[name])
            if rows != counted:
                raise DataError(
                    f"{name} has {rows:,} rows, but there are training counts of {counted:,}; give those of "
                    "the data that it was trained on, and of a hashed table those of its buckets"
                )

    def _kept(self, of_row: Tensor, table: AnyTable | Tensor) -> Tensor:
        """Return how many entries of each group a table has, `(G + 1,)` on the CPU."""
        device = table.device if isinstance(table, Tensor) else home_of(table)
        kept = torch.zeros(len(self.groups) + 1, dtype=torch.int64, device=device)
        of_row, start = of_row.to(device), 0
        for rows in _some_rows(table):
            place = of_row[start : start + len(rows)].long()
            kept.index_add_(0, place, torch.count_nonzero(rows, dim=1))
            start += len(rows)
        return kept.cpu()

    def _count(self, of_row: Tensor) -> Tensor:
        return torch.bincount(of_row, minlength=len(self.groups) + 1)


def _grouped(seen: Tensor, counted: Tensor) -> tuple[Tensor, tuple[FrequencyGroup, ...]]:
    """Return the group of each row `(N,)`, and what the groups are."""
    order = torch.argsort(seen, stable=True)
    order = order[counted[order]]
    never = int((seen[order] == 0).sum())
    ranks = torch.arange(len(order) - never)
    # 0 for rows never seen, then tenths from 1; what holds no row is closed up
    tenth = torch.cat(
        [torch.zeros(never, dtype=torch.int64), 1 + ranks * DECILES // max(len(ranks), 1)]
    )
    found, number, rows = torch.unique_consecutive(tenth, return_inverse=True, return_counts=True)
    place = torch.full((len(seen),), len(found), dtype=torch.int8)
    place[order] = number.to(torch.int8)
    ends = rows.cumsum(0)
    least, most = seen[order][ends - rows], seen[order][ends - 1]
    shapes = zip(least.tolist(), most.tolist(), rows.tolist(), strict=True)
    return place, tuple(FrequencyGroup(least=a, most=b, rows=n) for a, b, n in shapes)


def _counts_of(name: str, counts: Mapping[str, Tensor]) -> Tensor:
    """Return the counts of a table on the CPU, by its name or that of its field."""
    field = name.rpartition(".")[2]
    found = counts.get(name, counts.get(field))
    if found is None:
        raise DataError(
            f"there are no training counts of {name}, only of {', '.join(counts) or 'nothing'}; give counts "
            "by the names of the tables or of their fields"
        )
    found = torch.as_tensor(found).cpu()
    if found.dim() != 1 or found.is_floating_point() or found.is_complex():
        raise DataError(
            f"the training counts of {name} must be one whole number a row, got {tuple(found.shape)} of "
            f"{found.dtype}"
        )
    if len(found) and int(found.min()) < 0:
        raise DataError(f"the training counts of {name} must be 0 or more, got {int(found.min())}")
    return found.long()


def _stored_counts(table: AnyTable, counts: Tensor) -> Tensor:
    """Return how often each row below the hashing of a table was seen, where there is any."""
    while not isinstance(table, nn.Embedding | ThresholdedTable):
        if isinstance(table, HashedTable):
            buckets = torch.arange(len(counts)) % table.buckets
            folded = torch.zeros(table.inner.num_embeddings, dtype=torch.int64)
            counts = folded.index_add_(0, buckets, counts)
        table = table.inner
    return counts


def _shape(table: AnyTable | Tensor) -> tuple[int, int]:
    if isinstance(table, Tensor):
        return table.shape[0], table.shape[1]
    return table.num_embeddings, table.embedding_dim


def _some_rows(table: AnyTable | Tensor) -> Iterator[Tensor]:
    if isinstance(table, Tensor):
        yield from table.split(CHUNK)
    else:
        yield from row_chunks(table)


FORMAT = 1
NUMBERS = "insight.json"
SCAN = ("step", "kept", "by_frequency")
MOST_BINS = 16
"""Bins of a heat map, besides that of empty rows."""
MOST_ROWS = 1 << 15
"""Rows of all tables together whose inner products are taken; of larger tables, some rows stand for all."""
CHUNK_ROWS = 512
"""Rows whose inner products with all others are made at once."""

Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class PruningScan:
    """What was left at one step of pruning."""

    step: int
    """Steps made."""
    kept: int
    """Entries left in all tables."""
    by_frequency: tuple[float, ...]
    """The share of its entries that each frequency group has left."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """How many entries the rows of each frequency group keep."""

    bins: tuple[tuple[int, int], ...]
    """Kept entries of a row, from the first number to the second: empty rows first."""
    shares: tuple[tuple[float, ...], ...]
    """For each group, the share of its rows that is in each bin."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """How many entries the rows of a table keep."""

    histogram: tuple[int, ...]
    """Rows, or lookups of rows, with 0, 1, 2, ... entries."""
    mean: float
    """Entries kept, on average."""
    median: int
    """The least number of entries that half of them do not exceed."""
    empty_share: float
    """The share that keeps nothing."""


@dataclass(frozen=True, kw_only=True)
class TableWidths:
    """The widths that pruning has left the rows of one table."""

    name: str
    """Where the table is in the model."""
    rows: int
    """Rows without padding."""
    width: int
    """How long a row was."""
    by_row: Widths
    """Every row counts once."""
    by_lookup: Widths | None
    """Every row counts as often as training saw it; None where it saw none of them."""


@dataclass(frozen=True, kw_only=True)
class TicketInsight:
    """What one ticket keeps."""

    kept: int
    """Entries that survive."""
    entries: int
    """Entries there were."""
    facts: Mapping[str, Any]
    """What the ticket says of itself, such as its step."""
    heat_map: HeatMap
    """Entries kept against frequency."""
    tables: tuple[TableWidths, ...]
    """The same by table."""


@dataclass(frozen=True, kw_only=True)
class FieldInteractions:
    """The mean absolute inner product of the rows of two fields, for every two fields.

    A field with itself is the mean over all pairs of its rows, a row with itself among them.
    """

    tables: tuple[str, ...]
    """The tables of the fields, in the order of lines and columns."""
    rows: tuple[int, ...]
    """Rows of each table that were looked at: all, or as many as stand for it, at equal distances."""
    exact: bool
    """Whether all rows of all tables were looked at."""
    before: Matrix
    """Of the model as it was; None where a value is not finite or two tables have no common width."""
    after: Matrix
    """Of the model that was pruned and trained again."""


@dataclass(frozen=True, kw_only=True)
class PruningInsight:
    """What pruning kept, as plain values."""

    groups: tuple[FrequencyGroup, ...]
    """The frequency groups: rows never seen, then tenths of the others from the rarest."""
    scans: tuple[PruningScan, ...] = ()
    """What was left along training."""
    tickets: tuple[TicketInsight, ...]
    """What each ticket keeps, the largest first."""
    interactions: FieldInteractions | None = None
    """How fields meet before and after, where both models were given."""

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values, as `insight.json` holds it."""
        return {"format": FORMAT, **to_mapping(self)}


def pruning_insight(
    tickets: Sequence[Ticket],
    counts: Mapping[str, Tensor] | FrequencyGroups,
    *,
    scans: Sequence[Mapping[str, Any]] = (),
    before: nn.Module | None = None,
    after: nn.Module | None = None,
) -> PruningInsight:
    """Return what tickets of one pruning run keep, and what that did to how fields meet.

    counts           how often training saw each id, `(rows,)`, by table or field; or the groups that the
                     scans were made with, which know hashed tables and padding
    scans            a mapping a look at the tables: step, kept, by_frequency as `FrequencyGroups.shares`
    before, after    the model trained without pruning, and the one retrained from a ticket

    >>> ticket = Ticket({"user": torch.tensor([[True, False], [False, False]])})
    >>> insight = pruning_insight([ticket], {"user": torch.tensor([3, 1])})
    >>> widths = insight.tickets[0].tables[0]
    >>> widths.by_row.mean, widths.by_lookup.mean
    (0.5, 0.75)
    """
    _check(tickets, before, after)
    names = list(tickets[0].kept)
    groups = counts
    if not isinstance(groups, FrequencyGroups):
        model = after if before is None else before
        groups = FrequencyGroups(groups, names, padding=_padding(model))
    interactions = None
    if before is not None and after is not None:
        interactions = _compare(_sites(before, tickets[0]), _sites(after, tickets[0]))
    return PruningInsight(
        groups=groups.groups,
        scans=tuple(_scan(scan, groups) for scan in scans),
        tickets=tuple(
            _look_at(ticket, groups) for ticket in sorted(tickets, key=lambda t: -t.num_kept)
        ),
        interactions=interactions,
    )


def write_insight(
    insight: PruningInsight, folder: str | os.PathLike[str], *, plots: bool = True
) -> list[Path]:
    """Write `insight.json` and the plots to a folder, and return the files.

    Each file is written under another name and renamed, so that one with its name is whole.

    >>> import tempfile
    >>> insight = pruning_insight([Ticket({"x": torch.eye(3).bool()})], {"x": torch.tensor([3, 1, 0])})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in write_insight(insight, folder, plots=False)]
    ['insight.json']
    """
    from rarebit.pruning._plots import draw_insight

    try:
        text = json.dumps(insight.to_mapping(), indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"the facts of a ticket must be what JSON can hold: {error}") from None
    files = {NUMBERS: text.encode()} | (draw_insight(insight) if plots else {})
    return write_files(Path(folder), files, error=ModelFileError)


def _check(tickets: Sequence[Ticket], before: nn.Module | None, after: nn.Module | None) -> None:
    if not tickets:
        raise SettingsError("an insight needs at least one ticket, got none")
    shapes = [{name: mask.shape for name, mask in ticket.kept.items()} for ticket in tickets]
    if any(shape != shapes[0] for shape in shapes):
        raise DataError(
            "the tickets must be of one pruning run, got masks of different tables or shapes"
        )
    if (before is None) != (after is None):
        raise SettingsError("before and after are compared with each other; give both or neither")


def _scan(scan: Mapping[str, Any], groups: FrequencyGroups) -> PruningScan:
    said = {key: scan[key] for key in SCAN if key in scan}
    found: PruningScan = from_mapping(PruningScan, said, where="a scan")
    if len(found.by_frequency) != len(groups.groups):
        raise DataError(
            f"there are {len(groups.groups)} frequency groups, but the scan of step {found.step} has "
            f"{len(found.by_frequency)} shares; give the counts that the scans were made with"
        )
    return found


def _look_at(ticket: Ticket, groups: FrequencyGroups) -> TicketInsight:
    groups.check(ticket.kept)
    kept = {name: torch.count_nonzero(mask, dim=1).cpu() for name, mask in ticket.kept.items()}
    return TicketInsight(
        kept=ticket.num_kept,
        entries=ticket.num_entries,
        facts=ticket.facts,
        heat_map=_heat_map(kept, groups, max(mask.shape[1] for mask in ticket.kept.values())),
        tables=tuple(
            _table_widths(name, kept[name], groups, mask.shape[1])
            for name, mask in ticket.kept.items()
        ),
    )


def _heat_map(kept: Mapping[str, Tensor], groups: FrequencyGroups, width: int) -> HeatMap:
    step = max(math.ceil(width / MOST_BINS), 1)
    bins = ((0, 0), *((a, min(a + step - 1, width)) for a in range(1, width + 1, step)))
    rows = torch.zeros(len(groups.groups) + 1, len(bins), dtype=torch.int64)
    for name, entries in kept.items():
        place = groups.of_row[name].long() * len(bins) + (entries + step - 1) // step
        rows += torch.bincount(place, minlength=rows.numel()).view_as(rows)
    shares = rows[:-1].double() / rows[:-1].sum(dim=1, keepdim=True)
    return HeatMap(bins=bins, shares=tuple(map(tuple, shares.tolist())))


def _table_widths(name: str, kept: Tensor, groups: FrequencyGroups, width: int) -> TableWidths:
    own = groups.of_row[name] < len(groups.groups)
    kept, counts = kept[own], groups.counts[name][own]
    lookups = torch.zeros(width + 1, dtype=torch.int64).index_add_(0, kept, counts)
    return TableWidths(
        name=name,
        rows=len(kept),
        width=width,
        by_row=_widths(torch.bincount(kept, minlength=width + 1)),
        by_lookup=_widths(lookups) if lookups.any() else None,
    )


def _widths(histogram: Tensor) -> Widths:
    """Return what a histogram of kept entries `(D + 1,)` says."""
    total = max(int(histogram.sum()), 1)
    reached = 2 * histogram.cumsum(0) >= total
    return Widths(
        histogram=tuple(histogram.tolist()),
        mean=float((histogram * torch.arange(len(histogram))).sum()) / total,
        median=int(reached.int().argmax()),
        empty_share=float(histogram[0]) / total,
    )


def _padding(model: nn.Module | None) -> dict[str, int]:
    sites = [] if model is None else find_sites(model)
    known = {site.info.name: site.table.padding_idx for site in sites}
    return {name: row for name, row in known.items() if row is not None}


def _sites(model: nn.Module, ticket: Ticket) -> list[Site]:
    """Return the tables of a model that a ticket is of, but those with rows of one number."""
    found = {site.info.name: site for site in find_sites(model)}
    missing = [name for name in ticket.kept if name not in found]
    if missing:
        raise NoTableError(
            f"{type(model).__name__} has no table {missing[0]!r}, of which the ticket has a mask; give the "
            "models before and after pruning"
        )
    return [found[name] for name, mask in ticket.kept.items() if mask.shape[1] > 1]


def _compare(before: Sequence[Site], after: Sequence[Site]) -> FieldInteractions | None:
    if [site.info.rows for site in before] != [site.info.rows for site in after]:
        raise DataError("the tables of before and after differ in their numbers of rows")
    if not before:
        return None
    ids = _rows_to_look_at(before)
    return FieldInteractions(
        tables=tuple(site.info.name for site in before),
        rows=tuple(map(len, ids)),
        exact=all(len(rows) == _real_rows(site) for rows, site in zip(ids, before, strict=True)),
        before=_interactions(before, ids),
        after=_interactions(after, ids),
    )


def _real_rows(site: Site) -> int:
    return site.info.rows - (site.table.padding_idx is not None)


def _rows_to_look_at(sites: Sequence[Site]) -> list[Tensor]:
    """Return ids of each table, no padding: all, or as many as leave the sum at most `MOST_ROWS`."""
    sizes = [_real_rows(site) for site in sites]
    most = bisect_right(
        range(1, max(*sizes, 1) + 1), MOST_ROWS, key=lambda cap: sum(min(cap, n) for n in sizes)
    )
    chosen = []
    for site, size in zip(sites, sizes, strict=True):
        number = min(size, max(most, 1))
        # at equal distances: ids are often in the order of their frequency, so all of it is met
        places = torch.arange(number) * size // max(number, 1)
        padding = site.table.padding_idx
        chosen.append(places if padding is None else places + (places >= padding))
    return chosen


def _interactions(sites: Sequence[Site], ids: Sequence[Tensor]) -> Matrix:
    rows = [_rows_of(site, own) for site, own in zip(sites, ids, strict=True)]
    matrix: list[list[float | None]] = [[None] * len(rows) for _ in rows]
    for i, left in enumerate(rows):
        for j, right in enumerate(rows[: i + 1]):
            if left.shape[1] == right.shape[1]:
                matrix[i][j] = matrix[j][i] = _mean_product(left, right)
    return tuple(map(tuple, matrix))


@torch.no_grad()
def _rows_of(site: Site, ids: Tensor) -> Tensor:
    """Return rows as the interaction of the model meets them: a field's own width is projected."""
    rows: Tensor = site.table(ids.to(home_of(site.table)))
    if isinstance(site, FieldSite) and str(site.index) in site.collection.projections:
        rows = rows @ site.collection.projections[str(site.index)]
    return rows.float()


def _mean_product(left: Tensor, right: Tensor) -> float | None:
    """Return the mean of |l · r| over the rows of both, some at a time; None where it is not finite."""
    sums = [(some @ right.mT).abs_().sum(dim=1).double().sum() for some in left.split(CHUNK_ROWS)]
    if not left.numel() or not right.numel():
        return None
    mean = float(torch.stack(sums).sum()) / (len(left) * len(right))
    return mean if math.isfinite(mean) else None
