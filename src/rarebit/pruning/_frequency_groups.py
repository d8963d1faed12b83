"""Rows of tables in groups by how often training saw them, and what is left of each group at one moment.

Rows that training never saw are a group of their own. The others, over all tables together, are ordered by
their counts, equal ones by their place, and cut into ten groups of as many rows each, the rarest first. A
group without rows is left out, and so are padding rows.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rarebit.errors import DataError
from rarebit.methods.hashing import HashedTable
from rarebit.pruning.masked import row_chunks
from rarebit.pruning.pep import ThresholdedTable, thresholded_tables
from rarebit.tables.find import find_sites
from rarebit.tables.table import CHUNK, AnyTable, home_of

__all__ = ["FrequencyGroup", "FrequencyGroups"]

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
