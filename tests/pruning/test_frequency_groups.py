"""Groups of rows by frequency against loops over single rows, and values worked by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rarebit as rb
from rarebit.errors import DataError, NoTableError
from rarebit.models.deepfm import DeepFM
from rarebit.pruning._insight import FrequencyGroups
from rarebit.pruning.pep import set_threshold_, take_ticket, thresholded_tables

small_counts = st.lists(st.integers(0, 6), min_size=1, max_size=40)


def naive_groups(counts, padding):
    """Return the rows of each group as (table, row), from a sorted list of all rows."""
    rows = [
        (count, name, row)
        for name, table in counts.items()
        for row, count in enumerate(table)
        if padding.get(name) != row
    ]
    seen = sorted((row for row in rows if row[0]), key=lambda row: row[0])  # stable
    groups = [[row for row in rows if not row[0]]] + [[] for _ in range(10)]
    for rank, row in enumerate(seen):
        groups[1 + rank * 10 // len(seen)].append(row)
    return [group for group in groups if group]


@given(small_counts, small_counts, st.booleans(), st.integers(0, 1000))
def test_groups_and_shares_are_those_of_loops(users, items, padded, seed):
    counts = {"user": users, "item": items}
    padding = {"item": len(items) // 2} if padded else {}
    generator = torch.Generator().manual_seed(seed)
    # rows of different lengths: a share is one of entries
    masks = {
        "user": torch.rand(len(users), 3, generator=generator) < 0.4,
        "item": torch.rand(len(items), 5, generator=generator) < 0.6,
    }
    expected = naive_groups(counts, padding)
    found = FrequencyGroups(
        {name: torch.tensor(table) for name, table in counts.items()}, counts, padding=padding
    )
    assert [(g.least, g.most, g.rows) for g in found.groups] == [
        (min(group)[0], max(group)[0], len(group)) for group in expected
    ]
    for number, group in enumerate(expected):
        for _, name, row in group:
            assert found.of_row[name][row] == number
    for name, row in padding.items():
        assert found.of_row[name][row] == len(expected)
    shares = []
    for group in expected:
        entries = [bool(entry) for _, name, row in group for entry in masks[name][row]]
        shares.append(sum(entries) / len(entries))
    assert found.shares(masks) == pytest.approx(shares, abs=1e-15)


def test_equal_counts_are_told_apart_by_their_place():
    counts = {"user": torch.full((15,), 4), "item": torch.full((5,), 4)}
    found = FrequencyGroups(counts, ["a.user", "a.item"])
    assert found.of_row["a.user"].tolist() == [n // 2 for n in range(15)]
    assert found.of_row["a.item"].tolist() == [7, 8, 8, 9, 9]
    assert {(group.least, group.most, group.rows) for group in found.groups} == {(4, 4, 2)}


def test_the_counts_of_a_table_go_before_those_of_its_field():
    counts = {"user": torch.tensor([1, 2]), "wide.user": torch.tensor([0, 5])}
    found = FrequencyGroups(counts, ["wide.user", "deep.user"])
    assert found.counts["wide.user"].tolist() == [0, 5]
    assert found.counts["deep.user"].tolist() == [1, 2]


def test_values_and_modules_count_as_their_masks_do():
    # more rows than are looked up at once, the rarest first, so that a group is a slice
    weight = torch.randn(70_000, 2) * (
        torch.rand(70_000, 1) < torch.linspace(0, 1, 70_000)[:, None]
    )
    found = FrequencyGroups({"x": torch.arange(1, 70_001)}, ["x"])
    shares = [float((some != 0).double().mean()) for some in weight.split(7_000)]
    assert found.shares({"x": weight != 0}) == pytest.approx(shares)
    assert found.shares({"x": weight}) == pytest.approx(shares)
    assert found.shares({"x": nn.Embedding.from_pretrained(weight)}) == pytest.approx(shares)


def test_a_model_is_seen_as_its_ticket():
    splits = rb.data.generate(rb.data.SyntheticLog(rows=2000))
    model = DeepFM(splits.train.schema, dim=8, hidden=(4,))
    rb.apply_(model, rb.PEP(schedule="given"), where=lambda t: t.width > 1, verbose=False)
    groups = FrequencyGroups.of(model, splits.train.counts())
    # the padding row of tags was never seen, and belongs to no group
    assert groups.of_row["backbone.tables.tags"][0] == len(groups.groups)
    assert groups.shares(thresholded_tables(model)) == [1.0] * len(groups.groups)
    set_threshold_(model, 0.01)
    shares = groups.shares(thresholded_tables(model))
    assert shares == groups.shares(take_ticket(model).kept)
    # two thirds of N(0, 1) are within one standard deviation
    assert all(0.2 < share < 0.45 for share in shares)
    set_threshold_(model, 1e9)
    assert groups.shares(thresholded_tables(model)) == [0.0] * len(groups.groups)


def test_the_rows_of_a_hashed_table_are_its_buckets():
    model = nn.ModuleDict({"user": nn.Embedding(7, 4), "item": nn.Embedding(2, 4)})
    rb.apply_(model, rb.Hashing(buckets=3), where=lambda t: t.name == "user", verbose=False)
    rb.apply_(model, rb.PEP(), verbose=False)
    counts = {"user": torch.tensor([1, 0, 2, 10, 0, 20, 100]), "item": torch.tensor([9, 8])}
    groups = FrequencyGroups.of(model, counts)
    assert groups.counts["user"].tolist() == [111, 0, 22]
    assert groups.counts["item"].tolist() == [9, 8]
    assert groups.shares(thresholded_tables(model)) == [1.0] * 5


def test_a_log_without_rare_rows_has_no_such_group():
    assert [g.least for g in FrequencyGroups({"x": torch.tensor([2, 1])}, ["x"]).groups] == [1, 2]
    assert FrequencyGroups({"x": torch.zeros(0).long()}, ["x"]).groups == ()
    [never] = FrequencyGroups({"x": torch.zeros(3).long()}, ["x"]).groups
    assert (never.least, never.most, never.rows) == (0, 0, 3)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"item": torch.tensor([1])}, r"no counts for 'a\.user', only for item; give counts by"),
        ({"user": torch.tensor([1.0])}, r"must be integers, got torch.float32"),
        ({"user": torch.tensor([[1]])}, r"one number for each row, got the shape \(1, 1\)"),
        ({"user": torch.tensor([1, -2])}, r"counts of 'a\.user' must be 0 or more, got -2"),
    ],
)
def test_wrong_counts_are_refused(counts, message):
    with pytest.raises(DataError, match=message):
        FrequencyGroups(counts, ["a.user"])


def test_other_tables_than_those_of_the_groups_are_refused():
    with pytest.raises(DataError, match="at least one table, got none"):
        FrequencyGroups({"x": torch.tensor([1])}, [])
    groups = FrequencyGroups({"x": torch.tensor([1]), "y": torch.tensor([1])}, ["x", "y"])
    with pytest.raises(DataError, match=r"of the tables x, y, got x; give all of them"):
        groups.shares({"x": torch.ones(1, 2)})
    with pytest.raises(DataError, match=r"y has 3 rows, but there are training counts of 1; give"):
        groups.shares({"x": torch.ones(1, 2), "y": torch.ones(3, 2)})
    with pytest.raises(NoTableError, match=r"apply_ PEP\(\) first"):
        FrequencyGroups.of(nn.Sequential(nn.Embedding(2, 2)), {"0": torch.tensor([1, 1])})
