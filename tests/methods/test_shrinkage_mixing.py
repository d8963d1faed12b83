"""w v + (1 - w) p and its gradients, in few passes: against torch's own."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from rarebit.methods._shrinkage_mixing import mixed

SHAPES = {"of the table": (3,), "of each slot": (4, 3), "of each lookup": (5, 4, 3)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=3)))
def test_values_and_gradients_are_those_of_the_product_and_the_sum(shape, trained):
    own, weights = torch.randn(5, 4, 3).double(), torch.rand(5, 4, 1).double()
    inputs = [own, weights, torch.randn(SHAPES[shape]).double()]
    upstream = torch.randn_like(own)
    found, expected = [
        [
            value.clone().requires_grad_(needed)
            for value, needed in zip(inputs, trained, strict=True)
        ]
        for _ in range(2)
    ]
    rows = mixed(*found)
    v, w, p = expected
    plain = w * v + (1 - w) * p
    assert_close(rows, plain)
    if any(trained):
        (rows * upstream).sum().backward()
        (plain * upstream).sum().backward()
    for value, other in zip(found, expected, strict=True):
        assert (value.grad is None) == (other.grad is None)
        if other.grad is not None:
            assert_close(value.grad, other.grad)


def test_the_gradient_that_comes_is_left_as_it_is():
    inputs = [torch.randn(5, 4, 3), torch.rand(5, 4, 1), torch.randn(5, 4, 3)]
    inputs = [value.requires_grad_() for value in inputs]
    upstream = torch.randn(5, 4, 3)
    before = upstream.clone()
    mixed(*inputs).backward(upstream)
    assert torch.equal(upstream, before)
    memory = {value.grad.data_ptr() for value in inputs}
    assert len(memory) == 3  # or an optimizer would change one gradient with the other


@given(v=st.floats(-(2.0**90), 2.0**90, width=32), p=st.floats(-(2.0**90), 2.0**90, width=32))
def test_both_ends_are_exact(v, p):
    own, prior = torch.tensor([[v]]), torch.tensor([p])
    assert mixed(own, torch.ones(1, 1), prior).item() == own.item()
    assert mixed(own, torch.zeros(1, 1), prior).item() == prior.item()


def test_a_prior_that_hardly_counts_still_gets_its_gradient():
    weights = torch.full((1000, 1), 1 - 2.0**-20)
    own, prior = torch.randn(1000, 2), torch.zeros(2, requires_grad=True)
    upstream = torch.randn(1000, 2)
    mixed(own, weights, prior).backward(upstream)
    expected = (upstream.double() * 2.0**-20).sum(dim=0)
    assert_close(prior.grad.double(), expected, rtol=1e-4, atol=0.0)


def test_without_a_prior_it_is_the_product():
    own, weights = torch.randn(5, 3), torch.rand(5, 1)
    assert torch.equal(mixed(own, weights, None), weights * own)
