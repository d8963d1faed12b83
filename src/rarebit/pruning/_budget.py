"""What thresholds leave of a model's tables: how many entries, which ones, and the threshold for k of them.

All of it works on looked-up chunks on the tables' device, so that no copy of a table is made.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.errors import NoTableError
from rarebit.pruning._ticket import Ticket, kth_largest, row_chunks
from rarebit.pruning.pep import FieldLevels, Level, ThresholdedStack, ThresholdedTable
from rarebit.settings import require
from rarebit.tables.find import find_sites

__all__ = [
    "count_nonzero",
    "kth_largest_magnitude",
    "set_threshold_",
    "take_ticket",
    "threshold_parameters",
    "thresholded_tables",
]


def set_threshold_(model: nn.Module, value: float | Tensor) -> None:
    """Set the threshold of all tables that have `PEP(schedule="given")`, in place.

    A tensor on the tables' device is copied without waiting for it.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(schedule="given"), verbose=False)
    >>> set_threshold_(model, 1e9)
    >>> count_nonzero(model)
    0
    """
    if not isinstance(value, Tensor):
        require(0 <= value < math.inf, f"a threshold must be 0 or more and finite, got {value}")
    given = [
        part.levels.value
        for part in model.modules()
        if isinstance(part, ThresholdedTable | ThresholdedStack)
        and isinstance(part.levels, Level | FieldLevels)
        and not isinstance(part.levels.value, nn.Parameter)
    ]
    if not given:
        raise NoTableError(
            'no table of the model has a threshold to set; apply_ PEP(schedule="given") first'
        )
    for threshold in given:
        threshold.copy_(value) if isinstance(value, Tensor) else threshold.fill_(value)


def threshold_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the learned thresholds of a model, each once.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(granularity="dimension"), verbose=False)
    >>> [tuple(parameter.shape) for parameter in threshold_parameters(model)]
    [(8,)]
    """
    found = {
        id(parameter): parameter
        for part in model.modules()
        if isinstance(part, ThresholdedTable | ThresholdedStack)
        for parameter in part.levels.parameters()
    }
    return list(found.values())


def thresholded_tables(model: nn.Module) -> dict[str, ThresholdedTable]:
    """Return the tables of a model that have `PEP`, by name; of a hashed table, that of its buckets.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(), verbose=False)
    >>> thresholded_tables(model)["0"].levels
    Embedding(100, 8)
    """
    found = {}
    for site in find_sites(model):
        parts = [part for part in site.table.modules() if isinstance(part, ThresholdedTable)]
        if parts:
            found[site.info.name] = parts[0]
    if not found:
        raise NoTableError("no table of the model has thresholds; apply_ PEP() first")
    return found


def count_nonzero(model: nn.Module) -> int:
    """Return how many entries the thresholds have left in all tables with `PEP`.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(), verbose=False)
    >>> count_nonzero(model)
    800
    """
    counts = [
        torch.count_nonzero(rows)
        for table in thresholded_tables(model).values()
        for rows in row_chunks(table)
    ]
    return int(sum(count.item() for count in counts))


def kth_largest_magnitude(model: nn.Module, k: int) -> Tensor:
    """Return the k-th largest |V| over all tables with `PEP`, exactly, as a tensor on their device.

    Set as the threshold, it leaves the entries above it: k - 1 of them, or fewer where some are equal to
    it, as happens among millions. So a budget of k entries is met, and never missed, with the one after:
    `kth_largest_magnitude(model, k + 1)`.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding.from_pretrained(torch.tensor([[3.0, -4.0, 0.5]]), freeze=False))
    >>> changes = apply_(model, PEP(schedule="given"), verbose=False)
    >>> kth_largest_magnitude(model, 2)
    tensor(3.)
    """
    return kth_largest([table.inner for table in thresholded_tables(model).values()], k)


def take_ticket(model: nn.Module, **facts: Any) -> Ticket:
    """Return which entries the thresholds have left, table by table, with facts that JSON can hold.

    >>> from rarebit.pruning.pep import PEP
    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Sequential(nn.Embedding(100, 8))
    >>> changes = apply_(model, PEP(), verbose=False)
    >>> take_ticket(model, step=0)
    Ticket(1 table, 800 of 800 entries, step=0)
    """
    kept = {
        name: torch.cat([(rows != 0).cpu() for rows in row_chunks(table)])
        for name, table in thresholded_tables(model).items()
    }
    return Ticket(kept, facts=facts)
