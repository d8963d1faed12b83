import pytest
import torch
from torch import nn

from rarebit import Hashing, LowRank, apply_, optimizer
from rarebit.data import Field, Schema
from rarebit.errors import OptimizerError, SettingsError
from rarebit.models.deepfm import DeepFM

SCHEMA = Schema(
    (
        Field(name="user", rows=9),
        Field(name="tags", kind="multi", rows=6, max_length=3),
        Field(name="age", kind="numeric"),
    )
)


def names_in(model, group):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in group["params"]]


def test_tables_have_a_group_of_their_own():
    model = DeepFM(SCHEMA, dim=2, hidden=(3,))
    network, tables = optimizer(model).param_groups
    assert (network["name"], tables["name"]) == ("network", "tables")
    assert names_in(model, tables) == [
        "backbone.tables.stacks.0.embedding.weight",
        "wide.tables.stacks.0.embedding.weight",
    ]
    everything = names_in(model, network) + names_in(model, tables)
    assert sorted(everything) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("method", [Hashing(buckets=4), LowRank(rank=1)])
def test_what_a_method_trains_is_in_the_group_of_the_tables(method):
    model = DeepFM(SCHEMA, dim=2, hidden=(3,))
    apply_(model, method, verbose=False)
    tables = names_in(model, optimizer(model).param_groups[1])
    wanted = [name for name, _ in model.named_parameters() if ".tables." in name]
    assert sorted(tables) == sorted(wanted)


def test_groups_have_their_own_learning_rate_and_decay():
    model = DeepFM(SCHEMA, dim=2, hidden=(3,))
    same = optimizer(model, lr=0.1, weight_decay=0.2).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in same] == [(0.1, 0.2), (0.1, 0.2)]
    own = optimizer(model, lr=0.1, weight_decay=0.2, table_lr=0.3, table_weight_decay=0.0)
    assert [(g["lr"], g["weight_decay"]) for g in own.param_groups] == [(0.1, 0.2), (0.3, 0.0)]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("adam", torch.optim.Adam), ("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad)],
)
def test_kinds_are_torchs_own_and_fused_on_the_cpu(kind, wanted):
    made = optimizer(nn.Sequential(nn.Embedding(9, 4)), kind=kind)
    assert type(made) is wanted
    assert made.defaults["fused"] is True
    assert [group["name"] for group in made.param_groups] == ["tables"]


def test_what_cannot_be_fused_is_not():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    assert optimizer(model).defaults["fused"] is False


def test_momentum_reaches_sgd():
    made = optimizer(nn.Linear(2, 2), kind="sgd", momentum=0.9)
    assert made.param_groups[0]["momentum"] == 0.9


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    model[0].weight.requires_grad_(requires_grad=False)
    (group,) = optimizer(model).param_groups
    assert names_in(model, group) == ["1.weight", "1.bias"]


def test_a_tied_weight_is_trained_once_and_as_a_table():
    model = nn.Sequential(nn.Linear(4, 9, bias=False), nn.Embedding(9, 4))
    model[0].weight = model[1].weight
    (group,) = optimizer(model).param_groups
    assert (group["name"], len(group["params"])) == ("tables", 1)


def test_nothing_to_train_is_an_error():
    with pytest.raises(OptimizerError, match="the model has no trainable parameter"):
        optimizer(nn.ReLU())


def test_an_unknown_kind_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match=r"unknown optimizer 'adamw'; did you mean 'adam'\?"):
        optimizer(nn.Linear(2, 2), kind="adamw")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["dense", "rowwise"])
@pytest.mark.parametrize("kind", ["adam", "sgd", "adagrad"])
def test_every_optimizer_moves_weights_of_every_precision(kind, mode, dtype):
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 8)).to(dtype)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    made = optimizer(model, kind=kind, tables=mode, lr=0.1)
    model(torch.arange(40)).square().sum().backward()
    made.step()
    for parameter, before in zip(model.parameters(), start, strict=True):
        assert not torch.equal(parameter.detach(), before)
