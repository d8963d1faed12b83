"""e(i)_p = V[p, k] with the key that is most like a row, and its gradient through a softmax."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.research import DPQ
from rarebit.research.dpq import SoftmaxCodes
from rarebit.testing import method_checks


def learned(width: int = 6, method: DPQ = DPQ(pieces=2, bits=3)) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(40, width).double())
    rb.apply_(model, method, verbose=False)
    for weight in (model[0].keys, model[0].values):
        nn.init.normal_(weight)
    return model


def shares(table, i, p, size, width):
    """Return the likeness of a piece and all keys, with loops."""
    w, keys = table.inner.weight.detach()[i], table.keys.detach()
    found = []
    for k in range(8):
        total = 0.0
        for d in range(size):
            column = p * size + d
            total += float(w[column] if column < width else 0.0) * float(keys[p, k, d])
        found.append(total * float(table.scale))
    return found


@pytest.mark.parametrize("width", [6, 5])  # five: the second piece is padded
def test_rows_equal_the_equation(width):
    table, size = learned(width)[0], 3
    for i in range(40):
        for p in range(2):
            like = shares(table, i, p, size, width)
            k = max(range(8), key=like.__getitem__)
            part = table.values[p, k][: min(size, width - p * size)]
            assert_close(table(torch.tensor(i))[p * size : (p + 1) * size], part)


def test_values_get_the_gradient_of_what_is_looked_up_and_rows_that_of_the_softmax():
    table, factors = learned()[0], torch.randn(6, dtype=torch.float64)
    (table(torch.tensor(4)) * factors).sum().backward()
    values, query = torch.zeros_like(table.values), torch.zeros(6, dtype=torch.float64)
    for p in range(2):
        like = shares(table, 4, p, 3, 6)
        k, own = max(range(8), key=like.__getitem__), factors[3 * p : 3 * p + 3]
        values[p, k] = own
        soft = torch.tensor(like, dtype=torch.float64).softmax(0)
        gains = (table.values.detach()[p] * own).sum(1)  # of the loss in the share of each key
        logits = soft * (gains - (soft * gains).sum())
        query[3 * p : 3 * p + 3] = (logits[:, None] * table.keys.detach()[p]).sum(0) * table.scale
    assert_close(table.values.grad, values)
    assert_close(table.inner.weight.grad[4], query)
    assert not table.inner.weight.grad[5].any()


def test_products_start_as_those_of_standard_normal_numbers():
    base = nn.Embedding(3000, 16)
    nn.init.normal_(base.weight, std=0.01)
    table = DPQ(pieces=4, bits=6).wrap(base)
    # with the keys of other rows: a row is most like itself
    assert float(table.likeness(torch.arange(64, 3000)).detach().std()) == pytest.approx(
        1.0, rel=0.15
    )


@pytest.mark.parametrize("bits", [1, 3, 4])
def test_after_training_only_codes_and_values_are_stored(bits, tmp_path):
    model = learned(5, DPQ(pieces=2, bits=bits))
    before = model(torch.arange(40)).detach()
    table = model[0] = model[0].served()
    assert isinstance(table, SoftmaxCodes)
    assert torch.equal(model(torch.arange(40)), before)
    shapes = {name: tuple(value.shape) for name, value in table.state_dict().items()}
    assert shapes == {"codes": (40, -(-2 * bits // 8)), "values": (2, 2**bits, 3)}
    fresh = nn.Sequential(nn.Embedding(40, 5).double())
    loaded = rb.load_model(rb.save_model(model, tmp_path / "model"), into=fresh)
    assert torch.equal(loaded(torch.arange(40)), before)
    rb.merge_(loaded, verbose=False)
    assert torch.equal(loaded[0].weight, before)


CODES = DPQ(pieces=2, bits=2, frozen=True)
PROMISES = {name: check for name, check in method_checks(CODES) if "composition" not in name}


@pytest.mark.parametrize("name", PROMISES)
def test_the_contract_holds_for_codes(name):
    PROMISES[name]()
