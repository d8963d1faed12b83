"""Which rows are for training: exact sizes, seeds, ties, users, and times in every spelling."""

from datetime import UTC, date, datetime, time, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.log_schema import Column, LogSchema, Split  # noqa: E402  # after the check that Polars is there
from rarebit.data.raw.chunks import (  # noqa: E402  # the same
    BadRows,  # the same
    Place,
    RawChunk,
)
from rarebit.data.raw.coding import RowCoder  # noqa: E402  # the same
from rarebit.data.raw.encode import split_rows  # noqa: E402  # the same
from rarebit.errors import DataError  # noqa: E402  # the same

NO_KEY = np.empty(0)
SHARES = st.sampled_from([(0.8, 0.1, 0.1), (0.6, 0.4, 0.0), (0.34, 0.33, 0.33), (1.0, 0.0, 0.0)])


def naive(keys, shares):
    """Parts by sorting all rows; of equal keys, the first rows come first."""
    order = sorted(range(len(keys)), key=lambda row: (keys[row], row))
    first, second = round(len(keys) * shares[0]), round(len(keys) * (shares[0] + shares[1]))
    parts = [2] * len(keys)
    for rank, row in enumerate(order):
        parts[row] = 0 if rank < first else 1 if rank < second else 2
    return parts


@given(keys=st.lists(st.integers(-3, 3), min_size=10, max_size=60), shares=SHARES)
def test_times_with_ties_are_split_like_sorted_rows(keys, shares):
    split = Split(kind="time", column="t", shares=shares)
    found = split_rows(split, len(keys), np.array(keys, float))
    assert found.tolist() == naive(keys, shares)


@given(rows=st.integers(10, 200), shares=SHARES, seed=st.integers(0, 2**40))
def test_random_parts_have_the_exact_sizes(rows, shares, seed):
    found = split_rows(Split(shares=shares, seed=seed), rows, NO_KEY)
    sizes = np.bincount(found, minlength=3).tolist()
    first, second = round(rows * shares[0]), round(rows * (shares[0] + shares[1]))
    assert sizes == [first, second - first, rows - second]
    assert np.array_equal(found, split_rows(Split(shares=shares, seed=seed), rows, NO_KEY))


def test_seeds_differ_and_rows_are_drawn_evenly():
    drawn = np.stack([split_rows(Split(seed=seed), 100, NO_KEY) for seed in range(400)])
    assert len({row.tobytes() for row in drawn}) == 400
    trained = (drawn == 0).mean(axis=0)
    # 0.8 of 400 draws with a standard error of 0.02: five of them, over 100 rows
    assert np.abs(trained - 0.8).max() < 0.1


def test_rows_in_order():
    assert split_rows(Split(kind="order"), 20, NO_KEY).tolist() == [0] * 16 + [1] * 2 + [2] * 2


@given(users=st.lists(st.integers(0, 15), min_size=40, max_size=80), seed=st.integers(0, 99))
def test_a_user_is_in_one_part_whatever_number_it_has(users, seed):
    split = Split(kind="user", column="user", shares=(0.5, 0.3, 0.2), seed=seed)
    users = np.array(users + list(range(16)))
    found = split_rows(split, len(users), users)
    by_user = [set(found[users == user].tolist()) for user in range(16)]
    assert all(len(parts) == 1 for parts in by_user)
    sizes = np.bincount([parts.pop() for parts in by_user], minlength=3)
    assert sizes.tolist() == [8, 5, 3]
    renumbered = np.random.default_rng(seed).permutation(16)[users]
    assert np.array_equal(split_rows(split, len(users), renumbered), found)


def test_users_of_other_seeds_differ():
    users = np.arange(300) % 30
    splits = [Split(kind="user", column="user", seed=seed) for seed in range(20)]
    assert len({split_rows(split, 300, users).tobytes() for split in splits}) > 15


@pytest.mark.parametrize(
    ("split", "rows", "key", "part"),
    [
        (Split(), 2, NO_KEY, "valid"),
        (Split(kind="order"), 4, NO_KEY, "test"),
        (Split(kind="user", column="user"), 100, np.zeros(100), "valid"),
        (Split(kind="given"), 2, np.array([1, 2]), "train"),
        (Split(shares=(0.01, 0.99, 0.0)), 10, NO_KEY, "train"),
    ],
)
def test_too_few_rows(split, rows, key, part):
    with pytest.raises(DataError, match=f"the split leaves no row for {part}: {rows} rows are too"):
        split_rows(split, rows, key)


