"""e(i) = G1[i1] G2[i2] G3[i3] with i = (i1 n2 + i2) n3 + i3, and what follows from it."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.research import TTRec
from rarebit.research.tt_rec import row_factors, width_factors


@pytest.mark.parametrize(("rows", "width", "rank"), [(15, 6, 2), (27, 8, 3), (7, 5, 1)])
def test_rows_equal_the_equation(rows, width, rank):
    table = TTRec(rank=rank).wrap(nn.Embedding(rows, width).double())
    g1, g2, g3 = (part.weight.detach() for part in table.parts)
    (_, n2, n3), (d1, d2, d3) = row_factors(rows), width_factors(width)
    for i in range(rows):
        i1, i2, i3 = i // (n2 * n3), (i // n3) % n2, i % n3
        assert (i1 * n2 + i2) * n3 + i3 == i
        row = []
        for a, b, c in itertools.product(range(d1), range(d2), range(d3)):
            total = 0.0
            for r, s in itertools.product(range(rank), repeat=2):
                middle = g2[i2, (r * d2 + b) * rank + s]
                total += float(g1[i1, a * rank + r] * middle * g3[i3, s * d3 + c])
            row.append(total)
        assert_close(table(torch.tensor(i)).detach(), torch.tensor(row, dtype=torch.float64))


def train_of(weight: Tensor, rank: int) -> list[Tensor]:
    """Return the exact cores of a table of 8 x 8, by two singular value decompositions."""
    tensor = weight.view(2, 2, 2, 2, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(4, 16)
    left, values, right = torch.linalg.svd(tensor, full_matrices=False)  # (4, 4), (4,), (4, 16)
    u, s, v = torch.linalg.svd((values[:, None] * right).reshape(16, 4), full_matrices=False)
    middle = u.view(4, 2, 2, rank).permute(1, 0, 2, 3)  # (n2, R, d2, R)
    last = (s[:, None] * v).view(rank, 2, 2).permute(1, 0, 2)  # (n3, R, d3)
    return [left.reshape(2, 2 * rank), middle.reshape(2, -1), last.reshape(2, -1)]


def test_at_full_rank_it_holds_any_table():
    weight = torch.randn(8, 8, dtype=torch.float64)
    table = TTRec(rank=4).wrap(nn.Embedding.from_pretrained(weight, freeze=False))
    for part, core in zip(table.parts, train_of(weight, rank=4), strict=True):
        part.weight.data.copy_(core)
    assert_close(table.weight.detach(), weight)


@pytest.mark.parametrize("std", [1.0, 0.01])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_it_starts_with_the_variance_of_the_table(rank, std):
    base = nn.Embedding(2000, 16)
    nn.init.normal_(base.weight, std=std)
    # the mean square of one draw is itself uncertain
    rows = torch.stack([TTRec(rank=rank).wrap(base).weight.detach() for _ in range(20)])
    assert float(rows.std()) == pytest.approx(std, rel=0.15)


@pytest.mark.parametrize("number", [1, 2, 3, 8, 11, 27, 64, 1000, 967_795])
def test_factors_of_rows_and_widths(number):
    first, middle, last = row_factors(number)
    assert middle <= min(first, last)
    assert number <= first * middle * last <= number + first * last
    assert max(first, middle, last) <= math.ceil(round(number ** (1 / 3), 9))
    assert math.prod(width_factors(number)) == number


def test_a_table_that_would_not_shrink_is_left_alone():
    model = nn.ModuleDict({"few": nn.Embedding(6, 8), "many": nn.Embedding(1000, 8)})
    changes = rb.apply_(model, TTRec(rank=4), verbose=False)
    assert changes.skipped == (("few", "it would not become smaller"),)
    assert changes.after[0].num_parameters == 10 * 2 * 4 + 10 * 2 * 16 + 10 * 2 * 4


def test_the_share_is_kept_and_no_larger_rank_fits():
    shapes = [(1000, 8), (50, 8)]
    for share in (0.1, 0.5, 0.9):
        sized = TTRec.for_share(shapes, share)
        assert sized.kept(shapes) <= share < TTRec(rank=sized.rank + 1).kept(shapes)
    with pytest.raises(SettingsError, match="tt-rec cannot keep a share"):
        TTRec.for_share(shapes, 0.001)
