"""e(i) = n/(n+c) v_i + c/(n+c) p against loops, in its limits, in a model, with other methods, and with its counts."""

import copy
import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.shrunk_models import FIELDS, SCHEMA, WIDTH, C, counts_by_field, deepfm, ids_of
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import DataError, NoTableError, SettingsError
from rarebit.methods._counts import counted_in, counts_of_rows, set_counts_
from rarebit.methods.shrinkage import Shrinkage, ShrunkStack, ShrunkTable, mix
from rarebit.models.dcn_v2 import DCNv2
from rarebit.models.deepfm import DeepFM
from rarebit.tables.apply import end_training_
from rarebit.tables.table import full_table
from rarebit.technique import parse_techniques, technique_from_mapping


def shrunk_table(
    counts: Tensor, *, width: int = WIDTH, padding_idx: int | None = None, **settings: object
) -> ShrunkTable:
    """Return a table whose rows and prior are random."""
    base = nn.Embedding(len(counts), width, padding_idx=padding_idx)
    table = Shrinkage(counts=counts, **settings).wrap(base)
    if table.prior is not None:
        nn.init.normal_(table.prior.mean)
    return table


def naive_rows(own: Tensor, counts: Tensor, c: float, prior: Tensor) -> list[list[float]]:
    """Return the equation with loops over plain numbers."""
    rows = []
    for row, n in zip(own.tolist(), counts.tolist(), strict=True):
        weight = n / (n + c)
        rows.append(
            [weight * v + c / (n + c) * p for v, p in zip(row, prior.tolist(), strict=True)]
        )
    return rows


@pytest.mark.parametrize("prior", ["mean", "zero"])
def test_rows_are_those_of_the_equation(prior):
    counts = torch.tensor([0, 1, 2, 7, 100_000])
    table = shrunk_table(counts, c=3.0, prior=prior).double()
    mean = torch.zeros(WIDTH) if prior == "zero" else table.prior.mean
    expected = naive_rows(table.inner.weight, counts, 3.0, mean)
    assert_close(table.weight, torch.tensor(expected, dtype=torch.float64))


def test_a_row_worked_by_hand():
    table = shrunk_table(torch.tensor([30]), width=2, c=10.0)
    with torch.no_grad():
        table.inner.weight.copy_(torch.tensor([[4.0, -8.0]]))
        table.prior.mean.copy_(torch.tensor([2.0, 2.0]))
    # three quarters of the row and one of the mean
    assert table(torch.tensor(0)).tolist() == [3.5, -5.5]


@given(
    counts=st.lists(st.integers(0, 10**9), min_size=1, max_size=6),
    c=st.floats(0.0, 1e6),
)
def test_entries_lie_between_the_row_and_the_prior(counts, c):
    table = shrunk_table(torch.tensor(counts), c=c)
    rows, own = full_table(table), full_table(table.inner)
    prior = table.prior.mean.detach().expand_as(own)
    slack = 1e-5
    assert bool((rows >= torch.minimum(own, prior) - slack).all())
    assert bool((rows <= torch.maximum(own, prior) + slack).all())


@pytest.mark.parametrize("prior", ["mean", "zero"])
def test_without_strength_it_is_the_plain_table_bit_by_bit(prior):
    table = shrunk_table(torch.tensor([0, 1, 9, 70_000]), c=0.0, prior=prior)
    assert torch.equal(full_table(table), table.inner.weight)
    table.weight.sum().backward()
    assert torch.equal(table.inner.weight.grad, torch.ones(4, WIDTH))
    assert table.prior is None or not bool(table.prior.mean.grad.any())


def test_a_row_never_seen_is_the_prior_bit_by_bit_and_gets_no_gradient():
    table = shrunk_table(torch.tensor([0, 5]), c=0.01)
    rows = table(torch.tensor([0, 1]))
    assert torch.equal(rows[0], table.prior.mean)
    rows.sum().backward()
    assert not bool(table.inner.weight.grad[0].any())
    assert bool(table.inner.weight.grad[1].all())
    zero = shrunk_table(torch.tensor([0, 5]), c=0.01, prior="zero")
    assert not bool(zero(torch.tensor(0)).any())


