"""Singular values against torch's own, and what is made of them against the truth."""

import time

import pytest
import torch
from capabilities import needs_cuda
from hypothesis import given
from hypothesis import strategies as st

from rarebit.errors import DataError, SettingsError
from rarebit.tables.spectrum import (
    information_abundance,
    random_abundance,
    random_singular_values,
    rough_information_abundance,
    singular_values,
    stable_rank,
)


def make_table(kind, rows, width):
    """Return a random table, one whose spectrum decays fast, or one of rank one."""
    table = torch.randn(rows, width)
    if kind == "decaying":
        return table * 0.6 ** torch.arange(width)
    if kind == "rank one":
        return table[:, :1] * torch.randn(width)
    return table


KINDS = ["random", "decaying", "rank one"]


@pytest.mark.parametrize("kind", KINDS)
def test_abundance_is_that_of_torchs_singular_values(kind):
    table = make_table(kind, 20_000, 32)
    values = torch.linalg.svdvals(table.double())
    expected = float(values.sum() / values[0])
    assert information_abundance(table) == pytest.approx(expected, rel=1e-10, abs=0)
    assert stable_rank(table) == pytest.approx(
        float(values.square().sum() / values[0] ** 2), rel=1e-10, abs=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_rows_are_right_and_take_seconds(kind):
    table = make_table(kind, 1_000_000, 64)
    start = time.process_time()  # of one thread; a busy machine makes the clock on the wall run on
    found = information_abundance(table)
    assert time.process_time() - start < 10
    values = torch.linalg.svdvals(table.double())
    assert found == pytest.approx(float(values.sum() / values[0]), rel=1e-10, abs=0)


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 12),
    chunk_rows=st.integers(1, 50),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_chunks_and_shapes_do_not_matter(rows, width, chunk_rows, scale, seed):
    table = scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    found = singular_values(table, chunk_rows=chunk_rows)
    expected = torch.linalg.svdvals(table.double())
    assert found.shape == (min(rows, width),)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-13 * float(expected[0]))
    abundance = information_abundance(table)
    assert 1 <= abundance <= min(rows, width) + 1e-9
    assert stable_rank(table) <= abundance + 1e-9


@pytest.mark.parametrize("width", [1, 5, 64])
def test_abundance_of_an_orthonormal_table_is_its_width(width):
    table = torch.linalg.qr(torch.randn(1000, width, dtype=torch.float64)).Q
    assert information_abundance(7.0 * table) == pytest.approx(width, rel=1e-12)
    assert stable_rank(table) == pytest.approx(width, rel=1e-12)


def test_values_worked_by_hand():
    table = torch.diag(torch.tensor([4.0, 2.0, 1.0]))
    assert information_abundance(table) == 1.75
    assert stable_rank(table) == pytest.approx(21 / 16)
    assert information_abundance(torch.ones(9, 1)) == 1.0


@pytest.mark.parametrize("shape", [(9, 4), (1, 1), (0, 3)])
def test_a_table_without_anything_in_it_has_no_abundance(shape):
    assert information_abundance(torch.zeros(shape)) == 0.0
    assert stable_rank(torch.zeros(shape)) == 0.0
    assert float(rough_information_abundance(torch.zeros(shape))) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_kind_of_float_is_taken_as_it_is(dtype):
    table = torch.randn(100, 8).to(dtype).requires_grad_()
    expected = torch.linalg.svdvals(table.detach().double())
    assert torch.allclose(singular_values(table), expected, rtol=1e-12)
    assert not rough_information_abundance(table).requires_grad


def test_no_float64_copy_of_the_table_is_made(monkeypatch):
    sizes = []
    double = torch.Tensor.double
    monkeypatch.setattr(torch.Tensor, "double", lambda x: sizes.append(len(x)) or double(x))
    singular_values(torch.randn(10_000, 8))
    rough_information_abundance(torch.randn(200_000, 2))
    assert max(sizes[:-4]) <= 2048
    assert max(sizes) <= 65_536
    assert sum(sizes) == 210_000