def test_given_parts_may_leave_valid_and_test_empty():
    assert split_rows(Split(kind="given"), 2, np.array([0, 0])).tolist() == [0, 0]


def keys_of(times, bad=None):
    """What rows with these times are split by."""
    frame = pl.DataFrame({"t": times, "a": ["x"] * len(times), "click": [0] * len(times)})
    schema = LogSchema(
        label="click",
        columns=(Column(name="a"), Column(name="t", kind="time")),
        split=Split(kind="time", column="t"),
    )
    chunk = RawChunk(frame, lambda row: Place("log", row + 1, "", "row"))
    coder = RowCoder(schema, {"a": pl.Enum(["x"])})
    return coder.code(chunk, bad or BadRows()).key


MOMENT = datetime(2024, 2, 29, 23, 30, 15, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2024-02-29 23:30:15",
        "2024-02-29T23:30:15",
        "2024-02-29T23:30:15Z",
        "2024-02-29T23:30:15.000Z",
        "2024-02-29T23:30:15+00:00",
        "2024-03-01T01:30:15+02:00",
        "2024-02-29 18:00:15-0530",
        "2024/02/29 23:30:15",
        "2024-02-29 23:30:15 UTC",
        "29.02.2024 23:30:15",
        "29-Feb-2024 23:30:15",
        "29 FEB 2024 23:30:15",
        "29/Feb/2024:23:30:15 +0000",
        "Thu Feb 29 23:30:15 +0000 2024",
        str(int(MOMENT.timestamp())),
        f"{MOMENT.timestamp():.3f}",
    ],
)
def test_every_spelling_of_a_moment_is_the_same_key(text):
    assert keys_of([text]).tolist() == [MOMENT.timestamp()]


def test_coarse_times_and_parts_of_a_second():
    days = ["2024-02-29", "2024/03/01", "2024-03-01 10:05", "2024-03-01T10:05:00.25"]
    start = datetime(2024, 2, 29, tzinfo=UTC).timestamp()
    expected = [start, start + 86400, start + 86400 + 36300, start + 86400 + 36300.25]
    assert keys_of(days).tolist() == expected


@pytest.mark.parametrize(
    "times",
    [
        pl.Series([date(2024, 1, 1), date(2023, 5, 5), date(2024, 3, 3)]),
        pl.Series([datetime(2024, 1, 1), datetime(2023, 5, 5), datetime(2024, 1, 2)]),  # noqa: DTZ001  # files have naive times
        pl.Series([time(12), time(1), time(23)]),
        pl.Series([timedelta(days=2), timedelta(hours=1), timedelta(days=3)]),
        pl.Series([3, 1, 4]),
        pl.Series([3.5, 1.0, 4.5]),
        pl.Series(["3", "1", "10"]),
        pl.Series(
            [datetime(2024, 1, 1), datetime(2023, 5, 5), datetime(2024, 1, 2)],  # noqa: DTZ001  # given a zone here
            dtype=pl.Datetime("ns", "Europe/Berlin"),
        ),
        pl.Series(
            [datetime(2024, 1, 1), datetime(2023, 5, 5), datetime(2024, 1, 2)],  # noqa: DTZ001  # files have naive times
            dtype=pl.Datetime("ms"),
        ),
    ],
    ids=lambda series: str(series.dtype),
)
def test_times_of_any_type_keep_their_order(times):
    assert np.argsort(keys_of(times)).tolist() == [1, 0, 2]


def test_what_is_no_time_is_a_bad_row():
    bad = BadRows("aside")
    times = ["yesterday", "2024-13-01", "nan", None, "2024-01-01", "", "5"]
    assert len(keys_of(times, bad)) == 2
    assert bad.reasons == {"t is not a time": 5}
    bad = BadRows()
    keys_of(["2024-01-01", "02/03/2024", "5/6/24"], bad)
    message = r"t is not a time \(got '02/03/2024'\).* t may be .* 2024-02-29 .*\. Fix the file$"
    with pytest.raises(DataError, match=message):
        bad.raise_if_any()
    bad = BadRows("aside")
    assert keys_of([1.0, float("nan"), None], bad).tolist() == [1.0]
    assert bad.count == 2