def test_the_mean_starts_at_zero_and_the_method_of_a_table_has_no_counts():
    table = Shrinkage(counts=10, c=10.0).wrap(nn.Embedding(3, WIDTH))
    assert table.method == Shrinkage(c=10.0)
    assert table.method.counts is None  # the table itself saves the counts
    assert not bool(table.prior.mean.any())
    assert_close(full_table(table), table.inner.weight.detach() / 2)


def test_gradients_are_those_of_the_naive_form():
    counts = torch.tensor([0, 1, 2, 7, 40])
    table = shrunk_table(counts, c=10.0).double()
    ids, upstream = torch.tensor([4, 1, 1, 0, 2]), torch.randn(5, WIDTH, dtype=torch.float64)
    own = table.inner.weight.detach().clone().requires_grad_()
    mean = table.prior.mean.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for place, i in enumerate(ids.tolist()):
        row = counts[i] / (counts[i] + 10) * own[i] + 10 / (counts[i] + 10) * mean
        total = total + (row * upstream[place]).sum()
    total.backward()
    (table(ids) * upstream).sum().backward()
    assert_close(table.inner.weight.grad, own.grad)
    assert_close(table.prior.mean.grad, mean.grad)
    assert not bool(table.inner.weight.grad[3].any())


def test_padding_is_zero_and_moves_nothing():
    table = shrunk_table(torch.tensor([0, 3, 9]), padding_idx=1)
    rows = table(torch.tensor([1, 1]))
    assert not bool(rows.any())
    rows.sum().backward()
    assert not any(bool(p.grad.any()) for p in table.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_step_by_rows_moves_the_rows_that_were_looked_up(kind):
    model = nn.Sequential(nn.Embedding(9, WIDTH))
    rb.apply_(model, Shrinkage(counts=torch.arange(9), c=2.0), verbose=False)
    optimizer = rb.optimizer(model, lr=0.1, kind=kind, tables="rowwise")
    before = model[0].inner.weight.detach().clone()
    model(torch.tensor([4, 7, 4])).sum().backward()
    optimizer.step()
    moved = (model[0].inner.weight.detach() != before).any(dim=1)
    assert moved.nonzero().flatten().tolist() == [4, 7]


def test_counts_are_exact_in_half_precision():
    table = shrunk_table(torch.tensor([100_000, 1]), c=100_000.0 / 3).bfloat16()
    own, mean = table.inner.weight.detach().float(), table.prior.mean.detach().float()
    assert_close(full_table(table)[0].float(), 0.75 * own[0] + 0.25 * mean, atol=0.02, rtol=0.02)
    seen_often = shrunk_table(torch.tensor([100_000]), c=1.0).half()
    assert bool(full_table(seen_often).isfinite().all())


@pytest.mark.parametrize("c", [C, "auto", 5.0])
@pytest.mark.parametrize("prior", ["mean", "zero"])
def test_one_lookup_of_all_fields_equals_the_loop_over_tables(c, prior):
    model = deepfm(Shrinkage(counts=counts_by_field(), c=c, prior=prior)).double()
    collection = model.backbone.tables
    assert [type(stack) for stack in collection.stacks] == [ShrunkStack]
    ids = ids_of()
    stacked = collection.stacks[0](ids)
    columns = ids.split([field.max_length for field in FIELDS], dim=1)
    looped = [t.rows(column) for t, column in zip(collection.tables(), columns, strict=True)]
    assert_close(stacked, torch.cat(looped, dim=1))


def test_gradients_of_one_lookup_are_those_of_the_loop_over_tables():
    model = deepfm(Shrinkage(counts=counts_by_field())).double()
    stack, ids = model.backbone.tables.stacks[0], ids_of().clamp(min=1)  # 0 is padding
    tables = copy.deepcopy(stack).split()
    columns = ids.split([field.max_length for field in FIELDS], dim=1)
    looped = torch.cat([t.rows(c) for t, c in zip(tables, columns, strict=True)], dim=1)
    upstream = torch.randn_like(looped)
    (stack(ids) * upstream).sum().backward()
    (looped * upstream).sum().backward()
    inner = stack.inner.embedding.weight.grad.split(stack.sizes)
    for place, table in enumerate(tables):
        assert_close(inner[place], table.inner.weight.grad)
        assert_close(stack.prior.means.grad[place], table.prior.mean.grad)


def test_every_table_has_the_counts_and_the_strength_of_its_name():
    counts = counts_by_field()
    model = deepfm(Shrinkage(counts=counts, c=C))
    for tables in (model.backbone.tables, model.wide.tables):
        for field, table in zip(FIELDS, tables.tables(), strict=True):
            assert torch.equal(table.evidence.counts, counts[field.name])
            assert table.evidence.strength.item() == C[field.name]


def test_a_full_name_goes_before_the_name_of_a_field():
    counts = counts_by_field()
    special = torch.full((20,), 77)
    name = "backbone.tables.user"
    model = deepfm(Shrinkage(counts=counts | {name: special}, c=C | {name: 9.0}))
    table, wide = model.backbone.tables.tables()[0], model.wide.tables.tables()[0]
    assert torch.equal(table.evidence.counts, special)
    assert torch.equal(wide.evidence.counts, counts["user"])
    assert (table.evidence.strength.item(), wide.evidence.strength.item()) == (9.0, 2.0)


def test_first_order_weights_are_shrunk_as_well():
    changes = rb.apply_(deepfm(), Shrinkage(counts=5), verbose=False)
    assert {info.width for info in changes.after} == {1, WIDTH}
    assert not changes.skipped
    others = rb.apply_(deepfm(), Shrinkage(counts=5), min_width=2, verbose=False)
    assert {info.width for info in others.after} == {WIDTH}
    plain = rb.apply_(deepfm(), rb.PEP(), verbose=False)
    assert {reason for _, reason in plain.skipped} == {"narrower than min_width=2"}


def test_choosing_some_fields_leaves_the_others_plain():
    model = deepfm()
    shrinkage = Shrinkage(counts={"item": torch.arange(11)}, c=2.0)
    rb.apply_(model, shrinkage, where=lambda t: t.field == "item", verbose=False)
    kinds = [isinstance(table, ShrunkTable) for table in model.backbone.tables.tables()]
    assert kinds == [False, False, True]


def test_settings_with_a_strength_for_each_table_are_equal_and_hashable():
    first, second = Shrinkage(c={"a": 1.0, "b": 2.0}), Shrinkage(c={"b": 2.0, "a": 1.0})
    assert first == second
    assert hash(first) == hash(second)
    assert Shrinkage(c={"a": 1.0}) != first
    assert len({Shrinkage(c=1.0), Shrinkage(c=1.0), Shrinkage(c="auto")}) == 2
    assert str(Shrinkage(counts=3, c={"a": 1.0})) == "Shrinkage(c={'a': 1.0}, prior='mean')"


def test_counts_may_come_later():
    counts = {"0": torch.arange(9)}
    late = Shrinkage(c=2.0).with_counts(counts)
    assert late.counts is counts
    assert (late.c, late.prior) == (2.0, "mean")


def test_a_table_without_counts_says_what_to_do():
    model = nn.Sequential(nn.Embedding(9, WIDTH))
    rb.apply_(model, Shrinkage(), verbose=False)
    message = re.escape("apply its method with counts=train.counts(), or use set_counts_(model,")
    with pytest.raises(DataError, match="a table does not know its counts; " + message):
        model(torch.tensor([1]))


def test_without_counts_a_table_is_what_it_was():
    model = nn.Sequential(nn.Embedding(9, WIDTH))
    weight = model[0].weight.detach().clone()
    rb.apply_(model, Shrinkage(c=3.0), verbose=False)
    with torch.no_grad():
        assert torch.equal(model(torch.arange(9)), weight)
    rb.merge_(model, verbose=False)
    assert torch.equal(model[0].weight, weight)


def test_rows_and_means_count_as_weights_and_counts_do_not():
    for prior, own in (("zero", 0), ("mean", WIDTH)):
        model = nn.Sequential(nn.Embedding(9, WIDTH))
        rb.apply_(model, Shrinkage(counts=2, c=3.0, prior=prior), verbose=False)
        [info] = rb.find_tables(model)
        assert info.num_parameters == 9 * WIDTH + own
        assert info.num_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"item": torch.arange(9)}, "no counts for '0', only for item"),
        ({}, "no counts for '0', only for nothing"),
        ({"0": torch.ones(9)}, r"the counts of '0' must be integers, got torch.float32"),
        ({"0": torch.arange(8)}, r"one number for each of its 9 rows, got the shape \(8,\)"),
        (torch.arange(9).view(9, 1), r"for each of its 9 rows, got the shape \(9, 1\)"),
        (torch.arange(9) - 1, "the counts of '0' must be 0 or more, got -1"),
    ],
)
def test_counts_that_do_not_fit_are_refused_and_nothing_is_changed(counts, message):
    model = nn.Sequential(nn.Embedding(9, WIDTH))
    with pytest.raises(DataError, match=message):
        rb.apply_(model, Shrinkage(counts=counts), verbose=False)
    assert type(model[0]) is nn.Embedding


