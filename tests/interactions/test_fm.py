import pytest
import torch

from rarebit.interactions.basic import FactorizationMachine


def naive(embeddings):
    """Sum over i < j of v_i * v_j for one row `(F, D)`, term by term."""
    num_fields, dim = embeddings.shape
    return torch.stack(
        [
            sum(
                (
                    embeddings[i, d] * embeddings[j, d]
                    for i in range(num_fields)
                    for j in range(i + 1, num_fields)
                ),
                start=embeddings.new_zeros(()),
            )
            for d in range(dim)
        ]
    )


def test_a_value_worked_by_hand():
    embeddings = torch.tensor([[[1.0, -1.0], [2.0, 0.5], [3.0, 4.0]]])
    # 1*2 + 1*3 + 2*3 = 11        -1*0.5 + -1*4 + 0.5*4 = -2.5
    assert FactorizationMachine()(embeddings).tolist() == [[11.0, -2.5]]


@pytest.mark.parametrize("num_fields", [2, 5])
def test_values_and_gradients_equal_the_sum_over_pairs(num_fields):
    x = torch.randn(4, num_fields, 3, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(4, 3, dtype=torch.float64)
    got, want = FactorizationMachine()(x), torch.stack([naive(row) for row in x])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    (got_grad,) = torch.autograd.grad((got * pull).sum(), x)
    (want_grad,) = torch.autograd.grad((want * pull).sum(), x)
    torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=1e-13)


def test_one_field_has_no_pair():
    x = torch.randn(4, 1, 3, dtype=torch.float64, requires_grad=True)
    pairs = FactorizationMachine()(x)
    (gradient,) = torch.autograd.grad(pairs.sum(), x)
    assert not pairs.any()
    assert not gradient.any()


def test_gradients_equal_finite_differences():
    x = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(FactorizationMachine(), (x,))


def test_a_set_axis_equals_a_loop_over_sets():
    x = torch.randn(3, 4, 5, 2, dtype=torch.float64)
    machine = FactorizationMachine()
    torch.testing.assert_close(machine(x), torch.stack([machine(one) for one in x]), rtol=0, atol=0)
