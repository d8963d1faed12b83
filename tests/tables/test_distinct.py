"""Distinct rows of a batch, against dictionaries and loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rarebit.tables.distinct import NO_ROW, find_distinct

LOOKUPS = st.lists(st.integers(-1, 12), min_size=0, max_size=40)
FORMS = pytest.mark.parametrize("static", [False, True], ids=["compact", "static"])


def sums_by_hand(ids, values):
    sums = {}
    for i, value in zip(ids, values, strict=True):
        sums[i] = sums[i] + value if i in sums else value
    return sums


@FORMS
@given(ids=LOOKUPS)
def test_each_id_has_one_slot_and_the_sum_of_its_lookups_in_their_order(static, ids):
    values = torch.randn(len(ids), 3)
    expected = sums_by_hand(ids, values)
    found = find_distinct(torch.tensor(ids, dtype=torch.int64), static=static)
    sums = found.sum(values)
    used = len(expected)
    assert found.ids[:used].tolist() == sorted(expected)
    for slot, row in enumerate(found.ids[:used].tolist()):
        assert torch.equal(sums[slot], expected[row])
    assert (found.ids[used:] == NO_ROW).all()
    assert not sums[used:].any()
    assert len(found.ids) == (len(ids) if static else used)


@FORMS
@given(ids=LOOKUPS)
def test_lookups_know_their_slot_and_whether_they_are_the_first_of_their_id(static, ids):
    found = find_distinct(torch.tensor(ids, dtype=torch.int64), static=static)
    assert found.ids[found.slot_of].tolist() == ids
    first = found.at_first_lookups(torch.ones(len(found.ids), 1)).flatten().bool()
    assert first.tolist() == [i not in ids[:place] for place, i in enumerate(ids)]


@pytest.mark.threads(2)
def test_sums_have_the_same_bits_on_two_threads():
    ids, values = torch.randint(500, (20_000,)), torch.randn(20_000, 16)
    first = find_distinct(ids).sum(values)
    torch.set_num_threads(1)
    assert torch.equal(find_distinct(ids).sum(values), first)


def test_narrow_ids_stay_narrow():
    assert find_distinct(torch.tensor([4, 4], dtype=torch.int32)).ids.dtype == torch.int32
