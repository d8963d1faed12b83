"""Random numbers that are a function of (seed, stream, counter) and the same on every machine.

    bits(key, counter) = mix(key + counter * GOLDEN)      the splitmix64 generator, entered anywhere

There is no state, so any number of threads can draw any rows in any order. All operations are on
integers or exactly rounded (`+ - * /`, conversions): the last bit of `exp` or `log` differs between
machines.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["bell", "random_bits", "stream_key", "uniform"]

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
