"""Vocabularies that grow, beside a slow one that keeps a dictionary and never forgets how it came about."""

import tempfile
from collections import Counter
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rarebit.data import Column, Dataset, Growth, Vocabulary
from rarebit.errors import DataError, SettingsError

pl = pytest.importorskip("polars")


class SlowVocabulary:
    """The rules, value by value."""

    def __init__(self, growth):
        self.growth, self.day, self.next_id = growth, 0, 3
        self.ids, self.counts, self.last = {}, {}, {}
        self.waiting, self.free = Counter(), []

    def extend(self, values):
        self.day += 1
        seen, decay = Counter(values), 0.5 ** (1 / self.growth.half_life)
        for counts in (self.counts, self.waiting):
            for value in counts:
                counts[value] *= decay
        free = sorted(self.free)  # as it was yesterday
        for value in sorted(self.ids):
            if value in seen:
                self.counts[value] += seen[value]
                self.last[value] = self.day
        dropped = [
            value
            for value in self.ids
            if self.growth.drop_after is not None
            and self.day - self.last[value] >= self.growth.drop_after
            and self.counts[value] < self.growth.drop_below
        ]
        fresh = []
        for value in seen.keys() - self.ids.keys():
            total = self.waiting[value] + seen[value]
            if round(total) >= (self.growth.min_count or 1):
                fresh.append((-total, value))
            else:
                self.waiting[value] = total
        for value in dropped:
            self.free.append(self.ids.pop(value))
        reset = []
        for count, value in sorted(fresh):
            if free:
                reset.append(free[0])
                self.free.remove(free[0])
                self.ids[value] = free.pop(0)
            else:
                self.ids[value] = self.next_id
                self.next_id += 1
            self.counts[value], self.last[value] = -count, self.day
        return reset


days_of_values = st.lists(
    st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=12), min_size=1, max_size=8
)
growths = st.builds(
    Growth,
    min_count=st.sampled_from([None, 1, 2, 3]),
    half_life=st.sampled_from([0.5, 2.0, 30.0]),
    drop_after=st.sampled_from([None, 1, 2, 4]),
    drop_below=st.sampled_from([0.5, 1.0, 3.0, 100.0]),
)


@hypothesis.given(days_of_values, growths, st.data())
def test_a_vocabulary_grows_and_drops_as_a_dictionary_does(days, growth, data):
    vocabulary, slow = Vocabulary("item", growth=growth), SlowVocabulary(growth)
    for values in days:
        before, rows = dict(slow.ids), vocabulary.rows["item"]
        changes = vocabulary.extend({"item": values})
        assert [*changes.columns["item"].reset] == slow.extend(values)
        found = vocabulary.encode({"item": sorted("abcdefghij")})["item"].tolist()
        assert found == [slow.ids.get(value, 1) for value in "abcdefghij"]
        day = changes.columns["item"]
        assert day.rows == changes.rows["item"] == vocabulary.rows["item"] == slow.next_id >= rows
        assert {before[v] for v in before.keys() - slow.ids.keys()} == {*day.dropped}
        assert {slow.ids[v] for v in slow.ids.keys() - before.keys()} == {*day.new}
        assert day.waiting == len({*values} - slow.ids.keys())
        stay = before.keys() & slow.ids.keys()  # never renumbered
        assert {value: slow.ids[value] for value in stay} == {v: before[v] for v in stay}
        assert vocabulary.version == slow.day
        if data.draw(st.booleans(), label="saved"):
            with tempfile.TemporaryDirectory() as folder:
                vocabulary.save(Path(folder) / "saved")
                vocabulary = Vocabulary.open(Path(folder) / "saved", growth=growth)


def test_columns_that_share_a_vocabulary_grow_together():
    columns = [Column(name="seen", vocabulary="item"), Column(name="bought", vocabulary="item")]
    vocabulary = Vocabulary(*columns)
    day = vocabulary.extend({"seen": ["tea", "milk"], "bought": ["tea", "jam"]})
    assert day.rows == vocabulary.rows == {"seen": 6, "bought": 6}
    found = vocabulary.encode({"seen": ["jam"], "bought": ["milk"]})
    assert (found["seen"].tolist(), found["bought"].tolist()) == ([4], [5])  # tea has two


