"""Orders of an epoch: permutations, the same each time, as well mixed as the theory says, and local."""

import itertools

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data import order
from rarebit.data.order import chunk_plan, chunk_shuffled_order, shuffled_order
from rarebit.errors import SettingsError

SMALL = {
    "num_rows": st.integers(1, 60),
    "chunk_rows": st.integers(1, 70),
    "chunks_at_once": st.integers(1, 70),
    "seed": st.integers(0, 2**40),
}


def orders(epochs, num_rows, chunk_rows, chunks_at_once, seed=0):
    """The orders of many epochs, `(epochs, num_rows)`."""
    sizes = {"chunk_rows": chunk_rows, "chunks_at_once": chunks_at_once}
    drawn = [chunk_shuffled_order(num_rows, seed=seed, epoch=e, **sizes) for e in range(epochs)]
    return torch.stack(drawn).numpy()


@given(**SMALL, epoch=st.integers(0, 2**31))
def test_every_row_is_read_once(num_rows, chunk_rows, chunks_at_once, seed, epoch):
    sizes = {"chunk_rows": chunk_rows, "chunks_at_once": chunks_at_once}
    drawn = chunk_shuffled_order(num_rows, seed=seed, epoch=epoch, **sizes)
    assert drawn.dtype == torch.int64
    assert sorted(drawn.tolist()) == list(range(num_rows))
    assert torch.equal(
        drawn,
        chunk_shuffled_order(
            num_rows, seed=seed, epoch=epoch, chunk_rows=chunk_rows, chunks_at_once=chunks_at_once
        ),
    )


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row(rows):
    drawn = chunk_shuffled_order(rows, seed=0, epoch=0, chunk_rows=4, chunks_at_once=2)
    assert drawn.tolist() == list(range(rows))


def test_rows_are_renumbered_in_blocks(monkeypatch):
    expected = orders(3, 1000, 30, 10)
    monkeypatch.setattr(order, "BLOCK", 7)
    assert np.array_equal(orders(3, 1000, 30, 10), expected)


@pytest.mark.parametrize("sizes", [{}, {"chunk_rows": 16, "chunks_at_once": 4}])
def test_seed_and_epoch_decide_the_order(sizes):
    draw = chunk_shuffled_order if sizes else shuffled_order
    places = itertools.product([0, 1, 2, 2**31, 2**32 - 1], [0, 1, 2, 3])
    drawn = {tuple(draw(256, seed=s, epoch=e, **sizes).tolist()) for s, e in places}
    assert len(drawn) == 20


@given(**SMALL)
def test_a_chunk_is_read_while_its_group_is(num_rows, chunk_rows, chunks_at_once, seed):
    sizes = {"chunk_rows": chunk_rows, "chunks_at_once": chunks_at_once}
    drawn = chunk_shuffled_order(num_rows, seed=seed, epoch=0, **sizes)
    when = torch.argsort(drawn)
    most = chunk_rows * chunks_at_once
    # where the first chunk begins is not told: some place must explain the order
    assert any(
        all(int(chunk.max() - chunk.min()) < most for chunk in when.roll(-first).split(chunk_rows))
        for first in range(num_rows)
    )


def test_a_window_of_one_group_touches_only_its_chunks():
    for drawn in orders(20, 1200, chunk_rows=20, chunks_at_once=5):
        for window in drawn.reshape(-1, 100):
            rows = np.sort(window)
            jumps = np.diff(rows, append=rows[0] + 1200) != 1  # on the circle of rows
            assert 1 <= jumps.sum() <= 5
            lengths = np.diff(np.flatnonzero(jumps), prepend=np.flatnonzero(jumps)[-1] - 100)
            assert (lengths % 20 == 0).all()


def test_groups_are_of_about_the_same_size():
    # 11 chunks, at most 10 at once: 6 and 5, where 10 and 1 would leave one chunk by itself
    for drawn in orders(20, 1100, chunk_rows=100, chunks_at_once=10):
        halves = drawn[:600], drawn[600:]
        for rows, chunks in zip(halves, [6, 5], strict=True):
            jumps = np.diff(np.sort(rows), append=rows.min() + 1100) != 1
            assert jumps.sum() <= chunks


def test_borders_of_chunks_move_from_epoch_to_epoch():
    drawn = orders(200, 1200, chunk_rows=20, chunks_at_once=1)
    starts = {int(np.sort(epoch[20:40])[0]) % 20 for epoch in drawn}
    assert starts == set(range(20))


