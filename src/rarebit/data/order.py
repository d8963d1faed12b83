"""The order of the rows in an epoch, and random numbers that are the same on every machine.

    bits(key, counter) = mix(key + counter * GOLDEN)      the splitmix64 generator, entered anywhere

The numbers are a function of (seed, stream, counter). There is no state, so any number of threads can draw any rows in any order. All
operations are on integers or exactly rounded (`+ - * /`, conversions): the last bit of `exp` or `log` differs between machines.

    shuffled          every order of the rows is equally likely
    chunk-shuffled    the rows, on a circle, are cut at a random place into chunks of neighbours; the chunks are shuffled
                      and dealt into groups; the rows of a group are shuffled

The second order reads one group of chunks after the other, so only a group needs to be in memory. Each epoch draws another place
for the first cut: every row is equally likely at any time, and the rows of a chunk fall into two chunks later on.
"""

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rarebit.settings import require

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SIXTEEN_BITS = np.uint64(0xFFFF)
_BELL_CENTER = 4 * (2**16 - 1) / 2
_BELL_SPREAD = math.sqrt(4 * (2**32 - 1) / 12)  # of a sum of four uniform 16-bit integers


def stream_key(seed: int, *names: str | int) -> int:
    """Return the key of one stream of random numbers, 64 bits, from the seed and a readable name."""
    name = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def random_bits(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each counter."""
    bits = counters * _GOLDEN
    bits += np.uint64(key)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) from the upper 53 bits; the lower 11 stay free for other draws."""
    # Signed integers convert to floats in one instruction, unsigned ones do not everywhere.
    numbers = (bits >> np.uint64(11)).view(np.int64).astype(np.float64)
    numbers *= 2.0**-53
    return numbers


def bell(bits: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return bell-shaped numbers of mean 0 and variance 1: the sum of the four 16-bit quarters."""
    total = bits & _SIXTEEN_BITS
    for shift in (16, 32, 48):
        total += (bits >> np.uint64(shift)) & _SIXTEEN_BITS
    numbers = total.view(np.int64).astype(np.float32)  # below 2**18, so exact
    numbers -= np.float32(_BELL_CENTER)
    numbers *= np.float32(1 / _BELL_SPREAD)
    return numbers


CHUNK_BYTES = 1 << 20
"""Large enough that a disk reads a chunk about as fast as a whole file."""
MIN_CHUNK_ROWS = 256
BLOCK = 1 << 18
"""Rows renumbered at once: few, so that copies of them take little memory."""


def batch_bounds(num_rows: int, batch_size: int) -> list[tuple[int, int]]:
    """Return where each batch starts and stops. A single last row joins the batch before it.

    Batch normalisation has no variance on one row, so no batch is one row by accident.
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
    """Return a permutation of the rows, decided by seed and epoch, drawn on the device."""
    generator = _generator(seed, epoch, device)
    return torch.randperm(num_rows, generator=generator, device=device)


def chunk_shuffled_order(
    num_rows: int, *, seed: int, epoch: int, chunk_rows: int, chunks_at_once: int
) -> Tensor:
    """Return a permutation of the rows that reads `chunks_at_once` chunks at a time.

    Groups have `chunks_at_once` chunks, or a few less so that all have about as many: a small group at
    the end would be shuffled badly. It takes 8 bytes per row.
    """
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

    Rows may take half of the memory: the model needs some, too. Where they take more, a chunk is about
    1 MiB, and a group takes a quarter of the memory, so that the next one fits as well.
    """
    require(memory_bytes >= 1, f"memory_bytes must be at least 1, got memory_bytes={memory_bytes}")
    if num_rows * row_bytes <= memory_bytes // 2:
        return None
    chunk_rows = max(CHUNK_BYTES // row_bytes, MIN_CHUNK_ROWS)
    return chunk_rows, max(memory_bytes // 4 // (chunk_rows * row_bytes), 1)


def _generator(seed: int, epoch: int, device: torch.device | str = "cpu") -> torch.Generator:
    # torch's generator uses 32 bits of its seed only, so seed and epoch are mixed into them
    mixed = np.random.SeedSequence([seed, epoch]).generate_state(1)
    return torch.Generator(device).manual_seed(int(mixed[0]))