def test_a_table_without_a_strength_is_refused():
    with pytest.raises(SettingsError, match=r"no c for 'backbone\.tables\.user', only for item"):
        deepfm(Shrinkage(counts=3, c={"item": 3.0}))


def test_counts_by_name_are_for_a_model():
    with pytest.raises(SettingsError, match="counts by name are for several tables; use apply_ on"):
        Shrinkage(counts={"0": torch.arange(9)}).wrap(nn.Embedding(9, WIDTH))


def test_a_strength_that_is_no_number_is_refused():
    with pytest.raises(SettingsError, match="c must be a number for each table, got True"):
        Shrinkage(c={"user": True})


@pytest.mark.parametrize("form", [("c", "learned"), ("c", "held-out"), ("prior", "relatives")])
def test_a_removed_form_is_refused_with_the_reason(form):
    name, value = form
    reason = f"{name} must be .*, got '{value}'; '{value}' was removed: it lost its study, see docs"
    with pytest.raises(SettingsError, match=reason):
        Shrinkage(**{name: value})
    with pytest.raises(SettingsError, match=reason):
        parse_techniques(f"shrinkage:{name}={value}")
    with pytest.raises(SettingsError, match=reason):
        technique_from_mapping({"method": "shrinkage", name: value})


def test_settings_that_older_versions_stored_without_a_value_are_dropped():
    stored = {"method": "shrinkage", "counts": None, "c": 3.0, "prior": "zero"}
    older = stored | {"parent": None, "parent_rows": None}
    assert technique_from_mapping(older) == technique_from_mapping(stored)
    with pytest.raises(SettingsError, match="unknown setting 'parent' for Shrinkage"):
        technique_from_mapping(stored | {"parent": "author"})


