"""The rows of a table a few at a time, wherever they come from, and one pass over them.

A plain table lies in memory, a method's table computes its rows, a file is read from the disk: in no
case is more than a few rows made or read at once. Padding rows are left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.tables.spectrum import default_chunk, triangle_of
from rarebit.tables.table import AnyTable, home_of

__all__ = ["Rows", "Scan", "rows_of_slice", "rows_of_table", "scan"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows that can be read from one to another."""

    stored: int
    """How many there are, padding among them."""
    width: int
    """How long each is."""
    padding: int | None = None
    """The one to leave out."""
    device: torch.device = torch.device("cpu")
    read: Callable[[int, int], Tensor]
    """Returns the rows from the first number up to, and without, the second, `(n, D)`."""

    @property
    def count(self) -> int:
        """How many rows there are without padding."""
        return self.stored - (self.padding is not None)

    def chunks(self) -> Iterator[Tensor]:
        """Yield all rows but padding, in order, a few at a time."""
        step = default_chunk(self.device, self.width)
        for start in range(0, self.stored, step):
            chunk = self.read(start, min(start + step, self.stored))
            if self.padding is not None and start <= self.padding < start + len(chunk):
                chunk = without(chunk, self.padding - start)
            if len(chunk):
                yield chunk


def rows_of_table(table: AnyTable) -> Rows:
    """Return the rows of a table, plain or not.

    >>> rows_of_table(nn.Embedding(9, 4, padding_idx=0)).count
    8
    """
    device = home_of(table)

    def read(start: int, stop: int) -> Tensor:
        if isinstance(table, nn.Embedding):
            return table.weight.detach()[start:stop]
        with torch.no_grad():
            rows: Tensor = table(torch.arange(start, stop, device=device))
        return rows

    return Rows(
        stored=table.num_embeddings,
        width=table.embedding_dim,
        padding=table.padding_idx,
        device=device,
        read=read,
    )


def rows_of_slice(stored: Any) -> Rows:
    """Return the rows of a two-dimensional tensor of a safetensors file, which stay there."""
    rows, width = stored.get_shape()
    return Rows(stored=rows, width=width, read=lambda start, stop: stored[start:stop])


def without(values: Tensor, place: int) -> Tensor:
    """Return values without the one at a place.

    >>> without(torch.tensor([5, 6, 7]), 1)
    tensor([5, 7])
    """
    return torch.cat([values[:place], values[place + 1 :]])


@dataclass(frozen=True)
class Scan:
    """What one pass over the rows of a table gives."""

    norms: Tensor = field(repr=False)
    """The length of each row, `(N,)`, float64, on the CPU."""
    finite: Tensor = field(repr=False)
    """Whether each row holds finite numbers only, `(N,)`."""
    triangle: Tensor | None = field(repr=False)
    """The R of the table's QR; None without rows, and where one is not finite."""


def scan(rows: Rows) -> Scan:
    """Read the rows once: their norms, and the triangle that has their singular values.

    >>> scan(rows_of_table(nn.Embedding.from_pretrained(torch.tensor([[3.0, 4.0]])))).norms
    tensor([5.], dtype=torch.float64)
    """
    norms, finite = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.bool)]

    def seen() -> Iterator[Tensor]:
        for chunk in rows.chunks():
            norms.append(torch.linalg.vector_norm(chunk.double(), dim=1).cpu())
            finite.append(chunk.isfinite().all(dim=1).cpu())
            yield chunk

    # a NaN goes through QR to the end, so that no chunk has to wait for an answer
    triangle = triangle_of(seen(), rows.width)
    whole = rows.count > 0 and bool(torch.cat(finite).all())
    return Scan(torch.cat(norms), torch.cat(finite), triangle if whole else None)
