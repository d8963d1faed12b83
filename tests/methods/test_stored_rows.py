"""The rows that are changed between epochs are those that are trained, and an optimizer starts again with them."""

import copy

import pytest
import torch
from methods.shrunk_models import deepfm
from methods.training_data import rows_of, training_data
from rarebit.methods._stored_rows import restart_, stored_rows
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization

import rarebit as rb
from rarebit.errors import UnsupportedTableError
from rarebit.methods.forgetting import Forgetting

STEPS = 8
"""Steps of an epoch of 64 rows."""

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adagrad from 3": lambda params: torch.optim.Adagrad(
        params, lr=0.1, initial_accumulator_value=3.0
    ),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1, t0=2),
    "sparse adam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
}


def steps(table: nn.Embedding, optimizer: torch.optim.Optimizer, target: Tensor) -> None:
    for number in range(7):
        one_step(table, optimizer, target, number)


def one_step(
    table: nn.Embedding, optimizer: torch.optim.Optimizer, target: Tensor, number: int
) -> None:
    ids = torch.tensor([number % 5, 2])
    (table(ids) - target[ids]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_on_as_a_new_one(kind):
    table, target = nn.Embedding(5, 3, sparse=kind == "sparse adam"), torch.randn(5, 3)
    optimizer = OPTIMIZERS[kind](table.parameters())
    steps(table, optimizer, target)
    expected, goes_on = copy.deepcopy(table), copy.deepcopy(table)
    new, old = OPTIMIZERS[kind](expected.parameters()), OPTIMIZERS[kind](goes_on.parameters())
    old.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    restart_(optimizer, stored_rows(table, "a test"))
    steps(goes_on, old, target)
    for number in range(7):
        one_step(table, optimizer, target, number)
        one_step(expected, new, target, number)
        assert torch.equal(table.weight, expected.weight)
        assert str(optimizer.state_dict()["state"]) == str(new.state_dict()["state"])
    assert not torch.allclose(table.weight, goes_on.weight)


def test_a_state_stays_in_its_memory():
    table = nn.Embedding(5, 3)
    optimizer = torch.optim.Adam(table.parameters())
    steps(table, optimizer, torch.randn(5, 3))
    before = {key: value.data_ptr() for key, value in optimizer.state[table.weight].items()}
    restart_(optimizer, stored_rows(table, "a test"))
    now = optimizer.state[table.weight]
    assert {key: value.data_ptr() for key, value in now.items()} == before
    assert not any(value.any() for value in now.values())


def test_an_optimizer_that_has_made_no_step_has_nothing_to_forget():
    table = nn.Embedding(5, 3)
    optimizer = torch.optim.Adam(table.parameters())
    restart_(optimizer, stored_rows(table, "a test"))
    assert not optimizer.state


def test_weights_of_the_network_in_the_same_memory_are_none_of_the_tables():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    table, layer = model[0].weight, model[1].weight
    assert table.untyped_storage().data_ptr() == layer.untyped_storage().data_ptr()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    restart_(optimizer, stored_rows(model, "a test"))
    assert not bool(optimizer.state[table]["exp_avg"].any())
    assert bool(optimizer.state[layer]["exp_avg"].any())


def test_of_several_optimizers_the_one_of_the_tables_starts_again():
    model, train = deepfm(), rows_of(64)
    tables = {
        id(p): p for p in (*model.backbone.tables.parameters(), *model.wide.tables.parameters())
    }
    network = [p for p in model.parameters() if id(p) not in tables]
    optimizers = [torch.optim.Adam(network), torch.optim.Adam(tables.values())]
    forgetting = Forgetting().start(model, training_data(train))
    model(train[:8]).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    forgetting.after_step(STEPS + 1)
    forgetting.close()
    of_network, of_tables = (optimizer.state for optimizer in optimizers)
    assert all(bool(of_network[p]["step"].any()) for p in network)
    assert not any(bool(of_tables[p]["step"].any()) for p in tables.values())


def test_all_rows_are_found_where_they_are_trained():
    model = deepfm(rb.Shrinkage(counts=7, c=3.0, prior="hashed"))
    own = [
        tables.stacks[0].inner.embedding.weight
        for tables in (model.backbone.tables, model.wide.tables)
    ]
    found = stored_rows(model, "a test")
    assert [id(rows.parameter) for rows in found] == [
        id(weight) for weight in own for _ in range(3)
    ]
    for rows in found:
        rows.weight.fill_(5.0)
    assert all(bool((weight == 5.0).all()) for weight in own)


def test_a_table_that_is_used_twice_is_changed_once():
    table = nn.Embedding(5, 3)
    model = nn.ModuleDict({"query": table, "document": table})
    assert len(stored_rows(model, "a test")) == 1
    model["document"] = nn.Embedding(5, 3)
    model["document"].weight = table.weight
    with pytest.raises(
        UnsupportedTableError,
        match="a test changes each row once, and the tables 'query' and 'document' have the same",
    ):
        stored_rows(model, "a test")


def quantised() -> nn.Embedding:
    holder = nn.Sequential(nn.Embedding(5, 3))
    rb.apply_(holder, rb.Quantize(bits=8), verbose=False)
    return holder[0]


@pytest.mark.parametrize(
    "make", [quantised, lambda: nn.Embedding.from_pretrained(torch.ones(5, 3))]
)
def test_a_table_that_is_not_trained_is_refused_also_beside_others(make):
    model = nn.ModuleDict({"user": nn.Embedding(5, 3), "item": make()})
    with pytest.raises(
        UnsupportedTableError,
        match="a test changes rows that are stored and trained, and those of 'item' are not; give",
    ):
        stored_rows(model, "a test")
    assert len(stored_rows(model["user"], "a test")) == 1


class Elsewhere(nn.Module):
    """Looks rows up in other memory than that of the weight that is trained."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, weight: Tensor) -> Tensor:
        del weight
        return self.rows


def test_a_table_whose_rows_are_computed_is_refused():
    memory = torch.zeros(2, 5, 3)
    table = nn.Embedding(5, 3, _weight=memory[0])
    register_parametrization(table, "weight", Elsewhere(memory[1]))
    with pytest.raises(UnsupportedTableError, match="and those of 'user' are not"):
        stored_rows(nn.ModuleDict({"user": table}), "a test")
