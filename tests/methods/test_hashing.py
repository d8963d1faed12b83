"""e(i) = W[i mod m], and what follows from it."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.tables.apply import restore_tables


def hashed(table: nn.Embedding, buckets: int) -> rb.Table:
    model = nn.Sequential(table)
    rb.apply_(model, rb.Hashing(buckets=buckets), verbose=False)
    return model[0]


def test_rows_worked_by_hand():
    weight = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 9.0]])
    table = hashed(nn.Embedding.from_pretrained(weight), buckets=2)
    assert table(torch.tensor([3, 4])).tolist() == [[2.0, 3.0], [0.0, 1.0]]


@pytest.mark.parametrize("buckets", [2, 3, 7, 10])
def test_rows_equal_the_equation(buckets):
    table = hashed(nn.Embedding(10, 4), buckets)
    stored = table.inner.weight
    rows = table(torch.arange(10).view(2, 5))
    for i in range(10):
        assert_close(rows[i // 5, i % 5], stored[i - (i // buckets) * buckets], rtol=0, atol=0)


def test_the_first_rows_are_kept_and_copied():
    plain = nn.Embedding(10, 4)
    before = plain.weight.detach().clone()
    table = hashed(plain, buckets=6)
    assert_close(table.weight[:6], before[:6], rtol=0, atol=0)
    table.inner.weight.data.zero_()
    assert_close(plain.weight, before, rtol=0, atol=0)


def test_with_as_many_buckets_as_rows_nothing_changes():
    plain = nn.Embedding(9, 4, padding_idx=2)
    table, ids = hashed(plain, buckets=9), torch.tensor([[0, 8, 2], [2, 8, 5]])
    assert_close(table(ids), plain(ids), rtol=0, atol=0)
    weights = torch.randn(2, 3, 4)
    (table(ids) * weights).sum().backward()
    (plain(ids) * weights).sum().backward()
    assert_close(table.inner.weight.grad, plain.weight.grad, rtol=0, atol=0)


def test_a_bucket_gets_the_gradients_of_all_its_ids():
    table = hashed(nn.Embedding(10, 2), buckets=3)
    weights = torch.randn(5, 2)
    (table(torch.tensor([1, 4, 7, 2, 8])) * weights).sum().backward()
    expected = torch.stack([torch.zeros(2), weights[:3].sum(dim=0), weights[3:].sum(dim=0)])
    assert_close(table.inner.weight.grad, expected)


def test_with_one_bucket_all_rows_are_the_same():
    with pytest.warns(UserWarning, match="makes all rows of '0' equal"):
        weight = hashed(nn.Embedding(6, 3), buckets=1).weight
    assert_close(weight, weight[:1].expand(6, 3))


def test_padding_leaves_the_other_ids_of_its_bucket_alone():
    table = hashed(nn.Embedding(10, 2, padding_idx=1), buckets=4)
    table.inner.weight.data.fill_(1.0)
    rows = table(torch.tensor([1, 5, 9]))
    assert rows.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    rows.sum().backward()
    assert table.inner.weight.grad[1].tolist() == [2.0, 2.0]


def test_a_table_with_fewer_rows_is_left_alone():
    model = nn.ModuleDict({"small": nn.Embedding(4, 2), "large": nn.Embedding(40, 2)})
    changes = rb.apply_(model, rb.Hashing(buckets=5), verbose=False)
    assert changes.skipped == (("small", "no more than 5 rows"),)
    assert type(model["small"]) is nn.Embedding


def test_a_saved_table_that_was_hashed_twice_comes_back():
    model, methods = (
        nn.Sequential(nn.Embedding(20, 3)),
        [rb.Hashing(buckets=6), rb.Hashing(buckets=4)],
    )
    restore_tables(model, {"0": methods}, frozen=())
    stored = model[0].inner.inner.weight
    assert_close(model[0].weight, torch.stack([stored[(i % 6) % 4] for i in range(20)]))
    assert rb.find_tables(model)[0].methods == tuple(map(str, methods))
