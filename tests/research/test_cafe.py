"""Own rows for ids below h, shared rows for all others, and what follows from it."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.data.synthetic import generate
from rarebit.errors import SettingsError
from rarebit.research import CAFE


@pytest.mark.parametrize(("buckets", "hot", "num_hot"), [(10, 0.7, 7), (9, 0.5, 4), (5, 0.0, 0)])
def test_rows_equal_the_equation(buckets, hot, num_hot):
    table = CAFE(buckets=buckets, hot=hot).wrap(nn.Embedding(40, 3))
    for i in range(40):
        place = i
        if i >= num_hot:
            place = num_hot
            for _ in range(i - num_hot):  # counts around the shared rows
                place = place + 1 if place < buckets - 1 else num_hot
        assert_close(table(torch.tensor(i)), table.inner.weight[place])


def test_without_hot_ids_it_is_hashing():
    base = nn.Embedding(40, 3)
    hashed = rb.Hashing(buckets=9).wrap(base)
    assert torch.equal(CAFE(buckets=9, hot=0.0).wrap(base).weight, hashed.weight)


def test_with_as_many_rows_as_ids_it_is_the_plain_table():
    base = nn.Embedding(12, 3)
    assert torch.equal(CAFE(buckets=12).wrap(base).weight, base.weight)


def test_the_lowest_ids_of_a_log_are_the_most_frequent():
    counts = generate(rb.data.SyntheticLog(rows=5_000)).train.counts()["item"][3:]
    hot, others = counts[:50], counts[50:]
    assert float(hot.float().mean()) > 20 * float(others.float().mean())


def test_a_hot_row_learns_from_its_own_id_only():
    table = CAFE(buckets=10, hot=0.5).wrap(nn.Embedding(100, 3))
    table(torch.arange(5, 100)).sum().backward()
    assert not bool(table.inner.weight.grad[:5].any())
    assert bool(table.inner.weight.grad[5:].all())


@pytest.mark.parametrize("std", [1.0, 0.01])
def test_it_starts_with_the_variance_of_the_table(std):
    base = nn.Embedding(3000, 8)
    nn.init.normal_(base.weight, std=std)
    rows = CAFE(buckets=300).wrap(base).weight.detach()
    assert float(rows.std()) == pytest.approx(std, rel=0.06)


def test_the_share_is_kept_and_no_more_rows_fit():
    shapes = [(1000, 8), (50, 8)]
    for share in (0.01, 0.5, 0.9):
        sized = CAFE.for_share(shapes, share)
        assert sized.kept(shapes) <= share < CAFE(buckets=sized.buckets + 1).kept(shapes)
    with pytest.raises(SettingsError, match="cafe cannot keep a share"):
        CAFE.for_share(shapes, 0.0001)
