"""The singular values of a table, and how evenly they are spread (Guo et al., 2024, definition 1).

    information abundance    IA(E) = sum_k sigma_k / sigma_1            between 1 and K
    stable rank              sum_k sigma_k^2 / sigma_1^2                between 1 and K

    sigma_k    singular values of the table E, N rows of width K, the largest first

Rows that point everywhere alike give K, rows that all lie on one line give 1. A table of zeros has
neither by these formulas; it holds nothing, so both are 0 here.

    E = [E_1; E_2; ...]      R_1 = qr(E_1)      R_2 = qr([R_1; E_2])      ...

The last R has the singular values of E and is K x K. Each step is a QR in float64 of a few rows, so no float64 copy
of the table is made, and small values are right to the last digits. The K x K matrix E^T E would be cheaper and has
their squares, so that half of the digits are lost: good enough to watch training by, and no more.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rarebit.errors import DataError
from rarebit.settings import require

CPU_CHUNK = 2048
"""Rows of a step. Measured from 4 to 320 columns: with fewer, calls cost; with more, the caches."""
GPU_CHUNK = 1 << 16
SQUARINGS = 12
"""The 4096th power of a matrix has next to nothing left but its largest eigenvalues."""
ROOT_STEPS = 32
"""A step makes what is too small of a root 1.5 times larger, so that 1e-5 of the largest is reached."""


def singular_values(weight: Tensor, *, chunk_rows: int | None = None) -> Tensor:
    """Return the singular values of a table `(N, K)` in float64, the largest first, `(min(N, K),)`.

    `chunk_rows` are taken at a time; how many is decided by the device where it is not given.
    """
    _check(weight)
    if chunk_rows is None:
        chunk_rows = default_chunk(weight.device, weight.shape[1])
    require(chunk_rows >= 1, f"chunk_rows must be at least 1, got chunk_rows={chunk_rows}")
    triangle = triangle_of(weight.split(chunk_rows), weight.shape[1])
    if not bool(triangle.isfinite().all()):
        raise DataError("the table holds NaN or infinite numbers, so it has no singular values")
    values: Tensor = torch.linalg.svdvals(triangle)
    return values


def triangle_of(chunks: Iterable[Tensor], width: int) -> Tensor:
    """Return the R of the QR of rows that come in chunks: at most `(K, K)`, float64.

    Whatever a matrix does to the columns of the table, it can do to R: the singular values of E A are those of R A.
    """
    triangle: Tensor | None = None
    for chunk in chunks:
        rows = chunk.detach().double()
        stacked = rows if triangle is None else torch.cat([triangle, rows])
        triangle = torch.linalg.qr(stacked, mode="r").R
    return torch.zeros(0, width, dtype=torch.float64) if triangle is None else triangle


def default_chunk(device: torch.device, width: int) -> int:
    """Return how many rows of a table of this width are taken at a time."""
    rows = CPU_CHUNK if device.type == "cpu" else GPU_CHUNK
    return max(rows, 4 * width)  # a step also works on the R it has, which is `width` rows


def information_abundance(weight: Tensor) -> float:
    """Return the sum of the singular values over the largest: from 1, a line, to K; 0 for zeros.

    >>> information_abundance(torch.eye(5))
    5.0
    """
    return abundance_of(singular_values(weight))


def stable_rank(weight: Tensor) -> float:
    """Return the sum of the squared singular values over the largest one: from 1 to K; 0 for zeros."""
    return stable_rank_of(singular_values(weight))


def abundance_of(values: Tensor) -> float:
    """Return the information abundance of singular values, the largest first."""
    return float(_over_largest(values).sum())


def stable_rank_of(values: Tensor) -> float:
    """Return the stable rank of singular values, the largest first."""
    return float(_over_largest(values).square().sum())


def rough_information_abundance(weight: Tensor) -> Tensor:
    """Return about the information abundance, as a tensor `()`: to watch training by.

    It multiplies matrices and does nothing else, so no device is waited for. What is below 1e-5 of the
    largest singular value is lost. It costs a pass over the table: once an epoch, not once a step.
    """
    _check(weight)
    width = weight.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float64, device=weight.device)
    for chunk in weight.detach().split(GPU_CHUNK):
        rows = chunk.double()
        gram += rows.mT @ rows
    gram = _divided(gram, gram.trace())
    return _root_trace(_divided(gram, _largest_eigenvalue(gram)))


def random_abundance(rows: int, width: int, seed: int = 0) -> float:
    """Return the information abundance of a table of random numbers, N(0, 1), of this size."""
    return abundance_of(random_singular_values(rows, width, seed))


def random_singular_values(rows: int, width: int, seed: int = 0) -> Tensor:
    """Return the singular values of a table of random numbers, N(0, 1), without drawing the table.

    Its R is drawn (Bartlett, 1933): entries above the diagonal are N(0, 1), the i-th on it is the length of a random
    vector of rows - i + 1 numbers, and all are independent. A wide table is a tall one on its side.
    """
    require(rows >= 1, f"rows must be at least 1, got rows={rows}")
    require(width >= 1, f"width must be at least 1, got width={width}")
    tall, flat = max(rows, width), min(rows, width)
    draw = np.random.default_rng(seed)
    triangle = np.triu(draw.standard_normal((flat, flat)), 1)
    np.fill_diagonal(triangle, np.sqrt(draw.chisquare(tall - np.arange(flat))))
    values: Tensor = torch.linalg.svdvals(torch.from_numpy(triangle))
    return values


def _over_largest(values: Tensor) -> Tensor:
    """Return singular values as shares of the largest; zeros stay zeros."""
    return values if not len(values) or not values[0] else values / values[0]


def _divided(matrix: Tensor, scale: Tensor) -> Tensor:
    """Return a matrix of zeros for zero over zero, without asking the device which it is."""
    return matrix / scale.clamp(min=torch.finfo(matrix.dtype).tiny)


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    power = gram
    for _ in range(SQUARINGS):
        power = power @ power
        power = _divided(power, power.trace())
    return (gram * power).sum()


def _root_trace(gram: Tensor) -> Tensor:
    """Return the trace of the square root of a matrix whose eigenvalues lie in [0, 1].

    Newton and Schulz: Y T to the root and T Z to its inverse, T = (3 I - Z Y) / 2. Eigenvalues that have
    not arrived yet are below their root, so nothing is made larger than it is.
    """
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    root, inverse = gram, identity
    for _ in range(ROOT_STEPS):
        step = (3 * identity - inverse @ root) / 2
        root, inverse = root @ step, step @ inverse
    return root.trace()


def _check(weight: Tensor) -> None:
    if weight.ndim != 2 or not weight.is_floating_point():
        raise DataError(
            f"a table is two-dimensional and holds floats, got {tuple(weight.shape)} of {weight.dtype}"
        )
