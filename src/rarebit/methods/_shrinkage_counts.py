"""How often rows were seen: counts as they are given, for each table by its name."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from rarebit.errors import DataError
from rarebit.methods.hashing import HashedTable
from rarebit.sets.sets import SplitSetsTable
from rarebit.tables.table import AnyTable

__all__ = ["Counts", "counts_of_all", "counts_of_rows", "counts_of_table", "of_table"]

Counts: TypeAlias = int | Tensor | Mapping[str, Tensor]
"""One number for all rows, one for each row of a table `(N,)`, or these by name."""


def counts_of_all(tables: Mapping[str, AnyTable], counts: Counts) -> dict[str, Tensor]:
    """Return how often the rows that a method gets of each table were seen, by name, on the CPU.

    >>> from torch import nn
    >>> counts_of_all({"tables.user": nn.Embedding(3, 8)}, {"user": torch.tensor([7, 0, 1])})
    {'tables.user': tensor([7, 0, 1])}
    """
    return {
        name: counts_of_rows(table, counts_of_table(name, table.num_embeddings, counts))
        for name, table in tables.items()
    }


def of_table(name: str, by_name: Mapping[str, object]) -> object | None:
    """Return what is given for a table by its name, or else by the last part of it, its field.

    >>> of_table("tables.user", {"user": 3}), of_table("tables.user", {"item": 3})
    (3, None)
    """
    return by_name.get(name, by_name.get(name.rpartition(".")[2]))


def counts_of_table(name: str, rows: int, counts: Counts) -> Tensor:
    """Return how often each of so many rows was seen, `(N,)` on the CPU, or say what is wrong.

    >>> counts_of_table("tables.user", 3, {"user": torch.tensor([7, 0, 1])})
    tensor([7, 0, 1])
    >>> counts_of_table("tables.user", 3, 5)
    tensor([5, 5, 5])
    """
    found = of_table(name, counts) if isinstance(counts, Mapping) else counts
    if found is None:
        assert isinstance(counts, Mapping)
        raise DataError(
            f"there are no counts of {name!r}, only of {', '.join(counts) or 'nothing'}; give counts by "
            "the names of the tables or of their fields, or leave the table out with where="
        )
    numbers = torch.as_tensor(found).cpu()
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise DataError(
            f"the counts of {name!r} must be whole numbers, got {numbers.dtype}; use counts.long()"
        )
    if isinstance(found, int):
        numbers = numbers.expand(rows)
    if numbers.shape != (rows,):
        raise DataError(
            f"the counts of {name!r} must be one number for each of its {rows:,} rows, got the shape "
            f"{tuple(numbers.shape)}; take them from the data that its ids are of: train.counts()"
        )
    if rows and int(numbers.min()) < 0:
        raise DataError(f"the counts of {name!r} must be 0 or more, got {int(numbers.min())}")
    return numbers.long()


def counts_of_rows(table: AnyTable, counts: Tensor) -> Tensor:
    """Return how often the rows that a method gets of a table were seen: of a bucket, all its ids.

    >>> from torch import nn
    >>> from rarebit.methods.hashing import Hashing
    >>> counts_of_rows(Hashing(buckets=2).wrap(nn.Embedding(4, 8)), torch.tensor([5, 1, 0, 2]))
    tensor([5, 3])
    """
    if isinstance(table, SplitSetsTable):
        return counts_of_rows(table.tables[0], counts)
    if not isinstance(table, HashedTable):
        return counts
    if table.padding_idx is not None:  # it is looked up and never handed out
        counts = counts.index_fill(0, torch.tensor([table.padding_idx]), 0)
    buckets = torch.arange(len(counts)) % table.buckets
    folded = counts.new_zeros(table.inner.num_embeddings)
    return folded.index_add_(0, buckets, counts)
