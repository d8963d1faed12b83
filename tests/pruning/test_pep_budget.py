"""Thresholds that are given, how many entries they leave, and the one that leaves k of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import NoTableError, SettingsError
from rarebit.models.fm import FM
from rarebit.pruning.pep import (
    PEP,
    count_nonzero,
    kth_largest_magnitude,
    set_threshold_,
    take_ticket,
    threshold_parameters,
    thresholded_tables,
)
from rarebit.tables.table import full_table

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)
WIDTH = 4
GIVEN = PEP(schedule="given")


def model_of(*methods: rb.Method, dtype: torch.dtype = torch.float32) -> FM:
    model = FM(rb.data.Schema(FIELDS), dim=WIDTH).to(dtype)
    for method in methods:
        rb.apply_(model, method, verbose=False)
    return model


def test_counting_agrees_with_the_merged_tables_and_with_their_masks():
    model = model_of(PEP(init=-5.0))
    ticket, counted = take_ticket(model, step=7), count_nonzero(model)
    assert 0 < counted < 160
    assert ticket.num_kept == counted
    assert ticket.facts == {"step": 7}
    rb.merge_(model, verbose=False)
    merged = dict(zip(("user", "tags", "item"), model.backbone.tables.tables(), strict=True))
    assert sum(int((table.weight != 0).sum()) for table in merged.values()) == counted
    for name, table in merged.items():
        assert torch.equal(table.weight != 0, ticket.kept[f"backbone.tables.{name}"])


def test_a_given_threshold_is_set_everywhere_and_is_no_parameter():
    model = model_of(GIVEN, dtype=torch.float64)
    assert threshold_parameters(model) == []
    names = [name for name, _ in model.named_parameters()]
    assert not any("levels" in name for name in names)
    before = {n: full_table(t.inner) for n, t in thresholded_tables(model).items()}
    set_threshold_(model, 0.004)
    for name, table in thresholded_tables(model).items():
        expected = before[name].sign() * (before[name].abs() - 0.004).relu()
        assert_close(full_table(table), expected, rtol=0, atol=1e-15)
    set_threshold_(model, torch.tensor(0.0))
    assert count_nonzero(model) == 39 * WIDTH


def test_a_given_threshold_is_saved_with_the_model(tmp_path):
    model = model_of(GIVEN)
    set_threshold_(model, 0.005)
    twin = rb.load_model(rb.save_model(model, tmp_path))
    assert count_nonzero(twin) == count_nonzero(model) < 39 * WIDTH


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_threshold_that_is_none_is_refused(value):
    with pytest.raises(SettingsError, match="a threshold must be 0 or more and finite, got"):
        set_threshold_(model_of(GIVEN), value)


def test_a_model_without_thresholds_is_told():
    with pytest.raises(NoTableError, match="no table of the model has a threshold to set"):
        set_threshold_(model_of(PEP()), 0.1)
    with pytest.raises(NoTableError, match=r"no table of the model has thresholds; apply_ PEP\(\)"):
        count_nonzero(model_of())


@pytest.mark.filterwarnings("ignore:.* makes all rows")
@given(
    values=st.lists(
        st.floats(-1024.0, 1024.0, width=32, allow_subnormal=True), min_size=1, max_size=30
    ),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_the_kth_largest_is_the_one_that_sorting_gives(values, data, dtype):
    weight = torch.tensor(values, dtype=dtype).unsqueeze(1).expand(-1, 2).contiguous()
    model = nn.Sequential(nn.Embedding.from_pretrained(weight, freeze=False))
    rb.apply_(model, GIVEN, verbose=False)
    k = data.draw(st.integers(1, weight.numel()))
    expected = weight.abs().flatten().sort(descending=True).values[k - 1]
    found = kth_largest_magnitude(model, k)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_every_budget_is_met_exactly():
    model = model_of(GIVEN)
    for budget in (155, 100, 7, 1, 0):
        set_threshold_(model, kth_largest_magnitude(model, budget + 1))
        assert count_nonzero(model) == budget


def test_entries_that_are_equal_go_together_and_no_budget_is_missed():
    weight = torch.tensor([[4.0, 3.0, 3.0], [-3.0, 2.0, 1.0]])
    model = nn.Sequential(nn.Embedding.from_pretrained(weight, freeze=False))
    rb.apply_(model, GIVEN, verbose=False)
    left = []
    for budget in (5, 4, 3, 2, 1):
        set_threshold_(model, kth_largest_magnitude(model, budget + 1))
        left.append(count_nonzero(model))
    assert left == [5, 4, 1, 1, 1]


def test_padding_is_never_among_the_largest():
    model = nn.Sequential(nn.Embedding(5, 2, padding_idx=3))
    rb.apply_(model, GIVEN, verbose=False)
    with torch.no_grad():
        model[0].inner.weight.fill_(1.0)
        model[0].inner.weight[3] = 9.0
    assert float(kth_largest_magnitude(model, 1)) == 1.0
    assert float(kth_largest_magnitude(model, 10)) == 0.0


@pytest.mark.parametrize("k", [0, 161])
def test_a_rank_that_no_entry_has_is_refused(k):
    with pytest.raises(
        SettingsError, match=f"k must be from 1 to 160, the number of entries, got k={k}"
    ):
        kth_largest_magnitude(model_of(GIVEN), k)


def test_of_a_hashed_table_the_buckets_are_cut_and_counted():
    model = nn.ModuleDict({"user": nn.Embedding(20, WIDTH), "item": nn.Embedding(11, WIDTH)})
    for method in (rb.Hashing(buckets=7), GIVEN):
        rb.apply_(model, method, verbose=False)
    assert {t.num_embeddings for t in thresholded_tables(model).values()} == {7}
    set_threshold_(model, kth_largest_magnitude(model, 6))
    assert count_nonzero(model) == 5
    assert {mask.shape for mask in take_ticket(model).kept.values()} == {(7, WIDTH)}
