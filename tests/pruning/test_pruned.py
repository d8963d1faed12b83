"""The largest entries of all tables are left, and what is left is served packed."""

import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rarebit as rb
from rarebit.codes.packed import PackedTable
from rarebit.errors import RarebitError, SettingsError
from rarebit.models.fm import FM
from rarebit.pruning.masked import MaskedTable
from rarebit.tables.apply import end_training_
from rarebit.tables.table import full_table, stored_tensors
from rarebit.technique import refusal

FIELDS = (
    rb.data.Field(name="user", rows=30),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)
WIDTH, TOTAL = 8, 50 * 8


def fm(*methods: rb.Method) -> FM:
    model = FM(rb.data.Schema(FIELDS), dim=WIDTH)
    for method in methods:
        rb.apply_(model, method, verbose=False)
    return model


def tables_of(model: FM) -> list[nn.Module]:
    return model.backbone.tables.tables()


def rows_of(model: FM) -> list[Tensor]:
    return [full_table(table).detach().clone() for table in tables_of(model)]


def nbytes(tables) -> int:
    return sum(tensor.nbytes for table in tables for tensor in stored_tensors(table))


def log(rows: int = 64) -> rb.Dataset:
    ids = [torch.randint(f.rows, (rows, f.max_length)) for f in FIELDS]
    label = torch.randint(2, (rows,)).float()
    return rb.Dataset(rb.data.Schema(FIELDS), torch.cat(ids, dim=1), label=label)


@pytest.mark.parametrize("keep", [37, TOTAL - 20, TOTAL, 10 * TOTAL])
def test_the_largest_of_all_tables_are_left(keep):
    model = fm()
    before = rows_of(model)
    rb.apply_(model, rb.pruning.Pruned(keep=keep), verbose=False)
    order = torch.cat([rows.abs().flatten() for rows in before]).sort(descending=True).values
    border = float(order[keep]) if keep < TOTAL else 0.0
    for rows, expected in zip(rows_of(model), before, strict=True):
        assert torch.equal(rows, torch.where(expected.abs() > border, expected, 0.0))
    left = sum(int((rows != 0).sum()) for rows in rows_of(model))
    assert left == min(keep, int((order > 0).sum()))
    assert all(info.methods == () for info in rb.find_tables(model) if info.width == 1)


def test_a_table_of_its_own_is_cut_by_itself():
    table = nn.Embedding.from_pretrained(torch.tensor([[3.0, -4.0], [0.5, 2.0]]), freeze=False)
    pruned = rb.pruning.Pruned(keep=2).wrap(table)
    assert pruned.weight.tolist() == [[3.0, -4.0], [0.0, 0.0]]
    assert isinstance(pruned, MaskedTable)
    assert pruned.method == rb.pruning.Pruned(keep=2)


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_what_was_cut_stays_zero_while_the_rest_is_trained(tables):
    model = fm(rb.pruning.Pruned(keep=60))
    before = rows_of(model)
    rb.fit(
        model, log(), epochs=3, batch_size=16, lr=0.05, weight_decay=0.1, tables=tables,
        progress=False,
    )  # fmt: skip
    for rows, first in zip(rows_of(model), before, strict=True):
        assert torch.equal(rows != 0, first != 0)
        assert not torch.equal(rows, first)


@pytest.mark.filterwarnings("ignore:the largest")
@pytest.mark.parametrize(
    ("keep", "packed"),
    [(3, True), (60, True), (TOTAL - 15, False)],
    ids=["one each", "few", "most"],
)
def test_what_is_served_is_the_same_and_the_smaller_of_both_forms(keep, packed):
    model = fm(rb.pruning.Pruned(keep=keep)).eval()
    before, data = rows_of(model), log()
    scores = rb.predict(model, data)
    end_training_(model)
    assert (rb.predict(model, data) == scores).all()
    for table, rows in zip(tables_of(model), before, strict=True):
        assert isinstance(table, PackedTable) is packed
        assert packed or type(table) is nn.Embedding
        assert torch.equal(full_table(table), rows)
        both = [
            nbytes([rb.codes.Pack().wrap(nn.Embedding.from_pretrained(rows))]),
            4 * rows.numel(),
        ]
        assert nbytes([table]) == min(both)


def test_merged_it_is_a_plain_table_with_zeros():
    model = fm(rb.pruning.Pruned(keep=60))
    before = rows_of(model)
    rb.merge_(model, verbose=False)
    for table, rows in zip(tables_of(model), before, strict=True):
        assert type(table) is nn.Embedding
        assert torch.equal(table.weight, rows)


def test_saved_and_loaded_it_is_still_cut(tmp_path):
    model = fm(rb.pruning.Pruned(keep=60, by="magnitude"))
    twin = rb.load_model(rb.save_model(model, tmp_path))
    for one, other in zip(tables_of(twin), tables_of(model), strict=True):
        assert torch.equal(full_table(one), full_table(other))
        assert isinstance(one, MaskedTable)
        assert one.method == rb.pruning.Pruned(keep=60, by="magnitude")


