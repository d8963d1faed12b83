"""A collection is its fields' tables, looked up together: the same rows, the same gradients."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.tables.collection import PlainStack, TableCollection

FIELDS = (
    rb.data.Field(name="user", rows=8),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3, pooling="mean"),
    rb.data.Field(name="item", rows=7),
    rb.data.Field(name="words", kind="multi", rows=10, max_length=2, pooling="sum"),
    rb.data.Field(name="shop", rows=6),
)
D = 4
IDS = torch.tensor(
    [
        [7, 1, 2, 2, 6, 9, 9, 5],
        [0, 0, 0, 0, 0, 0, 0, 0],  # both lists are empty
        [3, 8, 0, 5, 1, 0, 4, 2],  # padding in the middle, and at the start
        [3, 4, 0, 0, 1, 7, 0, 2],
    ]
)
HASHING, LOW_RANK, FULL_RANK = rb.Hashing(buckets=5), rb.LowRank(rank=2), rb.LowRank(rank=D)


def named(*names: str):
    return lambda t: t.field in names


def collection(fields=FIELDS) -> TableCollection:
    return TableCollection(fields, D, std=1.0).double()


def naive(tables: list[nn.Module], ids: Tensor) -> Tensor:
    """Return the rows of all fields with one table a field, list by list."""
    starts = itertools.accumulate((f.max_length for f in FIELDS), initial=0)
    columns = []
    for field, table, start in zip(FIELDS, tables, starts, strict=False):
        rows = []
        for values in ids[:, start : start + field.max_length].tolist():
            kept = [i for i in values if field.kind != "multi" or i != 0]
            total = torch.zeros(D, dtype=torch.float64)
            for i in kept:
                total = total + table(torch.tensor(i))
            rows.append(total / max(len(kept), 1) if field.pooling == "mean" else total)
        columns.append(torch.stack(rows))
    return torch.stack(columns, dim=1)


def members(tables: TableCollection) -> list[list[str]]:
    return [[FIELDS[index].name for index in group] for group in tables.members]


def test_rows_worked_by_hand():
    fields = (
        rb.data.Field(name="x", rows=2),
        rb.data.Field(name="y", kind="multi", rows=3, max_length=2),
    )
    tables = TableCollection(fields, 1)
    tables.stacks[0].embedding.weight.data = torch.tensor([[1.0], [2.0], [0.0], [4.0], [8.0]])
    assert tables(torch.tensor([[1, 1, 2], [0, 2, 0], [0, 0, 0]])).tolist() == [
        [[2.0], [6.0]],
        [[1.0], [8.0]],
        [[1.0], [0.0]],
    ]


def test_rows_and_gradients_equal_a_loop_over_plain_tables():
    tables, weights = collection(), torch.randn(4, 5, D, dtype=torch.float64)
    plain = [
        nn.Embedding.from_pretrained(t.weight.clone(), freeze=False, padding_idx=t.padding_idx)
        for t in tables.tables()
    ]
    rows, expected = tables(IDS), naive(plain, IDS)
    assert_close(rows, expected)
    (rows * weights).sum().backward()
    (expected * weights).sum().backward()
    (weight,) = tables.parameters()
    assert_close(weight.grad, torch.cat([table.weight.grad for table in plain]))


def test_an_empty_list_is_a_row_of_zeros_and_teaches_nothing():
    tables = collection()
    rows = tables(IDS[1:2])
    assert not bool(rows[0, [1, 3]].any())
    rows.sum().backward()
    (weight,) = tables.parameters()
    assert not bool(weight.grad[8 : 8 + 9].any())  # tags


def test_each_field_is_a_table_of_its_own():
    tables = collection()
    assert [t.weight.shape for t in tables.tables()] == [(f.rows, D) for f in FIELDS]
    assert [t.padding_idx for t in tables.tables()] == [None, 0, None, 0, None]
    tables.tables()[2].weight.data.fill_(3.0)  # weights are shared with the stack
    assert bool((tables(IDS)[:, 2] == 3.0).all())


def test_padding_starts_at_zero_and_other_rows_do_not():
    for table in TableCollection(FIELDS, D).tables():
        zero = (table.weight == 0).all(dim=1).nonzero().flatten().tolist()
        assert zero == ([] if table.padding_idx is None else [0])


def test_rows_start_with_the_spread_that_is_asked_for():
    (weight,) = TableCollection((rb.data.Field(name="user", rows=4000),), 8, std=0.1).parameters()
    assert float(weight.detach().std()) == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_choice_of_fields_can_be_split_off_and_joined_again(count):
    for chosen in itertools.combinations([f.name for f in FIELDS], count):
        tables = collection()
        expected = tables(IDS)
        rb.apply_(tables, FULL_RANK, where=named(*chosen), verbose=False)
        assert_close(tables(IDS), expected)  # full rank is exact
        assert sorted(map(sorted, members(tables))) == sorted(
            sorted(group) for group in (chosen, {f.name for f in FIELDS} - set(chosen)) if group
        )
        assert_close(naive(tables.tables(), IDS), expected)
        rb.merge_(tables, verbose=False)
        assert members(tables) == [[f.name for f in FIELDS]]
        assert tables.slot_order is None
        assert_close(tables(IDS), expected)


def test_three_kinds_of_tables_side_by_side():
    tables = collection()
    rb.apply_(tables, HASHING, where=named("tags", "shop"), verbose=False)
    rb.apply_(tables, LOW_RANK, where=named("words", "user"), verbose=False)
    assert members(tables) == [["user", "words"], ["tags", "shop"], ["item"]]
    expected = naive(tables.tables(), IDS)
    assert_close(tables(IDS), expected)
    rb.merge_(tables, where=named("words"), verbose=False)
    assert members(tables) == [["user"], ["tags", "shop"], ["item", "words"]]
    assert_close(tables(IDS), expected)


def test_tables_with_equal_methods_share_a_stack_and_others_do_not():
    tables = collection()
    rb.apply_(tables, HASHING, where=named("user"), verbose=False)
    rb.apply_(tables, HASHING, where=named("item"), verbose=False)
    assert members(tables)[0] == ["user", "item"]
    rb.apply_(tables, rb.Hashing(buckets=4), where=named("shop"), verbose=False)
    assert len(tables.stacks) == 3


def test_a_stack_that_did_not_change_keeps_its_weights():
    tables = collection()
    rb.apply_(tables, HASHING, where=named("user", "item"), verbose=False)
    plain = tables.stacks[1]
    before = [id(p) for p in plain.parameters()]
    rb.apply_(tables, LOW_RANK, where=named("user"), verbose=False)
    assert any(stack is plain for stack in tables.stacks)
    assert [id(p) for p in plain.parameters()] == before


def test_unchanged_rows_are_the_same_to_the_last_bit():
    tables = collection()
    before = [t.weight.detach().clone() for t in tables.tables()]
    rb.apply_(tables, HASHING, where=named("tags"), verbose=False)
    for index in (0, 2, 3, 4):
        assert_close(tables.tables()[index].weight.detach(), before[index], rtol=0, atol=0)


def test_changing_a_collection_leaves_the_old_weights_alone():
    tables = collection()
    (weight,) = tables.parameters()
    before = weight.detach().clone()
    rb.apply_(tables, HASHING, where=named("user"), verbose=False)
    with torch.no_grad():
        for parameter in tables.parameters():
            parameter.zero_()
    assert_close(weight.detach(), before, rtol=0, atol=0)


def test_a_collection_of_one_field():
    tables = TableCollection(FIELDS[:1], D)
    expected = tables(IDS[:, :1])
    rb.apply_(tables, FULL_RANK, verbose=False)
    assert_close(tables(IDS[:, :1]), expected, atol=1e-6, rtol=1e-6)


def split_collection() -> TableCollection:
    tables = collection()
    rb.apply_(tables, HASHING, where=named("tags"), verbose=False)
    rb.apply_(tables, LOW_RANK, where=named("item", "words"), verbose=False)
    return tables


def test_int32_and_int64_ids_give_the_same():
    for tables in (collection(), split_collection()):
        assert_close(tables(IDS.int()), tables(IDS), rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "wide"), [(2**30 - 1, False), (2**30, True)])
def test_offsets_beyond_int32_are_int64(rows, wide):
    # such tables have a shape and no memory
    tables = [nn.Embedding(rows, 2, device="meta") for _ in range(2)]
    stack = PlainStack(tables, [1, 1])
    assert stack.offsets.dtype == (torch.int64 if wide else torch.int32)
    ids = torch.zeros(3, 2, dtype=torch.int32, device="meta")
    assert (ids + stack.offsets).dtype == stack.offsets.dtype
    assert stack.rows(ids).shape == (3, 2, 2)


def test_a_copy_is_independent():
    tables = split_collection()
    clone = copy.deepcopy(tables)
    expected = tables(IDS)
    assert_close(clone(IDS), expected, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    assert_close(tables(IDS), expected, rtol=0, atol=0)
    rb.merge_(clone, verbose=False)
    assert len(tables.stacks) == 3


def test_precision_can_be_changed_after_a_split():
    tables = split_collection()
    expected = tables(IDS)
    tables.to(torch.float32)
    assert tables(IDS).dtype == torch.float32
    assert_close(tables(IDS).double(), expected, atol=1e-6, rtol=1e-5)
    rb.merge_(tables, verbose=False)
    assert tables(IDS).dtype == torch.float32


def test_the_state_dict_holds_weights_alone():
    tables = split_collection()
    assert set(tables.state_dict()) == {name for name, _ in tables.named_parameters()}
    other = split_collection()
    other.load_state_dict(tables.state_dict())
    assert_close(other(IDS), tables(IDS), rtol=0, atol=0)


def test_a_frozen_collection_stays_frozen():
    tables = collection().requires_grad_(requires_grad=False)
    rb.apply_(tables, LOW_RANK, where=named("user"), verbose=False)
    assert not any(p.requires_grad for p in tables.parameters())
    assert not any(info.trainable for info in rb.find_tables(tables))
    rb.merge_(tables, verbose=False)
    assert not any(p.requires_grad for p in tables.parameters())


def test_frozen_and_trained_tables_are_kept_apart():
    tables = collection()
    rb.apply_(tables, HASHING, where=named("user"), verbose=False)
    tables.stacks[0].requires_grad_(requires_grad=False)
    rb.merge_(tables, verbose=False)
    assert members(tables) == [["user"], ["tags", "item", "words", "shop"]]
    assert [info.trainable for info in rb.find_tables(tables)] == [False, True, True, True, True]


def test_only_the_rows_that_were_looked_up_get_a_gradient():
    tables = collection()
    tables(IDS[2:3]).sum().backward()
    (weight,) = tables.parameters()
    expected = [3, 8 + 5, 8 + 8, 8 + 9 + 1, 8 + 9 + 7 + 4, 8 + 9 + 7 + 10 + 2]
    assert weight.grad.any(dim=1).nonzero().flatten().tolist() == expected
