"""Frappe: hand-made files of its format, the drawing of negatives, and the facts of the real set."""

import numpy as np
import pytest

pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import polars as pl
from capabilities import needs_real_data, real_data
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data.raw.chunks import BadRows
from rarebit.data.sources import find_source
from rarebit.data.sources.frappe import draw_unused
from rarebit.errors import DataError

HEADER = (
    *("user", "item", "cnt", "daytime", "weekday", "isweekend", "homework"),
    *("cost", "weather", "country", "city"),
)
USES = [
    ("0", "a", "1", "morning", "sunday", "weekend", "unknown", "free", "sunny", "Italy", "0"),
    ("0", "b", "7", "noon", "monday", "workday", "home", "paid", "cloudy", "Spain", "9"),
    ("1", "b", "2", "night", "monday", "workday", "work", "paid", "unknown", "unknown", "9"),
    ("1", "c", "2", "night", "friday", "workday", "work", "free", "", "unknown", "3"),
    ("0", "a", "3", "night", "friday", "workday", "work", "free", "rainy", "Spain", "3"),
]


def write(folder, uses=USES):
    text = "".join("\t".join(row) + "\n" for row in (HEADER, *uses))
    (folder / "frappe.csv").write_text(text, "utf-8")


def test_each_use_is_followed_by_two_negatives(tmp_path, read):
    write(tmp_path)
    reading = read("frappe", tmp_path)
    assert reading.frame.columns == list(find_source("frappe").schema().columns_read)
    assert reading.column("label") == [1, 0, 0] * 5
    # Each user has one app left, so the draws are known: c (free) for user 0, a (free) for user 1.
    assert reading.column("item") == [*"acc", *"bcc", *"baa", *"caa", *"acc"]
    assert reading.column("cost") == [
        *["free"] * 3, *["paid", "free", "free"] * 2, *["free"] * 6,
    ]  # fmt: skip
    same = reading.frame.drop("label", "item", "cost").rows()
    uses = [(u[0], *u[3:7], u[8] or None, *u[9:]) for u in USES]
    assert same == [use for use in uses for _ in range(3)]
    assert reading.lines() == [2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]


def test_a_negative_has_the_cost_of_its_own_app(tmp_path, read):
    context = ("1", "noon", "monday", "workday", "home")
    rest = ("sunny", "Spain", "1")
    uses = [(f"u{i}", f"free{i}", *context, "free", *rest) for i in range(20)]
    uses += [(f"u{i}", f"paid{i}", *context, "paid", *rest) for i in range(20)]
    write(tmp_path, uses)
    reading = read("frappe", tmp_path)
    for item, cost in zip(reading.column("item"), reading.column("cost"), strict=True):
        assert item.startswith(cost)
    negatives = reading.frame.filter(pl.col("label") == 0)
    assert negatives["cost"].n_unique() == 2
    assert read("frappe", tmp_path).frame.equals(reading.frame)


def test_a_use_without_an_app_is_bad(tmp_path, read):
    write(tmp_path, [*USES, ("0", "", *USES[0][2:])])
    reading = read("frappe", tmp_path / "frappe.csv", "aside")
    assert len(reading.rows) == 15
    assert (reading.bad.count, reading.bad.first[0].number) == (1, 7)


def test_a_user_of_all_apps_has_no_negatives(tmp_path):
    write(tmp_path, USES[:3])
    with pytest.raises(DataError, match="user '0' used all 2 items of the log, so no negative"):
        list(find_source("frappe").rows(tmp_path, BadRows()))


@given(st.data(), st.integers(0, 5))
def test_draws_are_apps_that_the_user_did_not_use(data, seed):
    used = np.array(
        data.draw(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1))
    )
    used[:, data.draw(st.integers(0, 5))] = False
    users = np.array(
        data.draw(st.lists(st.integers(0, len(used) - 1), max_size=20)), dtype=np.int64
    )
    drawn = draw_unused(users, used, 2, seed)
    assert drawn.shape == (len(users), 2)
    assert not any(
        used[user, item] for user, items in zip(users, drawn, strict=True) for item in items
    )


def test_draws_are_uniform_and_independent():
    used = np.zeros((1, 10), dtype=bool)
    used[0, [0, 3, 4, 8]] = True
    rows = 30_000
    drawn = draw_unused(np.zeros(rows, dtype=np.int64), used, 2, seed=1)
    pairs = np.zeros((10, 10))
    np.add.at(pairs, (drawn[:, 0], drawn[:, 1]), 1)
    free = np.flatnonzero(~used[0])
    expected = rows / 36
    # five standard deviations of a count
    assert abs(pairs[np.ix_(free, free)] - expected).max() < 5 * np.sqrt(expected)
    assert pairs.sum() == pairs[np.ix_(free, free)].sum()
    assert not np.array_equal(drawn, draw_unused(np.zeros(rows, dtype=np.int64), used, 2, seed=2))


@needs_real_data("frappe.csv")
def test_the_real_set(read):
    reading = read("frappe", real_data("frappe.csv").parent)
    frame = reading.frame
    assert (frame.height, sum(reading.column("label"))) == (288_609, 96_203)
    fields = find_source("frappe").schema().columns_read[1:]
    assert reading.distinct(*fields) == [957, 4082, 7, 7, 2, 3, 2, 9, 80, 233]
    used = frame.filter(pl.col("label") == 1).select("user", "item").unique()
    negatives = frame.filter(pl.col("label") == 0)
    assert negatives.join(used, on=["user", "item"], how="semi").height == 0
    assert frame.select("item", "cost").n_unique() == 4082
