"""e(i) = W[i] P with a width d = D (n / N)^a of W, and what follows from it."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.research import MixedDimensions


def test_rows_equal_the_equation():
    table = MixedDimensions(full=4, alpha=0.5).wrap(nn.Embedding(16, 6).double())
    assert table.inner.weight.shape == (16, 3)  # 6 sqrt(4 / 16)
    for i in range(16):
        for d in range(6):
            products = [table.inner.weight[i, k] * table.right[k, d] for k in range(3)]
            assert_close(table(torch.tensor(i))[d], torch.stack(products).sum())


@pytest.mark.parametrize(
    ("rows", "alpha", "width"),
    [
        (100, 0.3, 16),
        (50, 0.3, 16),
        (1000, 0.3, 8),
        (100_000, 0.3, 2),
        (10**9, 0.3, 1),
        (400, 0.5, 8),
    ],
)
def test_widths_worked_by_hand(rows, alpha, width):
    assert MixedDimensions(full=100, alpha=alpha).width_of(rows, 16) == width


def test_a_projection_of_one_gives_the_columns_of_the_table():
    base = nn.Embedding(90, 6)
    table = MixedDimensions(full=10, alpha=0.5).wrap(base)
    table.right.data = torch.eye(2, 6)
    assert torch.equal(table.weight[:, :2], base.weight[:, :2])
    assert not bool(table.weight[:, 2:].any())


@pytest.mark.parametrize("std", [1.0, 0.01])
def test_it_starts_with_the_variance_of_the_table(std):
    base = nn.Embedding(2000, 64)
    nn.init.normal_(base.weight, std=std)
    rows = MixedDimensions(full=500, alpha=0.5).wrap(base).weight.detach()
    assert float(rows.std()) == pytest.approx(std, rel=0.05)


def test_short_tables_keep_their_width_and_longer_ones_are_narrower():
    model = nn.ModuleDict(
        {"short": nn.Embedding(9, 8), "mid": nn.Embedding(80, 8), "long": nn.Embedding(5000, 8)}
    )
    changes = rb.apply_(model, MixedDimensions(full=20), verbose=False)
    assert changes.skipped == (("short", "it would not become smaller"),)
    assert [info.num_parameters for info in changes.after] == [(80 + 8) * 5, (5000 + 8) * 2]


def test_the_share_is_kept_and_no_wider_tables_fit():
    shapes = [(1000, 8), (50, 8)]
    for share in (0.2, 0.5, 0.9):
        sized = MixedDimensions.for_share(shapes, share)
        assert sized.kept(shapes) <= share < MixedDimensions(full=1.06 * sized.full).kept(shapes)
    with pytest.raises(SettingsError, match="mixed-dimensions cannot keep a share"):
        MixedDimensions.for_share(shapes, 0.01)