SHAPES = {"of the table": (3,), "of each slot": (4, 3), "of each lookup": (5, 4, 3)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=2)))
def test_values_and_gradients_are_those_of_the_product_and_the_sum(shape, trained):
    own, weights = torch.randn(5, 4, 3).double(), torch.rand(5, 4, 1).double()
    inputs = [own, weights, torch.randn(SHAPES[shape]).double()]
    upstream = torch.randn_like(own)
    found, expected = [
        [
            value.clone().requires_grad_(needed)
            for value, needed in zip(inputs, (trained[0], False, trained[1]), strict=True)
        ]
        for _ in range(2)
    ]
    rows = mix(*found)
    v, w, p = expected
    plain = w * v + (1 - w) * p
    assert_close(rows, plain)
    if any(trained):
        (rows * upstream).sum().backward()
        (plain * upstream).sum().backward()
    for value, other in zip(found, expected, strict=True):
        assert (value.grad is None) == (other.grad is None)
        if other.grad is not None:
            assert_close(value.grad, other.grad)


def test_the_gradient_that_comes_is_left_as_it_is():
    inputs = [torch.randn(5, 4, 3), torch.rand(5, 4, 1), torch.randn(5, 4, 3)]
    own, _, prior = inputs[0].requires_grad_(), inputs[1], inputs[2].requires_grad_()
    upstream = torch.randn(5, 4, 3)
    before = upstream.clone()
    mix(*inputs).backward(upstream)
    assert torch.equal(upstream, before)
    # or an optimizer would change one gradient with the other
    assert own.grad.data_ptr() != prior.grad.data_ptr()


