"""e(i)[d] = g(i, b) M[h(i, b)][d mod Z] with b = d // Z, and what follows from it."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.research import ROBE
from rarebit.research.robe import PLACE, SIGN

PRIME = 2147483647


def hashed(numbers: tuple[int, int, int], i: int, b: int, many: int) -> int:
    return (numbers[0] * i + numbers[1] * b + numbers[2]) % PRIME % many


@pytest.mark.parametrize(("width", "block"), [(6, 2), (6, 6), (7, 3), (3, 8), (4, 1)])
def test_rows_equal_the_equation(width, block):
    table = ROBE(size=20, block=block).wrap(nn.Embedding(15, width))
    array, num_slots = table.inner.weight.detach(), 20 // block
    assert array.shape == (num_slots, block)
    for i in range(15):
        row = table(torch.tensor(i))
        for d in range(width):
            b = d // block
            sign = 1 - 2 * hashed(SIGN, i, b, 2)
            assert_close(row[d], sign * array[hashed(PLACE, i, b, num_slots), d % block])


def test_hashes_of_large_ids_are_exact():
    ids = torch.tensor([2**31 - 2, 2**31 - 1], dtype=torch.int64)
    slots, signs = ROBE(size=1000, block=10).locate(ids, 3)
    for b in range(3):
        for k, i in enumerate(ids.tolist()):
            assert int(slots[b, k]) == hashed(PLACE, i, b, 100)
            assert int(signs[b, k]) == 1 - 2 * hashed(SIGN, i, b, 2)


@pytest.mark.parametrize("block", [2, 4])
def test_without_collisions_it_is_the_plain_table(block):
    method, base = ROBE(size=40_000, block=block), nn.Embedding(9, 4)
    slots, _ = method.locate(torch.arange(9), 4 // block)
    assert len(slots.unique()) == slots.numel()  # no collisions
    assert torch.equal(method.wrap(base).weight, base.weight)


def test_a_block_starts_as_that_of_the_lowest_id_that_has_it():
    method, base = ROBE(size=12, block=4), nn.Embedding(30, 4)
    rows, (slots, signs) = method.wrap(base).weight, method.locate(torch.arange(30), 1)
    for i in range(30):
        first = min(k for k in range(30) if slots[0, k] == slots[0, i])
        assert_close(rows[i], base.weight[first] * signs[0, first] * signs[0, i])


def test_slots_and_signs_are_used_evenly():
    slots, signs = ROBE(size=800).locate(torch.arange(20_000), 2)
    for b in range(2):
        assert int(slots[b].bincount(minlength=100).min()) > 100  # 200 on average
    assert abs(float(signs.double().mean())) < 0.02


@pytest.mark.parametrize("std", [1.0, 0.01])
def test_it_starts_with_the_variance_of_the_table(std):
    base = nn.Embedding(3000, 8)
    nn.init.normal_(base.weight, std=std)
    rows = ROBE(size=3000).wrap(base).weight.detach()
    assert float(rows.std()) == pytest.approx(std, rel=0.06)


def test_only_the_blocks_of_the_ids_get_a_gradient():
    method = ROBE(size=200, block=4)
    table = method.wrap(nn.Embedding(100, 8))
    table(torch.tensor([[7, 91]])).sum().backward()
    slots, _ = method.locate(torch.tensor([7, 91]), 2)
    touched = table.inner.weight.grad.any(dim=1).nonzero().flatten()
    assert set(touched.tolist()) <= set(slots.flatten().tolist())


def test_an_array_larger_than_the_table_leaves_it_alone():
    model = nn.ModuleDict({"few": nn.Embedding(6, 8), "many": nn.Embedding(50, 8)})
    changes = rb.apply_(model, ROBE(size=203), verbose=False)
    assert changes.skipped == (("few", "it would not become smaller"),)
    assert changes.after[0].num_parameters == 200  # whole blocks
    assert ROBE(size=203).stored(50, 8) == 200


def test_the_share_is_kept_and_no_larger_array_fits():
    shapes = [(1000, 8), (50, 8)]
    for share in (0.01, 0.5, 0.9):
        sized = ROBE.for_share(shapes, share)
        assert sized.kept(shapes) <= share < ROBE(size=sized.size + 8).kept(shapes)
    with pytest.raises(SettingsError, match="robe cannot keep a share"):
        ROBE.for_share(shapes, 0.0001)
