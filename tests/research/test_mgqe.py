"""e(i)_p = C[p, k] with the nearest of the centroids that an id may have, and what follows from it."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.research import MGQE
from rarebit.research.mgqe import CodedTable
from rarebit.testing import method_checks

SMALL = MGQE(pieces=2, centroids=6, tail_centroids=3, head=0.25)


def learned(width: int = 6, method: MGQE = SMALL) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(40, width).double())
    rb.apply_(model, method, verbose=False)
    nn.init.normal_(model[0].centroids)
    return model


@pytest.mark.parametrize("width", [6, 5])  # five: the second piece is padded
def test_rows_equal_the_equation(width):
    table = learned(width)[0]
    w, size = table.inner.weight.detach(), 3
    for i in range(40):
        for p in range(2):
            piece = [w[i, d] if d < width else 0.0 for d in range(p * size, (p + 1) * size)]
            distances = []
            for k in range(6 if i < 10 else 3):
                centroid = table.centroids[p * 6 + k]
                distances.append(sum((a - b) ** 2 for a, b in zip(piece, centroid, strict=True)))
            nearest = min(range(len(distances)), key=distances.__getitem__)
            part = table.centroids[p * 6 + nearest][: min(size, width - p * size)]
            assert_close(table(torch.tensor(i))[p * size : (p + 1) * size], part)


def test_rows_and_centroids_get_the_gradient_of_what_is_looked_up():
    table, factors = learned()[0], torch.randn(3, 6, dtype=torch.float64)
    ids = torch.tensor([4, 30, 4])
    (table(ids) * factors).sum().backward()
    expected = torch.zeros(40, 6, dtype=torch.float64)
    centroids = torch.zeros(12, 3, dtype=torch.float64)
    for row, i in enumerate(ids.tolist()):
        expected[i] += factors[row]
        for p in range(2):
            piece = table.weight.detach()[i, 3 * p : 3 * p + 3]
            (k,) = (table.centroids[6 * p : 6 * p + 6] == piece).all(1).nonzero().flatten()
            centroids[6 * p + k] += factors[row, 3 * p : 3 * p + 3]
    assert_close(table.inner.weight.grad, expected)
    assert_close(table.centroids.grad, centroids)


def test_with_a_centroid_per_row_it_starts_as_the_plain_table():
    base = nn.Embedding(16, 6)
    table = MGQE(pieces=3, centroids=16, head=0.0).wrap(base)
    assert_close(table.weight, base.weight)


def test_it_starts_with_about_the_variance_of_the_table():
    for std in (1.0, 0.01):
        base = nn.Embedding(3000, 8)
        nn.init.normal_(base.weight, std=std)
        rows = MGQE(pieces=4, head=0.5).wrap(base).weight.detach()
        assert float(rows.std()) == pytest.approx(std, rel=0.15)  # the nearest are closer to zero


@pytest.mark.parametrize("num_head", [4, 10, 30])
def test_after_training_only_codes_and_centroids_are_stored(num_head, tmp_path):
    model = learned(5, replace(SMALL, head=num_head / 40))
    before = model(torch.arange(40))
    model[0] = model[0].served()
    table = model[0]
    assert isinstance(table, CodedTable)
    assert torch.equal(model(torch.arange(40)), before.detach())
    assert not list(model.parameters())
    shapes = {name: tuple(value.shape) for name, value in table.state_dict().items()}
    assert shapes == {"head": (num_head, 2), "tail": (40 - num_head, 1), "centroids": (12, 3)}
    assert table.head.dtype == table.tail.dtype == torch.uint8
    fresh = nn.Sequential(nn.Embedding(40, 5).double())
    loaded = rb.load_model(rb.save_model(model, tmp_path / "model"), into=fresh)
    assert torch.equal(loaded(torch.arange(40)), before.detach())
    rb.merge_(loaded, verbose=False)
    assert torch.equal(loaded[0].weight, before.detach())


def test_a_run_stores_codes():
    settings = rb.RunSettings(
        model="fm",
        data=rb.data.SyntheticLog(rows=2_000),
        training=rb.Training(epochs=1),
        methods=(MGQE(pieces=4, centroids=8, tail_centroids=8),),
    )
    result = rb.run(settings, progress=False)
    tables = rb.find_tables(result.model)
    coded = [info for info in tables if info.methods]
    plain = sum(info.rows * info.width * 4 for info in coded)
    assert coded
    assert sum(info.num_bytes for info in coded) < 0.3 * plain


def test_the_bytes_are_those_of_the_formula():
    table = SMALL.wrap(nn.Embedding(40, 6)).served()
    num_bytes = sum(value.nbytes for value in table.state_dict().values())
    assert num_bytes == 10 * 2 + 30 * 1 + 4 * 6 * 6
    assert SMALL.stored(40, 6) == -(-50 // 4) + 36


CODES = MGQE(pieces=2, centroids=4, tail_centroids=2, frozen=True)
PROMISES = {name: check for name, check in method_checks(CODES) if "composition" not in name}


@pytest.mark.parametrize("name", PROMISES)
def test_the_contract_holds_for_codes(name):
    PROMISES[name]()


def test_the_share_is_kept():
    shapes = [(10_000, 16), (50, 16)]
    for share in (0.05, 0.1, 0.2):
        assert 0.6 * share < MGQE.for_share(shapes, share).kept(shapes) <= share
    with pytest.raises(SettingsError, match="mgqe cannot keep a share"):
        MGQE.for_share(shapes, 0.001)
