import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data.prepared import (
    DataStatistics,
    FieldStatistics,
    tail_ranks,
    value_statistics,
)
from rarebit.errors import SettingsError
from rarebit.settings import from_mapping, to_mapping

USER = FieldStatistics(
    name="user",
    kind="categorical",
    distinct=3,
    rows=6,
    top_share=0.75,
    rare_share=0.25,
    missing_share=0.5,
    unknown_shares=(0.0, 0.1, 0.2),
    tail=(12, 3, 1),
)
DATA = DataStatistics(rows=(8, 1, 1), label_rates=(0.25, 0.0, 1.0), bad_rows=2, fields=(USER,))


def naive(rows):
    """Return top and rare share of a list of values, by loops."""
    counts = Counter(rows)
    frequent = [value for value, _ in counts.most_common()]
    num_top = 0
    while num_top * 5 < len(frequent):
        num_top += 1
    in_top = [value for value in rows if value in frequent[:num_top]]
    rare = [value for value in rows if counts[value] < 10]
    return len(in_top) / len(rows), len(rare) / len(rows)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=80))
def test_shares_equal_a_count_by_hand(rows):
    found = value_statistics(np.bincount(rows, minlength=20))
    top, rare = naive(rows)
    assert found["distinct"] == len(set(rows))
    assert found["top_share"] == pytest.approx(top)
    assert found["rare_share"] == pytest.approx(rare)


def test_a_fifth_of_the_values_is_rounded_up():
    # 7 values: 1.4 rounded up is 2, with 10 + 5 of the 20 rows
    assert value_statistics(np.array([1, 1, 10, 1, 5, 1, 1]))["top_share"] == 0.75


def test_ten_times_is_not_rare():
    assert value_statistics(np.array([10, 9]))["rare_share"] == pytest.approx(9 / 19)


def test_no_values_have_no_shares():
    nothing = {"distinct": 0, "top_share": 0.0, "rare_share": 0.0, "tail": ()}
    assert value_statistics(np.zeros(3, np.int64)) == nothing
    assert value_statistics(np.zeros(0, np.int64)) == nothing


@given(st.integers(1, 3_000_000))
def test_ranks_go_from_the_first_to_the_last_by_a_factor(distinct):
    ranks = tail_ranks(distinct)
    assert (ranks[0], ranks[-1]) == (1, distinct)
    assert ranks == sorted(set(ranks))
    assert len(ranks) <= 24
    # rounding moves each of the two by a half at most
    factor = distinct ** (1 / 23)
    steps = itertools.pairwise(ranks)
    assert all(after - 0.51 <= (before + 0.51) * factor for before, after in steps)


@given(st.lists(st.integers(0, 10**9), max_size=200))
def test_the_tail_falls_from_the_largest_count_to_the_smallest(counts):
    found = value_statistics(np.array(counts, np.int64))
    seen = [count for count in counts if count]
    assert list(found["tail"]) == sorted(found["tail"], reverse=True)
    assert len(found["tail"]) == len(tail_ranks(len(seen)))
    if seen:
        assert (found["tail"][0], found["tail"][-1]) == (max(seen), min(seen))
    assert all(type(count) is int for count in found["tail"])


def test_statistics_survive_json():
    text = json.dumps(to_mapping(DATA))
    assert from_mapping(DataStatistics, json.loads(text)) == DATA


def test_what_cannot_be_is_refused():
    with pytest.raises(
        SettingsError, match="user: 3 distinct values have a tail of 3 counts, got 1"
    ):
        FieldStatistics(**{**vars(USER), "tail": (12,)})
    with pytest.raises(SettingsError, match="every split has rows and a label rate, got 1 and 2"):
        DataStatistics(rows=(1,), label_rates=(0.5, 0.5), bad_rows=0, fields=())
    with pytest.raises(SettingsError, match="unknown setting 'row'"):
        from_mapping(DataStatistics, {**to_mapping(DATA), "row": 1})
