"""Language models whose only table is tied to the output: methods on it, once it is untied."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import ModelFileError, OptimizerError, UnsupportedTableError

METHODS = [rb.LowRank(rank=2), rb.Hashing(buckets=7), rb.PEP(init=-9.0), rb.Quantize()]
IDS = torch.tensor([[3, 7, 1], [8, 0, 3]])


class TiedModel(nn.Module):
    """As GPT-2 and BERT: `output.weight` is `words.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.output = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.output.weight = self.words.weight

    def forward(self, ids):
        return self.output(self.words(ids))


def test_the_refusal_offers_to_untie():
    with pytest.raises(
        UnsupportedTableError,
        match=r"tied to 'output\.weight', .* Give it a copy with untie=True, or leave it out with where=",
    ):
        rb.apply_(TiedModel(), METHODS[0])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_method_changes_the_table_and_the_output_keeps_its_weight(method):
    model = TiedModel()
    output, rows = model.output.weight, model.words.weight.detach().clone()
    rb.apply_(model, method, untie=True, verbose=False)
    assert model.output.weight is output
    assert_close(output.detach(), rows)
    others = {p.data_ptr() for p in model.words.parameters()}
    assert output.data_ptr() not in others
    with torch.no_grad():
        output.zero_()
    assert bool(model.words(IDS).any())
    expected = model(IDS)
    rb.merge_(model, verbose=False)
    assert_close(model(IDS), expected)
    assert model.output.weight is output is not model.words.weight


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_trains_both_afterwards(given):
    model = TiedModel()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 0.5}], lr=0.1)
    model.held = [model.words.weight] if given else [optimizer]
    rb.apply_(model, METHODS[0], untie=True, optimizer=optimizer if given else None, verbose=False)
    rb.check_optimizer(model, optimizer)
    held = optimizer.param_groups[0]["params"]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    if given:  # a penalty goes on with both
        own = [model.output.weight, *model.words.parameters()]
        assert [id(p) for p in model.held] == [id(p) for p in own]
    before = [p.detach().clone() for p in held]
    model(IDS).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(held, before, strict=True))


def test_two_tables_with_one_weight_become_two():
    model = nn.ModuleDict({"a": nn.Embedding(9, 4), "b": nn.EmbeddingBag(9, 4)})
    model["b"].weight = model["a"].weight
    model.held = [model["a"].weight]
    optimizer = torch.optim.Adam(model.parameters())
    rb.apply_(model, METHODS[0], untie=True, optimizer=optimizer, verbose=False)
    held = [id(p) for p in optimizer.param_groups[0]["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))
    assert sorted(map(id, model.held)) == sorted(held)
    assert len(held) == 4


def test_an_untied_model_is_read_into_a_tied_one(tmp_path):
    model = TiedModel()
    rb.apply_(model, METHODS[0], untie=True, verbose=False)
    with torch.no_grad():
        model.output.weight.add_(1.0)
    loaded = rb.load_model(rb.save_model(model, tmp_path), into=TiedModel())
    assert_close(loaded(IDS), model(IDS))


def test_a_merged_untied_model_is_not_read_into_a_tied_one(tmp_path):
    model = TiedModel()
    rb.apply_(model, METHODS[0], untie=True, verbose=False)
    rb.merge_(model, verbose=False)
    saved = rb.save_model(model, tmp_path)
    with pytest.raises(
        ModelFileError, match=r"words\.weight and output\.weight are two weights in"
    ):
        rb.load_model(saved, into=TiedModel())
    fresh = TiedModel()
    fresh.output.weight = nn.Parameter(fresh.output.weight.detach().clone())
    assert_close(rb.load_model(saved, into=fresh)(IDS), model(IDS))


def test_a_frozen_tied_table_stays_tied(tmp_path):
    model, fresh = TiedModel(), TiedModel()
    model.words.weight.requires_grad_(False)
    saved = rb.save_model(model, tmp_path)
    with pytest.raises(ModelFileError, match=r"its weight is tied to 'output\.weight'"):
        rb.load_model(saved, into=fresh)
    assert fresh.output.weight is fresh.words.weight


def test_a_parameter_over_the_same_memory_is_tied_too():
    model = TiedModel()
    model.output.weight = nn.Parameter(model.words.weight)
    assert model.output.weight is not model.words.weight
    with pytest.raises(UnsupportedTableError, match=r"its weight is tied to 'output\.weight'"):
        rb.apply_(model, METHODS[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rb.apply_(model, METHODS[0], untie=True, optimizer=optimizer, verbose=False)
    assert len(optimizer.param_groups[0]["params"]) == len([*model.parameters()]) == 4


def test_untie_changes_nothing_where_no_weight_is_tied():
    model = nn.Sequential(nn.Embedding(9, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rb.apply_(model, METHODS[0], untie=True, verbose=False)
    with pytest.raises(OptimizerError, match="does not hold"):
        rb.check_optimizer(model, optimizer)
