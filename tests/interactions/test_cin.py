import itertools

import pytest
import torch

from rarebit.errors import SettingsError
from rarebit.interactions.cin import CompressedInteraction
from rarebit.testing import counting_large_tensors

VARIANTS = pytest.mark.parametrize(
    ("relu", "split_half"), list(itertools.product([False, True], repeat=2))
)


def naive(fields, weights, biases, *, split_half):
    """x^{k+1}_h = sum_ij W^h_ij (x^k_i * x^0_j) for one row `(F, D)`, map by map, then summed."""
    maps, features = list(fields), []
    for layer, weight in enumerate(weights):
        found = []
        for h in range(len(weight)):
            total = torch.zeros_like(fields[0])
            for i, map_ in enumerate(maps):
                for j, field in enumerate(fields):
                    total = total + weight[h, i * len(fields) + j] * map_ * field
            found.append(torch.clamp(total + biases[layer][h], min=0.0) if biases else total)
        is_last = layer == len(weights) - 1
        half = len(found) // 2
        features += found[half:] if split_half and not is_last else found
        maps = found[:half] if split_half else found
    return torch.stack([sum(map_.unbind()) for map_ in features])


def network(num_sets=None, **variant):
    return CompressedInteraction(3, (4, 2, 3), num_sets=num_sets, **variant).double()


def test_a_value_worked_by_hand():
    cin = CompressedInteraction(2, (1, 1))
    with torch.no_grad():
        cin.weights[0].copy_(torch.tensor([[1.0, 2.0, 0.0, -1.0]]))
        cin.weights[1].copy_(torch.tensor([[0.5, 1.0]]))
    # v_1 = (1, 2), v_2 = (3, 1): x^1 = v_1 v_1 + 2 v_1 v_2 - v_2 v_2 = (1 + 6 - 9, 4 + 4 - 1)
    # x^2 = 0.5 x^1 v_1 + x^1 v_2 = (-1 - 6, 7 + 7)
    assert cin(torch.tensor([[[1.0, 2.0], [3.0, 1.0]]])).tolist() == [[5.0, 7.0]]


@VARIANTS
def test_values_and_gradients_equal_the_papers_equation(relu, split_half):
    cin = network(relu=relu, split_half=split_half)
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    rows = [naive(row, cin.weights, cin.biases, split_half=split_half) for row in x]
    got, want = cin(x), torch.stack(rows)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert got.shape[-1] == cin.out_width == (6 if split_half else 9)
    assert len(cin.biases) == (3 if relu else 0)
    pull = torch.randn_like(got)
    inputs = (x, *cin.parameters())
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), inputs),
        torch.autograd.grad((want * pull).sum(), inputs),
        rtol=0,
        atol=1e-12,
    )


@VARIANTS
def test_sets_with_layers_of_their_own_equal_a_loop_over_sets(relu, split_half):
    stacked = network(num_sets=3, relu=relu, split_half=split_half)
    assert tuple(stacked.weights[0].shape) == (3, 4, 9)
    one = network(relu=relu, split_half=split_half)
    x = torch.randn(3, 5, 3, 2, dtype=torch.float64, requires_grad=True)
    loop = []
    for index in range(3):
        weights = {name: weight[index] for name, weight in stacked.named_parameters()}
        loop.append(torch.func.functional_call(one, weights, x[index]))
    got, want = stacked(x), torch.stack(loop)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    pull = torch.randn_like(got)
    inputs = (x, *stacked.parameters())
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), inputs),
        torch.autograd.grad((want * pull).sum(), inputs),
        rtol=0,
        atol=1e-12,
    )


def test_sets_that_share_layers_equal_a_loop_over_sets():
    cin = network(relu=True)
    x = torch.randn(3, 5, 3, 2, dtype=torch.float64)
    want = torch.stack([cin(one) for one in x])
    torch.testing.assert_close(cin(x), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("num_sets", [None, 2])
@pytest.mark.parametrize("half_precision", [False, True])
def test_the_products_of_a_layer_are_made_once_and_so_is_their_gradient(num_sets, half_precision):
    sets = () if num_sets is None else (num_sets,)
    cin = CompressedInteraction(5, (6, 4), relu=True, num_sets=num_sets)
    x = torch.randn(*sets, 40, 5, 3, requires_grad=True)
    least = (num_sets or 1) * 40 * 3 * 5 * 5  # the smaller of two layers: F F products a row and d
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=half_precision),
        counting_large_tensors(least) as made,
    ):
        out = cin(x)
    assert len(made) == 2, made
    with counting_large_tensors(least) as made:
        out.sum().backward()
    assert len(made) == 2, made


def test_weights_start_as_those_of_a_linear_layer():
    cin = CompressedInteraction(4, (50, 30), relu=True, num_sets=2)
    for weight, bias, width in zip(cin.weights, cin.biases, (16, 200), strict=True):
        bound = width**-0.5
        for values in (weight.detach(), bias.detach()):
            assert float(values.abs().max()) <= bound
            assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_fields": 0}, "num_fields must be at least 1, got num_fields=0"),
        ({"layers": ()}, "a compressed interaction network needs a layer, got none"),
        ({"layers": (4, 0)}, r"layers need at least 1 feature map, got \(4, 0\)"),
        ({"split_half": True}, r"needs layers of even size, except the last, got \(4, 3, 2\)"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(SettingsError, match=message):
        CompressedInteraction(**{"num_fields": 3, "layers": (4, 3, 2)} | arguments)


def test_an_odd_last_layer_can_be_split():
    assert CompressedInteraction(3, (4, 3), split_half=True)(torch.randn(2, 3, 2)).shape == (2, 5)
