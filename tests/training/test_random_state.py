"""Draws after restoring a state against the draws that followed when it was taken."""

import json
import random

import numpy as np
import pytest
import torch
from capabilities import needs_cuda
from hypothesis import given
from hypothesis import strategies as st

from rarebit.errors import TrainingError
from rarebit.training.fit import random_state, set_random_state


def draws(n=700):
    """More than a generator's 624 words, and an odd number of normal ones: they come in pairs."""
    return (
        torch.rand(n).tolist(),
        torch.randn(17).tolist(),
        [random.random() for _ in range(n)],  # noqa: S311  # no secrets here
        [random.gauss(0, 1) for _ in range(3)],
        np.random.rand(n).tolist(),  # noqa: NPY002  # the global state is under test
        np.random.randn(3).tolist(),  # noqa: NPY002  # the same
    )


def leaves(value):
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        for inner in value.values():
            yield from leaves(inner)
    else:
        yield value


@given(before=st.integers(0, 3), odd=st.booleans())
def test_draws_go_on_as_they_would_have(before, odd):
    for _ in range(before):
        draws(13)
    if odd:
        random.gauss(0, 1)
        np.random.randn()  # noqa: NPY002  # the same
    state = random_state()
    wanted = draws()
    assert draws() != wanted
    for _ in range(2):
        set_random_state(state)
        assert draws() == wanted


def test_a_state_is_plain_values_and_tensors_of_bytes():
    random.gauss(0, 1)
    for leaf in leaves(random_state()):
        if isinstance(leaf, torch.Tensor):
            assert leaf.dtype == torch.uint8
        else:
            assert leaf is None or type(leaf) in (int, float)
            assert json.loads(json.dumps(leaf)) == leaf


def test_taking_a_state_draws_nothing():
    state = random_state()
    random_state()
    wanted = draws()
    set_random_state(state)
    random_state()
    assert draws() == wanted


def test_a_state_does_not_change_with_later_draws():
    state = random_state()
    copies = [leaf.clone() for leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
    draws()
    after = [leaf for leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(copies, after, strict=True))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("python", {"position": 625}),
        ("python", {"position": -1}),
        ("python", {"position": True}),
        ("python", {"version": 9}),
        ("python", {"words": torch.zeros(4, dtype=torch.uint8)}),
        ("python", {"gauss": "x"}),
        ("numpy", {"position": 10**9}),
        ("numpy", {"position": None}),
        ("numpy", {"words": torch.zeros(624)}),
        ("numpy", {"words": [1, 2]}),
        ("numpy", {"gauss": {}}),
    ],
)
def test_a_state_that_cannot_be_one_is_refused_and_nothing_is_set(part, change):
    state = random_state()
    damaged = state | {part: state[part] | change}
    draws()
    later = random_state()
    wanted = draws()
    set_random_state(later)
    with pytest.raises(TrainingError, match=r"the random state is damaged: .*; start from another"):
        set_random_state(damaged)
    assert draws() == wanted


@pytest.mark.parametrize(
    "torch_state", [torch.zeros(3, dtype=torch.uint8), torch.zeros(5056, dtype=torch.uint8), None]
)
def test_a_damaged_state_of_torch_is_refused(torch_state):
    state = random_state()
    wanted = draws()
    set_random_state(state)
    with pytest.raises(TrainingError, match="the random state is damaged"):
        set_random_state(state | {"torch": torch_state})
    assert draws() == wanted


@pytest.mark.parametrize("state", [{}, {"python": None}, {"python": 3, "numpy": 4, "torch": 5}])
def test_nonsense_is_refused(state):
    with pytest.raises(TrainingError, match="the random state is damaged"):
        set_random_state(state)


def test_devices_that_are_not_there_are_left_out():
    state = random_state()
    wanted = draws()
    set_random_state(state | {"cuda": {"4096": torch.zeros(16, dtype=torch.uint8)}})
    assert draws() == wanted


@needs_cuda
def test_draws_on_the_gpu_go_on_as_they_would_have():
    torch.rand(3, device="cuda")
    state = random_state()
    wanted = torch.rand(9, device="cuda")
    set_random_state(state)
    assert torch.equal(torch.rand(9, device="cuda"), wanted)
