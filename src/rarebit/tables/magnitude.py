"""The largest entries of several tables: which ones they are, and how large the k-th of them is.

All of it works on looked-up chunks on the tables' device, so that no copy of a table is made.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rarebit.settings import require
from rarebit.tables.table import CHUNK, AnyTable, home_of
from rarebit.tables.ticket import Ticket

__all__ = ["keep_largest", "kth_largest", "row_chunks"]

DIGIT = 16
"""Bits of a number that are looked at in one pass, when the k-th largest one is sought."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as a number has."""


def kth_largest(tables: Sequence[AnyTable], k: int) -> Tensor:
    """Return the k-th largest magnitude of all entries, exactly, as a tensor on the tables' device.

    The bits of a number that is not negative, read as an integer, are in the order of the numbers. So a
    few passes suffice, each counting how many of the numbers that agree in the bits found so far have
    which next bits: nothing is sorted, and no copy of a table is made. Padding rows count as zeros.

    >>> from torch import nn
    >>> kth_largest([nn.Embedding.from_pretrained(torch.tensor([[3.0, -4.0, 0.5]]))], 2)
    tensor(3.)
    """
    total = _num_entries(tables)
    require(1 <= k <= total, f"k must be from 1 to {total:,}, the entries there are, got k={k}")
    dtype = next(tables[0].parameters()).dtype
    bits, found = dtype.itemsize * 8, 0
    for shift in range(bits - DIGIT, -1, -DIGIT):
        counts = torch.zeros(1 << DIGIT, dtype=torch.int64)
        for codes in _magnitude_codes(tables, dtype):
            # of the top digit, nothing is known yet
            alike = codes if shift == bits - DIGIT else codes[codes >> (shift + DIGIT) == found]
            digits = (alike >> shift) & ((1 << DIGIT) - 1)
            counts += torch.bincount(digits, minlength=1 << DIGIT).cpu()
        # numbers with this digit or a larger one, largest first
        at_least = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(at_least, k))
        k -= int(at_least[place - 1]) if place else 0
        found = found << DIGIT | ((1 << DIGIT) - 1 - place)
    code = torch.tensor(found, dtype=INTEGERS[dtype.itemsize], device=home_of(tables[0]))
    return code.view(dtype)


def keep_largest(tables: Mapping[str, AnyTable], k: int, **facts: Any) -> Ticket:
    """Return the ticket of the k largest entries of all tables, with facts that JSON can hold.

    Of entries that are equal at the border none is kept, so that there are never more than k.

    >>> from torch import nn
    >>> table = nn.Embedding.from_pretrained(torch.tensor([[3.0, -4.0], [0.5, 2.0]]))
    >>> keep_largest({"item": table}, 2).kept["item"].tolist()
    [[True, True], [False, False]]
    """
    require(k >= 1, f"at least one entry must be kept, got {k}")
    every = list(tables.values())
    border = None if k >= _num_entries(every) else kth_largest(every, k + 1)
    kept = {}
    for name, table in tables.items():
        masks = [
            (rows != 0 if border is None else rows.abs() > border).cpu()
            for rows in row_chunks(table)
        ]
        kept[name] = torch.cat(masks)
    return Ticket(kept, facts=facts)


@torch.no_grad()
def row_chunks(table: AnyTable) -> Iterator[Tensor]:
    """Yield the rows that a table hands out, some at a time; the padding row is zero.

    >>> from torch import nn
    >>> [chunk.shape for chunk in row_chunks(nn.Embedding(9, 4))]
    [torch.Size([9, 4])]
    """
    ids = torch.arange(table.num_embeddings, device=home_of(table))
    for chunk in ids.split(CHUNK):
        rows = table(chunk)
        if table.padding_idx is not None:
            # a plain table hands its padding row out as it is stored
            rows = rows.masked_fill((chunk == table.padding_idx).unsqueeze(-1), 0.0)
        yield rows


def _num_entries(tables: Sequence[AnyTable]) -> int:
    return sum(table.num_embeddings * table.embedding_dim for table in tables)


def _magnitude_codes(tables: Sequence[AnyTable], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the bits of |V| as integers, in the order of the magnitudes, some at a time."""
    for table in tables:
        for rows in row_chunks(table):
            yield rows.abs().to(dtype).view(INTEGERS[dtype.itemsize]).reshape(-1)
