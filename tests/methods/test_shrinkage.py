"""e(i) = n/(n+c) v_i + c/(n+c) p(i): against loops, in its limits, in a model, and what it refuses."""

import copy
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.shrunk_models import FIELDS, WIDTH, C, counts_by_field, deepfm, ids_of
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import DataError, SettingsError
from rarebit.methods.shrinkage import Shrinkage, ShrunkStack, ShrunkTable
from rarebit.tables.table import full_table


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


def test_the_mean_starts_at_zero_and_a_learned_strength_at_ten():
    table = Shrinkage(counts=10, c="learned").wrap(nn.Embedding(3, WIDTH))
    assert table.method.counts is None  # what is saved are the counts themselves
    assert not bool(table.prior.mean.any())
    assert_close(table.evidence.c, torch.tensor([10.0]))
    assert_close(full_table(table), table.inner.weight.detach() / 2)


def test_gradients_are_those_of_the_naive_form():
    counts = torch.tensor([0, 1, 2, 7, 40])
    table = shrunk_table(counts, c="learned").double()
    ids, upstream = torch.tensor([4, 1, 1, 0, 2]), torch.randn(5, WIDTH, dtype=torch.float64)
    own = table.inner.weight.detach().clone().requires_grad_()
    mean = table.prior.mean.detach().clone().requires_grad_()
    log_c = table.evidence.strength.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for place, i in enumerate(ids.tolist()):
        c = log_c.exp()
        row = counts[i] / (counts[i] + c) * own[i] + c / (counts[i] + c) * mean
        total = total + (row * upstream[place]).sum()
    total.backward()
    (table(ids) * upstream).sum().backward()
    assert_close(table.inner.weight.grad, own.grad)
    assert_close(table.prior.mean.grad, mean.grad)
    assert_close(table.evidence.strength.grad, log_c.grad)
    assert not bool(table.inner.weight.grad[3].any())


def test_a_learned_strength_stays_finite_however_small_it_gets():
    table = shrunk_table(torch.tensor([0, 3]), c="learned")
    with torch.no_grad():
        table.evidence.strength.fill_(-200.0)  # exp of it is zero
    table(torch.tensor([0, 1])).sum().backward()
    assert torch.equal(full_table(table), table.inner.weight)
    assert bool(table.evidence.strength.grad.isfinite().all())


def test_padding_is_zero_and_moves_nothing():
    table = shrunk_table(torch.tensor([0, 3, 9]), c="learned", padding_idx=1)
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


@pytest.mark.parametrize("c", [C, "learned", "estimated", "held-out", "first-pass", "auto", 5.0])
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
    model = deepfm(Shrinkage(counts=counts_by_field(), c="learned")).double()
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
        assert_close(stack.evidence.strength.grad[place], table.evidence.strength.grad[0])
        assert bool(table.evidence.strength.grad.any())


def test_every_table_has_the_counts_and_the_strength_of_its_name():
    counts = counts_by_field()
    model = deepfm(Shrinkage(counts=counts, c=C))
    for tables in (model.backbone.tables, model.wide.tables):
        for field, table in zip(FIELDS, tables.tables(), strict=True):
            assert torch.equal(table.evidence.counts, counts[field.name])
            assert table.evidence.c.item() == C[field.name]


def test_a_full_name_goes_before_the_name_of_a_field():
    counts = counts_by_field()
    special = torch.full((20,), 77)
    name = "backbone.tables.user"
    model = deepfm(Shrinkage(counts=counts | {name: special}, c=C | {name: 9.0}))
    table, wide = model.backbone.tables.tables()[0], model.wide.tables.tables()[0]
    assert torch.equal(table.evidence.counts, special)
    assert torch.equal(wide.evidence.counts, counts["user"])
    assert (table.evidence.c.item(), wide.evidence.c.item()) == (9.0, 2.0)


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


def test_counts_may_come_later():
    counts = {"0": torch.arange(9)}
    late = Shrinkage(c=2.0).with_counts(counts)
    assert late.counts is counts
    assert (late.c, late.prior) == (2.0, "mean")


def test_a_table_without_counts_says_what_to_do():
    model = nn.Sequential(nn.Embedding(9, WIDTH))
    rb.apply_(model, Shrinkage(), verbose=False)
    message = re.escape("apply its method with counts=train.counts(), or use set_counts_(model,")
    with pytest.raises(DataError, match="does not know how often its rows were seen; " + message):
        model(torch.tensor([1]))


def test_without_counts_a_table_is_what_it_was():
    model = nn.Sequential(nn.Embedding(9, WIDTH))
    weight = model[0].weight.detach().clone()
    rb.apply_(model, Shrinkage(c=3.0), verbose=False)
    with torch.no_grad():
        assert torch.equal(model(torch.arange(9)), weight)
    rb.merge_(model, verbose=False)
    assert torch.equal(model[0].weight, weight)


def test_the_weights_that_are_counted_are_rows_means_and_learned_strengths():
    for c, prior, own in ((3.0, "zero", 0), (3.0, "mean", WIDTH), ("learned", "mean", WIDTH + 1)):
        model = nn.Sequential(nn.Embedding(9, WIDTH))
        rb.apply_(model, Shrinkage(counts=2, c=c, prior=prior), verbose=False)
        [info] = rb.find_tables(model)
        assert info.num_parameters == 9 * WIDTH + own
        assert info.num_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"item": torch.arange(9)}, "there are no counts of '0', only of item"),
        ({}, "there are no counts of '0', only of nothing"),
        ({"0": torch.ones(9)}, r"the counts of '0' must be whole numbers, got torch.float32"),
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
    with pytest.raises(SettingsError, match=r"no c of 'backbone\.tables\.user', only of item"):
        deepfm(Shrinkage(counts=3, c={"item": 3.0}))


def test_counts_by_name_are_for_a_model():
    with pytest.raises(SettingsError, match="counts by name are of several tables; use apply_ on"):
        Shrinkage(counts={"0": torch.arange(9)}).wrap(nn.Embedding(9, WIDTH))


def test_a_strength_that_is_no_number_is_refused():
    with pytest.raises(SettingsError, match="c must be a number for each table, got True"):
        Shrinkage(c={"user": True})
