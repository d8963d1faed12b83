"""Co-occurrence with the top items, against loops over records and over texts."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data import co_occurrence
from rarebit.data.co_occurrence import count_in_records, count_in_text, find_top_items
from rarebit.data.dataset import Dataset
from rarebit.data.schema import PADDING, Field, Schema
from rarebit.errors import DataError

SCHEMA = Schema(
    (
        Field(name="user", rows=5),
        Field(name="tags", kind="multi", rows=6, max_length=3),
        Field(name="price", kind="numeric"),
        Field(name="day", rows=2),
    )
)
RECORDS = st.lists(
    st.tuples(
        st.integers(0, 4), *[st.integers(0, 5)] * 3, st.floats(-1, 1, width=32), st.integers(0, 1)
    ),
    min_size=1,
    max_size=14,
)
TEXTS = st.integers(1, 7).flatmap(
    lambda length: st.lists(
        st.lists(st.integers(0, 6), min_size=length, max_size=length), min_size=1, max_size=5
    )
)


def log_of(records):
    ids = [[user, *tags, day] for user, *tags, _, day in records]
    numeric = [[price] for *_, price, _ in records]
    return Dataset(SCHEMA, ids, numeric)


def naive_top(counts, number):
    """Return the most frequent items that were seen, by sorting all of them."""
    every = [
        (-int(n), place, row, name)
        for place, (name, count) in enumerate(counts.items())
        for row, n in enumerate(count)
        if n > 0
    ]
    return [(name, row) for _, _, row, name in sorted(every)[:number]]


def naive_meetings(data):
    """Return how often each two items of a log are in a record, place by place."""
    met = Counter()
    slots = [
        (field, slot)
        for field in SCHEMA.table_fields
        for slot in range(*SCHEMA.slots[field.name].indices(SCHEMA.num_slots))
    ]
    for record in data.ids.tolist():
        items = [
            (field.name, record[slot])
            for field, slot in slots
            if not (field.kind == "multi" and record[slot] == PADDING)
        ]
        for a, one in enumerate(items):
            for b, other in enumerate(items):
                if a != b and one != other:
                    met[one, other] += 1
    return met


def naive_neighbours(texts):
    """Return how often each two tokens are in a window of three, pair by pair."""
    met = Counter()
    for text in texts:
        for a, one in enumerate(text):
            for other in text[a + 1 : a + 3]:
                if one != other:
                    met[one, other] += 1
                    met[other, one] += 1
    return met


def dense(found, name):
    counts = found.fields[name]
    return counts.dense(torch.arange(len(counts.offsets) - 1)).long().tolist()


def small_chunks(patch, chunk):
    patch.setattr(co_occurrence, "CHUNK", chunk)
    patch.setattr(co_occurrence, "BLOCK", 2)
    patch.setattr(co_occurrence, "ROWS", 2)


@pytest.mark.slow
@pytest.mark.threads(2)
@given(
    records=RECORDS,
    top_items=st.integers(1, 15),
    memory=st.integers(0, 500),
    chunk=st.integers(1, 20),
)
def test_counts_in_records_equal_a_loop_over_them(records, top_items, memory, chunk):
    data = log_of(records)
    top, met = naive_top(data.counts(), top_items), naive_meetings(data)
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk)
        patch.setattr("rarebit.data.co_occurrence.MEMORY", memory)
        found = count_in_records(data, data.counts(), top_items=top_items)
    assert list(found.top_items) == top
    assert list(found.fields) == ["user", "tags", "day"]
    for field in SCHEMA.table_fields:
        wanted = [[met[(field.name, row), item] for item in top] for row in range(field.rows)]
        assert dense(found, field.name) == wanted


@pytest.mark.slow
@given(
    texts=TEXTS,
    top_items=st.integers(1, 8),
    memory=st.sampled_from([0, 100, 1 << 20]),
    chunk=st.integers(1, 20),
)
def test_counts_in_texts_equal_a_loop_over_them(texts, top_items, memory, chunk):
    tokens = torch.tensor(texts)
    counts = {"word": tokens.reshape(-1).bincount(minlength=7)}
    top, met = naive_top(counts, top_items), naive_neighbours(texts)
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk)
        patch.setattr("rarebit.data.co_occurrence.MEMORY", memory)
        found = count_in_text(tokens, counts, top_items=top_items)
    assert dense(found, "word") == [[met[row, item] for _, item in top] for row in range(7)]


def test_a_text_of_one_row_and_a_plain_one_are_the_same():
    tokens = torch.tensor([3, 1, 3, 0, 1, 1, 2])
    counts = {"word": tokens.bincount()}
    one, two = (count_in_text(form, counts) for form in (tokens, tokens[None].int()))
    assert dense(one, "word") == dense(two, "word")


def test_texts_do_not_touch():
    tokens = torch.tensor([[0, 0], [1, 1]])
    found = count_in_text(tokens, {"word": torch.tensor([2, 2])})
    assert dense(found, "word") == [[0, 0], [0, 0]]


def test_padding_of_a_text_is_no_item():
    tokens = torch.tensor([[1, 2, 0, 0], [1, 0, 0, 0]])
    found = count_in_text(tokens, {"word": torch.tensor([5, 2, 1])}, padding=0)
    assert found.top_items == (("word", 1), ("word", 2))
    assert dense(found, "word") == [[0, 0], [0, 1], [1, 0]]


def test_padding_of_a_log_is_no_item_even_if_it_was_counted():
    data = log_of([(0, 1, 0, 0, 0.0, 0), (0, 0, 0, 0, 0.0, 1)])
    counts = data.counts()
    counts["tags"][PADDING] = 99
    found = count_in_records(data, counts)
    assert ("tags", PADDING) not in found.top_items
    assert dense(found, "tags")[PADDING] == [0] * len(found.top_items)


def test_a_value_twice_in_a_record_meets_others_twice_and_not_itself():
    data = log_of([(0, 3, 3, 4, 0.0, 1)])
    found = count_in_records(data, data.counts())
    row = dict(zip(found.top_items, dense(found, "tags")[3], strict=True))
    assert row == {("tags", 3): 0, ("tags", 4): 2, ("user", 0): 2, ("day", 1): 2}


def test_only_the_named_fields_are_counted_and_the_top_items_are_of_all():
    data = log_of([(0, 1, 0, 0, 0.0, 0), (1, 2, 0, 0, 0.0, 0)])
    found = count_in_records(data, data.counts(), top_items=1, fields=["user"])
    assert (list(found.fields), found.top_items) == (["user"], (("day", 0),))
    assert dense(found, "user")[:2] == [[1], [1]]


def test_counts_that_may_not_fit_32_bits_have_64():
    records = co_occurrence._Records(log_of([(0, 1, 2, 2, 0.0, 0)] * 3))
    narrow = co_occurrence._count(records, records.data.counts(), 9, ["tags"])
    records.most = 1 << 31
    wide = co_occurrence._count(records, records.data.counts(), 9, ["tags"])
    assert (narrow.fields["tags"].values.dtype, wide.fields["tags"].values.dtype) == (
        torch.int32,
        torch.int64,
    )
    assert dense(narrow, "tags") == dense(wide, "tags")


def test_what_stays_has_no_zeros_and_ascending_columns():
    data = log_of([(n % 5, n % 6, n // 2 % 6, 0, 0.0, n % 2) for n in range(50)])
    for counts in count_in_records(data, data.counts()).fields.values():
        assert int(counts.values.min()) > 0
        for start, stop in zip(counts.offsets[:-1], counts.offsets[1:], strict=True):
            columns = counts.columns[start:stop].tolist()
            assert columns == sorted(set(columns))


@given(
    ids=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=20),
    start=st.integers(0, 5),
    number=st.integers(1, 4),
)
def test_no_two_pieces_count_the_same_row_and_all_of_a_band_is_counted_once(ids, start, number):
    band = co_occurrence._Band("tags", start, torch.zeros(5 - start, 1, dtype=torch.int32))
    pieces = list(band.pieces(torch.tensor(ids), number))
    rows = [set(piece.ids.tolist()) for piece in pieces]
    assert sum(len(some) for some in rows) == len(set().union(*rows))
    found = [
        (row, place)
        for piece in pieces
        for row, place in zip(piece.ids.tolist(), piece.places.tolist(), strict=True)
    ]
    wanted = [(row, place) for place, some in enumerate(ids) for row in some if start <= row < 5]
    assert sorted(found) == sorted(wanted)


@given(rows=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9)), limit=st.integers(1, 12))
def test_each_reading_counts_at_most_so_many_rows_and_all_readings_count_all(rows, limit):
    passes = co_occurrence._passes(rows, limit)
    sizes = [sum(stop - start for _, start, stop in spans) for spans in passes]
    assert all(size == limit for size in sizes[:-1])
    assert sizes[-1] <= limit
    counted = [(name, row) for spans in passes for name, *span in spans for row in range(*span)]
    assert counted == [(name, row) for name, end in rows.items() for row in range(end)]


def test_top_items_that_were_never_seen_are_none():
    assert find_top_items({"user": torch.tensor([0, 3])}, 5) == [("user", 1)]


def test_a_log_of_numbers_has_no_items():
    data = Dataset.from_columns({"price": [0.5, 1.5]}, label=[0, 1])
    with pytest.raises(DataError, match="co-occurrence is of ids, but no field has a table"):
        count_in_records(data, data.counts())


def test_where_no_item_was_ever_counted_none_is_a_top_one():
    data = log_of([(0, 1, 0, 0, 0.0, 0)])
    found = count_in_records(data, {name: count * 0 for name, count in data.counts().items()})
    assert (found.top_items, dense(found, "day")) == ((), [[], []])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"user": torch.ones(5)}, "there are no counts of 'tags'; give those of all fields"),
        (
            {"user": torch.ones(4), "tags": torch.ones(6), "day": torch.ones(2)},
            r"'user' has 5 rows, but its counts have the shape \(4,\)",
        ),
    ],
)
def test_counts_of_other_data_are_refused(counts, message):
    data = log_of([(0, 1, 0, 0, 0.0, 0)])
    with pytest.raises(DataError, match=message):
        count_in_records(data, counts)


def test_a_field_without_a_table_is_refused():
    data = log_of([(0, 1, 0, 0, 0.0, 0)])
    with pytest.raises(DataError, match="no field 'usr' has a table; did you mean 'user'"):
        count_in_records(data, data.counts(), fields=["usr"])
    with pytest.raises(DataError, match="no field 'price' has a table"):
        count_in_records(data, data.counts(), fields=["price"])


@pytest.mark.parametrize("number", [0, 32_768])
def test_a_number_of_top_items_that_cannot_be_is_refused(number):
    with pytest.raises(DataError, match=f"top_items must be from 1 to 32767, got {number}"):
        count_in_text(torch.tensor([0]), {"word": torch.tensor([1])}, top_items=number)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            torch.tensor([0.5]),
            r"whole numbers \(n,\) or \(texts, length\), got \(1,\) of torch.float32",
        ),
        (torch.zeros(1, 1, 1, dtype=torch.int64), r"got \(1, 1, 1\)"),
        (torch.tensor([0, 3]), "tokens must be from 0 to 2, as there are counts of 3, got 0 to 3"),
        (torch.tensor([-1, 2]), "got -1 to 2"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens, message):
    with pytest.raises(DataError, match=message):
        count_in_text(tokens, {"word": torch.tensor([1, 1, 1])})


def test_a_text_has_one_table():
    with pytest.raises(DataError, match="needs the counts of one table, got those of a, b"):
        count_in_text(torch.tensor([0]), {"a": torch.tensor([1]), "b": torch.tensor([1])})
