"""e(i) = R[i mod m] ∘ Q[i // m], and what follows from it."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError, UnsupportedTableError
from rarebit.research import QR

COMBINED = {"mult": lambda low, high: low * high, "add": lambda low, high: low + high}
both = pytest.mark.parametrize("combine", COMBINED)


@both
def test_rows_equal_the_equation(combine):
    table = QR(buckets=4, combine=combine).wrap(nn.Embedding(15, 3))
    nn.init.normal_(table.more[0].weight)
    for i in range(15):
        remainder, quotient = i - 4 * int(i / 4), int(i / 4)
        for d in range(3):
            pair = (table.inner.weight[remainder, d], table.more[0].weight[quotient, d])
            assert_close(table(torch.tensor(i))[d], COMBINED[combine](*pair))


def test_rows_worked_by_hand():
    table = QR(buckets=2).wrap(nn.Embedding(4, 1))
    table.inner.weight.data = torch.tensor([[2.0], [3.0]])
    table.more[0].weight.data = torch.tensor([[5.0], [7.0]])
    assert table.weight.tolist() == [[10.0], [15.0], [14.0], [21.0]]


def test_with_as_many_buckets_as_rows_it_is_the_plain_table():
    base = nn.Embedding(9, 4)
    for buckets in (9, 12):
        assert torch.equal(QR(buckets=buckets).wrap(base).weight, base.weight)


def test_ids_below_the_buckets_keep_their_rows_in_a_product():
    base = nn.Embedding(20, 4)
    assert torch.equal(QR(buckets=6).wrap(base).weight[:6], base.weight[:6])


@both
@pytest.mark.parametrize("std", [1.0, 0.01])
def test_it_starts_with_the_variance_of_the_table(combine, std):
    base = nn.Embedding(3000, 8)
    nn.init.normal_(base.weight, std=std)
    rows = QR(buckets=60, combine=combine).wrap(base).weight.detach()
    assert float(rows.std()) == pytest.approx(std, rel=0.06)


@both
def test_a_bag_pools_what_was_combined(combine):
    model = nn.Sequential(nn.EmbeddingBag(15, 3, mode="sum"))
    rb.apply_(model, QR(buckets=4, combine=combine), verbose=False)
    nn.init.normal_(model[0].table.more[0].weight)
    rows = model[0].weight
    assert_close(model(torch.tensor([[1, 5, 14]])), (rows[1] + rows[5] + rows[14]).unsqueeze(0))


@both
def test_after_training_every_id_has_its_own_row(combine):
    model = nn.Sequential(nn.Embedding(40, 6))
    rb.apply_(model, QR(buckets=8, combine=combine), verbose=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    target = torch.randn(40, 6)
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.arange(40)) - target).square().sum().backward()
        optimizer.step()
    rb.merge_(model, verbose=False)
    assert type(model[0]) is nn.Embedding
    assert len(model[0].weight.unique(dim=0)) == 40


def test_a_table_that_would_not_shrink_is_left_alone():
    model = nn.ModuleDict({"few": nn.Embedding(6, 8), "many": nn.Embedding(50, 8)})
    changes = rb.apply_(model, QR(buckets=7), verbose=False)
    assert changes.skipped == (("few", "it would not become smaller"),)
    assert changes.after[0].num_parameters == (7 + 8) * 8


def test_the_share_is_kept_and_no_larger_size_fits():
    shapes = [(1000, 8), (50, 8)]
    for share in (0.1, 0.5, 0.9):
        sized = QR.for_share(shapes, share)
        assert sized.kept(shapes) <= share < QR(buckets=sized.buckets + 1).kept(shapes)
    with pytest.raises(SettingsError, match=r"qr cannot keep a share of 0.01 .* is 0.0876"):
        QR.for_share(shapes, 0.01)


def test_rules_for_stored_rows_are_refused():
    model = nn.Sequential(nn.Embedding(50, 8))
    rb.apply_(model, QR(buckets=7), verbose=False)
    with pytest.raises(UnsupportedTableError, match="here ids share what is stored"):
        rb.apply_(model, rb.Tail(counts=3), verbose=False)
