"""In what order an epoch reads the rows: all of them mixed, or mixed in parts that fit in memory.

    shuffled          every order of the rows is equally likely
    chunk-shuffled    the rows lie on a circle that is cut, at a random place, into chunks of neighbours;
                      the chunks are shuffled and dealt into groups; a group's rows are mixed one by one

Read in the second order, a file is touched in one group of chunks after the other, so no more than a
group needs to be in memory. Since the place of the first cut is drawn anew in each epoch, every row is
equally likely to be read at any time, and rows that were in one chunk are in two chunks later on.
"""

import math

import numpy as np
import torch
from torch import Tensor

from rarebit.settings import require

__all__ = ["batch_bounds", "chunk_plan", "chunk_shuffled_order", "shuffled_order"]

CHUNK_BYTES = 1 << 20
"""Large enough that a disk reads a chunk about as fast as if its neighbours were read, too."""
MIN_CHUNK_ROWS = 256
BLOCK = 1 << 18
"""Rows that are renumbered at once: few enough that copies of them take no memory to speak of."""


def batch_bounds(num_rows: int, batch_size: int) -> list[tuple[int, int]]:
    """Return where each batch starts and stops. A single last row joins the batch before it.

    Batch normalisation has no variance on one row, so no batch is ever one row by accident.

    >>> batch_bounds(9, 4)
    [(0, 4), (4, 9)]
    """
    require(batch_size >= 1, f"batch_size must be at least 1, got batch_size={batch_size}")
    bounds = [
        (start, min(start + batch_size, num_rows)) for start in range(0, num_rows, batch_size)
    ]
    if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] == 1:
        last = bounds.pop()
        bounds[-1] = (bounds[-1][0], last[1])
    return bounds


def shuffled_order(
    num_rows: int, *, seed: int, epoch: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the order of the rows in one epoch: a permutation that seed and epoch decide.

    It is drawn on the device, whose kind has its own random numbers.

    >>> sorted(shuffled_order(4, seed=0, epoch=1).tolist())
    [0, 1, 2, 3]
    """
    generator = _generator(seed, epoch, device)
    return torch.randperm(num_rows, generator=generator, device=device)


def chunk_shuffled_order(
    num_rows: int, *, seed: int, epoch: int, chunk_rows: int, chunks_at_once: int
) -> Tensor:
    """Return an order of the rows in one epoch that reads `chunks_at_once` chunks at a time.

    A permutation that seed and epoch decide. Groups have `chunks_at_once` chunks, or a few less so that
    all have about as many: a small group at the end would be mixed badly. It takes 8 bytes a row.

    >>> order = chunk_shuffled_order(6, seed=0, epoch=1, chunk_rows=2, chunks_at_once=1)
    >>> sorted(order.tolist())
    [0, 1, 2, 3, 4, 5]
    """
    require(num_rows >= 0, f"num_rows must be at least 0, got num_rows={num_rows}")
    require(chunk_rows >= 1, f"chunk_rows must be at least 1, got chunk_rows={chunk_rows}")
    require(
        chunks_at_once >= 1,
        f"chunks_at_once must be at least 1, got chunks_at_once={chunks_at_once}",
    )
    generator = _generator(seed, epoch)
    order = torch.empty(num_rows, dtype=torch.int64)
    if num_rows == 0:
        return order
    first_row = int(torch.randint(num_rows, (), generator=generator))
    num_chunks = math.ceil(num_rows / chunk_rows)
    chunks = torch.randperm(num_chunks, generator=generator)
    start = 0
    for group in torch.tensor_split(chunks, math.ceil(num_chunks / chunks_at_once)):
        # the one chunk that may be short has the highest number: sorted, it is the last of its group
        chunk_starts = group.sort().values * chunk_rows
        last_rows = min(chunk_rows, num_rows - int(chunk_starts[-1]))
        stop = start + (len(group) - 1) * chunk_rows + last_rows
        torch.randperm(stop - start, generator=generator, out=order[start:stop])
        for block in order[start:stop].split(BLOCK):
            rows = chunk_starts[block // chunk_rows] + block % chunk_rows + first_row
            torch.remainder(rows, num_rows, out=block)
        start = stop
    return order


def chunk_plan(num_rows: int, row_bytes: int, memory_bytes: int) -> tuple[int, int] | None:
    """Return `chunk_rows` and `chunks_at_once` to shuffle by, or None for rows that fit in memory.

    Rows fit in half of the memory: the model needs some, too. Where they do not, a chunk is about
    1 MiB, and a group of them takes a quarter of the memory, so that the next one can be read beside it.

    >>> chunk_plan(45_840_617, 160, memory_bytes=16 << 30) is None
    True
    >>> chunk_plan(45_840_617, 160, memory_bytes=8 << 30)
    (6553, 2048)
    """
    require(num_rows >= 0, f"num_rows must be at least 0, got num_rows={num_rows}")
    require(row_bytes >= 1, f"row_bytes must be at least 1, got row_bytes={row_bytes}")
    require(memory_bytes >= 1, f"memory_bytes must be at least 1, got memory_bytes={memory_bytes}")
    if num_rows * row_bytes <= memory_bytes // 2:
        return None
    chunk_rows = max(CHUNK_BYTES // row_bytes, MIN_CHUNK_ROWS)
    return chunk_rows, max(memory_bytes // 4 // (chunk_rows * row_bytes), 1)


def _generator(seed: int, epoch: int, device: torch.device | str = "cpu") -> torch.Generator:
    # torch's generator looks at 32 bits of its seed only, so seed and epoch are mixed into them
    mixed = np.random.SeedSequence([seed, epoch]).generate_state(1)
    return torch.Generator(device).manual_seed(int(mixed[0]))
