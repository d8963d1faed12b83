"""e(i) = (W V_r)[i] V_rᵀ with the first r right singular vectors of W, and what follows from it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.technique import parse_techniques


def low_rank(weight: Tensor, rank: int) -> rb.Table:
    model = nn.Sequential(nn.Embedding.from_pretrained(weight.clone(), freeze=False))
    rb.apply_(model, rb.LowRank(rank=rank), min_width=1, verbose=False)
    return model[0]


def with_singular_values(rows: int, values: list[float]) -> Tensor:
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    return left * torch.tensor(values, dtype=torch.float64) @ right.T


def decaying(rows: int, width: int, ratio: float) -> Tensor:
    return with_singular_values(rows, [ratio**k for k in range(width)])


def squared_error(weight: Tensor, table: rb.Table) -> float:
    return float((weight - table.weight.detach()).square().sum())


def test_rows_worked_by_hand():
    # Singular values 5 and 2 along the axes: rank one keeps the larger.
    table = low_rank(torch.tensor([[5.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), rank=1)
    assert_close(table.weight, torch.tensor([[5.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    assert_close(table.right.abs(), torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_rows_equal_the_equation(rank):
    table = low_rank(torch.randn(7, 4), rank)
    rows = table(torch.arange(7).view(7, 1))
    for i in range(7):
        for d in range(4):
            products = [table.inner.weight[i, k] * table.right[k, d] for k in range(rank)]
            assert_close(rows[i, 0, d], torch.stack(products).sum())


def test_the_vectors_are_those_of_the_singular_value_decomposition():
    weight = decaying(20, 6, ratio=0.5)
    vectors = torch.linalg.svd(weight).Vh[:3]
    right = low_rank(weight, rank=3).right
    assert_close((right * vectors).sum(dim=1).abs(), torch.ones(3, dtype=torch.float64))
    assert_close(right @ right.T, torch.eye(3, dtype=torch.float64))


def test_at_full_rank_nothing_changes():
    weight = torch.randn(30, 5)
    assert_close(low_rank(weight, rank=5).weight, weight, atol=1e-6, rtol=1e-6)


def test_at_full_rank_a_table_wider_than_long_does_not_change_either():
    weight = torch.randn(3, 8)
    assert_close(low_rank(weight, rank=3).weight, weight, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("shape", [(50, 6), (6, 50), (6, 6)])
def test_the_error_is_the_tail_of_the_singular_values(rank, shape):
    weight = torch.randn(shape, dtype=torch.float64)
    tail = float(torch.linalg.svdvals(weight)[rank:].square().sum())
    assert squared_error(weight, low_rank(weight, rank)) == pytest.approx(tail, rel=1e-9)


def test_small_singular_values_are_not_lost():
    # Their squares, 1 and 1e-18, do not fit one float64 matrix: no Gram matrix would see the second.
    weight = with_singular_values(40, [1.0, 1e-9, 1e-12, 0.0])
    assert squared_error(weight, low_rank(weight, rank=2)) < 2 * 1e-12**2


@pytest.mark.parametrize("ratio", [0.9, 0.5, 0.1])
def test_a_decaying_table_keeps_what_its_spectrum_says(ratio):
    weight = decaying(25, 6, ratio)
    kept = 1 - squared_error(weight, low_rank(weight, rank=2)) / float(weight.square().sum())
    assert kept == pytest.approx((1 - ratio**4) / (1 - ratio**12), rel=1e-9)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_table_of_rank_one_is_kept_whole(rank):
    weight = torch.outer(torch.randn(15).double(), torch.randn(5).double())
    assert_close(low_rank(weight, rank).weight, weight, atol=1e-12, rtol=1e-12)


def test_a_table_of_zeros_stays_zero_and_finite():
    assert not bool(low_rank(torch.zeros(9, 4), rank=2).weight.any())


@given(
    rows=st.integers(1, 12),
    width=st.integers(1, 8),
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_other_factors_of_this_rank_are_closer(rows, width, data, seed):
    rank = data.draw(st.integers(1, min(rows, width)))
    generator = torch.Generator().manual_seed(seed)
    weight, basis = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, width), (rank, width))
    )
    # the best left factor for a random right one: a strong opponent
    opponent = weight @ torch.linalg.pinv(basis) @ basis
    error = squared_error(weight, low_rank(weight, rank))
    assert error <= float((weight - opponent).square().sum()) + 1e-9


def test_no_small_step_from_the_start_is_closer():
    weight = torch.randn(12, 5, dtype=torch.float64)
    table = low_rank(weight, rank=2)
    start = squared_error(weight, table)
    for scale in (1e-3, 1e-1):
        moved = low_rank(weight, rank=2)
        moved.inner.weight.data += scale * torch.randn(12, 2)
        moved.right.data += scale * torch.randn(2, 5)
        assert squared_error(weight, moved) > start


def test_gradients_equal_the_equation():
    table, weights = low_rank(torch.randn(7, 4, dtype=torch.float64), rank=2), torch.randn(3, 4)
    ids = torch.tensor([6, 1, 6])
    (table(ids) * weights).sum().backward()
    left, right = torch.zeros(7, 2, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    for row, i in enumerate(ids.tolist()):
        left[i] += table.right.detach() @ weights[row].double()
        right += torch.outer(table.inner.weight.detach()[i], weights[row].double())
    assert_close(table.inner.weight.grad, left)
    assert_close(table.right.grad, right)


def test_a_table_smaller_than_the_rank_is_left_alone():
    model = nn.ModuleDict(
        {"few": nn.Embedding(3, 8), "narrow": nn.Embedding(9, 3), "good": nn.Embedding(9, 8)}
    )
    changes = rb.apply_(model, rb.LowRank(rank=4), verbose=False)
    assert changes.skipped == (("few", "smaller than rank 4"), ("narrow", "smaller than rank 4"))


def test_a_merged_low_rank_can_be_cut_further():
    weight = decaying(20, 6, ratio=0.5)
    model = nn.Sequential(low_rank(weight, rank=4))
    rb.merge_(model, verbose=False)
    rb.apply_(model, rb.LowRank(rank=2), verbose=False)
    tail = sum(0.5 ** (2 * k) for k in range(2, 6))
    assert math.isclose(squared_error(weight, model[0]), tail, rel_tol=1e-9)
    assert rb.find_tables(model)[0].num_parameters == (20 + 6) * 2


def test_when_it_is_applied_is_a_setting():
    early, late = rb.LowRank(rank=2), rb.LowRank(rank=2, after_training=True)
    assert (early.after_training, late.after_training) == (False, True)
    assert early != late
    assert str(early) == "LowRank(rank=2)"
    assert str(late) == "LowRank(rank=2, after_training=True)"


def test_applied_by_hand_it_cuts_at_once_either_way():
    weight = decaying(20, 6, ratio=0.5)
    tables = []
    for late in (False, True):
        model = nn.Sequential(nn.Embedding.from_pretrained(weight, freeze=False))
        rb.apply_(model, rb.LowRank(rank=2, after_training=late), verbose=False)
        tables.append(model[0].weight)
        assert model[0].right.requires_grad
    assert torch.equal(*tables)


def test_it_is_typed_with_when_it_is_applied():
    late, unsized = parse_techniques(
        "low-rank:after_training=true:rank=4,low-rank:after_training=true"
    )
    assert late.text == "low-rank:rank=4:after_training=true"
    assert late.build([(1000, 8)], 1.0) == (rb.LowRank(rank=4, after_training=True),)
    early = rb.LowRank.for_share([(1000, 8)], 0.5)
    sized = rb.LowRank(rank=early.rank, after_training=True)
    assert unsized.build([(1000, 8)], 0.5) == (sized,)


def test_a_product_is_cut_as_it_would_be_merged():
    product = rb.MLET(inner_dim=64, std=30.0).wrap(nn.Embedding(500, 8))
    cut, expected = (rb.LowRank(rank=8).wrap(table) for table in (product, product.merge()))
    assert torch.equal(cut.inner.weight, expected.inner.weight)
    assert torch.equal(cut.right, expected.right)
