"""Insight into what pruning kept: by row frequency, by table, and between fields (Liu et al., ICLR 2021).

    scans           share of the entries kept in each frequency group, during training (figure 6 b)
    heat map        how many entries the rows of each frequency group keep (figure 6 c)
    tables          how many entries the rows of each table keep: their learned widths
    interactions    mean of |e_i · e_j| over all rows i and j of two fields, before and after (figure 5)

Frequency groups: rows that training never saw, then ten groups of equal size over all tables, ordered by count (ties by
position), the rarest first. Empty groups are left out, and so are known padding rows.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.errors import DataError, ModelFileError, NoTableError, SettingsError
from rarebit.methods._counts import counts_by_table
from rarebit.pruning.masked import Ticket
from rarebit.pruning.pep import thresholded_tables
from rarebit.settings import check_types, from_mapping, to_mapping
from rarebit.storage.files import write_files
from rarebit.tables.apply import FieldSite, Site, find_sites
from rarebit.tables.counts import counts_of_table
from rarebit.tables.table import CHUNK, AnyTable, home_of, row_chunks

DECILES = 10


@dataclass(frozen=True, kw_only=True)
class FrequencyGroup:
    """Rows with similar training counts."""

    least: int
    """The smallest count."""
    most: int
    """The largest count; 0 for rows never seen."""
    rows: int
    """Number of rows."""


class FrequencyGroups:
    """The rows of tables in groups by training count, from rows never seen to the most frequent tenth.

    counts     how often training saw each id, `(rows,)`, by the name of the table or its last part: the field
    names      the tables, by their names in the model
    padding    the padding rows of tables, which belong to no group
    """

    def __init__(
        self, counts: Mapping[str, Tensor], names: Iterable[str], *, padding: Mapping[str, int] = {}
    ) -> None:
        self.counts = {name: counts_of_table(name, None, counts) for name in names}
        """How often training saw each row, `(N,)` on the CPU, by the name of the table."""
        if not self.counts:
            raise DataError("frequency groups need the name of at least one table, got none")
        is_padding = {
            name: torch.zeros_like(n, dtype=torch.bool) for name, n in self.counts.items()
        }
        for name, row in padding.items():
            if name in is_padding:
                is_padding[name][row] = True
        place, self.groups = _grouped(
            torch.cat([*self.counts.values()]), ~torch.cat([*is_padding.values()])
        )
        sizes = [len(count) for count in self.counts.values()]
        self.of_row = dict(zip(self.counts, place.split(sizes), strict=True))
        """The group of each row, `(N,)` of int8, by the name of the table; of padding, one past the last."""

    @classmethod
    def of(cls, model: nn.Module, counts: Mapping[str, Tensor]) -> "FrequencyGroups":
        """Return the groups of the tables of a model that have `PEP`; for a hashed one, those of its buckets."""
        chosen = thresholded_tables(model)
        tables = {site.info.name: site.table for site in find_sites(model)}
        by_table = counts_by_table({name: tables[name] for name in chosen}, counts)
        return cls(by_table, chosen, padding=_padding_rows(chosen))

    def shares(self, tables: Mapping[str, AnyTable | Tensor]) -> list[float]:
        """Return the share of entries that are not zero, per group.

        Tables are modules, whose rows are looked up in chunks on their device, or masks or values `(N, D)`.
        """
        self.check(tables)
        kept = torch.zeros(len(self.groups) + 1, dtype=torch.int64)
        entries = torch.zeros_like(kept)
        for name, table in tables.items():
            if isinstance(table, Tensor):
                device, width, chunks = table.device, table.shape[1], iter(table.split(CHUNK))
            else:
                device, width, chunks = home_of(table), table.embedding_dim, row_chunks(table)
            of_row, start = self.of_row[name].to(device), 0
            found = torch.zeros_like(kept, device=device)
            for rows in chunks:
                place = of_row[start : start + len(rows)].long()
                found.index_add_(0, place, torch.count_nonzero(rows, dim=1))
                start += len(rows)
            kept += found.cpu()
            entries += torch.bincount(self.of_row[name], minlength=len(kept)) * width
        shares: list[float] = (kept[:-1].double() / entries[:-1].clamp(min=1)).tolist()
        return shares

    def check(self, tables: Mapping[str, AnyTable | Tensor]) -> None:
        """Raise unless these are the tables of the groups, with the same rows."""
        if set(tables) != set(self.counts):
            raise DataError(
                f"the frequency groups are of the tables {', '.join(self.counts)}, got "
                f"{', '.join(tables) or 'none'}; give all of them and no others"
            )
        for name, table in tables.items():
            rows = len(table) if isinstance(table, Tensor) else table.num_embeddings
            if rows != len(self.counts[name]):
                raise DataError(
                    f"{name} has {rows:,} rows, but there are training counts of {len(self.counts[name]):,}; "
                    "give those of its training data, and for a hashed table those of its buckets"
                )


def _grouped(seen: Tensor, counted: Tensor) -> tuple[Tensor, tuple[FrequencyGroup, ...]]:
    """Return the group of each row `(N,)`, and the groups."""
    order = torch.argsort(seen, stable=True)
    order = order[counted[order]]
    never = int((seen[order] == 0).sum())
    ranks = torch.arange(len(order) - never)
    # 0 for rows never seen, then tenths from 1; empty ones are left out
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


FORMAT = 1
NUMBERS = "insight.json"
SCAN = ("step", "kept", "by_frequency")
MOST_BINS = 16
"""Bins of a heat map, besides that of empty rows."""
MOST_ROWS = 1 << 15
"""Rows of all tables together to take inner products of; larger tables are sampled."""
CHUNK_ROWS = 512
"""Rows to multiply with all others at once."""

Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class PruningScan:
    """The tables at one step of pruning."""

    step: int
    kept: int
    """Entries left in all tables."""
    by_frequency: tuple[float, ...]
    """The share of entries left, per frequency group."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """How many entries the rows of each frequency group keep."""

    bins: tuple[tuple[int, int], ...]
    """Entries kept per row, from the first number to the second: empty rows first."""
    shares: tuple[tuple[float, ...], ...]
    """For each group, the share of its rows in each bin."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """How many entries the rows of a table keep."""

    histogram: tuple[int, ...]
    """Rows, or lookups of rows, with 0, 1, 2, ... entries."""
    mean: float
    median: int
    empty_share: float
    """The share that keeps no entry."""


@dataclass(frozen=True, kw_only=True)
class TableWidths:
    """The widths of the rows of one table after pruning."""

    name: str
    rows: int
    """Rows without padding."""
    width: int
    """The width before pruning."""
    by_row: Widths
    """Every row counts once."""
    by_lookup: Widths | None
    """Every row counts as often as training saw it; None if it saw none of them."""


@dataclass(frozen=True, kw_only=True)
class TicketInsight:
    """What one ticket keeps."""

    kept: int
    entries: int
    """Entries before pruning."""
    facts: Mapping[str, Any]
    """The facts of the ticket, such as its step."""
    heat_map: HeatMap
    tables: tuple[TableWidths, ...]


@dataclass(frozen=True, kw_only=True)
class FieldInteractions:
    """The mean absolute inner product of the rows of two fields, for every two fields.

    For a field with itself it is the mean over all pairs of its rows, including a row with itself.
    """

    tables: tuple[str, ...]
    """The tables of the fields, in the order of the matrix."""
    rows: tuple[int, ...]
    """Rows used of each table: all, or a sample at equal distances."""
    exact: bool
    """Whether all rows of all tables were used."""
    before: Matrix
    """Of the unpruned model; None where a value is not finite or two tables differ in width."""
    after: Matrix
    """Of the pruned and retrained model."""


@dataclass(frozen=True, kw_only=True)
class PruningInsight:
    """What pruning kept, as plain values."""

    groups: tuple[FrequencyGroup, ...]
    """Rows never seen, then tenths of the others from the rarest."""
    scans: tuple[PruningScan, ...] = ()
    tickets: tuple[TicketInsight, ...]
    """The largest first."""
    interactions: FieldInteractions | None = None
    """None without the models before and after."""

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values of `insight.json`."""
        return {"format": FORMAT, **to_mapping(self)}


