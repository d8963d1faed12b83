import pytest
import torch

from rarebit.errors import SettingsError
from rarebit.interactions.cross import CrossNetwork


def naive(embeddings, weight, bias):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l for one row `(F, D)`, number by number."""
    first = [
        embeddings[f, d] for f in range(embeddings.shape[0]) for d in range(embeddings.shape[1])
    ]
    crossed = list(first)
    for matrix, shift in zip(weight, bias, strict=True):
        products = [
            sum((matrix[i, j] * crossed[j] for j in range(len(first))), start=shift[i])
            for i in range(len(first))
        ]
        crossed = [x0 * p + x for x0, p, x in zip(first, products, crossed, strict=True)]
    return torch.stack(crossed)


def network(num_layers, num_sets=None):
    made = CrossNetwork(num_fields=3, dim=2, num_layers=num_layers, num_sets=num_sets).double()
    torch.nn.init.normal_(made.bias)
    return made


def test_a_value_worked_by_hand():
    cross = CrossNetwork(num_fields=2, dim=1, num_layers=2)
    with torch.no_grad():
        cross.weight.copy_(torch.tensor([[[1.0, 2.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]]))
        cross.bias.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    # x0 = (2, 3): W x0 + b = (9, 3), x1 = (2*9 + 2, 3*3 + 3) = (20, 12)
    # W x1 + b = (12, 19), x2 = (2*12 + 20, 3*19 + 12) = (44, 69)
    assert cross(torch.tensor([[[2.0], [3.0]]])).tolist() == [[44.0, 69.0]]


@pytest.mark.parametrize("num_layers", [1, 3])
def test_values_and_gradients_equal_the_papers_equation(num_layers):
    cross = network(num_layers)
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(4, 6, dtype=torch.float64)
    got, want = cross(x), torch.stack([naive(row, cross.weight, cross.bias) for row in x])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    inputs = (x, cross.weight, cross.bias)
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), inputs),
        torch.autograd.grad((want * pull).sum(), inputs),
        rtol=0,
        atol=1e-12,
    )


def test_gradients_equal_finite_differences():
    cross = network(2)
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: cross(x), (x, cross.weight, cross.bias))


def test_sets_with_layers_of_their_own_equal_a_loop_over_sets():
    stacked = network(2, num_sets=3)
    assert tuple(stacked.weight.shape) == (3, 2, 6, 6)
    x = torch.randn(3, 5, 3, 2, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(3, 5, 6, dtype=torch.float64)
    one, loop = network(2), []
    for index in range(3):
        weights = {"weight": stacked.weight[index], "bias": stacked.bias[index]}
        loop.append(torch.func.functional_call(one, weights, x[index]))
    got, want = stacked(x), torch.stack(loop)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    inputs = (x, stacked.weight, stacked.bias)
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), inputs),
        torch.autograd.grad((want * pull).sum(), inputs),
        rtol=0,
        atol=1e-12,
    )


def test_sets_that_share_layers_equal_a_loop_over_sets():
    cross = network(2)
    x = torch.randn(3, 5, 3, 2, dtype=torch.float64)
    want = torch.stack([cross(one) for one in x])
    torch.testing.assert_close(cross(x), want, rtol=0, atol=1e-13)


def test_every_layer_of_every_set_starts_differently_and_within_xaviers_bound():
    weight = CrossNetwork(num_fields=3, dim=2, num_layers=2, num_sets=2).weight.detach()
    matrices = weight.view(4, 36)
    assert len({tuple(matrix.tolist()) for matrix in matrices}) == 4
    assert float(matrices.abs().max()) <= (6 / 12) ** 0.5
    assert float(matrices.std()) == pytest.approx((2 / 12) ** 0.5, rel=0.2)


@pytest.mark.parametrize("name", ["num_fields", "dim", "num_layers"])
def test_sizes_below_one_are_refused(name):
    sizes = {"num_fields": 3, "dim": 2, "num_layers": 1} | {name: 0}
    with pytest.raises(SettingsError, match=f"{name} must be at least 1, got {name}=0"):
        CrossNetwork(**sizes)
