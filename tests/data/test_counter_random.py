"""Counter-based random numbers: known values, no state, the right distributions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data.order import bell, random_bits, stream_key, uniform

MASK = 2**64 - 1
COUNTERS = np.arange(20_000, dtype=np.uint64)


def splitmix64(key, counter):
    """The published generator in plain Python integers."""
    z = (key + counter * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@given(st.integers(0, MASK), st.lists(st.integers(0, MASK), min_size=1, max_size=5))
def test_bits_are_those_of_splitmix64(key, counters):
    bits = random_bits(key, np.array(counters, dtype=np.uint64))
    assert bits.tolist() == [splitmix64(key, counter) for counter in counters]


def test_the_order_of_drawing_does_not_matter():
    backwards = random_bits(7, COUNTERS[::-1].copy())[::-1]
    assert np.array_equal(random_bits(7, COUNTERS), backwards)


@given(st.integers(0, 2**32))
def test_every_bit_is_a_fair_coin(seed):
    bits = random_bits(stream_key(seed, "coin"), COUNTERS)
    ones = [int((bits >> np.uint64(place) & np.uint64(1)).sum()) for place in range(64)]
    # five standard deviations of a fair coin: 64 coins, a hundred seeds
    assert max(abs(count - 10_000) for count in ones) < 5.5 * np.sqrt(20_000) / 2


def test_streams_differ_by_seed_and_by_name():
    keys = {stream_key(seed, name) for seed in range(50) for name in ("a", "b", "label")}
    assert len(keys) == 150


def test_uniform_is_flat_and_below_one():
    numbers = uniform(random_bits(3, COUNTERS))
    assert numbers.min() >= 0.0
    assert uniform(np.array([MASK], dtype=np.uint64))[0] < 1.0
    tenths = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert abs(tenths - 2000).max() < 5 * np.sqrt(2000)


def test_bell_has_mean_0_and_variance_1():
    numbers = bell(random_bits(5, COUNTERS)).astype(np.float64)
    assert numbers.mean() == pytest.approx(0, abs=5 / np.sqrt(20_000))
    assert numbers.var() == pytest.approx(1, abs=0.05)
