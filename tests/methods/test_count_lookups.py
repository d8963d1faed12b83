"""`count_lookups`: the ids that a model looks up, counted by use."""

import pytest
import torch
from methods.shrunk_models import FIELDS, deepfm
from methods.training_data import rows_of
from torch import nn

import rarebit as rb
from rarebit.methods._counts import count_lookups
from rarebit.tables.apply import MODULE_HOOKS


def num_hooks(model: nn.Module) -> int:
    return sum(len(getattr(part, kind)) for part in model.modules() for kind in MODULE_HOOKS)


@pytest.mark.parametrize("methods", [(), (rb.Hashing(buckets=4),), (rb.LowRank(rank=2),)])
def test_a_zoo_model_looks_up_what_the_data_counts(methods):
    data, model = rows_of(100), deepfm(*methods)
    counts = count_lookups(model, data.batches(16))
    expected = data.counts()
    assert list(counts) == [info.name for info in rb.find_tables(model)]
    for info in rb.find_tables(model):
        assert torch.equal(counts[info.name], expected[info.field])
    assert {info.field for info in rb.find_tables(model)} == {field.name for field in FIELDS}


def test_lookups_worked_by_hand():
    model = nn.ModuleDict({"user": nn.Embedding(4, 2, padding_idx=3), "item": nn.Embedding(2, 2)})

    def call(model, batch):
        model["user"](batch)
        model["user"](batch[:1])

    counts = count_lookups(model, [torch.tensor([[0, 3], [0, 1]]), torch.tensor([[2, 2]])], call)
    # the first row of each batch is looked up twice, padding never counts
    assert counts["user"].tolist() == [3, 1, 4, 0]
    assert counts["item"].tolist() == [0, 0]


@pytest.mark.parametrize("padding", [None, 2])
def test_bags_count_their_ids_and_not_their_offsets(padding):
    model = nn.ModuleDict({"tags": nn.EmbeddingBag(5, 2, mode="sum", padding_idx=padding)})
    ids, offsets = torch.tensor([2, 4, 4, 0]), torch.tensor([0, 1])
    weights = torch.tensor([0.5, 0.5, 0.5, 0.5])
    expected = [1, 0, 1 if padding is None else 0, 0, 2]
    calls = (
        lambda model, ids: model["tags"](ids, offsets),
        lambda model, ids: model["tags"](offsets=offsets, input=ids),
        lambda model, ids: model["tags"](per_sample_weights=weights, offsets=offsets, input=ids),
        lambda model, ids: model["tags"](ids.view(2, 2).int()),
    )
    for call in calls:
        assert count_lookups(model, [ids], call)["tags"].tolist() == expected


def test_a_coded_table_counts_as_a_plain_one():
    model = nn.Sequential(nn.Embedding(30, 4))
    ids = torch.randint(30, (50,))
    before = count_lookups(model, [ids])
    rb.compress_(model, counts=before, size=0.9, verbose=False)
    assert torch.equal(count_lookups(model, [ids])["0"], before["0"])
    assert torch.equal(before["0"], torch.bincount(ids, minlength=30))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 2)
        self.frozen = nn.BatchNorm1d(2)

    def forward(self, ids):
        return self.frozen(self.table(ids))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    model = Parts()
    model.frozen.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def call(model, ids):
        assert not model.training
        assert not model(ids).requires_grad
        if fails:
            raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            count_lookups(model, [torch.arange(9)], call)
    else:
        assert count_lookups(model, [torch.arange(9)], call)["table"].tolist() == [1] * 9
    assert num_hooks(model) == 0
    assert [part.training for part in (model, model.table, model.frozen)] == [True, True, False]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_model_without_tables_or_batches_counts_nothing():
    assert count_lookups(nn.Linear(2, 2), [torch.zeros(1, 2)]) == {}
    assert count_lookups(nn.Sequential(nn.Embedding(3, 2)), [])["0"].tolist() == [0, 0, 0]


def test_the_counts_are_those_that_methods_take():
    data, model = rows_of(100), deepfm()
    counts = count_lookups(model, data.batches(16))
    rb.apply_(model, rb.Shrinkage(counts=counts, c=3.0), verbose=False)
    for table, field in zip(model.backbone.tables.tables(), FIELDS, strict=True):
        assert torch.equal(table.evidence.counts, data.counts()[field.name])