@given(v=st.floats(-(2.0**90), 2.0**90, width=32), p=st.floats(-(2.0**90), 2.0**90, width=32))
def test_both_ends_are_exact(v, p):
    own, prior = torch.tensor([[v]]), torch.tensor([p])
    assert mix(own, torch.ones(1, 1), prior).item() == own.item()
    assert mix(own, torch.zeros(1, 1), prior).item() == prior.item()


def test_a_prior_that_hardly_counts_still_gets_its_gradient():
    weights = torch.full((1000, 1), 1 - 2.0**-20)
    own, prior = torch.randn(1000, 2), torch.zeros(2, requires_grad=True)
    upstream = torch.randn(1000, 2)
    mix(own, weights, prior).backward(upstream)
    expected = (upstream.double() * 2.0**-20).sum(dim=0)
    assert_close(prior.grad.double(), expected, rtol=1e-4, atol=0.0)


def test_without_a_prior_it_is_the_product():
    own, weights = torch.randn(5, 3), torch.rand(5, 1)
    assert torch.equal(mix(own, weights, None), weights * own)


def batch_of(rows: int = 16) -> rb.data.Batch:
    return rb.Dataset(SCHEMA, ids_of(rows))[:]


@pytest.mark.parametrize("c", [C, "typical", 7.0])
def test_merged_tables_have_the_same_rows_bit_by_bit(c):
    model, batch = deepfm(Shrinkage(counts=counts_by_field(), c=c)), batch_of()
    rows, scores = model.backbone.tables(batch.ids), model(batch)
    rb.merge_(model, verbose=False)
    assert torch.equal(model.backbone.tables(batch.ids), rows)
    assert torch.equal(model(batch), scores)
    assert all(not info.methods for info in rb.find_tables(model))


def test_after_training_the_tables_are_plain():
    model, batch = deepfm(Shrinkage(counts=counts_by_field(), c=3.0)), batch_of()
    scores = model(batch)
    end_training_(model)
    assert all(not info.methods for info in rb.find_tables(model))
    assert torch.equal(model(batch), scores)


def test_a_saved_model_has_its_counts_its_strengths_and_its_means(tmp_path):
    for c in (C, "typical", 7.0):
        model, batch = deepfm(Shrinkage(counts=counts_by_field(), c=c)), batch_of()
        copied = rb.load_model(rb.save_model(model, tmp_path))
        assert torch.equal(copied(batch), model(batch))
        assert rb.find_tables(copied) == rb.find_tables(model)
        for old, new in zip(
            model.backbone.tables.tables(), copied.backbone.tables.tables(), strict=True
        ):
            assert torch.equal(old.evidence.counts, new.evidence.counts)
            assert torch.equal(old.evidence.strength, new.evidence.strength)


def test_rows_of_a_product_are_shrunk():
    model, ids = deepfm(rb.MLET(inner_dim=8), Shrinkage(counts=counts_by_field(), c=3.0)), ids_of()
    for table in model.backbone.tables.tables():
        assert [type(method).__name__ for method in table.methods] == ["MLET", "Shrinkage"]
        counts = table.evidence.counts
        factors = table.inner
        product = (factors.inner.weight @ factors.projection).detach()
        if table.padding_idx is not None:
            product[table.padding_idx] = 0.0
        expected = torch.tensor(naive_rows(product, counts, 3.0, table.prior.mean))
        assert_close(table.rows(torch.arange(len(counts))), expected, atol=1e-5, rtol=1e-5)
    model.backbone.tables(ids).sum().backward()
    assert all(p.grad is not None for p in model.backbone.tables.parameters())


@pytest.mark.parametrize(
    "then", [rb.PEP(init=-2.0), rb.pruning.Masked(), rb.pruning.Pruned(keep=60)]
)
def test_what_comes_then_works_on_the_shrunk_rows(then):
    model = deepfm(Shrinkage(counts=counts_by_field(), c=3.0))
    rows = [full_table(table) for table in model.backbone.tables.tables()]
    rb.apply_(model, then, verbose=False)
    for table, before in zip(model.backbone.tables.tables(), rows, strict=True):
        assert isinstance(table.inner, ShrunkTable)
        after = full_table(table)
        kept = after != 0
        if isinstance(then, rb.PEP):
            cut = before.abs() - torch.sigmoid(torch.tensor(-2.0))
            assert_close(after, before.sign() * cut.clamp(min=0.0))
        else:
            assert torch.equal(after[kept], before[kept])


