import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rarebit.errors import SettingsError
from rarebit.interactions.basic import FactorizationMachine
from rarebit.interactions.field_pairs import FieldWeightedMachine, FieldWeightedPooling

BOTH = pytest.mark.parametrize("kind", [FieldWeightedMachine, FieldWeightedPooling])


def naive(kind, x, weight):
    """The weighted sum of products for one row `(F, D)`, term by term."""
    num_fields = len(x)
    if kind is FieldWeightedMachine:
        pairs = [(i, j) for i in range(num_fields) for j in range(i + 1, num_fields)]
        terms = [weight[number] * x[i] * x[j] for number, (i, j) in enumerate(pairs)]
    else:
        terms = [weight[i, j] * x[i] * x[j] for i in range(num_fields) for j in range(num_fields)]
    return sum(terms, start=torch.zeros_like(x[0]))


def lively(kind, num_fields, num_sets=None):
    made = kind(num_fields, num_sets=num_sets).double()
    (weight,) = made.parameters()
    torch.nn.init.normal_(weight)
    return made, weight


def assert_equal_with_gradients(got, want, inputs):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    pull = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), inputs),
        torch.autograd.grad((want * pull).sum(), inputs),
        rtol=0,
        atol=1e-12,
    )


def test_values_worked_by_hand():
    x = torch.tensor([[[1.0], [2.0], [3.0]]])
    machine, pooling = FieldWeightedMachine(3), FieldWeightedPooling(3)
    with torch.no_grad():
        machine.strength.copy_(torch.tensor([1.0, 10.0, 100.0]))
        pooling.weight.copy_(torch.tensor([[1.0, 0, 0], [10, 0, 2], [0, 3, 0]]))
    # r_12 1*2 + r_13 1*3 + r_23 2*3
    assert machine(x).tolist() == [[2.0 + 30.0 + 600.0]]
    # w_11 1*1 + w_21 2*1 + w_23 2*3 + w_32 3*2
    assert pooling(x).tolist() == [[1.0 + 20.0 + 12.0 + 18.0]]


@BOTH
@pytest.mark.parametrize("num_fields", [2, 5])
def test_values_and_gradients_equal_the_papers_sum(kind, num_fields):
    module, weight = lively(kind, num_fields)
    x = torch.randn(4, num_fields, 3, dtype=torch.float64, requires_grad=True)
    want = torch.stack([naive(kind, row, weight) for row in x])
    assert_equal_with_gradients(module(x), want, (x, weight))


@BOTH
def test_sets_with_weights_of_their_own_equal_a_loop_over_sets(kind):
    stacked, weight = lively(kind, 4, num_sets=3)
    one, own = lively(kind, 4)
    assert tuple(weight.shape) == (3, *own.shape)
    rows = torch.randn(5, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    x = rows.permute(2, 0, 1, 3)  # as a backbone gives them
    [(name, _)] = one.named_parameters()
    loop = [torch.func.functional_call(one, {name: weight[m]}, x[m]) for m in range(3)]
    assert_equal_with_gradients(stacked(x), torch.stack(loop), (rows, weight))


@BOTH
def test_sets_that_share_weights_equal_a_loop_over_sets(kind):
    module, _ = lively(kind, 4)
    x = torch.randn(3, 5, 4, 2, dtype=torch.float64)
    want = torch.stack([module(one) for one in x])
    torch.testing.assert_close(module(x), want, rtol=0, atol=1e-13)


@BOTH
def test_a_step_makes_no_table_of_pairs_for_each_row(kind):
    rows, num_fields, dim = 50, 20, 2
    module = kind(num_fields)
    x = torch.randn(rows, num_fields, dim, requires_grad=True)
    with LargestTensor() as seen:
        module(x).sum().backward()
    assert 0 < seen.largest <= rows * num_fields * dim


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor has that anything gives back."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out


def test_weights_start_as_the_papers_say():
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(
        FieldWeightedMachine(5).double()(x), FactorizationMachine()(x), rtol=0, atol=1e-12
    )
    weight = FieldWeightedPooling(60, num_sets=2).weight.detach()
    assert float(weight.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(weight.std()) == pytest.approx(1.0, rel=0.05)
    assert not torch.equal(weight[0], weight[1])


def test_one_field_has_no_pair_but_its_square():
    x = torch.randn(4, 1, 3)
    assert not FieldWeightedMachine(1)(x).any()
    pooling = FieldWeightedPooling(1)
    torch.testing.assert_close(pooling(x), x[:, 0].square() * pooling.weight[0, 0])


@BOTH
def test_no_field_is_refused(kind):
    with pytest.raises(SettingsError, match="num_fields must be at least 1, got num_fields=0"):
        kind(0)
