"""Distinct rows of a batch, against dictionaries and loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rarebit.tables.collection import NO_ROW, find_distinct

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
    own, keep = torch.randn(len(ids), 1), torch.tensor(ids, dtype=torch.int64) % 3 == 2
    leave = (found.ids % 3 == 2) | (found.starts == len(ids))
    put = found.put_first(torch.full((len(found.ids), 1), 7.0), own, keep, leave).flatten()
    for place, i in enumerate(ids):
        is_first = i not in ids[:place]
        assert put[place] == (own[place] if i % 3 == 2 else 7.0 if is_first else 0.0)


@given(ids=LOOKUPS, spare=st.integers(0, 3))
def test_slots_that_cannot_be_needed_are_not_kept(ids, spare):
    lookups = torch.tensor(ids, dtype=torch.int64)
    found, most = find_distinct(lookups, static=True), len(set(ids)) + spare
    fewer = find_distinct(lookups, static=True, most=most)
    assert len(fewer.ids) == min(most, len(ids))
    assert torch.equal(fewer.ids, found.ids[:most])
    assert torch.equal(fewer.starts, found.starts[:most])
    assert torch.equal(fewer.slot_of, found.slot_of)


@pytest.mark.threads(2)
def test_sums_have_the_same_bits_on_two_threads():
    ids, values = torch.randint(500, (20_000,)), torch.randn(20_000, 16)
    first = find_distinct(ids).sum(values)
    torch.set_num_threads(1)
    assert torch.equal(find_distinct(ids).sum(values), first)


def test_narrow_ids_stay_narrow():
    assert find_distinct(torch.tensor([4, 4], dtype=torch.int32)).ids.dtype == torch.int32
