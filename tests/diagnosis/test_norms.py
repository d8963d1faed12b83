"""Norms and counts against loops, scipy, and values worked by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from rarebit.diagnosis.rows import count_dead, norm_bins, spearman

small_counts = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def test_rows_that_weight_decay_erased_are_dead():
    norms = torch.full((1000,), 0.04)
    norms[:100] = 1e-9
    assert count_dead(norms) == 100
    norms[:999] = 1e-9  # the scale is that of the row that lives, not of the dead majority
    assert count_dead(norms) == 999


def test_dead_is_at_most_a_thousandth_of_the_root_mean_square():
    norms = torch.ones(10_000, dtype=torch.float64)
    norms[0], norms[1] = 0.0009, 0.0011
    assert count_dead(norms) == 1


def test_no_row_of_a_random_table_is_dead_and_all_of_a_table_of_zeros():
    assert count_dead(torch.randn(100_000, 4).norm(dim=1)) == 0
    assert count_dead(torch.zeros(7)) == 7
    assert count_dead(torch.zeros(0)) == 0


@given(small_counts)
def test_bins_are_powers_of_two(counts):
    norms = torch.rand(len(counts), dtype=torch.float64)
    expected = {}
    for norm, count in zip(norms.tolist(), counts, strict=True):
        least, most = 0, 0
        while count > most:
            least, most = most + 1, 2 * most + 1
        expected.setdefault((least, most), []).append(norm)
    found = norm_bins(norms, torch.tensor(counts))
    assert [(b.least, b.most) for b in found] == sorted(expected)
    for b in found:
        inside = expected[b.least, b.most]
        assert b.rows == len(inside)
        assert b.mean_norm == pytest.approx(sum(inside) / len(inside))


@pytest.mark.parametrize("power", [20, 31, 50])
def test_large_counts_fall_into_the_right_bin(power):
    counts = torch.tensor([2**power - 1, 2**power])
    assert [b.least for b in norm_bins(torch.ones(2), counts)] == [2 ** (power - 1), 2**power]


@given(small_counts, st.integers(0, 1000))
def test_correlation_is_that_of_scipy(counts, seed):
    norms = torch.randint(0, 5, (len(counts),), generator=torch.Generator().manual_seed(seed))
    found = spearman(norms.double(), torch.tensor(counts))
    if len(set(counts)) == 1 or len(set(norms.tolist())) == 1:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(norms.numpy(), counts).statistic, abs=1e-12)


def test_correlation_knows_order_only():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert spearman(x, x.exp()) == pytest.approx(1)
    assert spearman(x, -(x**3)) == pytest.approx(-1)
    assert spearman(x[:0], x[:0]) is None
