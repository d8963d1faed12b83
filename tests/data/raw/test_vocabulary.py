"""Which values get an id, against a plain sort."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.raw.coding import GrowingDictionary  # noqa: E402  # after the check that Polars is there
from rarebit.data.raw.encode import add_counts, make_vocabulary  # noqa: E402  # the same
from rarebit.data.raw.encoder import _digest  # noqa: E402  # the same

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


@given(
    counted=st.dictionaries(TEXTS, st.integers(0, 4), max_size=20),
    min_count=st.integers(1, 4),
)
def test_values_stand_by_count_and_then_by_text(counted, min_count):
    texts = pl.Series(list(counted), dtype=pl.String)
    counts = np.array(list(counted.values()), dtype=np.int64)
    values, found_ids = make_vocabulary(counts, texts.gather, min_count=min_count)
    kept = [value for value, n in counted.items() if n >= min_count]
    expected = sorted(kept, key=lambda value: (-counted[value], value))
    assert values.to_list() == expected
    ids = [3 + expected.index(value) if value in expected else 1 for value in counted]
    assert found_ids.tolist() == [0, 1, 2, *ids]


@given(
    singles=st.integers(0, 50),
    others=st.integers(0, 5),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
def test_a_share_of_the_values_seen_once_is_left_out(singles, others, share, seed):
    counts = np.array([1] * singles + [2] * others)
    texts = pl.Series([f"v{n}" for n in range(len(counts))], dtype=pl.String)
    values, _ = make_vocabulary(counts, texts.gather, unknown_share=share, stream="user", seed=seed)
    assert len(values) == len(counts) - math.ceil(singles * share)
    assert set(texts.to_list()[singles:]) <= set(values.to_list())
    order = np.random.default_rng(seed).permutation(len(counts))
    shuffled, _ = make_vocabulary(
        counts[order], texts.gather(order).gather, unknown_share=share, stream="user", seed=seed
    )
    assert shuffled.to_list() == values.to_list()
    if share > 0 and min(counts, default=2) == 1:
        least_two, _ = make_vocabulary(counts, texts.gather, min_count=2, unknown_share=share)
        assert len(least_two) == others


def test_seeds_and_columns_leave_out_other_values():
    texts = pl.Series([f"v{n}" for n in range(100)])
    left = {
        tuple(
            make_vocabulary(
                np.ones(100, int), texts.gather, unknown_share=0.5, stream=stream, seed=seed
            )[0]
        )
        for stream in ("user", "item")
        for seed in (0, 1)
    }
    assert len(left) == 4


def test_no_values():
    values, ids = make_vocabulary(np.zeros(0, int), GrowingDictionary().texts, unknown_share=0.5)
    assert values.to_list() == []
    assert ids.tolist() == [0, 1, 2]


@given(st.lists(TEXTS, max_size=6), st.lists(TEXTS, max_size=6))
def test_digests_are_equal_for_equal_values_only(first, second):
    digests = [_digest(pl.Series(values, dtype=pl.String)) for values in (first, second)]
    assert (digests[0] == digests[1]) == (first == second)


@given(
    codes=st.lists(st.integers(0, 9), max_size=30),
    size=st.integers(10, 200),
)
def test_counts_are_added(codes, size):
    counts = np.ones(size, np.int64)
    add_counts(counts, np.array(codes, np.int32))
    counted = Counter(codes)
    assert counts.tolist() == [1 + counted[code] for code in range(size)]


def test_a_growing_dictionary_numbers_values_as_they_come():
    dictionary = GrowingDictionary()
    codes = [
        pl.Series(values).cast(dictionary.dtype).to_physical().to_numpy()
        for values in (["b", "a", "b"], ["c", "a", ""])
    ]
    found = np.concatenate(codes)
    assert dictionary.texts(found).to_list() == ["b", "a", "b", "c", "a", ""]
    assert found.tolist() == [1, 2, 1, 3, 2, 0]
