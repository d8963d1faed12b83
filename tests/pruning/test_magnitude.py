"""The k-th largest magnitude and the k largest entries, against sorting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.pruning.masked import keep_largest, kth_largest, row_chunks
from rarebit.tables.table import CHUNK

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# few different numbers, so that many are equal, beside any others that the smallest dtype can hold
values = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0]),
    st.floats(-60_000.0, 60_000.0, allow_subnormal=True),
)


def table_of(weight: Tensor, padding_idx: int | None = None) -> nn.Embedding:
    return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=padding_idx)


@st.composite
def several_tables(draw, dtypes=DTYPES):
    """Return one to three tables of a dtype, some with padding, and their rows with it at zero."""
    dtype = draw(st.sampled_from(dtypes))
    tables, counted = [], []
    for _ in range(draw(st.integers(1, 3))):
        rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
        numbers = draw(st.lists(values, min_size=rows * width, max_size=rows * width))
        weight = torch.tensor(numbers, dtype=torch.float64).to(dtype).view(rows, width)
        padding = draw(st.one_of(st.none(), st.integers(0, rows - 1)))
        tables.append(table_of(weight.clone(), padding))
        if padding is not None:
            weight[padding] = 0.0
        counted.append(weight)
    return tables, counted


def sorted_magnitudes(counted: list[Tensor]) -> Tensor:
    return torch.cat([weight.abs().flatten() for weight in counted]).sort(descending=True).values


@given(drawn=several_tables(), data=st.data())
def test_the_kth_largest_is_the_one_that_sorting_gives(drawn, data):
    tables, counted = drawn
    expected = sorted_magnitudes(counted)
    k = data.draw(st.integers(1, len(expected)))
    found = kth_largest(tables, k)
    assert found.dtype == expected.dtype
    assert found.shape == ()
    assert torch.equal(found, expected[k - 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_of_a_table_with_neighbouring_numbers(dtype):
    # numbers that differ in their last bit, in one before it, or in their exponent alone
    one = torch.tensor(1.0, dtype=dtype)
    above = torch.nextafter(one, torch.tensor(2.0, dtype=dtype)) if dtype.itemsize > 2 else one
    row = torch.stack([one, above, one * 2, one / 2, above * 2, one * 0, -one * 1024])
    weight = torch.stack([row, row.flip(0), -row])
    expected = weight.abs().flatten().sort(descending=True).values
    found = [kth_largest([table_of(weight)], k) for k in range(1, 22)]
    assert torch.equal(torch.stack(found), expected)


def borders_by_sorting(counted: list[Tensor], k: int) -> list[float]:
    """Return the border of each table: one for all, but a table below it keeps its largest entry."""
    poor: list[int] = []
    while True:
        others = [weight for index, weight in enumerate(counted) if index not in poor]
        order = sorted_magnitudes(others) if others else torch.zeros(0)
        left = k - len(poor)
        border = float(order[left]) if left < len(order) else 0.0
        found = [i for i, weight in enumerate(counted) if 0 < float(weight.abs().max()) <= border]
        found = sorted({*poor, *found})
        if found == poor or len(found) >= k:
            break
        poor = found
    seconds = [[*sorted_magnitudes([weight]).tolist(), 0.0][1] for weight in counted]
    return [seconds[index] if index in poor else border for index in range(len(counted))]


@pytest.mark.filterwarnings("ignore:the largest")
@given(drawn=several_tables(), data=st.data())
def test_the_largest_are_kept_never_more_than_asked_and_none_at_an_equal_border(drawn, data):
    tables, counted = drawn
    order = sorted_magnitudes(counted)
    k = data.draw(st.integers(1, len(order) + 2))
    named = {f"table {index}": table for index, table in enumerate(tables)}
    ticket = keep_largest(named, k, step=3)
    borders = borders_by_sorting(counted, k)
    for name, weight, border in zip(named, counted, borders, strict=True):
        assert torch.equal(ticket.kept[name], weight.abs() > border)
    assert ticket.num_kept <= k
    assert ticket.facts == {"step": 3}
    assert ticket.start == {}
    if len(set(order.tolist())) == len(order) > k:
        assert ticket.num_kept == k
        assert k < len(tables) or all(bool(mask.any()) for mask in ticket.kept.values())


def test_kept_entries_counted_by_hand():
    tables = {
        "user": table_of(torch.tensor([[3.0, -4.0], [0.5, 2.0]])),
        "item": table_of(torch.tensor([[-3.0, 9.0], [8.0, -1.0]]), padding_idx=1),
    }
    three = keep_largest(tables, 3)  # 9 and 4; of 3 and -3 there is room for one alone
    assert three.kept["user"].tolist() == [[False, True], [False, False]]
    assert three.kept["item"].tolist() == [[False, True], [False, False]]
    assert keep_largest(tables, 4).num_kept == 4
    everything = keep_largest(tables, 100)
    assert everything.kept["user"].all()
    assert everything.kept["item"].tolist() == [[True, True], [False, False]]


def test_what_a_method_hands_out_is_what_counts():
    model = nn.ModuleDict({"user": nn.Embedding(7, 4)})
    rb.apply_(model, rb.MLET(inner_dim=6), verbose=False)
    product = model["user"].weight.detach()
    expected = product.abs().flatten().sort(descending=True).values
    assert torch.equal(kth_largest([model["user"]], 5), expected[4])
    kept = keep_largest({"user": model["user"]}, 5).kept["user"]
    assert torch.equal(kept, product.abs() > expected[5])


def test_rows_come_in_chunks_that_together_are_the_table():
    table = nn.Embedding(2 * CHUNK + 3, 2, padding_idx=CHUNK + 1)
    with torch.no_grad():
        table.weight[CHUNK + 1] = 5.0  # a plain table hands out what is stored there
    chunks = list(row_chunks(table))
    assert [len(chunk) for chunk in chunks] == [CHUNK, CHUNK, 3]
    expected = table.weight.detach().clone()
    expected[CHUNK + 1] = 0.0
    assert torch.equal(torch.cat(chunks), expected)
    assert not chunks[0].requires_grad
    largest = expected.abs().max()
    assert torch.equal(kth_largest([table], 1), largest)
    assert keep_largest({"it": table}, 1).kept["it"].nonzero().tolist() == [
        list(divmod(int(expected.abs().argmax()), 2))
    ]


@pytest.mark.parametrize("k", [-1, 0, 9])
def test_a_rank_that_no_entry_has_is_refused(k):
    with pytest.raises(
        SettingsError, match=f"k must be from 1 to 8, the number of entries, got k={k}"
    ):
        kth_largest([nn.Embedding(2, 4)], k)


def test_nothing_left_is_refused():
    with pytest.raises(SettingsError, match="at least one entry must be kept, got 0"):
        keep_largest({"it": nn.Embedding(2, 4)}, 0)