@pytest.mark.parametrize("kind", KINDS)
def test_the_rough_form_is_close(kind):
    table = make_table(kind, 3000, 32)
    rough = rough_information_abundance(table)
    assert rough.shape == ()
    assert float(rough) == pytest.approx(information_abundance(table), rel=1e-4)


def test_the_rough_form_tells_equal_singular_values_and_wide_tables():
    table = torch.linalg.qr(torch.randn(300, 16, dtype=torch.float64)).Q
    assert float(rough_information_abundance(1e-6 * table)) == pytest.approx(16, rel=1e-8)
    wide = torch.randn(3, 16)
    expected = information_abundance(wide)
    assert float(rough_information_abundance(wide)) == pytest.approx(expected, rel=1e-8)


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_finds_the_same(kind):
    table = make_table(kind, 200_000, 32)
    found = singular_values(table.cuda())
    assert found.is_cuda
    assert information_abundance(table.cuda()) == pytest.approx(
        information_abundance(table), rel=1e-10
    )


@needs_cuda
def test_the_rough_form_waits_for_no_gpu():
    table = torch.randn(200_000, 32, device="cuda")
    rough_information_abundance(table)  # what is loaded on first use may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        rough = rough_information_abundance(table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(rough) == pytest.approx(information_abundance(table), rel=1e-6)


@pytest.mark.parametrize(("rows", "width"), [(40, 6), (6, 40), (5, 5), (1, 4), (4, 1)])
def test_random_tables_are_spread_as_tables_that_are_really_drawn(rows, width):
    draws = 2000
    drawn = torch.linalg.svdvals(torch.randn(draws, rows, width, dtype=torch.float64))
    ours = torch.stack([random_singular_values(rows, width, seed) for seed in range(draws)])
    spread = (drawn.var(dim=0) + ours.var(dim=0)).div(draws).sqrt()
    assert ((drawn.mean(dim=0) - ours.mean(dim=0)).abs() < 4.5 * spread).all()
    abundances = [values.sum(dim=1) / values[:, 0] for values in (drawn, ours)]
    for share in (0.1, 0.5, 0.9):
        below = (abundances[1] <= abundances[0].quantile(share)).double().mean()
        assert float(below) == pytest.approx(share, abs=0.05) or min(rows, width) == 1


def test_a_random_table_of_any_size_is_drawn_at_once():
    assert random_abundance(10**15, 16) == pytest.approx(16, rel=1e-6)
    assert random_abundance(1000, 8, seed=1) == random_abundance(1000, 8, seed=1)
    assert random_abundance(1000, 8, seed=1) != random_abundance(1000, 8, seed=2)
    table = torch.randn(20_000, 16)
    assert random_abundance(20_000, 16) == pytest.approx(information_abundance(table), rel=0.01)


@pytest.mark.parametrize("table", [torch.zeros(3), torch.zeros(3, 2, dtype=torch.int64)])
def test_what_is_no_table_is_refused(table):
    for function in (singular_values, rough_information_abundance):
        with pytest.raises(DataError, match="a table is two-dimensional and holds floats, got"):
            function(table)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (2500, 3)])
def test_a_number_that_is_not_finite_is_told(number, place):
    table = torch.randn(5000, 4)
    table[place] = number
    with pytest.raises(DataError, match="holds NaN or infinite numbers"):
        information_abundance(table)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(SettingsError, match="chunk_rows must be at least 1, got chunk_rows=0"):
        singular_values(torch.ones(2, 2), chunk_rows=0)
    with pytest.raises(SettingsError, match="rows must be at least 1, got rows=0"):
        random_abundance(0, 4)
    with pytest.raises(SettingsError, match="width must be at least 1, got width=0"):
        random_abundance(4, 0)
