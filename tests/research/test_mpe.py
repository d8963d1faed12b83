"""e(i) = Q_b(w_i) with the bits of the group of an id, which a search picks."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.research import MPE
from rarebit.research.mpe import TAU, PrecisionCodes, SearchTable
from rarebit.testing import method_checks


def made(width: int = 5, **settings) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(40, width).double())
    rb.apply_(model, MPE(**{"bits": 2.5, "group": 8} | settings), verbose=False)
    nn.init.normal_(model[0].steps, std=0.3)
    nn.init.normal_(model[0].bias, std=0.3)
    return model


def quantized(w, b, table, column):
    """Return Q_b of a number, with plain floats."""
    bias = float(table.bias[column])
    if b == 0:
        return bias
    a = float(table.start[b - 1]) * math.exp(float(table.steps[b - 1]))
    level = math.floor(max(min((w - bias) / a, 2 ** (b - 1)), -(2 ** (b - 1))))
    return bias + a * (min(level, 2 ** (b - 1) - 1) + 0.5)


def test_rows_equal_the_equation():
    table = made()[0].requires_grad_(requires_grad=False)
    table.precision.copy_(torch.tensor([6, 3, 0, 1, 2]))
    rows = table(torch.arange(40))
    for i in range(40):
        for d in range(5):
            w = float(table.inner.weight[i, d])
            found = quantized(w, int(table.precision[i // 8]), table, d)
            assert float(rows[i, d]) == pytest.approx(found, abs=1e-12)


def test_rows_of_a_search_are_mixtures_of_all_numbers_of_bits():
    table = made(stage="search")[0].requires_grad_(requires_grad=False)
    nn.init.normal_(table.logits, std=TAU)
    rows = table(torch.arange(40))
    for i in range(0, 40, 3):
        weights = [math.exp(float(x) / TAU) for x in table.logits[i // 8]]
        for d in range(5):
            w = float(table.inner.weight[i, d])
            mixed = sum(y * quantized(w, b, table, d) for b, y in enumerate(weights))
            assert float(rows[i, d]) == pytest.approx(mixed / sum(weights), abs=1e-12)


def test_rows_get_the_gradient_of_what_is_not_clipped():
    table, factors = made(bits=2.0)[0], torch.randn(5, dtype=torch.float64)
    with torch.no_grad():
        table.inner.weight[4, 0] = 100.0  # far beyond the largest level
    (table(torch.tensor([4])) * factors).sum().backward()
    scaled = (table.inner.weight[4] - table.bias) / table.alpha[1]
    expected = factors * (scaled.abs() < 2)
    assert_close(table.inner.weight.grad[4], expected)
    assert float(expected[0]) == 0.0 != float(expected.abs().sum())


def test_bits_are_as_even_as_they_can_be():
    assert MPE(bits=2.5, group=8).even(40).tolist() == [3, 3, 2, 2, 2]
    assert MPE(bits=1.0).even(100).tolist() == [1]


def test_the_likeliest_bits_within_the_bytes_are_picked():
    table = made(stage="search", width=8)[0]
    # the first group likes six bits far better than the others like any
    table.logits.data.copy_(TAU * torch.tensor([[0.0] * 6 + [9.0], *[[0.0, 0.5] + [0.0] * 5] * 4]))
    # 40 rows of 8 numbers are 80 bytes with two bits each: 48 for the first group, and one bit for the others
    [bits] = MPE(bits=2.0, group=8).pick([table])
    assert bits.tolist() == [6, 1, 1, 1, 1]
    # 48 bytes: a byte is worth 9 / 48 in the first group, and 0.5 / 8 in the others
    [bits] = MPE(bits=1.25, group=8).pick([table])
    assert bits.tolist() == [6, 0, 0, 0, 0]


@pytest.mark.parametrize("precision", [[6, 3, 0, 1, 2], [0] * 5, [5] * 5])
def test_after_training_only_integers_are_stored(precision, tmp_path):
    model = made()
    model[0].precision.copy_(torch.tensor(precision))
    before = model(torch.arange(40)).detach()
    table = model[0] = model[0].served()
    assert isinstance(table, PrecisionCodes)
    assert_close(model(torch.arange(40)), before, rtol=0, atol=1e-12)
    assert len(table.codes) == sum(8 * -(-5 * bits // 8) for bits in precision)
    fresh = nn.Sequential(nn.Embedding(40, 5).double())
    loaded = rb.load_model(rb.save_model(model, tmp_path / "model"), into=fresh)
    assert torch.equal(loaded(torch.arange(40)), model(torch.arange(40)))
    rb.merge_(loaded, verbose=False)
    assert torch.equal(loaded[0].weight, model(torch.arange(40)))


def test_a_damaged_file_is_refused():
    table = made()[0].served()
    kept = dict(table.state_dict())
    assert "shape" in table.take(kept | {"bias": kept["bias"][:2]})
    assert "missing" in table.take({})
    for name, wrong in (("codes", kept["codes"][:-1]), ("precision", kept["precision"] + 9)):
        assert table.take(kept | {name: wrong}) is not None


def test_a_run_searches_and_stores_integers_within_the_bytes():
    settings = rb.RunSettings(
        model="fm",
        data=rb.data.SyntheticLog(rows=4_000),
        training=rb.Training(epochs=1, batch_size=128),
        methods=(MPE(bits=1.5, group=32),),
    )
    result = rb.run(settings, progress=False, say=lambda line: None)
    tables = [m for m in result.model.modules() if isinstance(m, PrecisionCodes)]
    assert tables
    assert not any(isinstance(m, SearchTable) for m in result.model.modules())
    method = tables[0].mpe
    whole = sum(4 * method.stored(t.num_embeddings, t.embedding_dim) for t in tables)
    assert sum(sum(b.nbytes for b in t.state_dict().values()) for t in tables) <= whole
    assert len({bits for t in tables for bits in t.precision.tolist()}) > 2


CODES = MPE(bits=2.5, group=4, stage="frozen")
PROMISES = {name: check for name, check in method_checks(CODES) if "composition" not in name}


@pytest.mark.parametrize("name", PROMISES)
def test_the_contract_holds_for_integers(name):
    PROMISES[name]()
