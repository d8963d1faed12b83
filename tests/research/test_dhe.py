"""e(i) = f(x_1, ..., x_k) with hashes x of the id, and what follows from it."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.research import DHE


def mish(x: float) -> float:
    return x * math.tanh(math.log1p(math.exp(x)))


def test_rows_equal_the_equation():
    table = DHE(hidden=4, hashes=5, layers=2).wrap(nn.Embedding(30, 3).double())
    for i in (0, 7, 29):
        values = []
        for j in range(5):
            a, b = 16807 ** (j + 2) % 2147483647, 48271 ** (j + 2) % 2147483647
            values.append(2 * (((a * i + b) % 2147483647) % 10**6) / (10**6 - 1) - 1)
        for number, layer in enumerate(table.network[::2]):
            sums = []
            for weights, bias in zip(layer.weight.tolist(), layer.bias.tolist(), strict=True):
                sums.append(sum(w * v for w, v in zip(weights, values, strict=True)) + bias)
            values = [mish(total) for total in sums] if number < 2 else sums
        assert_close(table(torch.tensor(i)).tolist(), values)


def test_hashes_of_large_ids_are_exact():
    table = DHE(hidden=2, hashes=3).wrap(nn.Embedding(9, 2).double())
    seen = []
    table.network.register_forward_pre_hook(lambda network, inputs: seen.append(inputs[0]))
    table(torch.tensor(2**31 - 2))
    for j in range(3):
        hashed = (16807 ** (j + 2) * (2**31 - 2) + 48271 ** (j + 2)) % (2**31 - 1) % 10**6
        assert float(seen[0][j]) == pytest.approx(2 * hashed / (10**6 - 1) - 1, abs=1e-12)


def test_hashes_are_uniform_and_unlike_each_other():
    table = DHE(hidden=2, hashes=16).wrap(nn.Embedding(9, 2))
    seen = []
    table.network.register_forward_pre_hook(lambda network, inputs: seen.append(inputs[0]))
    table(torch.arange(20_000))
    assert_close(seen[0].mean(0), torch.zeros(16), atol=0.03, rtol=0)
    assert_close(seen[0].var(0), torch.full((16,), 1 / 3), atol=0.02, rtol=0)
    assert float((seen[0].T.corrcoef() - torch.eye(16)).abs().max()) < 0.05


def test_a_wide_network_can_learn_any_small_table():
    target = torch.randn(20, 4)
    table = DHE(hidden=64, hashes=64).wrap(nn.Embedding(20, 4))
    optimizer = torch.optim.Adam(table.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        loss = (table(torch.arange(20)) - target).square().mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1e-3


@pytest.mark.parametrize("std", [1.0, 0.01])
@pytest.mark.parametrize("layers", [1, 4])
def test_it_starts_with_the_variance_of_the_table(layers, std):
    base = nn.Embedding(3000, 8)
    nn.init.normal_(base.weight, std=std)
    rows = DHE(hidden=16, hashes=32, layers=layers).wrap(base).weight.detach()
    expected = base.weight.detach().square().mean().sqrt().expand(8)
    assert_close(rows.std(0), expected, rtol=1e-3, atol=0)
    assert_close(rows.mean(0), torch.zeros(8), atol=1e-3 * std, rtol=0)


def test_its_size_does_not_depend_on_the_rows():
    model = nn.ModuleDict({"few": nn.Embedding(6, 8), "many": nn.Embedding(5000, 8)})
    changes = rb.apply_(model, DHE(hidden=4, hashes=10), verbose=False)
    assert changes.skipped == (("few", "it would not become smaller"),)
    assert changes.after[0].num_parameters == 11 * 4 + 5 * 4 + 5 * 8


def test_the_share_is_kept_and_no_wider_network_fits():
    shapes = [(1000, 8), (50, 8)]
    for share in (0.1, 0.5, 0.9):
        sized = DHE.for_share(shapes, share)
        wider = DHE(hidden=sized.hidden + 1, hashes=sized.hashes + 1)
        assert sized.kept(shapes) <= share < wider.kept(shapes)
    with pytest.raises(SettingsError, match="dhe cannot keep a share"):
        DHE.for_share(shapes, 0.001)
