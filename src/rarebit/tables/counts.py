"""Values by the name of a table or of its field, and counts: how often training saw each id."""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from rarebit.errors import DataError
from rarebit.tables.table import field_of

T = TypeVar("T")

Counts: TypeAlias = int | Tensor | Mapping[str, Tensor]
"""One number for all rows, one per row of a table `(N,)`, or these by name."""


def by_table_name(name: str, values: Mapping[str, T]) -> T | None:
    """Return the value for a table: by its full name, else by the last part, its field."""
    return values.get(name, values.get(field_of(name)))


def counts_of_table(name: str, rows: int | None, counts: Counts) -> Tensor:
    """Return how often training saw each id of a table, `(N,)` on the CPU, or raise `DataError`.

    Without `rows`, counts of any length will do.
    """
    found = by_table_name(name, counts) if isinstance(counts, Mapping) else counts
    if found is None and isinstance(counts, Mapping):
        raise DataError(
            f"no counts for {name!r}, only for {', '.join(map(str, counts)) or 'nothing'}; give counts by the names of "
            "the tables or of their fields, or leave the table out with where="
        )
    try:
        numbers = torch.as_tensor(found).cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # texts, or numbers of too many digits
        raise DataError(
            f"the counts of {name!r} must be a tensor of integers, got a {type(found).__name__} that is none: use "
            "train.counts()"
        ) from error
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise DataError(
            f"the counts of {name!r} must be integers, got {numbers.dtype}; use counts.long()"
        )
    if isinstance(found, int) and rows is not None:
        numbers = numbers.expand(rows)
    if numbers.dim() != 1 or (rows is not None and len(numbers) != rows):
        wanted = "each row" if rows is None else f"each of its {rows:,} rows"
        raise DataError(
            f"the counts of {name!r} must be one number for {wanted}, got the shape {tuple(numbers.shape)}; "
            "take them from the data that its ids come from: train.counts()"
        )
    if len(numbers) and int(numbers.min()) < 0:
        raise DataError(f"the counts of {name!r} must be 0 or more, got {int(numbers.min())}")
    return numbers.long()
