"""The paper's equations for a step of SGD on both factors, against the step itself, in float64.

The paper's matrices are the transposes of ours: W1 (d, k), W2 (k, n), W = W1 W2 (d, n).
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rarebit as rb
from rarebit.methods.mlet import MLET, FactorizedTable

pytestmark = pytest.mark.filterwarnings("ignore:MLET with inner_dim:UserWarning")

LR = 0.05
SHAPES = [(2, 5, 1), (2, 5, 2), (2, 5, 4), (4, 30, 9), (3, 4, 8), (6, 40, 2)]
"""d, n and k: the paper's toy, and shapes with every order of the three."""

shapes = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 14))


@dataclass
class Step:
    """One step of SGD on a factorized table, and what the paper names of it."""

    w1: Tensor
    """(d, k)"""
    w2: Tensor
    """(k, n)"""
    gradient: Tensor
    """G, the gradient of the full table, (d, n)."""
    moved: Tensor
    """W(t+1) - W(t), (d, n)."""


def take_step(d: int, n: int, k: int, seed: int = 0) -> Step:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(n, d, dtype=torch.float64))
    rb.apply_(model, MLET(inner_dim=k, std=0.5), min_width=1, verbose=False)
    table = model[0]
    assert isinstance(table, FactorizedTable)
    ids, wanted = torch.randint(n, (4,)), torch.randn(4, d, dtype=torch.float64)
    w1, w2 = table.projection.detach().T.clone(), table.inner.weight.detach().T.clone()
    plain = nn.Embedding.from_pretrained((w1 @ w2).T.contiguous(), freeze=False)
    (plain(ids) - wanted).square().sum().backward()
    optimizer = torch.optim.SGD(table.parameters(), lr=LR)
    (table(ids) - wanted).square().sum().backward()
    optimizer.step()
    return Step(w1, w2, plain.weight.grad.T, table.weight.detach().T - w1 @ w2)


def first_order(step: Step) -> Tensor:
    """Return (2)."""
    w1, w2, gradient = step.w1, step.w2, step.gradient
    return -LR * (w1 @ w1.T @ gradient + gradient @ w2.T @ w2)


def reweighted(step: Step) -> Tensor:
    """Return (7), direction by direction."""
    d, n = step.gradient.shape
    factors = reweighting_factors(step.w1, step.w2)
    u, v = torch.linalg.svd(step.w1).U, torch.linalg.svd(step.w2).Vh.T
    total = torch.zeros(d, n, dtype=torch.float64)
    for i in range(d):
        for j in range(n):
            g_ij = u[:, i] @ step.gradient @ v[:, j]
            total -= LR * factors[i, j] * g_ij * torch.outer(u[:, i], v[:, j])
    return total


def reweighting_factors(w1: Tensor, w2: Tensor) -> Tensor:
    """Return sigma1_i² + sigma2_j², `(d, n)`; beyond its number of values a factor counts as zero."""
    return squares(w1, w1.shape[0]).unsqueeze(1) + squares(w2, w2.shape[1])


def squares(factor: Tensor, count: int) -> Tensor:
    values = torch.linalg.svdvals(factor).square()
    return torch.cat([values, torch.zeros(count - len(values), dtype=torch.float64)])


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


@pytest.mark.parametrize(("d", "n", "k"), SHAPES)
def test_equation_3_is_the_step_itself(d, n, k):
    step = take_step(d, n, k)
    w1, w2, gradient = step.w1, step.w2, step.gradient
    after = (w1 - LR * gradient @ w2.T) @ (w2 - LR * w1.T @ gradient)
    assert largest(step.moved) > 1e-4
    assert largest(step.moved - (after - w1 @ w2)) < 1e-12


@pytest.mark.parametrize(("d", "n", "k"), SHAPES)
def test_equation_2_leaves_out_the_second_order_term_and_nothing_else(d, n, k):
    step = take_step(d, n, k)
    second_order = LR**2 * step.gradient @ step.w2.T @ step.w1.T @ step.gradient
    assert largest(second_order) > 1e-8
    assert largest(step.moved - first_order(step) - second_order) < 1e-12


@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
def test_equation_2_is_the_theorem(shape, seed):
    step = take_step(*shape, seed)
    assert largest(first_order(step) - reweighted(step)) < 1e-10


@pytest.mark.parametrize(("k", "non_zero", "informative"), [(1, 6, 2), (2, 10, 4), (4, 10, 8)])
def test_the_counts_of_the_papers_toy(k, non_zero, informative):
    # table 1 shows five zeros for k = 1; by the paper's own formula it is four
    step = take_step(2, 5, k)
    assert counts(step) == (non_zero, informative)


@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
def test_the_counts_of_any_shape(shape, seed):
    d, n, k = shape
    long1, long2 = min(d, k), min(k, n)
    # a direction is lost where both of its factors are zero
    expected = d * n - (d - long1) * (n - long2)
    assert counts(take_step(*shape, seed)) == (expected, d * long2)
    if k <= n:
        assert expected == (d * n if k >= d else k * n + (d - k) * k)


def counts(step: Step) -> tuple[int, int]:
    """Return how many factors are not zero, and how many have a part that knows of other ids."""
    d, n = step.gradient.shape
    non_zero = int((reweighting_factors(step.w1, step.w2) > 1e-12).sum())
    return non_zero, d * int((squares(step.w2, n) > 1e-12).sum())


def test_plain_training_moves_looked_up_rows_and_mlet_all():
    step = take_step(4, 30, 9)
    assert int(step.gradient.any(dim=0).sum()) <= 4
    assert bool((step.moved.abs().amax(dim=0) > 1e-9).all())


def test_the_rate_grows_with_the_inner_width_and_the_scale():
    # E[W1 W1ᵀ] = k std² I: what the control with a matched rate is matched to
    torch.manual_seed(0)
    for k, std in ((64, 0.25), (512, 0.5)):
        model = nn.Sequential(nn.Embedding(5, 60, dtype=torch.float64))
        rb.apply_(model, MLET(inner_dim=k, std=std), verbose=False)
        rate = model[0].projection.detach().square().sum() / 60
        assert float(rate) == pytest.approx(k * std**2, rel=0.05)
