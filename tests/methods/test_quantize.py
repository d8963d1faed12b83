"""e(i) = s q_i: the integers, the search of the scale, and the lookup."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import UnsupportedTableError
from rarebit.methods import quantize
from rarebit.methods.quantize import (
    Quantize,
    QuantizedTable,
    best_scale,
    grid_of_scales,
    pack,
    round_to_codes,
    squared_errors,
    unpack,
)
from rarebit.models.fm import FM

both = pytest.mark.parametrize("bits", [8, 4])

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)

WEIGHTS = st.lists(
    st.floats(-10, 10, width=32) | st.sampled_from([0.0, 0.5, -0.5, 1e-30]), min_size=1, max_size=12
)


def quantised(weight: Tensor, bits: int = 8, padding_idx: int | None = None) -> QuantizedTable:
    table = nn.Embedding.from_pretrained(weight.clone(), freeze=False, padding_idx=padding_idx)
    return Quantize(bits=bits).wrap(table)


def largest_code(bits: int) -> int:
    return {8: 127, 4: 7}[bits]


def naive_codes(weight: Tensor, scale: float, bits: int) -> list[list[int]]:
    most = largest_code(bits)
    return [[max(-most, min(most, round(w / scale))) for w in row] for row in weight.tolist()]


def naive_error(weight: Tensor, scale: float, bits: int) -> float:
    codes = naive_codes(weight, scale, bits)
    pairs = zip(weight.flatten().tolist(), (q for row in codes for q in row), strict=True)
    return math.fsum((w - scale * q) ** 2 for w, q in pairs)


def naive_grid(weight: Tensor, bits: int) -> list[float]:
    largest = max(abs(w) for w in weight.flatten().tolist())
    return [largest * 2 ** (-j / 32) / largest_code(bits) for j in range(256)]


# ---- the integers


def test_a_table_worked_by_hand():
    table = quantised(torch.tensor([[127.0, -3.0], [63.5, 0.2]]))
    assert table.scale.item() == 1.0
    assert table.codes.tolist() == [[127, -3], [64, 0]]  # a half goes to the even neighbour
    assert table(torch.tensor([[1], [0]])).tolist() == [[[64.0, 0.0]], [[127.0, -3.0]]]


def test_a_table_of_4_bits_worked_by_hand():
    table = quantised(torch.tensor([[7.0, -3.0, 1.0], [6.0, -7.0, 0.0]]), bits=4)
    assert table.scale.item() == 1.0
    # 8 added: 15 5 9, 14 1 8; the first half of a row is low, the third number beside nothing
    assert table.codes.tolist() == [[15 + 16 * 9, 5 + 16 * 8], [14 + 16 * 8, 1 + 16 * 8]]
    assert table(torch.tensor([1])).tolist() == [[6.0, -7.0, 0.0]]


@both
def test_codes_are_those_of_the_equation(bits):
    weight = torch.randn(15, 5)
    for scale in (0.003, 0.1, 0.4, 5.0):
        codes = round_to_codes(weight, torch.tensor(scale, dtype=torch.float64), bits)
        assert codes.dtype == torch.int8
        assert codes.tolist() == naive_codes(weight, scale, bits)


@both
@given(weights=WEIGHTS)
def test_inside_of_the_clip_a_weight_moves_by_half_a_step_at_most(bits, weights):
    weight = torch.tensor([weights])
    table = quantised(weight, bits)
    scale, most = table.scale.double(), largest_code(bits)
    error = (weight.double() - table.weight.double()).abs()
    inside = weight.double().abs() <= most * scale
    assert bool((error[inside] <= scale * (0.5 + 1e-4)).all())
    assert_close(table.weight[~inside].abs(), (most * scale).float().expand(int((~inside).sum())))


@given(width=st.integers(1, 9), rows=st.integers(1, 5), data=st.data())
def test_packed_codes_come_back(width, rows, data):
    draw = st.lists(st.integers(-7, 7), min_size=width, max_size=width)
    codes = torch.tensor([data.draw(draw) for _ in range(rows)], dtype=torch.int8)
    packed = pack(codes)
    assert packed.shape == (rows, math.ceil(width / 2))
    assert (packed.dtype, packed.element_size()) == (torch.uint8, 1)
    assert torch.equal(unpack(packed, width), codes)


# ---- the search


@both
@settings(max_examples=30)
@given(weights=WEIGHTS)
def test_the_errors_are_those_of_a_loop(bits, weights):
    weight = torch.tensor([weights], dtype=torch.float64)
    scales = grid_of_scales(weight, bits)
    found = squared_errors(weight, scales, bits)
    expected = [naive_error(weight, scale, bits) for scale in scales.tolist()]
    size = float(weight.square().sum())
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12 * size)


@both
@pytest.mark.parametrize("outlier", [5.0, 9.0, 30.0])
def test_the_scale_is_the_one_that_a_naive_search_finds(bits, outlier):
    weight, most = torch.randn(8_000, 5, dtype=torch.float64), largest_code(bits)
    weight[3, 3] = -outlier

    def error(scale: float) -> float:
        return float((weight - scale * (weight / scale).round().clamp(-most, most)).square().sum())

    grid = naive_grid(weight, bits)
    best = min(grid, key=error)
    assert best_scale(weight, bits).item() == pytest.approx(best, rel=1e-12)
    assert best < grid[0] or (bits, outlier) == (
        8,
        30.0,
    )  # there, rounding costs less than clipping


def test_the_grid_is_the_one_that_is_documented():
    weight = torch.tensor([[0.5, -12.7, 3.0]], dtype=torch.float64)
    assert_close(grid_of_scales(weight, 8), torch.tensor(naive_grid(weight, 8)).double())
    found = grid_of_scales(weight, 8)
    assert found[0].item() == pytest.approx(0.1)
    assert found[32].item() == pytest.approx(0.05)
    assert found[-1] > 0.1 / 256


def test_the_table_is_searched_in_chunks(monkeypatch):
    weight = torch.randn(31, 7)
    scales = grid_of_scales(weight, 4)
    whole = squared_errors(weight, scales, 4)
    monkeypatch.setattr(quantize, "NUMBERS", 10)
    assert_close(squared_errors(weight, scales, 4), whole)


def test_a_table_of_several_chunks_is_quantised_whole():
    weight = torch.randn((1 << 16) + 3, 2)
    table = quantised(weight)
    expected = (weight.double() / table.scale.double()).round().clamp(-127, 127)
    assert torch.equal(table.codes.double(), expected)


@both
def test_on_heavy_tails_the_search_beats_the_largest_weight(bits):
    weight = torch.randn(20_000, 10)
    weight[7, 7] = 12.0
    table = quantised(weight, bits)
    largest = grid_of_scales(weight, bits)[:1]
    searched = float((table.weight - weight).double().square().sum())
    assert searched < 0.6 * float(squared_errors(weight, largest, bits))


@both
@given(weights=WEIGHTS)
def test_the_search_never_loses_to_the_largest_weight(bits, weights):
    weight = torch.tensor([weights])
    scale = best_scale(weight, bits).double().item()
    largest = grid_of_scales(weight, bits)[0].double().item()
    size = float(weight.double().square().sum())
    assert naive_error(weight, scale, bits) <= naive_error(weight, largest, bits) + 1e-12 * size


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-300, 3.0, -1e30])
def test_tables_of_one_value(bits, dtype, value):
    weight = torch.full((3, 2), value, dtype=dtype)
    table = quantised(weight, bits)
    tiny = torch.finfo(dtype).tiny
    assert table.scale > 0
    assert_close(table.weight, weight, rtol=1e-5, atol=tiny)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_and_nothing_is_changed(bad):
    model = nn.ModuleDict({"good": nn.Embedding(3, 2), "bad": nn.Embedding(4, 2)})
    with torch.no_grad():
        model["bad"].weight[1, 1] = bad
    message = r"Quantize\(bits=8\) .* to 'bad': its row 1 has numbers that are not finite; go back"
    with pytest.raises(UnsupportedTableError, match=message):
        rb.apply_(model, Quantize())
    assert all(isinstance(table, nn.Embedding) for table in model.values())


# ---- the lookup


@both
@settings(max_examples=30)
@given(rows=st.integers(1, 9), width=st.integers(1, 6), padding=st.none() | st.integers(0, 8))
def test_a_lookup_equals_the_merged_table(bits, rows, width, padding):
    padding = None if padding is None else padding % rows
    model = nn.ModuleList([nn.Embedding(rows, width, padding_idx=padding)])
    ids = torch.randint(rows, (3, 4))
    rb.apply_(model, Quantize(bits=bits), min_width=1, verbose=False)
    before = model[0](ids), model[0](ids.int())
    assert torch.equal(*before)
    rb.merge_(model, verbose=False)
    assert type(model[0]) is nn.Embedding
    assert torch.equal(model[0](ids), before[0])


def test_what_a_bag_has_in_its_padding_row_does_not_matter():
    bag = nn.EmbeddingBag(5, 2, mode="sum", padding_idx=3)
    with torch.no_grad():
        bag.weight[3] = 1e6
    other = nn.EmbeddingBag.from_pretrained(bag.weight.clone(), mode="sum", padding_idx=3)
    other.weight[3] = 0.0
    model = nn.ModuleList([bag, other])
    rb.apply_(model, Quantize(), verbose=False)
    assert torch.equal(model[0].table.scale, model[1].table.scale)
    ids = torch.tensor([[0, 3], [3, 3], [4, 1]])
    assert torch.equal(model[0](ids), model[1](ids))
    assert model[0](ids)[1].tolist() == [0.0, 0.0]


@both
def test_a_table_of_half_precision_stays_so(bits):
    weight = torch.randn(9, 4)
    table = quantised(weight.half(), bits)
    assert table(torch.tensor([1])).dtype == torch.float16
    assert_close(table.weight.float(), quantised(weight, bits).weight, rtol=0, atol=0.1)


def test_fields_are_looked_up_at_once_with_a_scale_each():
    model = FM(rb.data.Schema(FIELDS), dim=5)
    tables = model.backbone.tables
    for place, table in enumerate(tables.tables()):
        table.weight.data.mul_(10.0**place)
    rb.apply_(model, Quantize(bits=4), verbose=False)
    (stack,) = tables.stacks
    assert stack.codes.shape == (20 + 9 + 11, 3)
    split = tables.tables()
    assert [table.scale.item() for table in split] == stack.scales.tolist()
    assert len(set(stack.scales.tolist())) == 3
    starts = [table.codes.data_ptr() - stack.codes.data_ptr() for table in split]
    assert starts == [0, 20 * 3, 29 * 3]
    ids = torch.tensor([[19, 8, 0, 3, 10], [0, 0, 0, 0, 0]])
    user, tags, item = split
    expected = [
        user(ids[:, 0]),
        tags(ids[:, 1:4]).sum(1) / torch.tensor([[2], [1]]),
        item(ids[:, 4]),
    ]
    assert_close(tables(ids), torch.stack(expected, dim=1))


def test_fields_of_different_bits_and_none_left_that_is_trained():
    model = FM(rb.data.Schema(FIELDS), dim=5)
    tables = model.backbone.tables
    wide = {
        field.name: table.weight.detach()
        for field, table in zip(FIELDS, tables.tables(), strict=True)
    }
    rb.apply_(tables, Quantize(), where=lambda t: t.field != "item", verbose=False)
    rb.apply_(tables, Quantize(bits=4), where=lambda t: t.field == "item", verbose=False)
    assert list(tables.parameters()) == []
    for field, table in zip(FIELDS, tables.tables(), strict=True):
        bits = 4 if field.name == "item" else 8
        assert torch.equal(table.codes, quantised(wide[field.name], bits, table.padding_idx).codes)
    ids = torch.tensor([[3, 1, 2, 0, 7]])
    before = tables(ids)
    rb.merge_(tables, verbose=False)
    assert len(tables.stacks) == 1
    assert torch.equal(tables(ids), before)


def test_a_table_without_rows_is_left_alone():
    model = nn.ModuleDict({"none": nn.Embedding(0, 4), "some": nn.Embedding(9, 4)})
    changes = rb.apply_(model, Quantize(), verbose=False)
    assert changes.skipped == (("none", "it has no weights"),)
    assert [info.name for info in changes.after] == ["some"]