def test_a_multi_valued_column_grows_and_is_padded():
    vocabulary = Vocabulary(Column(name="tags", kind="multi", separator="|", max_length=2))
    vocabulary.extend({"tags": ["a|b", "a", None]})
    assert vocabulary.encode({"tags": ["b|a", "a|c", ""]})["tags"].tolist() == [
        [4, 3],
        [3, 1],
        [2, 0],
    ]


def test_a_value_in_another_spelling_is_the_same_value():
    vocabulary = Vocabulary("item")
    vocabulary.extend({"item": [15, 16, 15]})
    day = vocabulary.extend({"item": ["15.0", "17"]})
    assert day.columns["item"].new.tolist() == [5]
    assert vocabulary.encode({"item": [15.0, 17.0, 16.0]})["item"].tolist() == [3, 5, 4]


def test_ids_do_not_depend_on_the_order_of_rows():
    rows = ["b", "a", "c", "a", "d"] * 3
    both = [Vocabulary("item"), Vocabulary("item")]
    for vocabulary, order in zip(both, (rows, rows[::-1]), strict=True):
        vocabulary.extend({"item": ["z"]})
        vocabulary.extend({"item": order})
    assert both[0].encoder.checksum == both[1].encoder.checksum


def test_a_new_version_knows_its_parent():
    vocabulary = Vocabulary("item")
    vocabulary.extend({"item": ["a"]})
    parent = vocabulary.encoder.checksum
    vocabulary.extend({"item": ["b"]})
    assert vocabulary.encoder.seen.parent == parent != vocabulary.encoder.checksum


def test_the_vocabulary_of_a_data_set_goes_on_from_its_counts():
    clicks = {"item": ["a"] * 6 + ["b"] * 4, "click": [0, 1] * 5}
    data = Dataset.from_frame(clicks, label="click")
    vocabulary = Vocabulary.of(data, growth=Growth(half_life=1.0))
    assert vocabulary.rows == {"item": data.schema["item"].rows}
    seen = vocabulary.encoder.seen.counts["item"]
    assert sum(seen) == len(data.splits.train)
    vocabulary.extend({"item": ["c"]})
    assert vocabulary.encoder.seen.counts["item"].tolist() == [*(seen / 2), 1.0]
    assert vocabulary.encode({"item": ["a", "b", "c"]})["item"].tolist() == [3, 4, 5]


def test_the_memory_of_waiting_values_does_not_grow_and_never_counts_too_few():
    vocabulary = Vocabulary("item", growth=Growth(min_count=3))
    for day in range(2):
        items = [f"{day}-{number}" for number in range(20_000)]
        vocabulary.extend({"item": items})
    assert vocabulary.encoder.seen.waiting.nbytes == 1 << 20
    assert vocabulary.rows["item"] < 3 + 20  # of 40,000 that were seen once
    day = vocabulary.extend({"item": ["1-7", "1-7", "1-8"]})
    assert vocabulary.encode({"item": ["1-7"]})["item"][0] in day.columns["item"].new


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Growth(min_count=0), "min_count must be at least 1, got min_count=0"),
        (lambda: Growth(half_life=0.0), "half_life must be above 0"),
        (lambda: Growth(drop_after=0), "drop_after must be at least 1"),
        (lambda: Growth(drop_below=-1.0), "drop_below must be 0 or more"),
        (
            lambda: Vocabulary(Column(name="x", kind="numeric")),
            "categorical and multi columns, got",
        ),
        (Vocabulary, "at least one column"),
    ],
)
def test_wrong_settings_are_named(make, message):
    with pytest.raises(SettingsError, match=message):
        make()


def test_wrong_frames_and_files_are_named(tmp_path):
    vocabulary = Vocabulary("item")
    with pytest.raises(DataError, match="'item'"):
        vocabulary.extend({"itme": ["a"]})
    vocabulary.extend({"item": ["a"]})
    vocabulary.save(tmp_path / "one")
    np.save(tmp_path / "one" / "waiting.npy", np.zeros((3, 3), np.float32))
    with pytest.raises(DataError, match="is damaged"):
        Vocabulary.open(tmp_path / "one", growth=Growth(min_count=2)).extend({"item": ["b"]})