def pruning_insight(
    tickets: Sequence[Ticket],
    counts: Mapping[str, Tensor] | FrequencyGroups,
    *,
    scans: Sequence[Mapping[str, Any]] = (),
    before: nn.Module | None = None,
    after: nn.Module | None = None,
) -> PruningInsight:
    """Return what tickets of one pruning run keep, and how that changes the interaction of fields.

    counts           how often training saw each id, `(rows,)`, by table or field; or the groups that the
                     scans were made with, which know hashed tables and padding
    scans            a mapping per scan: step, kept, by_frequency as `FrequencyGroups.shares`
    before, after    the model trained without pruning, and the one retrained from a ticket

    >>> ticket = Ticket({"user": torch.tensor([[True, False], [False, False]])})
    >>> insight = pruning_insight([ticket], {"user": torch.tensor([3, 1])})
    >>> widths = insight.tickets[0].tables[0]
    >>> widths.by_row.mean, widths.by_lookup.mean
    (0.5, 0.75)
    """
    if not tickets:
        raise SettingsError("an insight needs at least one ticket, got none")
    shapes = [{name: mask.shape for name, mask in ticket.kept.items()} for ticket in tickets]
    if any(shape != shapes[0] for shape in shapes):
        raise DataError(
            "the tickets must be of one pruning run, got masks of different tables or shapes"
        )
    if (before is None) != (after is None):
        raise SettingsError("before and after are compared with each other; give both or neither")
    groups, interactions = counts, None
    if not isinstance(groups, FrequencyGroups):
        sites = [] if before is None else find_sites(before)
        padding = _padding_rows({site.info.name: site.table for site in sites})
        groups = FrequencyGroups(groups, tickets[0].kept, padding=padding)
    if before is not None and after is not None:
        interactions = _compare(_sites(before, tickets[0]), _sites(after, tickets[0]))
    return PruningInsight(
        groups=groups.groups,
        scans=tuple(_check_scan(scan, len(groups.groups)) for scan in scans),
        tickets=tuple(
            _describe(ticket, groups) for ticket in sorted(tickets, key=lambda t: -t.num_kept)
        ),
        interactions=interactions,
    )