SIZES = [
    (50, 7, 2),
    pytest.param((48, 8, 1), marks=pytest.mark.slow),
    (50, 50, 1),
    pytest.param((50, 1, 3), marks=pytest.mark.slow),
    (50, 30, 1),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_is_read_at_any_time_equally_often(sizes):
    when = np.argsort(orders(3000, *sizes), axis=1)
    for row in (0, 1, 24, sizes[0] - 1):
        counts = np.bincount(when[:, row], minlength=sizes[0])
        assert scipy.stats.chisquare(counts).pvalue > 1e-4
    # and a count that is not flat is found
    counts[0] += 100
    assert scipy.stats.chisquare(counts).pvalue < 1e-4


@pytest.fixture(scope="module")
def batches_of_rows():
    """The batch of 20 rows that each of 400 rows is in, by epoch: 4 of 40 chunks of 10 at once."""
    return np.argsort(orders(2000, 400, chunk_rows=10, chunks_at_once=4), axis=1) // 20


@pytest.mark.slow
@pytest.mark.parametrize("apart", [1, 5, 9, 15])
def test_neighbours_meet_in_a_batch_as_often_as_theory_says(apart, batches_of_rows):
    same_chunk = max(10 - apart, 0) / 10
    same_group = same_chunk + (1 - same_chunk) * (4 - 1) / (40 - 1)
    expected = same_group * (20 - 1) / (40 - 1)
    met = batches_of_rows == np.roll(batches_of_rows, -apart, axis=1)
    assert met.mean() == pytest.approx(expected, rel=0.03)
    for row in (0, 195, 399):  # the ends of the file are not special
        assert met[:, row].mean() == pytest.approx(expected, abs=4 * np.sqrt(expected / 2000))
    mixed_all = (20 - 1) / (400 - 1)
    assert (expected > mixed_all) == (apart < 10)


@pytest.mark.parametrize(("chunk", "at_once"), [(50, 4), (50, 20), (25, 8), (10, 200)])
def test_the_label_rate_of_batches_of_a_sorted_file_spreads_as_theory_says(chunk, at_once):
    rows, batch, epochs, rate = 20_000, 100, 40, 0.25
    chunks, group = rows // chunk, chunk * at_once
    label = np.arange(rows) < rate * rows
    # every chunk is of one label: a group's rate is that of some of all chunks, drawn without repeats,
    # and a batch's that of some of the group's rows
    between = rate * (1 - rate) / at_once * (chunks - at_once) / (chunks - 1)
    within = (rate * (1 - rate) - between) / batch * (group - batch) / (group - 1)
    rates = label[orders(epochs, rows, chunk, at_once)].reshape(-1, batch).mean(axis=1)
    assert rates.mean() == pytest.approx(rate)
    assert rates.var() == pytest.approx(between + within, rel=0.15)
    unshuffled = label.reshape(-1, batch).mean(axis=1)
    assert unshuffled.var() == pytest.approx(rate * (1 - rate))
    assert rates.var() < 0.3 * unshuffled.var()


def test_with_all_chunks_at_once_it_is_a_full_shuffle():
    """The limit: neighbours meet no more often than any two rows."""
    batch_of = np.argsort(orders(2000, 200, chunk_rows=10, chunks_at_once=20), axis=1) // 20
    met = batch_of == np.roll(batch_of, -1, axis=1)
    assert met.mean() == pytest.approx((20 - 1) / (200 - 1), rel=0.03)


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "memory", "plan"),
    [
        (1000, 100, 200_000, None),  # exactly half
        (1000, 100, 199_998, (10_485, 1)),  # a chunk is more than there is
        (10**9, 160, 2**34, (6553, 4096)),
        (10**9, 2**20, 2**34, (256, 16)),  # at least 256 rows
        (10**9, 2**30, 1, (256, 1)),
        (0, 100, 1, None),
    ],
)
def test_a_plan_takes_a_quarter_of_the_memory(num_rows, row_bytes, memory, plan):
    assert chunk_plan(num_rows, row_bytes, memory) == plan


@given(st.integers(1, 2**40), st.integers(1, 2**22), st.integers(2**32, 2**45))
def test_any_plan_fits(num_rows, row_bytes, memory):
    plan = chunk_plan(num_rows, row_bytes, memory)
    assert (plan is None) == (2 * num_rows * row_bytes <= memory)
    if plan is not None:
        chunk_rows, at_once = plan
        assert chunk_rows * at_once * row_bytes <= memory / 4
        assert chunk_rows * (at_once + 1) * row_bytes > memory / 4
        assert chunk_rows == max(2**20 // row_bytes, 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1, 0), "memory_bytes must be at least 1, got memory_bytes=0"),
    ],
)
def test_a_plan_of_wrong_sizes_is_refused(arguments, message):
    with pytest.raises(SettingsError, match=message):
        chunk_plan(*arguments)
