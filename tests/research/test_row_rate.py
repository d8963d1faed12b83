"""A row learns at n/(n+c) of the learning rate, under any optimizer; what it hands out at first stays."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import DataError, SettingsError, UnsupportedTableError
from rarebit.methods._counts import counted_in, set_counts_
from rarebit.models.deepfm import DeepFM
from rarebit.research.row_rate import RatedStack, RatedTable, RowRate

SCHEMA = rb.data.Schema(
    (
        rb.data.Field(name="user", rows=20),
        rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
        rb.data.Field(name="item", rows=11),
    )
)
COUNTS = torch.tensor([0, 1, 2, 30, 100_000])
RATES = [n / (n + 10) for n in COUNTS.tolist()]
WIDTH = 3

OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}


def rated(counts: Tensor = COUNTS, c: float = 10.0, **options: int) -> tuple[nn.Sequential, Tensor]:
    """Return a model with rates, and the rows it had before."""
    model = nn.Sequential(nn.Embedding(len(counts), WIDTH, **options)).double()
    start = model[0].weight.detach().clone()
    rb.apply_(model, RowRate(counts=counts, c=c), verbose=False)
    return model, start


def counts_by_field() -> dict[str, Tensor]:
    return {field.name: torch.randint(0, 50, (field.rows,)) for field in SCHEMA.fields}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_that_of_plain_rows_with_learning_rates_of_their_own(kind):
    model, start = rated()
    wanted = torch.randn(len(COUNTS), WIDTH, dtype=torch.float64)
    rows = [nn.Parameter(row.clone()) for row in start]
    optimizers = [
        OPTIMIZERS[kind](model.parameters()),
        OPTIMIZERS[kind](
            [{"params": [row], "lr": 0.1 * rate} for row, rate in zip(rows, RATES, strict=True)]
        ),
    ]
    for _ in range(7):
        for optimizer, table in zip(
            optimizers, (model(torch.arange(len(COUNTS))), torch.stack(rows)), strict=True
        ):
            optimizer.zero_grad()
            (table - wanted).square().sum().backward()
            optimizer.step()
    assert_close(model[0].weight.detach(), torch.stack(rows).detach())
    assert torch.equal(model[0].weight[0], start[0])
    assert bool((model[0].weight[1:] != start[1:]).all())


def test_at_first_the_rows_are_those_of_the_table():
    model, start = rated()
    assert_close(model[0].weight.detach(), start)


def test_without_strength_it_is_the_plain_table_bit_by_bit():
    model, start = rated(c=0.0)
    rows = model(torch.arange(len(COUNTS)))
    assert torch.equal(rows, start)
    rows.sum().backward()
    assert torch.equal(model[0].inner.weight.grad, torch.ones_like(start))


def test_merged_it_has_the_same_rows_bit_by_bit():
    model, _ = rated(padding_idx=2)
    rows = model(torch.arange(len(COUNTS)))
    rb.merge_(model, verbose=False)
    assert torch.equal(model[0].weight, rows)
    assert type(model[0]) is nn.Embedding


def test_counts_that_are_replaced_change_rates_and_no_rows():
    model, start = rated()
    set_counts_(model, {"0": COUNTS + 5})
    assert_close(model[0].weight.detach(), start)
    before = model[0].weight.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(len(COUNTS))).sum().backward()
    optimizer.step()
    expected = torch.tensor([(n + 5) / (n + 15) for n in COUNTS.tolist()], dtype=torch.float64)
    moved = before - model[0].weight.detach()
    assert_close(moved, 0.1 * expected.unsqueeze(1).expand_as(moved))


def test_one_lookup_of_all_fields_equals_the_loop_over_tables_and_counts_may_come_later():
    counts, models = counts_by_field(), []
    for given in (counts, None):
        torch.manual_seed(0)
        model = DeepFM(SCHEMA, dim=4, hidden=(8,), batch_norm=False)
        rb.apply_(model, RowRate(counts=given, c=3.0), verbose=False)
        models.append(model)
    set_counts_(models[1], counts)
    ids = torch.randint(1, 9, (16, 5))
    for model in models:
        [stack] = model.backbone.tables.stacks
        assert type(stack) is RatedStack
        columns = zip(stack.split(), ids.split([1, 3, 1], dim=1), strict=True)
        assert_close(stack(ids), torch.cat([table(column) for table, column in columns], dim=1))
        assert all(isinstance(table, RatedTable) for table in model.wide.tables.tables())
    assert_close(models[0].backbone.tables(ids), models[1].backbone.tables(ids))
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    for name, tensor in models[0].state_dict().items():
        assert_close(models[1].state_dict()[name], tensor)


def test_a_bucket_has_the_rate_of_all_its_ids():
    model = nn.Sequential(nn.Embedding(5, WIDTH))
    rb.apply_(model, rb.Hashing(buckets=2), verbose=False)
    rb.apply_(model, RowRate(counts=COUNTS), verbose=False)
    [table] = counted_in(model[0])
    assert table.evidence.counts.tolist() == [100_002, 31]


def test_a_saved_model_comes_back(tmp_path):
    model = DeepFM(SCHEMA, dim=4, hidden=(8,))
    rb.apply_(model, RowRate(counts=counts_by_field()), verbose=False)
    batch = rb.Dataset(SCHEMA, torch.randint(0, 9, (16, 5)))[:]
    copied = rb.load_model(rb.save_model(model, tmp_path))
    assert torch.equal(copied(batch), model(batch))
    rb.apply_(model, rb.Quantize(), verbose=False)
    copied = rb.load_model(rb.save_model(model, tmp_path))
    assert torch.equal(copied(batch), model(batch))


def test_what_cannot_be_done_is_refused():
    model = nn.Sequential(nn.Embedding(5, WIDTH))
    with pytest.raises(DataError, match="no counts for '0', only for item"):
        rb.apply_(model, RowRate(counts={"item": COUNTS}), verbose=False)
    with pytest.raises(SettingsError, match="counts by name are for several tables"):
        RowRate(counts={"0": COUNTS}).wrap(model[0])
    rb.apply_(model, rb.PEP(), verbose=False)
    with pytest.raises(UnsupportedTableError, match=r"RowRate\(c=10\.0\) takes a plain table, got"):
        RowRate(counts=3).wrap(model[0])
    other = nn.Sequential(nn.Embedding(5, WIDTH))
    rb.apply_(other, RowRate(), verbose=False)
    with pytest.raises(DataError, match="does not know its counts"):
        other(torch.tensor([1]))


def test_counts_may_be_given_to_a_method_later():
    assert RowRate(c=2.0).with_counts(COUNTS).counts is COUNTS
    table = RowRate(c=10.0).with_counts(30).wrap(nn.Embedding(2, WIDTH))
    assert_close(
        table.evidence.weights(torch.arange(2), torch.zeros(2).long()), torch.full((2, 1), 0.75)
    )
