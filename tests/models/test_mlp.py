import pytest
import torch
from torch import nn

from rarebit.errors import SettingsError
from rarebit.interactions.basic import Linear
from rarebit.models._base import MLP


def test_batch_normalisation_comes_between_the_product_and_the_relu():
    mlp = MLP(3, (4,), batch_norm=True).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    first, norm, last = mlp.layers[0], mlp.layers[1], mlp.layers[3]
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    hidden = x @ first.weight.T + first.bias
    spread = ((hidden - hidden.mean(0)) ** 2).mean(0)
    hidden = (hidden - hidden.mean(0)) / (spread + norm.eps).sqrt() * norm.weight + norm.bias
    want = (hidden.clamp(min=0) @ last.weight.T + last.bias)[:, 0]
    torch.testing.assert_close(mlp(x), want, rtol=0, atol=1e-12)


def test_dropout_zeroes_hidden_units_in_training_only():
    mlp = MLP(3, (1000,), dropout=0.25)
    assert [type(layer) for layer in mlp.layers] == [Linear, nn.ReLU, nn.Dropout, Linear]
    seen = []
    mlp.layers[3].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    x = torch.ones(1, 3)
    mlp.eval()(x)
    mlp.train()(x)
    active = seen[0] > 0
    dropped = (seen[1] == 0) & active
    assert float(dropped.sum() / active.sum()) == pytest.approx(0.25, abs=0.06)
    kept = active & ~dropped
    torch.testing.assert_close(seen[1][kept], seen[0][kept] / 0.75)


def test_a_single_row_keeps_its_axis():
    assert MLP(3, (2,))(torch.zeros(1, 3)).shape == (1,)


def test_bad_settings_are_refused():
    with pytest.raises(SettingsError, match=r"hidden layers need at least 1 unit, got \(4, 0\)"):
        MLP(3, (4, 0))
    for dropout in (1.0, -0.1, 1.5, float("nan")):
        with pytest.raises(
            SettingsError, match=rf"dropout must lie in \[0, 1\), got dropout={dropout}"
        ):
            MLP(3, (4,), dropout=dropout)