def test_a_bucket_was_seen_as_often_as_all_its_ids_but_padding():
    counts = counts_by_field()
    model = deepfm(rb.Hashing(buckets=4), Shrinkage(counts=counts, c=3.0))
    for field, table in zip(FIELDS, model.backbone.tables.tables(), strict=True):
        expected = [0] * 4
        for i, n in enumerate(counts[field.name].tolist()):
            if not (field.kind == "multi" and i == 0):
                expected[i % 4] += n
        [shrunk] = counted_in(table)
        assert shrunk.evidence.counts.tolist() == expected


def test_each_set_is_shrunk_by_the_same_counts():
    counts = counts_by_field()
    model = DCNv2(SCHEMA, dim=WIDTH, hidden=(8,))
    rb.apply_(model, rb.MultiEmbedding(num_sets=3), verbose=False)
    rb.apply_(model, rb.Hashing(buckets=4), verbose=False)
    rb.apply_(model, Shrinkage(counts=counts, c=C), verbose=False)
    for field, table in zip(FIELDS, model.backbone.tables.tables(), strict=True):
        folded = counts_of_rows(table, counts[field.name])
        shrunk = counted_in(table)
        assert shrunk
        assert all(torch.equal(one.evidence.counts, folded) for one in shrunk)
        assert all(one.evidence.strength.item() == C[field.name] for one in shrunk)


@pytest.mark.parametrize(
    "then", [rb.PEP(), rb.pruning.Masked(), rb.pruning.Pruned(keep=60), rb.Quantize()]
)
@pytest.mark.parametrize("first", [[], [rb.MLET(inner_dim=8)]])
def test_a_saved_model_with_other_methods_comes_back(first, then, tmp_path):
    model = deepfm(*first, Shrinkage(counts=counts_by_field(), c=3.0))
    rb.apply_(model, then, verbose=False)
    copied, batch = rb.load_model(rb.save_model(model, tmp_path)), batch_of()
    assert torch.equal(copied(batch), model(batch))
    assert rb.find_tables(copied) == rb.find_tables(model)


@pytest.mark.parametrize("before", [[], [rb.Hashing(buckets=4)]])
@pytest.mark.parametrize("after", [[], [rb.PEP(init=-6.0)]])
def test_counts_that_are_set_are_those_that_were_given_at_once(before, after):
    counts = {field.name: torch.randint(0, 50, (field.rows,)) for field in SCHEMA.fields}
    models = []
    for at_first in (counts, None, {name: count + 1 for name, count in counts.items()}):
        torch.manual_seed(0)
        model = DeepFM(SCHEMA, dim=4, hidden=(8,))
        for method in (*before, Shrinkage(counts=at_first, c=3.0), *after):
            rb.apply_(model, method, verbose=False)
        models.append(model)
    for model in models[1:]:
        set_counts_(model, counts)
        batch = rb.Dataset(SCHEMA, torch.randint(0, 9, (16, 5)))[:]
        assert torch.equal(model(batch), models[0](batch))
        for old, new in zip(
            models[0].backbone.tables.tables(), model.backbone.tables.tables(), strict=True
        ):
            assert torch.equal(
                counted_in(old)[0].evidence.counts, counted_in(new)[0].evidence.counts
            )


def test_counts_of_sets_are_set_set_by_set():
    model = DCNv2(SCHEMA, dim=4, hidden=(8,))
    rb.apply_(model, rb.MultiEmbedding(num_sets=2), verbose=False)
    rb.apply_(model, Shrinkage(), verbose=False)
    counts = {field.name: torch.randint(1, 50, (field.rows,)) for field in SCHEMA.fields}
    set_counts_(model, counts)
    for field, table in zip(SCHEMA.fields, model.backbone.tables.tables(), strict=True):
        for one in counted_in(table):
            assert torch.equal(one.evidence.counts, counts[field.name])


