"""One pass over the rows of a table, and statistics of their norms.

A plain table is in memory, a method's table computes its rows, a file is read from disk: never more than
a few rows at once. Padding rows are skipped.

dead           a row whose norm is at most a thousandth of the root mean square of all norms:
               weight decay erases rows that no batch looks up, to 1e-9 of their size in 300 steps of Adam
correlation    Spearman's, of norm and training count, over the values that training saw
bins           mean norm of the rows seen 0, 1, 2-3, 4-7, 8-15, ... times
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.tables.spectrum import default_chunk, triangle_of
from rarebit.tables.table import AnyTable, home_of

DEAD = 1e-3


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows that can be read range by range."""

    stored: int
    """Number of rows, padding included."""
    width: int
    padding: int | None = None
    """The row to skip."""
    device: torch.device = torch.device("cpu")
    read: Callable[[int, int], Tensor]
    """Returns the rows from the first number up to, but without, the second, `(n, D)`."""

    @property
    def count(self) -> int:
        """Number of rows without padding."""
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
    """Return the rows of a table, plain or not."""
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
    """Return the rows of a two-dimensional tensor in a safetensors file, which stay on disk."""
    rows, width = stored.get_shape()
    return Rows(stored=rows, width=width, read=lambda start, stop: stored[start:stop])


def without(values: Tensor, place: int) -> Tensor:
    """Return values without the one at a place."""
    return torch.cat([values[:place], values[place + 1 :]])


@dataclass(frozen=True)
class Scan:
    """The result of one pass over the rows of a table."""

    norms: Tensor = field(repr=False)
    """Length of each row, `(N,)`, float64, on the CPU."""
    finite: Tensor = field(repr=False)
    """Whether each row is finite, `(N,)`."""
    triangle: Tensor | None = field(repr=False)
    """The R of the table's QR; None without rows, and when a row is not finite."""


def scan(rows: Rows) -> Scan:
    """Read the rows once: their norms, and the triangle that has their singular values."""
    norms, finite = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.bool)]

    def seen() -> Iterator[Tensor]:
        for chunk in rows.chunks():
            norms.append(torch.linalg.vector_norm(chunk.double(), dim=1).cpu())
            finite.append(chunk.isfinite().all(dim=1).cpu())
            yield chunk

    # QR passes a NaN through to the end, so no chunk has to wait for an answer
    triangle = triangle_of(seen(), rows.width)
    whole = rows.count > 0 and bool(torch.cat(finite).all())
    return Scan(torch.cat(norms), torch.cat(finite), triangle if whole else None)


@dataclass(frozen=True, kw_only=True)
class NormBin:
    """The rows whose values were seen about equally often."""

    least: int
    """The lowest training count in the bin."""
    most: int
    """The highest."""
    rows: int
    mean_norm: float


def count_dead(norms: Tensor) -> int:
    """Return how many norms are negligible compared with the others; all, if all are zero."""
    norms = norms.double()
    return int((norms <= DEAD * norms.square().mean().sqrt()).sum())


def norm_bins(norms: Tensor, counts: Tensor) -> tuple[NormBin, ...]:
    """Return the mean norm by training count, in powers of two, without empty bins."""
    # the exponent of a count: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7; exact, unlike a logarithm
    place = torch.frexp(counts.double()).exponent.long()
    rows = torch.bincount(place)
    totals = torch.bincount(place, weights=norms.double())
    return tuple(
        NormBin(
            least=1 << (power - 1) if power else 0,
            most=(1 << power) - 1,
            rows=int(rows[power]),
            mean_norm=float(totals[power] / rows[power]),
        )
        for power in rows.nonzero().flatten().tolist()
    )


def spearman(x: Tensor, y: Tensor) -> float | None:
    """Return the rank correlation of two lists; None if one of them is constant."""
    x, y = _centred_ranks(x), _centred_ranks(y)
    scale = float(x.square().sum() * y.square().sum()) ** 0.5
    return float((x * y).sum()) / scale if scale else None


def _centred_ranks(values: Tensor) -> Tensor:
    """Return the rank of each value minus the mean rank; equal values share their mean rank."""
    _, place, times = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = times.cumsum(0).double() - (times - 1) / 2
    return ranks[place] - (len(values) + 1) / 2
