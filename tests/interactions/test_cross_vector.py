import pytest
import torch

from rarebit.errors import SettingsError
from rarebit.interactions.cross import VectorCrossNetwork
from rarebit.testing import counting_large_tensors


def naive(embeddings, weight, bias):
    """x_{l+1} = x_0 (w_l . x_l) + b_l + x_l for one row `(F, D)`, number by number."""
    first = [
        embeddings[f, d] for f in range(embeddings.shape[0]) for d in range(embeddings.shape[1])
    ]
    crossed = list(first)
    for vector, shift in zip(weight, bias, strict=True):
        product = sum(w * x for w, x in zip(vector, crossed, strict=True))
        crossed = [x0 * product + b + x for x0, b, x in zip(first, shift, crossed, strict=True)]
    return torch.stack(crossed)


def network(num_layers, num_sets=None):
    made = VectorCrossNetwork(num_fields=3, dim=2, num_layers=num_layers, num_sets=num_sets)
    torch.nn.init.normal_(made.bias)
    return made.double()


def test_a_value_worked_by_hand():
    cross = VectorCrossNetwork(num_fields=2, dim=1, num_layers=2)
    with torch.no_grad():
        cross.weight.copy_(torch.tensor([[1.0, 2.0], [0.5, -1.0]]))
        cross.bias.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    # x0 = (2, 3): w . x0 = 8, x1 = (2*8 + 1 + 2, 3*8 + 0 + 3) = (19, 27)
    # w . x1 = -17.5, x2 = (2*-17.5 + 0 + 19, 3*-17.5 - 1 + 27) = (-16, -26.5)
    assert cross(torch.tensor([[[2.0], [3.0]]])).tolist() == [[-16.0, -26.5]]


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_values_and_gradients_equal_the_papers_equation(num_layers):
    cross = network(num_layers)
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(4, 6, dtype=torch.float64)
    got, want = cross(x), torch.stack([naive(row, cross.weight, cross.bias) for row in x])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    inputs = (x, cross.weight, cross.bias)
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), inputs),
        torch.autograd.grad((want * pull).sum(), inputs),
        rtol=1e-11,
        atol=1e-11,
    )


def test_sets_with_layers_of_their_own_equal_a_loop_over_sets():
    stacked = network(2, num_sets=3)
    assert tuple(stacked.weight.shape) == tuple(stacked.bias.shape) == (3, 2, 6)
    x = torch.randn(3, 5, 3, 2, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(3, 5, 6, dtype=torch.float64)
    one, loop = network(2), []
    for index in range(3):
        weights = {"weight": stacked.weight[index], "bias": stacked.bias[index]}
        loop.append(torch.func.functional_call(one, weights, x[index]))
    got, want = stacked(x), torch.stack(loop)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    inputs = (x, stacked.weight, stacked.bias)
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), inputs),
        torch.autograd.grad((want * pull).sum(), inputs),
        rtol=1e-12,
        atol=1e-12,
    )


def test_sets_that_share_layers_equal_a_loop_over_sets():
    cross = network(2)
    x = torch.randn(3, 5, 3, 2, dtype=torch.float64)
    want = torch.stack([cross(one) for one in x])
    torch.testing.assert_close(cross(x), want, rtol=1e-12, atol=1e-12)


def test_more_layers_make_no_more_large_tensors():
    x = torch.randn(50, 3, 2, requires_grad=True)
    counts = []
    for num_layers in (1, 5):
        cross = VectorCrossNetwork(num_fields=3, dim=2, num_layers=num_layers)
        with counting_large_tensors(x.numel()) as made:
            cross(x).sum().backward()
        counts.append(len(made))
    assert counts[0] == counts[1]


def test_in_half_precision_only_the_matrix_product_is_inexact():
    cross = network(4).float()
    x = torch.randn(50, 3, 2)
    exact = cross(x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = cross(x)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(
        rough, exact, rtol=0.02, atol=0.02 * float(exact.detach().abs().max())
    )


def test_every_layer_of_every_set_starts_differently_and_with_xaviers_spread():
    cross = VectorCrossNetwork(num_fields=20, dim=5, num_layers=2, num_sets=2)
    vectors = cross.weight.detach().view(4, 100)
    assert len({tuple(vector.tolist()) for vector in vectors}) == 4
    assert float(vectors.std()) == pytest.approx((2 / 101) ** 0.5, rel=0.1)
    assert not cross.bias.any()


@pytest.mark.parametrize("name", ["num_fields", "dim", "num_layers"])
def test_sizes_below_one_are_refused(name):
    sizes = {"num_fields": 3, "dim": 2, "num_layers": 1} | {name: 0}
    with pytest.raises(SettingsError, match=f"{name} must be at least 1, got {name}=0"):
        VectorCrossNetwork(**sizes)
