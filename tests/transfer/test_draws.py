"""Random numbers of a step: splitmix64 as in the data folder, without a state but the step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data.order import random_bits, uniform
from rarebit.transfer.losses import Draws
from rarebit.transfer.running import Listed

CPU = torch.device("cpu")


@given(key=st.integers(0, 2**64 - 1), step=st.integers(0, 2**31), first=st.integers(0, 2**31))
def test_numbers_are_those_of_splitmix(key, step, first):
    draws = Draws(key, CPU)
    draws.step.fill_(step)
    counters = (np.arange(4, dtype=np.uint64) + np.uint64(first)) + np.uint64(step << 32)
    expected = uniform(random_bits(key, counters))
    assert draws.uniform(2, 2, first=first).flatten().tolist() == expected.tolist()


def test_steps_and_places_have_numbers_of_their_own():
    draws = Draws(0, CPU)
    seen = []
    for _ in range(50):
        draws.advance()
        seen += draws.uniform(20).tolist() + draws.uniform(20, first=20).tolist()
    assert len(set(seen)) == 2000
    assert np.mean(seen) == pytest.approx(0.5, abs=0.03)


def test_samples_are_ids_of_their_own_table_and_reach_all_of_them():
    masks = [torch.arange(10) % 2 == 0, torch.zeros(2, dtype=torch.bool), torch.arange(5) == 3]
    listed = Listed.of(masks)
    found = listed.sample(Draws(0, CPU).uniform(500, 3))
    assert found.shape == (500, 3)
    assert found[:, 0].unique().tolist() == [0, 2, 4, 6, 8]
    assert found[:, 2].unique().tolist() == [3]
    assert not found[:, 1].any()  # none to learn from, but a row that is there


@given(turn=st.floats(0, 1, exclude_max=True), number=st.integers(1, 9))
def test_a_ring_has_different_ids_as_far_as_there_are_any(turn, number):
    masks = [torch.arange(9) >= 4, torch.zeros(3, dtype=torch.bool), torch.arange(4) == 1]
    found = Listed.of(masks).ring(torch.full((3,), turn, dtype=torch.float64), number)
    for mask, ids in zip(masks, found.T.tolist(), strict=True):
        there = [i for i in ids if i >= 0]
        assert len(there) == len(set(there)) == min(number, int(mask.sum()))
        assert all(mask[i] for i in there)
        assert ids[len(there) :] == [-1] * (number - len(there))


def test_a_number_that_rounds_to_the_count_is_still_below_it():
    listed = Listed.of([torch.arange(7) < 5, torch.arange(7) >= 5])
    assert listed.sample(torch.tensor([[1.0, 1.0]])).tolist() == [[4, 6]]