def test_counts_that_do_not_fit_change_nothing():
    model = nn.ModuleDict({"a": nn.Embedding(4, 3), "b": nn.Embedding(5, 3)})
    rb.apply_(model, Shrinkage(counts=2), verbose=False)
    with pytest.raises(DataError, match="no counts for 'b', only for a"):
        set_counts_(model, {"a": torch.arange(4)})
    assert model["a"].evidence.counts.tolist() == [2, 2, 2, 2]
    with pytest.raises(
        NoTableError, match=r"no table of the model keeps counts; apply_ Shrinkage first"
    ):
        set_counts_(nn.Sequential(nn.Embedding(4, 3)), 3)


def test_a_loaded_model_that_never_had_counts_still_says_so():
    model = nn.Sequential(nn.Embedding(4, 3))
    rb.apply_(model, Shrinkage(), verbose=False)
    other = nn.Sequential(nn.Embedding(4, 3))
    rb.apply_(other, Shrinkage(counts=3), verbose=False)
    other.load_state_dict(model.state_dict())
    with pytest.raises(DataError, match="does not know its counts"):
        other(torch.tensor([1]))


def test_a_typical_strength_is_the_median_of_the_counts_of_ids_that_were_seen():
    model = nn.ModuleDict({"user": nn.Embedding(6, 4), "item": nn.Embedding(4, 4)})
    rb.apply_(model, Shrinkage(c="typical"), verbose=False)
    counts = {"user": torch.tensor([0, 1, 2, 9, 40, 0]), "item": torch.tensor([0, 0, 7, 0])}
    set_counts_(model, counts)
    assert [float(model[name].evidence.strength) for name in counts] == [2.0, 7.0]
    fixed = nn.ModuleDict({"user": nn.Embedding(6, 4), "item": nn.Embedding(4, 4)})
    fixed.load_state_dict({f"{name}.weight": full_table(model[name].inner) for name in counts})
    rb.apply_(fixed, Shrinkage(counts=counts, c={"user": 2.0, "item": 7.0}), verbose=False)
    for name in counts:
        assert torch.equal(full_table(model[name]), full_table(fixed[name]))


def test_a_typical_strength_grows_with_the_counts_and_is_known_at_once_where_they_are():
    model = nn.ModuleDict({"user": nn.Embedding(3, 4)})
    rb.apply_(model, Shrinkage(counts={"user": torch.tensor([1, 5, 5])}), verbose=False)
    assert float(model["user"].evidence.strength) == 5.0
    set_counts_(model, {"user": torch.tensor([10, 50, 70])})
    assert float(model["user"].evidence.strength) == 50.0


def test_without_any_id_seen_a_typical_strength_is_one_and_all_rows_are_the_prior():
    model = nn.ModuleDict({"user": nn.Embedding(3, 4)})
    never = {"user": torch.zeros(3, dtype=torch.int64)}
    with pytest.warns(UserWarning, match="makes all rows of 'user' equal"):
        rb.apply_(model, Shrinkage(counts=never), verbose=False)
    assert float(model["user"].evidence.strength) == 1.0
    assert torch.equal(full_table(model["user"]), torch.zeros(3, 4))


def test_each_field_of_a_stack_has_a_typical_strength_of_its_own():
    model = DeepFM(SCHEMA, dim=4, hidden=(8,))
    rb.apply_(model, Shrinkage(), verbose=False)
    set_counts_(model, {f.name: 1 + 10 * torch.arange(f.rows) for f in SCHEMA.fields})
    for site in rb.find_tables(model):
        assert site.methods == (str(Shrinkage(c="typical")),)
    for table, field in zip(model.backbone.tables.tables(), SCHEMA.fields, strict=True):
        assert float(table.evidence.strength) == 1 + 10 * ((field.rows - 1) // 2)


def test_auto_is_remembered_as_what_it_stands_for():
    model = deepfm(Shrinkage(c="auto"))
    set_counts_(model, counts_by_field())
    assert {t.method for t in model.backbone.tables.tables()} == {Shrinkage(c="typical")}
