"""The closed form of algorithm 1, against a solver of the problem it solves, and its limit cases."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch.testing import assert_close

from rarebit.transfer.lexico import global_barrier, row_barrier

DOUBLE = torch.float64
LARGE = torch.tensor(1e6, dtype=DOUBLE)
numbers = st.floats(-3, 3).map(lambda x: round(x, 3))


def rows_of(width, least=1):
    row = st.lists(numbers, min_size=width, max_size=width)
    return st.lists(row, min_size=least, max_size=6)


def nearest(transfer, main, barrier):
    """The vector nearest to the transfer gradient beyond the barrier, by a general solver."""
    found = minimize(
        lambda nu: ((nu - transfer) ** 2).sum(),
        x0=transfer,
        jac=lambda nu: 2 * (nu - transfer),
        constraints=[
            {"type": "ineq", "fun": lambda nu: main @ nu - barrier, "jac": lambda nu: main}
        ],
        method="SLSQP",
        options={"ftol": 1e-10, "maxiter": 200},
    )
    assert found.success, found.message
    return found.x


@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("loss", [0.05, 1e6], ids=["loss is the barrier", "gradient is"])
def test_the_closed_form_solves_the_problem_of_each_row(alpha, loss):
    main, transfer = torch.randn(2, 40, 3, dtype=DOUBLE)
    found = row_barrier(main, transfer, torch.tensor(loss, dtype=DOUBLE), alpha)
    assert (found.coefficient > 0).any()
    for g, t, mu in zip(main.numpy(), transfer.numpy(), found.gradient, strict=True):
        expected = nearest(t, g, alpha * min(g @ g, loss))
        assert_close(mu, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_the_global_form_solves_the_problem_of_all_rows_at_once():
    main, transfer = torch.randn(2, 5, 3, dtype=DOUBLE)
    found = global_barrier(main, transfer, LARGE, alpha=2.0)
    g, t = main.flatten().numpy(), transfer.flatten().numpy()
    expected = torch.tensor(nearest(t, g, 2.0 * (g @ g)))
    assert_close(found.gradient.flatten(), expected, rtol=1e-4, atol=1e-4)
    assert found.coefficient.unique().numel() == 1
    assert not torch.equal(found.gradient, row_barrier(main, transfer, LARGE).gradient)


def by_hand(g, t, loss, alpha):
    """Algorithm 1 as it is written, number by number."""
    square = sum(x * x for x in g)
    if square == 0:
        return list(t), 0.0, 0.0
    phi = alpha * min(square, loss)
    coefficient = max((phi - sum(x * y for x, y in zip(t, g, strict=True))) / square, 0.0)
    return [x + coefficient * y for x, y in zip(t, g, strict=True)], coefficient, phi


@given(main=rows_of(2), other=rows_of(2, least=6), loss=st.floats(0, 9), alpha=st.floats(0.1, 4))
def test_rows_are_those_of_the_algorithm(main, other, loss, alpha):
    transfer = other[: len(main)]
    tensors = [torch.tensor(x, dtype=DOUBLE) for x in (main, transfer, loss)]
    found = row_barrier(*tensors, alpha)
    for i, (g, t) in enumerate(zip(main, transfer, strict=True)):
        mu, coefficient, phi = by_hand(g, t, loss, alpha)
        assert_close(found.gradient[i], torch.tensor(mu, dtype=DOUBLE))
        assert found.coefficient[i].item() == pytest.approx(coefficient)
        assert found.barrier[i].item() == pytest.approx(phi)


@given(main=rows_of(3), other=rows_of(3, least=6))
def test_the_barrier_is_met_exactly_or_the_transfer_is_left_alone(main, other):
    main = torch.tensor(main, dtype=DOUBLE)
    transfer = torch.tensor(other[: len(main)], dtype=DOUBLE)
    found = row_barrier(main, transfer, LARGE)
    met = (found.gradient * main).sum(dim=1)
    is_held = found.coefficient > 0
    assert_close(met[is_held], found.barrier[is_held])
    assert torch.equal(found.gradient[~is_held], transfer[~is_held])
    assert (met >= found.barrier - 1e-9).all()


@given(main=rows_of(3), alpha=st.floats(0.5, 3), share=st.floats(0, 0.99))
def test_no_transfer_and_one_that_goes_the_same_way_are_alpha_main_gradients(main, alpha, share):
    main = torch.tensor(main, dtype=DOUBLE)
    for transfer in (torch.zeros_like(main), share * alpha * main):
        found = row_barrier(main, transfer, LARGE, alpha)
        has_gradient = main.any(dim=1)
        assert_close(found.gradient[has_gradient], (alpha * main)[has_gradient])


def test_a_row_without_main_gradient_takes_the_transfer_and_is_no_mistake():
    main, transfer = torch.zeros(2, 3), torch.randn(2, 3)
    found = row_barrier(main, transfer, torch.tensor(1.0))
    assert torch.equal(found.gradient, transfer)
    assert not found.not_finite.any()


def test_gradients_of_rows_seen_once_in_a_large_batch_have_their_barrier():
    main, transfer = torch.randn(2, 50, 4) * torch.tensor([1e-8, 1.0]).reshape(2, 1, 1)
    found = row_barrier(main, transfer, torch.tensor(0.5))
    wide = row_barrier(main.double(), transfer.double(), torch.tensor(0.5))
    assert_close(found.coefficient.double(), wide.coefficient, rtol=1e-4, atol=1e-4)


def test_a_coefficient_that_is_not_finite_counts_as_none_and_is_counted():
    main = torch.tensor([[1e-22, 0.0], [1.0, 0.0]])
    transfer = torch.tensor([[-1.0, 3.0], [-1.0, 3.0]])
    assert main[0].square().sum() > 0  # not zero, but a fraction of it overflows
    found = row_barrier(main, transfer * 1e20, torch.tensor(1.0))
    assert found.not_finite.tolist() == [True, False]
    assert torch.equal(found.gradient[0], transfer[0] * 1e20)
    assert torch.isfinite(found.gradient).all()


def test_a_loss_below_zero_is_no_licence_to_raise_it():
    main, transfer = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 1.0]])
    assert row_barrier(main, transfer, torch.tensor(-5.0)).gradient.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("rule", [row_barrier, global_barrier])
def test_rules_do_not_depend_on_the_order_of_the_rows(rule):
    gradients, order = torch.randn(2, 9, 4, dtype=DOUBLE), torch.randperm(9)
    whole = rule(*gradients, LARGE).gradient
    assert_close(rule(*gradients[:, order], LARGE).gradient, whole[order])


@pytest.mark.parametrize("rule", [row_barrier, global_barrier])
def test_slots_without_a_row_change_nothing(rule):
    gradients, loss = torch.randn(2, 2, 4), torch.tensor(1.0)
    padded = torch.cat([torch.zeros(2, 1, 4), gradients, torch.zeros(2, 1, 4)], dim=1)
    found = rule(*padded, loss).gradient
    assert_close(found[1:3], rule(*gradients, loss).gradient)
    assert not found[[0, 3]].any()


def test_embedding_sets_have_a_barrier_each():
    main, transfer = torch.randn(2, 5, 3, 4)
    found = row_barrier(main, transfer, torch.tensor(2.0))
    for m in range(3):
        alone = row_barrier(main[:, m], transfer[:, m], torch.tensor(2.0))
        assert_close(found.gradient[:, m], alone.gradient)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_a_small_step_lowers_the_main_loss_by_what_the_barriers_promise(scale):
    """First order: the loss falls by at least the learning rate times the sum of phi."""
    weight = torch.randn(6, 3, dtype=DOUBLE, requires_grad=True)
    goal, pull = torch.randn(2, 6, 3, dtype=DOUBLE)

    def main_loss(rows):
        return (torch.tanh(rows) - goal).square().mean()

    loss = main_loss(weight)
    (g,) = torch.autograd.grad(loss, weight)
    found = row_barrier(g, scale * pull, loss.detach())
    for lr in (1e-4, 1e-5):
        fall = loss - main_loss(weight - lr * found.gradient)
        second_order = 10 * (lr * found.gradient).square().sum()
        assert fall >= lr * found.barrier.sum() - second_order


def test_a_transfer_that_opposes_raises_the_main_loss_in_the_plain_sum_and_not_behind_a_barrier():
    weight = torch.randn(6, 3, dtype=DOUBLE, requires_grad=True)
    loss = torch.tanh(weight).square().mean()
    (g,) = torch.autograd.grad(loss, weight)
    held = row_barrier(g, -3 * g, loss.detach()).gradient
    plain_sum, behind = (torch.tanh(weight - 1e-3 * mu).square().mean() for mu in (-2 * g, held))
    assert behind < loss < plain_sum
