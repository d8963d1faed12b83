import pytest
import torch

from rarebit.errors import SettingsError
from rarebit.interactions.field_pairs import FieldAwareMachine


def naive(embeddings, dim):
    """Sum over i < j of v_i^j * v_j^i for one row `(F, F * D)`, term by term."""
    num_fields = len(embeddings)
    v = [[row[j * dim : (j + 1) * dim] for j in range(num_fields)] for row in embeddings]
    pairs = [(i, j) for i in range(num_fields) for j in range(i + 1, num_fields)]
    return sum((v[i][j] * v[j][i] for i, j in pairs), start=embeddings.new_zeros(dim))


def test_a_value_worked_by_hand():
    machine = FieldAwareMachine(num_fields=3, dim=1)
    x = torch.tensor([[[9.0, 2.0, 3.0], [4.0, 9.0, 5.0], [6.0, 7.0, 9.0]]])
    # v_1^2 v_2^1 + v_1^3 v_3^1 + v_2^3 v_3^2 = 2*4 + 3*6 + 5*7; the nines meet no field
    assert machine(x).tolist() == [[61.0]]


@pytest.mark.parametrize("num_fields", [2, 5])
def test_values_and_gradients_equal_the_papers_sum_over_pairs(num_fields):
    machine = FieldAwareMachine(num_fields, 3)
    x = torch.randn(4, num_fields, num_fields * 3, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(4, 3, dtype=torch.float64)
    got, want = machine(x), torch.stack([naive(row, 3) for row in x])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    (got_grad,) = torch.autograd.grad((got * pull).sum(), x)
    (want_grad,) = torch.autograd.grad((want * pull).sum(), x)
    torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=1e-13)


def test_one_field_has_no_pair():
    x = torch.randn(4, 1, 3, requires_grad=True)
    pairs = FieldAwareMachine(1, 3)(x)
    (gradient,) = torch.autograd.grad(pairs.sum(), x)
    assert pairs.shape == (4, 3)
    assert not pairs.any()
    assert not gradient.any()


def test_a_set_axis_equals_a_loop_over_sets():
    machine = FieldAwareMachine(4, 2)
    x = torch.randn(3, 5, 4, 8, dtype=torch.float64)
    sets_last = x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)  # as a backbone gives them
    want = torch.stack([machine(one) for one in x])
    torch.testing.assert_close(machine(sets_last), want, rtol=0, atol=0)


def test_it_stores_nothing():
    assert not FieldAwareMachine(4, 2).state_dict()


@pytest.mark.parametrize("name", ["num_fields", "dim"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(SettingsError, match=f"{name} must be at least 1, got {name}=0"):
        FieldAwareMachine(**{"num_fields": 3, "dim": 2} | {name: 0})
