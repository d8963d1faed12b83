import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, Field
from rarebit.data.synthetic import (
    DrawnColumn,
    _draw_ids,
    draw_column,
    draw_topics,
    parent_ids,
)

COUNTERS = np.arange(40_000, dtype=np.uint64)


def draw(column, seed=0):
    return draw_column(column, seed, COUNTERS, draw_topics(seed, COUNTERS))


@pytest.mark.parametrize("power", [1, 2, 3, 8])
@pytest.mark.parametrize("num_values", [20, 1000, 175_782])
def test_the_top_fifth_of_values_holds_its_share_of_the_rows(num_values, power):
    values = draw(DrawnColumn("user", num_values, power=power))[0] - FIRST_VALUE
    for share in (0.2, 0.6):
        expected = share ** (1 / power)
        seen = (values < share * num_values).mean()
        assert abs(seen - expected) < 5 * np.sqrt(expected * (1 - expected) / len(values)) + 0.002


@pytest.mark.parametrize("num_values", [1, 2, 19, 20, 41, 300, 175_782])
@pytest.mark.parametrize("power", [1, 12])
def test_ids_lie_in_the_table(num_values, power):
    ids = draw(DrawnColumn("user", num_values, power=power))
    assert ids.min() >= FIRST_VALUE
    assert ids.max() < FIRST_VALUE + num_values


@pytest.mark.parametrize("num_values", [1, 3, 1000, 175_782, 2**20])
@pytest.mark.parametrize("power", [1, 2, 3, 12])
def test_the_largest_number_below_one_gives_the_last_value(num_values, power):
    all_ones, own_topic = np.array([2**64 - 1], dtype=np.uint64), np.array([num_values - 1])
    ids = _draw_ids(DrawnColumn("user", num_values, power=power), all_ones, own_topic)
    assert ids.tolist() == [FIRST_VALUE + num_values - 1]


@given(st.integers(1, 200_000))
def test_every_topic_has_four_frequent_values_or_there_is_one_topic(num_values):
    column = DrawnColumn("user", num_values)
    assert column.num_topics in {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert column.num_topics == 1 or column.num_frequent >= 4 * column.num_topics


def test_values_of_one_topic_meet_in_the_same_rows():
    user, item = DrawnColumn("user", 1000), DrawnColumn("item", 2000, power=2)
    ids = [draw(column)[0] - FIRST_VALUE for column in (user, item)]
    beyond_head = (ids[0] >= user.num_topics) & (ids[1] >= item.num_topics)
    topics = [values[beyond_head] % user.num_topics for values in ids]
    # both moved: 9/16; else by chance
    assert abs((topics[0] == topics[1]).mean() - (9 / 16 + 7 / 16 / user.num_topics)) < 0.02


def test_the_most_frequent_values_have_no_topic():
    user, item = DrawnColumn("user", 1000), DrawnColumn("item", 1000)
    ids = [draw(column)[0] - FIRST_VALUE for column in (user, item)]
    head = ids[0] < user.num_topics
    topics = [values[head] % user.num_topics for values in ids]
    by_chance = sum(
        (topics[0] == t).mean() * (topics[1] == t).mean() for t in range(user.num_topics)
    )
    assert abs((topics[0] == topics[1]).mean() - by_chance) < 0.02


@given(st.integers(40, 5000), st.integers(0, 5))
def test_a_rare_value_has_a_frequent_parent_of_its_topic(num_values, seed):
    column = DrawnColumn("user", num_values)
    parents = parent_ids(column, seed) - FIRST_VALUE
    values = np.arange(FIRST_VALUE + num_values) - FIRST_VALUE
    rare = values >= num_values // 5
    assert np.array_equal(parents[~rare], values[~rare])
    assert (parents[rare] < num_values // 5).all()
    assert (parents[rare] >= column.num_topics).all()  # not one of everybody's values
    assert (parents[rare] % column.num_topics == values[rare] % column.num_topics).all()


def test_a_field_without_topics_has_no_parents():
    assert np.array_equal(parent_ids(DrawnColumn("hour", 24), 0), np.arange(27))


def test_missing_values_are_one_in_64_where_allowed():
    missing = (draw(DrawnColumn("city", 100, can_be_missing=True)) == MISSING).mean()
    assert abs(missing - 1 / 64) < 5 * np.sqrt(1 / 64 / len(COUNTERS))
    assert not (draw(DrawnColumn("city", 100)) == MISSING).any()


def test_lists_have_all_lengths_equally_often_and_padding_at_the_end():
    ids = draw(DrawnColumn("tags", 100, max_length=4))
    assert ids.shape == (4, len(COUNTERS))
    is_padding = ids == PADDING
    assert (is_padding[1:] >= is_padding[:-1]).all()
    counts = np.bincount(4 - is_padding.sum(axis=0), minlength=5)
    assert np.abs(counts / len(COUNTERS) - 0.2).max() < 0.01


def test_the_values_of_a_list_are_drawn_one_by_one():
    first, second, *_ = draw(DrawnColumn("tags", 1000, power=1, max_length=4))
    both = (first != PADDING) & (second != PADDING)
    assert (first[both] == second[both]).mean() < 0.1


def test_numbers_are_standardised():
    numbers = draw(DrawnColumn("age"))
    assert numbers.dtype == np.float32
    assert numbers.shape == (len(COUNTERS),)
    assert abs(numbers.mean()) < 0.02
    assert abs(numbers.std() - 1) < 0.02


def test_fields_of_one_shape_are_drawn_apart():
    assert (draw(DrawnColumn("user", 1000)) == draw(DrawnColumn("item", 1000))).mean() < 0.2
    assert (draw(DrawnColumn("user", 1000), seed=1) == draw(DrawnColumn("user", 1000))).mean() < 0.2


@pytest.mark.parametrize(
    ("column", "field"),
    [
        (DrawnColumn("age"), Field(name="age", kind="numeric")),
        (DrawnColumn("user", 7), Field(name="user", rows=10)),
        (
            DrawnColumn("tags", 7, max_length=2),
            Field(name="tags", kind="multi", rows=10, max_length=2),
        ),
    ],
)
def test_a_column_knows_its_field(column, field):
    assert column.field == field