shapes = st.lists(st.tuples(st.integers(1, 300), st.integers(2, 256)), min_size=1, max_size=3)


@pytest.mark.filterwarnings("ignore:the largest")
@settings(max_examples=40)
@given(shapes=shapes, share=st.floats(0.01, 0.99))
# every row has an entry, so that all offsets are there
@example(shapes=[(64, 16)], share=0.5)
@example(shapes=[(1, 200)], share=0.5)
def test_a_share_of_the_bytes_is_not_passed(shapes, share):
    torch.manual_seed(2)
    tables = {str(i): nn.Embedding(*shape) for i, shape in enumerate(shapes)}
    method = rb.pruning.Pruned.for_share(shapes, share)
    whole = 4 * sum(rows * width for rows, width in shapes)
    smallest = nbytes(
        rb.pruning.Pruned(keep=1).serve(t) for t in rb.pruning.Pruned(keep=1).wrap_all(tables)
    )
    served = [method.serve(table) for table in method.wrap_all(tables)]
    # an offset more than rows, and whole words of bits, that a small table cannot hide
    assert nbytes(served) <= max(share * whole, smallest) + 12 * len(tables)
    assert method.keep >= 1


def test_the_budget_of_a_share_by_hand():
    # 0.1 of 256,000 bytes, less 4 bytes and a bit a row and 12 a table, at 5 bytes an entry
    assert rb.pruning.Pruned.for_share([(1000, 64)], 0.1).keep == int((25_600 - 4125 - 12) / 5)
    assert rb.pruning.Pruned.for_share([(600, 64), (400, 64)], 0.1).keep == int(
        (25_600 - 4125 - 24) / 5
    )
    # too few bytes for an offset a row, but enough for one an entry
    assert rb.pruning.Pruned.for_share([(1000, 2)], 0.1).keep == int((800 - 125 - 12) / 9)
    assert rb.pruning.Pruned.for_share([(1000, 2)], 0.01).keep == 1
    with pytest.raises(SettingsError, match="share"):
        rb.pruning.Pruned.for_share([(1000, 64)], 1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "at least one entry must be kept, got keep=0"),
        ({"keep": 5, "epochs": 0}, "epochs must be at least 1, got epochs=0"),
        ({"keep": 2.5}, "keep"),
        ({"keep": 5, "by": "luck"}, "by"),
        ({"keep": 5, "start": "build"}, "start"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        rb.pruning.Pruned(**options)


REFUSED = {
    "hashing": rb.Hashing(buckets=5),
    "low-rank": rb.LowRank(rank=2),
    "quantize": rb.Quantize(),
    "masked": rb.pruning.Masked(rb.pruning.Ticket({"0": torch.ones(9, 6).bool()})),
    "pruned": rb.pruning.Pruned(keep=9),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_says_why(name):
    model = nn.Sequential(nn.Embedding(9, 6))
    rb.apply_(model, REFUSED[name], verbose=False)
    reason = refusal(type(REFUSED[name]), rb.pruning.Pruned)
    assert reason is not None
    with pytest.raises(RarebitError, match=re.escape(reason)):
        rb.apply_(model, rb.pruning.Pruned(keep=5), verbose=False)


AFTER = [
    (rb.MLET(inner_dim=9), r"mlet goes before pruned: write mlet\+pruned, or merge first"),
    (rb.PEP(), "both are masks; use one of them, or merge first"),
    (rb.Hashing(buckets=3), "buckets of many ids have no entries to spare"),
    (rb.LowRank(rank=2), "a product of factors is small already"),
]


@pytest.mark.parametrize(("then", "reason"), AFTER, ids=[str(then) for then, _ in AFTER])
def test_nothing_but_rounding_comes_after_it(then, reason):
    model = nn.Sequential(nn.Embedding(9, 6))
    rb.apply_(model, rb.pruning.Pruned(keep=9), verbose=False)
    with pytest.raises(RarebitError, match=reason):
        rb.apply_(model, then, verbose=False)


def test_rounded_to_integers_its_zeros_stay_zero():
    model = fm(rb.pruning.Pruned(keep=60))
    before = rows_of(model)
    rb.apply_(model, rb.Quantize(), verbose=False)
    for rows, first in zip(rows_of(model), before, strict=True):
        assert not bool(rows[first == 0].any())
        assert bool(rows.any())


def test_the_product_of_mlet_is_what_is_cut():
    model = fm(rb.MLET(inner_dim=12))
    before = rows_of(model)
    rb.apply_(model, rb.pruning.Pruned(keep=40), verbose=False)
    order = torch.cat([rows.abs().flatten() for rows in before]).sort(descending=True).values
    for rows, expected in zip(rows_of(model), before, strict=True):
        cut = torch.where(expected.abs() > order[40], expected, 0.0)
        torch.testing.assert_close(rows, cut, rtol=1e-5, atol=1e-8)