def write_insight(
    insight: PruningInsight, folder: str | os.PathLike[str], *, plots: bool = True
) -> list[Path]:
    """Write `insight.json` and the plots to a folder, and return the files.

    Each file is written under a temporary name and renamed, so an existing file is complete.

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


def _padding_rows(tables: Mapping[str, AnyTable]) -> dict[str, int]:
    rows = {name: table.padding_idx for name, table in tables.items()}
    return {name: row for name, row in rows.items() if row is not None}


def _check_scan(scan: Mapping[str, Any], num_groups: int) -> PruningScan:
    values = {key: scan[key] for key in SCAN if key in scan}
    found: PruningScan = from_mapping(PruningScan, values, where="a scan")
    if len(found.by_frequency) != num_groups:
        raise DataError(
            f"there are {num_groups} frequency groups, but the scan of step {found.step} has "
            f"{len(found.by_frequency)} shares; give the counts that the scans were made with"
        )
    return found


def _describe(ticket: Ticket, groups: FrequencyGroups) -> TicketInsight:
    groups.check(ticket.kept)
    kept = {name: torch.count_nonzero(mask, dim=1).cpu() for name, mask in ticket.kept.items()}
    widths = {name: mask.shape[1] for name, mask in ticket.kept.items()}
    tables = []
    for name, width in widths.items():
        own = groups.of_row[name] < len(groups.groups)
        of_rows, counts = kept[name][own], groups.counts[name][own]
        lookups = torch.zeros(width + 1, dtype=torch.int64).index_add_(0, of_rows, counts)
        tables.append(
            TableWidths(
                name=name,
                rows=len(of_rows),
                width=width,
                by_row=_widths(torch.bincount(of_rows, minlength=width + 1)),
                by_lookup=_widths(lookups) if lookups.any() else None,
            )
        )
    return TicketInsight(
        kept=ticket.num_kept,
        entries=ticket.num_entries,
        facts=ticket.facts,
        heat_map=_heat_map(kept, groups, max(widths.values())),
        tables=tuple(tables),
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


def _widths(histogram: Tensor) -> Widths:
    """Return the statistics of a histogram of kept entries `(D + 1,)`."""
    total = max(int(histogram.sum()), 1)
    reached = 2 * histogram.cumsum(0) >= total
    return Widths(
        histogram=tuple(histogram.tolist()),
        mean=float((histogram * torch.arange(len(histogram))).sum()) / total,
        median=int(reached.int().argmax()),
        empty_share=float(histogram[0]) / total,
    )


def _sites(model: nn.Module, ticket: Ticket) -> list[Site]:
    """Return the tables of a model that a ticket has masks for, without first-order weights."""
    found = {site.info.name: site for site in find_sites(model)}
    for name in ticket.kept:
        if name not in found:
            raise NoTableError(
                f"{type(model).__name__} has no table {name!r}, which the ticket has a mask for; give the "
                "models before and after pruning"
            )
    return [found[name] for name, mask in ticket.kept.items() if mask.shape[1] > 1]


def _compare(before: Sequence[Site], after: Sequence[Site]) -> FieldInteractions | None:
    if [site.info.rows for site in before] != [site.info.rows for site in after]:
        raise DataError("the tables of before and after differ in their numbers of rows")
    if not before:
        return None
    sizes = [site.info.rows - (site.table.padding_idx is not None) for site in before]
    most = bisect_right(
        range(1, max(*sizes, 1) + 1), MOST_ROWS, key=lambda cap: sum(min(cap, n) for n in sizes)
    )
    ids = []
    for site, size in zip(before, sizes, strict=True):
        number = min(size, max(most, 1))
        # at equal distances: ids are often in the order of their frequency
        places = torch.arange(number) * size // max(number, 1)
        padding = site.table.padding_idx
        ids.append(places if padding is None else places + (places >= padding))
    return FieldInteractions(
        tables=tuple(site.info.name for site in before),
        rows=tuple(map(len, ids)),
        exact=[len(rows) for rows in ids] == sizes,
        before=_interactions(before, ids),
        after=_interactions(after, ids),
    )


@torch.no_grad()
def _interactions(sites: Sequence[Site], ids: Sequence[Tensor]) -> Matrix:
    every = []
    for site, own in zip(sites, ids, strict=True):
        rows: Tensor = site.table(own.to(home_of(site.table)))
        if isinstance(site, FieldSite) and str(site.index) in site.collection.projections:
            rows = rows @ site.collection.projections[str(site.index)]
        every.append(rows.float())
    matrix: list[list[float | None]] = [[None] * len(every) for _ in every]
    for i, left in enumerate(every):
        for j, right in enumerate(every[: i + 1]):
            if left.shape[1] == right.shape[1]:
                matrix[i][j] = matrix[j][i] = _mean_product(left, right)
    return tuple(map(tuple, matrix))


def _mean_product(left: Tensor, right: Tensor) -> float | None:
    """Return the mean of |l · r| over the rows of both, in chunks; None if it is not finite."""
    if not left.numel() or not right.numel():
        return None
    sums = [(some @ right.mT).abs_().sum(dim=1).double().sum() for some in left.split(CHUNK_ROWS)]
    mean = float(torch.stack(sums).sum()) / (len(left) * len(right))
    return mean if math.isfinite(mean) else None
