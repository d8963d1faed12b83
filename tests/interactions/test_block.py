import pytest
import torch
from torch import nn

from rarebit.errors import SettingsError
from rarebit.interactions.basic import Block, Blocks


def naive(x, weight, bias, norm=None):
    """relu(norm(W x + b)) for a batch `(B, W)`, unit by unit."""
    units = []
    for number in range(len(bias)):
        out = torch.stack([weight[number] @ row + bias[number] for row in x])
        if norm is not None:
            scale, shift = norm
            spread = ((out - out.mean()) ** 2).mean()
            out = (out - out.mean()) / (spread + 1e-5).sqrt() * scale[number] + shift[number]
        units.append(torch.stack([value if value > 0 else 0.0 * value for value in out]))
    return torch.stack(units, dim=1)


def block(num_sets=None, *, batch_norm=False):
    made = Block(3, 4, batch_norm=batch_norm, num_sets=num_sets).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def norm_of(made, index=0):
    if isinstance(made.norm, nn.Identity):
        return None
    return tuple(p.view(-1, 4)[index] for p in (made.norm.weight, made.norm.bias))


def assert_equal_with_gradients(got, want, inputs):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    pull = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), inputs),
        torch.autograd.grad((want * pull).sum(), inputs),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("batch_norm", [False, True])
def test_values_and_gradients_equal_the_layer_unit_by_unit(batch_norm):
    made = block(batch_norm=batch_norm)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    want = naive(x, made.weight, made.bias, norm_of(made))
    assert_equal_with_gradients(made(x), want, (x, *made.parameters()))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_sets_with_weights_of_their_own_equal_a_loop_over_sets(batch_norm):
    made = block(num_sets=3, batch_norm=batch_norm)
    assert tuple(made.weight.shape) == (3, 4, 3)
    x = torch.randn(3, 6, 3, dtype=torch.float64, requires_grad=True)
    loop = [naive(x[m], made.weight[m], made.bias[m], norm_of(made, m)) for m in range(3)]
    assert_equal_with_gradients(made(x), torch.stack(loop), (x, *made.parameters()))


def test_in_evaluation_each_set_is_normalised_by_what_it_was_in_training():
    made = block(num_sets=2, batch_norm=True)
    x = torch.randn(2, 500, 3, dtype=torch.float64) * torch.tensor([1.0, 9.0]).view(2, 1, 1)
    for _ in range(100):
        made(x)
    trained = made(x).detach()
    torch.testing.assert_close(made.eval()(x).detach(), trained, rtol=0.01, atol=0.01)
    torch.testing.assert_close(made(x[:, :1]), made(x)[:, :1])


def test_dropout_zeroes_units_in_training_only():
    made = Block(3, 1000, dropout=0.25, num_sets=2)
    x = torch.ones(2, 1, 3)
    plain = made.eval()(x)
    dropped = made.train()(x)
    kept = dropped > 0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.75)
    assert float(kept.sum() / (plain > 0).sum()) == pytest.approx(0.75, abs=0.06)
    assert not torch.equal(kept[0], kept[1])


def test_weights_start_as_those_of_torchs_linear_layers():
    weight = Block(25, 40, num_sets=2).weight.detach()
    torch.manual_seed(0)
    linear = nn.Linear(25, 40).weight.detach()
    assert float(weight.abs().max()) <= 0.2
    assert float(weight.std()) == pytest.approx(float(linear.std()), rel=0.1)
    assert not torch.equal(weight[0], weight[1])


def test_layers_one_behind_the_other_equal_a_loop():
    made = Blocks(3, (5, 2), num_sets=2).double()
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    want = x
    for layer in made:
        want = torch.stack([naive(want[m], layer.weight[m], layer.bias[m]) for m in range(2)])
    torch.testing.assert_close(made(x), want, rtol=0, atol=1e-12)
    assert made.out_width == 2


def test_no_layer_changes_nothing():
    made = Blocks(3, ())
    x = torch.randn(6, 3)
    assert made.out_width == 3
    assert torch.equal(made(x), x)


def test_bad_settings_are_refused():
    with pytest.raises(SettingsError, match="hidden layers need at least 1 unit, got 0"):
        Block(3, 0)
    with pytest.raises(SettingsError, match=r"dropout must lie in \[0, 1\), got dropout=1.0"):
        Block(3, 4, dropout=1.0)
