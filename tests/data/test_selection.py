"""Who may learn from whom, against loops over items, and values worked by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data import selection as module
from rarebit.data.co_occurrence import _sparse, count_in_records, count_in_text
from rarebit.data.dataset import Dataset
from rarebit.data.schema import Field, Schema
from rarebit.data.selection import (
    CoOccurrence,
    FrequencySplit,
    find_relatives,
    select,
    split_by_frequency,
)
from rarebit.errors import DataError, SettingsError

RECORDS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)),
    min_size=1,
    max_size=30,
)
SETTINGS = st.builds(
    CoOccurrence,
    top_items=st.integers(1, 20),
    relatives=st.integers(1, 4),
    drop=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    split=st.builds(FrequencySplit, top=st.sampled_from([0.2, 0.5, 1.0])),
)


def log_of(records):
    """Return a log with a multi-valued field, a number, and a user that never occurs."""
    schema = Schema(
        (
            Field(name="user", rows=11),
            Field(name="tags", kind="multi", rows=6, max_length=2),
            Field(name="price", kind="numeric"),
            Field(name="day", rows=4),
        )
    )
    return Dataset(schema, [list(record) for record in records], [[0.5]] * len(records))


def naive_frequent(counts, share):
    """Return the ids of the most frequent share of the values, rounded up."""
    seen = [row for row, count in enumerate(counts) if count > 0]
    number = next(n for n in range(len(seen) + 1) if n >= share * len(seen) - 1e-9)
    return sorted(seen, key=lambda row: (-counts[row], row))[:number]


def naive_cosine(one, other):
    both = math.sqrt(sum(x * x for x in one)) * math.sqrt(sum(x * x for x in other))
    return sum(x * y for x, y in zip(one, other, strict=True)) / both if both else 0.0


def check_field(found, counts, met, settings):
    """Compare the selection of one field with loops over its items."""
    counts = counts.tolist()
    vectors = met.dense(torch.arange(len(counts))).tolist()
    frequent = naive_frequent(counts, settings.split.top)
    rare = [row for row, count in enumerate(counts) if count > 0 and row not in frequent]
    assert found.source.nonzero()[:, 0].tolist() == sorted(frequent)
    assert found.rare.nonzero()[:, 0].tolist() == rare
    best = {}
    for row in range(len(counts)):
        cosines = {item: naive_cosine(vectors[row], vectors[item]) for item in frequent}
        wanted = sorted((c for c in cosines.values() if c > 0 and row in rare), reverse=True)
        wanted = (wanted + [0.0] * settings.relatives)[: settings.relatives]
        assert found.weights[row].tolist() == pytest.approx(wanted, abs=1e-6)
        for item, weight in zip(
            found.relatives[row].tolist(), found.weights[row].tolist(), strict=True
        ):
            if weight > 0:
                assert weight == pytest.approx(cosines[item], abs=1e-6)
            else:
                assert item == row
        assert found.similarity[row].item() == found.weights[row, 0].item()
        best[row] = wanted[0]
    kept = found.target.nonzero()[:, 0].tolist()
    out = [row for row in rare if row not in kept]
    assert len(out) == math.floor(settings.drop * len(rare) + 1e-9)
    assert set(kept) <= set(rare)
    assert all(best[a] <= best[b] + 1e-6 for a in out for b in kept)
    empty = [row for row in rare if not any(vectors[row])]
    assert all(row in out for row in empty) or all(row in empty for row in out)


@given(records=RECORDS, settings=SETTINGS, blocks=st.integers(1, 4))
def test_a_selection_from_a_log_equals_loops_over_its_items(records, settings, blocks):
    data = log_of(records)
    counts = data.counts()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RARE", "FREQUENT", "CHECKED"):
            patch.setattr(module, name, blocks)
        selection = select(data, counts, settings)
    met = count_in_records(data, counts, top_items=settings.top_items)
    assert list(selection.fields) == ["user", "tags", "day"]
    for name, found in selection.fields.items():
        check_field(found, counts[name], met.fields[name], settings)


@given(tokens=st.lists(st.integers(0, 12), min_size=1, max_size=60), settings=SETTINGS)
def test_a_selection_from_a_text_equals_loops_over_its_words(tokens, settings):
    tokens = torch.tensor(tokens)
    counts = tokens.bincount(minlength=14)
    found = select(tokens, counts, settings)["items"]
    met = count_in_text(tokens, {"items": counts}, top_items=settings.top_items)
    check_field(found, counts, met.fields["items"], settings)


def vectors(*rows):
    """Return counts given in full."""
    return _sparse(torch.tensor(rows))


def test_cosines_worked_by_hand():
    met = vectors([3, 4, 0], [4, 3, 0], [0, 0, 2], [3, 4, 0])
    ids, cosines = find_relatives(met, torch.tensor([0]), torch.tensor([1, 2, 3]), 3)
    assert ids.tolist() == [[3, 1, -1]]
    assert cosines.tolist() == [pytest.approx([1.0, 24 / 25, 0.0])]


def test_equal_relatives_are_ordered_by_id_and_have_equal_cosines():
    row = [7, 1, 3, 11, 2]
    met = vectors([1, 1, 1, 1, 1], *[row] * 9)
    ids, cosines = find_relatives(met, torch.tensor([0]), torch.arange(9, 0, -1), 9)
    assert ids.tolist() == [list(range(1, 10))]
    assert len(set(cosines[0].tolist())) == 1


def test_large_counts_keep_their_cosines():
    # 2e9 squared is beyond int64, and far beyond what float32 counts exactly
    met = vectors([2_000_000_000, 1], [2_000_000_000, 0], [0, 2_000_000_001])
    ids, cosines = find_relatives(met, torch.tensor([0]), torch.tensor([1, 2]), 2)
    assert ids.tolist() == [[1, 2]]
    assert cosines.tolist() == [pytest.approx([1.0, 5e-10])]


def chosen(rows, counts, **settings):
    """Return the selection of a field from what its items meet, given in full."""
    counts = torch.tensor(counts)
    settings = CoOccurrence(**settings)
    source = split_by_frequency(counts, settings.split)
    return module._selected(counts, source, vectors(*rows), settings)


def test_items_that_meet_nothing_go_first_then_the_least_similar_then_the_first():
    # item 0 is frequent; 1 and 4 meet nothing it meets, 3 meets nothing at all, 2 and 5 are alike
    rows = [[5, 5, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 2], [1, 0, 0]]
    counts, split = [9, 1, 1, 1, 1, 1], FrequencySplit(threshold=9)
    targets = [
        chosen(rows, counts, drop=drop, split=split).target.tolist()
        for drop in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    left_out = [[row for row in range(1, 6) if not target[row]] for target in targets]
    assert left_out == [[], [3], [1, 3], [1, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_a_threshold_takes_the_place_of_a_share():
    rows = [[1, 1], [1, 1], [1, 0], [0, 0]]
    found = chosen(rows, [9, 1, 1, 1], threshold=0.8, drop=0.0)
    assert found.target.tolist() == [False, True, False, False]
    assert found.similarity.tolist() == pytest.approx([0, 1, math.sqrt(0.5), 0])


def test_a_fifth_is_rounded_up_for_the_frequent_and_down_for_what_is_left_out():
    # 11 values: 2.2 -> 3 frequent; 8 rare: 1.6 -> 1 left out
    rows = [[row + 1, 1] for row in range(11)]
    found = chosen(rows, [20 - row for row in range(11)])
    assert (int(found.source.sum()), int(found.rare.sum()), int(found.target.sum())) == (3, 8, 7)


def test_a_fifth_of_five_is_one_for_every_multiple():
    for number in range(5, 2000, 5):
        counts = torch.ones(number)
        assert int(split_by_frequency(counts, FrequencySplit(top=0.2)).sum()) == number // 5


def test_a_field_of_one_value_has_nobody_to_learn():
    data = Dataset.from_columns({"user": [0, 0], "item": [0, 1]}, label=[0, 1])
    found = select(data, data.counts())["user"]
    assert (found.source.tolist(), found.target.tolist()) == ([True], [False])
    assert (found.relatives.tolist(), found.weights.tolist()) == ([[0] * 5], [[0.0] * 5])


def test_where_all_are_frequent_nobody_learns():
    data = log_of([(1, 2, 3, 0), (2, 2, 4, 1)])
    found = select(data, data.counts(), CoOccurrence(split=FrequencySplit(top=1.0)))["user"]
    assert found.source.nonzero()[:, 0].tolist() == [1, 2]
    assert not found.target.any()
    assert not found.rare.any()


@pytest.mark.parametrize(
    "settings",
    [CoOccurrence(split=FrequencySplit(threshold=99), drop=0.0), FrequencySplit(threshold=99)],
)
def test_where_none_is_frequent_nobody_learns(settings):
    data = log_of([(1, 2, 3, 0), (2, 2, 4, 1)])
    found = select(data, data.counts(), settings)["user"]
    assert not found.source.any()
    assert not found.target.any()
    assert found.rare.nonzero()[:, 0].tolist() == [1, 2]


def test_items_never_seen_are_on_neither_side_and_are_not_part_of_the_share():
    rows = [[5, 5], [0, 0], [0, 0], [1, 0], [1, 1], [0, 1], [1, 1], [1, 1]]
    found = chosen(rows, [9, 0, 0, 1, 1, 1, 1, 1])
    assert not (found.source | found.target)[1:3].any()
    assert int(found.source.sum()) == 2  # a fifth of 6, rounded up
    assert int(found.rare.sum() - found.target.sum()) == 0  # a fifth of 4, rounded down


def test_frequency_alone_makes_every_rare_item_a_target():
    found = select(None, {"user": torch.tensor([4, 0, 1, 9, 1])}, FrequencySplit())["user"]
    assert found.source.tolist() == [False, False, False, True, False]
    assert found.target.tolist() == [True, False, True, False, True]
    assert (found.relatives.shape, found.weights.shape) == ((5, 0), (5, 0))


def test_given_ids_are_the_frequent_ones():
    split = FrequencySplit(ids=(1, 3))
    found = select(None, torch.tensor([4, 0, 1, 9, 1]), split)["items"]
    assert found.source.tolist() == [False, True, False, True, False]
    assert found.target.tolist() == [True, False, True, False, True]
    with pytest.raises(DataError, match="ids must be from 0 to 2, got 3"):
        select(None, torch.tensor([4, 0, 1]), split)
    with pytest.raises(DataError, match=r"of one field, got a, b; choose one: fields=\[...\]"):
        select(None, {"a": torch.ones(9), "b": torch.ones(9)}, split)
    both = {"a": torch.ones(9), "b": torch.ones(9)}
    assert list(select(None, both, split, fields=["b"]).fields) == ["b"]


def test_padding_is_no_item():
    data = log_of([(1, 0, 3, 0), (1, 0, 4, 1)])
    counts = data.counts()
    counts["tags"][0] = 99
    found = select(data, counts, CoOccurrence(split=FrequencySplit(top=0.5)))["tags"]
    assert not (found.source | found.target)[0]
    assert int(counts["tags"][0]) == 99  # what was given stays as it is
    tokens = torch.tensor([[1, 2, 0], [2, 1, 3]])
    text = select(tokens, tokens.reshape(-1).bincount(), CoOccurrence(drop=0.0), padding=0)
    assert text["items"].source.tolist() == [False, True, False, False]
    assert text["items"].target.tolist() == [False, False, True, True]


def test_a_selection_moves_to_a_device():
    found = select(None, torch.tensor([4, 1]), FrequencySplit())["items"].to("meta")
    assert {getattr(found, part.name).device.type for part in dataclasses.fields(found)} == {"meta"}


def test_an_item_is_explained():
    rows = [[5, 5], [1, 1], [0, 0], [1, 0], [0, 0], [2, 1]]
    field = chosen(rows, [1500, 1, 0, 3, 1, 2], drop=0.25, relatives=1)
    selection = module.Selection({"zip": field}, CoOccurrence())
    assert [selection.explain("zip", item) for item in range(6)] == [
        "zip 0 was seen 1,500 times: frequent, others may learn from it",
        "zip 1 was seen once: rare, it may learn from 0 (1.00)",
        "zip 2 was never seen in training: it is left alone",
        "zip 3 was seen 3 times: rare, it may learn from 0 (0.71)",
        "zip 4 was seen once: rare, left out, as it is least like any frequent item",
        "zip 5 was seen 2 times: rare, it may learn from 0 (0.95)",
    ]
    with pytest.raises(DataError, match="'zip' has ids from 0 to 5, got 6"):
        selection.explain("zip", 6)
    with pytest.raises(DataError, match="nothing was selected of 'zpi'; did you mean 'zip'"):
        selection.explain("zpi", 0)


def test_what_was_left_out_is_told_with_its_nearest():
    field = chosen([[1, 1], [1, 0], [0, 0], [1, 1]], [9, 1, 1, 1], threshold=0.9)
    selection = module.Selection({"zip": field}, CoOccurrence())
    assert selection.explain("zip", 1, words=["a", "b", "c", "d"]) == (
        "zip 'b' was seen once: rare, left out, as it is least like any frequent item: 'a' (0.71)"
    )


def test_co_occurrence_needs_a_log_or_a_text():
    with pytest.raises(DataError, match="counted in a Dataset or in a tensor of tokens, got none"):
        select(None, torch.tensor([4, 1]), CoOccurrence())


def test_a_field_without_counts_is_refused():
    with pytest.raises(DataError, match="no counts of 'usr'; did you mean 'user'"):
        select(None, {"user": torch.tensor([1])}, FrequencySplit(), fields=["usr"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FrequencySplit(top=0.0), "top must be a share above 0, up to 1, got top=0.0"),
        (lambda: FrequencySplit(top=1.1), "got top=1.1"),
        (lambda: FrequencySplit(threshold=0), "threshold must be at least 1, got threshold=0"),
        (lambda: FrequencySplit(threshold=2, ids=(1,)), "by threshold or by ids, got both"),
        (lambda: CoOccurrence(top_items=0), "top_items must be from 1 to 32,767, got top_items=0"),
        (lambda: CoOccurrence(top_items=32_768), "got top_items=32768"),
        (lambda: CoOccurrence(relatives=0), "relatives must be at least 1, got relatives=0"),
        (lambda: CoOccurrence(drop=-0.1), "drop must be a share from 0 to 1, got drop=-0.1"),
        (lambda: CoOccurrence(threshold=1.5), "threshold must be a cosine from 0 to 1"),
        (lambda: CoOccurrence(split=0.2), "split must be FrequencySplit, got 0.2"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, message):
    with pytest.raises(SettingsError, match=message):
        make()
