"""Rules that are told which tables their rows are of: what they see, and what they can look up."""

import pytest
import torch
from contract.model_checks import SCHEMA, lively, make_batch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.models.deepfm import DeepFM
from rarebit.row_gradients.seam import GroupRule, RowGradients
from rarebit.tables.apply import find_sites


class Notes(GroupRule):
    """Keeps what it is shown, and answers the sum over the losses."""

    def __init__(self):
        self.steps = []

    def answer(self, step):
        self.steps.append(step)
        return step.gradients.sum(dim=0)


def with_method(table, method):
    model = nn.ModuleDict({"item": table})
    rb.apply_(model, method, verbose=False)
    return model["item"]


def bag(mode, **options):
    return nn.EmbeddingBag(12, 6, mode=mode, **options)


TABLES = {
    "plain": lambda: nn.Embedding(12, 6),
    "padding": lambda: nn.Embedding(12, 6, padding_idx=3),
    "hashing": lambda: with_method(nn.Embedding(12, 6), rb.Hashing(buckets=5)),
    "mlet": lambda: with_method(nn.Embedding(12, 6), rb.MLET(inner_dim=8)),
    "bag of sums": lambda: bag("sum"),
    "bag of means": lambda: bag("mean", padding_idx=2),
    "bag of largest": lambda: bag("max"),
    "sparse bag": lambda: bag("mean", sparse=True),
}


@pytest.mark.parametrize("static", [False, True], ids=["compact", "static"])
@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_a_rule_sees_what_the_table_holds_in_each_row(make, static):
    model, rule = nn.ModuleDict({"item": make()}), Notes()
    weight = model["item"].weight.detach()
    first, second = torch.randint(12, (20, 3)), torch.randint(12, (5, 3))
    with RowGradients(model, rule) as rows:
        rows._static = static
        loss = model["item"](first).square().sum() + model["item"](second).sum()
        rows.backward(loss)
    (step,) = rule.steps
    assert step.number == 0
    is_row = step.ids >= 0
    seen = set(first.flatten().tolist()) | set(second.flatten().tolist())
    assert step.ids[is_row].tolist() == sorted(seen - {model["item"].padding_idx})
    assert_close(step.rows[is_row], weight[step.ids[is_row]])


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_rows_of_a_table_can_be_looked_up(make):
    model, ids = nn.ModuleDict({"item": make()}), torch.tensor([[4], [1], [4]])
    weight = model["item"].weight.detach()
    with RowGradients(model, Notes()) as rows:
        found = rows.look_up(0, ids)
        assert_close(found, weight[ids])
        assert not found.requires_grad
        model["item"](ids).sum()  # a lookup that asks for nothing leaves nothing behind


def test_rows_of_the_chosen_fields_of_a_stack_can_be_looked_up():
    model, rule = lively(lambda schema: DeepFM(schema, dim=4, hidden=(8,))), Notes()
    sites = [site for site in find_sites(model) if site.info.width == 4]
    weights = {site.info.field: site.table.weight.detach() for site in sites}
    chosen = ["tags", "words", "item"]
    ids = torch.tensor([[1, 2, 3], [8, 9, 12]])
    with RowGradients(model, rule, where=lambda t: t.field in chosen) as rows:
        found = rows.look_up(0, ids)
        rows.backward(model(make_batch()).sum())
        (group,) = rows.tables
    for column, name in enumerate(chosen):
        assert torch.equal(found[:, column], weights[name][ids[:, column]])
    (step,) = rule.steps
    joined = torch.cat([weights[name] for name in chosen])
    assert torch.equal(step.rows, joined[step.ids])
    assert group.num_rows == len(joined)
    assert [field.name for field in SCHEMA.table_fields][1:] == chosen


def test_groups_come_by_their_number_tied_ones_last():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tied, self.other, self.item = (nn.Embedding(9, 4) for _ in range(3))
            self.other.weight = self.tied.weight

        def forward(self, ids):
            return self.item(ids) * self.tied(ids) + self.other(ids)

    model, rule, ids = Model(), Notes(), torch.tensor([2, 5])
    with RowGradients(model, rule) as rows:
        rows.backward(model(ids).sum())
        assert [rows.tables[step.number].names for step in rule.steps] == [
            ("item",),
            ("tied", "other"),
        ]
        assert torch.equal(rows.look_up(1, ids[:, None]), model.tied.weight[ids][:, None])
    item, tied = rule.steps
    assert item.ids.tolist() == [2, 5]
    assert torch.equal(tied.rows, model.tied.weight)
