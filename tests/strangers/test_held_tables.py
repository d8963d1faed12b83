"""Models that hold their tables a second time: in lists, penalties, optimizers, objects and functions."""

import functools
import re
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import OptimizerError, UnsupportedTableError
from rarebit.models.dnn import DNN
from rarebit.models.fm import FM

LOW_RANK, HASHING = rb.LowRank(rank=2), rb.Hashing(buckets=5)
IDS = torch.tensor([[3, 7], [8, 0], [3, 1]])


class Ranker(nn.Module):
    """A user, an item, and a layer: what the others hold twice."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(9, 4), nn.Embedding(8, 4)
        self.out = nn.Linear(8, 1)
        self.finish()

    def finish(self) -> None:
        pass

    def rows(self, ids):
        return [self.user(ids[:, 0]), self.item(ids[:, 1])]

    def forward(self, ids):
        return self.out(torch.cat(self.rows(ids), dim=1)).squeeze(1)


class OwnOptimizer(Ranker):
    """As in FuxiCTR: the optimizer and its schedule are built with the model, and `fit` uses them."""

    def finish(self):
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1)

    def fit_step(self, ids):
        self.optimizer.zero_grad()
        loss = (self(ids) - 1.0).square().mean()
        loss.backward()
        self.optimizer.step()


class Penalised(Ranker):
    """As in DeepCTR-Torch: lists of parameters, or of named ones, with the factors of their penalties."""

    def finish(self):
        tables = [*self.user.parameters(), *self.item.parameters()]
        self.regularization_weight = [(tables, 0.0, 0.5)]
        self.regularization_weight.append((list(self.out.named_parameters()), 0.0, 0.1))

    def penalty(self):
        total = torch.zeros(())
        for weights, _, l2 in self.regularization_weight:
            for weight in weights:
                total = (
                    total + l2 * (weight[1] if isinstance(weight, tuple) else weight).square().sum()
                )
        return total


class Listed(Ranker):
    """A plain list of the tables, which `forward` reads."""

    def finish(self):
        self.tables = [self.user, self.item]

    def rows(self, ids):
        return [table(ids[:, place]) for place, table in enumerate(self.tables)]


class Pair(NamedTuple):
    user: nn.Module
    item: nn.Module


@dataclass(frozen=True)
class Frozen:
    table: nn.Module


class Slotted:
    __slots__ = ("table",)

    def __init__(self, table):
        self.table = table


class Helper(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table


def keep(kept):
    return lambda: kept


def test_an_optimizer_built_by_the_model_trains_the_new_tables():
    model = OwnOptimizer()
    model.fit_step(IDS)
    changes = rb.apply_(model, LOW_RANK, verbose=False)
    assert changes.exchanged == ("optimizer (Adam)",)
    rb.check_optimizer(model, model.optimizer)
    before = model.user.weight.detach().clone(), model.out.weight.detach().clone()
    layer_state = model.optimizer.state[model.out.weight]
    model.fit_step(IDS)
    assert int(layer_state["step"]) == 2
    assert (model.user.weight - before[0]).abs().max() > 0.01
    assert model.schedule.optimizer is model.optimizer
    assert rb.merge_(model, verbose=False).exchanged == ("optimizer (Adam)",)
    before = model.user.weight.detach().clone()
    model.fit_step(IDS)
    assert (model.user.weight - before).abs().max() > 0.01


def test_a_given_optimizer_that_the_model_holds_is_exchanged_once():
    model = OwnOptimizer()
    rb.apply_(model, LOW_RANK, optimizer=model.optimizer, verbose=False)
    held = [p for group in model.optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in model.parameters()]


COUNTS = {"user": torch.arange(9), "item": torch.arange(8)}


@pytest.mark.parametrize(
    ("method", "apart"),
    [
        (LOW_RANK, None),
        (HASHING, None),
        (rb.MLET(inner_dim=6), None),
        (rb.PEP(init=-9.0), "levels"),
        (rb.PEP(init=-9.0, granularity="global"), "levels"),
        (rb.Shrinkage(counts=COUNTS), "prior"),
    ],
)
def test_a_penalty_goes_on_with_what_stores_the_rows(method, apart):
    model = Penalised()
    changes = rb.apply_(model, method, verbose=False)
    own = [*model.user.named_parameters(prefix="user"), *model.item.named_parameters(prefix="item")]
    rows = [(name, p) for name, p in own if name.split(".")[1] != apart]
    assert (len(rows) < len(own)) == (apart is not None)
    held = model.regularization_weight[0][0]
    assert [id(p) for p in held] == [id(p) for _, p in rows]
    assert all(name in str(changes) for name, _ in rows)
    expected = 0.5 * sum(p.square().sum() for _, p in rows)
    expected = expected + 0.1 * sum(p.square().sum() for p in model.out.parameters())
    assert_close(model.penalty(), expected)
    model.penalty().backward()
    assert all(p.grad is not None for _, p in rows)
    rb.merge_(model, verbose=False)
    assert [id(p) for p in held] == [id(model.user.weight), id(model.item.weight)]


def test_a_penalty_of_one_table_is_left_to_the_others():
    model = Penalised()
    rb.apply_(model, LOW_RANK, where=lambda t: t.name == "user", verbose=False)
    held = model.regularization_weight[0][0]
    own = [model.user.inner.weight, model.user.right, model.item.weight]
    assert sorted(map(id, held)) == sorted(map(id, own))


def test_a_list_of_tables_is_read_by_forward():
    model = Listed()
    plain = Ranker()
    changes = rb.apply_(model, LOW_RANK, verbose=False)
    assert changes.exchanged == ("tables[0]", "tables[1]")
    assert "also exchanged: tables[0]" in str(changes)
    assert model.tables == [model.user, model.item]
    model(IDS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    expected = model(IDS)
    rb.merge_(model, verbose=False)
    assert model.tables == [model.user, model.item]
    assert [type(table) for table in model.tables] == [nn.Embedding, nn.Embedding]
    assert_close(model(IDS), expected)
    plain.load_state_dict(model.state_dict())
    assert_close(plain(IDS), expected)


def test_a_tuple_in_two_places_is_made_anew_in_both():
    model = Ranker()
    pair = (model.user, 1)
    model.one, model.two = [pair], {"a": pair}
    rb.apply_(model, HASHING, verbose=False)
    assert model.one[0][0] is model.two["a"][0] is model.user


HOLDS = {
    "list": (lambda t: [t], lambda held: held[0]),
    "tuple": (lambda t: (1, (t,)), lambda held: held[1][0]),
    "named tuple": (lambda t: Pair(t, None), lambda held: held.user),
    "dict": (lambda t: {"a": {"b": t}}, lambda held: held["a"]["b"]),
    "set": (lambda t: {t}, lambda held: next(iter(held))),
    "tuple in a dict": (lambda t: {"a": (t, 1)}, lambda held: held["a"][0]),
    "frozen dataclass": (Frozen, lambda held: held.table),
    "slots": (Slotted, lambda held: held.table),
    "partial": (lambda t: functools.partial(print, table=t), lambda held: held.keywords["table"]),
    "list in a closure": (lambda t: keep([t]), lambda held: held()[0]),
    "module outside": (lambda t: [Helper(t)], lambda held: held[0].table),
}


@pytest.mark.parametrize("kind", HOLDS)
@pytest.mark.parametrize("change", [lambda m: rb.apply_(m, HASHING, verbose=False), rb.pack_])
def test_a_module_is_exchanged_wherever_it_is_held(kind, change):
    make, read = HOLDS[kind]
    model = Ranker()
    with torch.no_grad():
        model.user.weight[1:] = 0.0
    model.__dict__["held"] = make(model.user)
    assert change(model).exchanged
    assert read(model.held) is model.user
    assert type(model.user) is not nn.Embedding
    rb.merge_(model, verbose=False)
    assert read(model.held) is model.user
    assert type(model.user) is nn.Embedding


REFUSED = {
    "closure": (
        lambda m: keep(m.user),
        "'held.kept' of the model, which a function keeps",
    ),
    "default": (
        lambda m: lambda table=m.user: table,
        "'held.default[0]' of the model, which a function keeps",
    ),
    "bound method": (
        lambda m: m.user.forward,
        "'held.__self__' of the model, which a method keeps",
    ),
    "partial": (
        lambda m: functools.partial(print, m.user),
        "'held.args[0]' of the model, which a partial keeps",
    ),
    "key": (lambda m: {m.user: 1}, "\"held['a key']\" of the model, which is a key"),
    "deque": (lambda m: deque([m.user]), "'held[0]' of the model, which a deque keeps"),
    "named parameter": (
        lambda m: [("user", m.user.weight)],
        "which has room for one parameter, and the new",
    ),
    "dict of parameters": (
        lambda m: dict(m.named_parameters()),
        "which has room for one parameter",
    ),
    "memory": (
        lambda m: [m.user.weight.data.T],
        "'held[0]' of the model, which shares memory with",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exchanged_is_refused_by_name_and_nothing_changes(kind):
    make, message = REFUSED[kind]
    model = OwnOptimizer()
    model.tables = [model.item]
    model.__dict__["held"] = make(model)
    parts, held = list(model.modules()), [*model.optimizer.param_groups[0]["params"]]
    with pytest.raises(UnsupportedTableError, match=re.escape(message)) as error:
        rb.apply_(model, LOW_RANK, verbose=False)
    assert "before this call, and make it again after it" in str(error.value)
    assert all(map(lambda a, b: a is b, parts, model.modules()))
    assert all(map(lambda a, b: a is b, held, model.optimizer.param_groups[0]["params"]))
    assert model.tables == [model.item]
    del model.__dict__["held"]
    assert rb.apply_(model, LOW_RANK, verbose=False)


def test_one_parameter_takes_the_place_of_one():
    model = Ranker()
    model.named = {"user": model.user.weight, "pair": ("user", model.user.weight)}
    rb.apply_(model, HASHING, verbose=False)
    assert model.named["user"] is model.user.inner.weight
    assert model.named["pair"][1] is model.user.inner.weight
    rb.merge_(model, verbose=False)
    assert model.named["pair"][1] is model.user.weight


def test_a_part_of_a_table_is_refused_when_it_is_merged():
    model = Ranker()
    rb.apply_(model, HASHING, verbose=False)
    model.inner = [model.user.inner]
    with pytest.raises(
        UnsupportedTableError, match=r"'inner\[0\]' of the model, which is a part of 'user'"
    ):
        rb.merge_(model, verbose=False)


def test_a_table_with_two_names_in_a_module_list_and_a_list():
    model = Ranker()
    model.again = model.user
    model.parts = nn.ModuleList([model.user, model.item])
    model.tables = [*model.parts]
    rb.apply_(model, HASHING, verbose=False)
    assert model.again is model.user is model.parts[0] is model.tables[0]
    rb.merge_(model, verbose=False)
    assert model.again is model.user is model.parts[0] is model.tables[0]
    assert type(model.user) is nn.Embedding


def test_an_attribute_that_leads_back_to_the_model_ends():
    model = Listed()
    model.out.__dict__["parent"] = model
    model.loop = [model]
    model.loop.append(model.loop)
    assert len(rb.apply_(model, HASHING, verbose=False).exchanged) == 2
    assert model.tables[0] is model.user


class Cached(Ranker):
    @functools.cached_property
    def all_tables(self):
        return [self.user, self.item]


def test_a_cache_that_was_filled_is_exchanged():
    model = Cached()
    assert model.all_tables
    assert rb.apply_(model, HASHING, verbose=False).exchanged == ("all_tables[0]", "all_tables[1]")
    assert model.all_tables == [model.user, model.item]


def test_a_long_list_of_numbers_is_not_searched():
    model = Ranker()
    model.vocabulary = {str(number): number for number in range(20_000)}
    model.lines = [[number] for number in range(20_000)]
    assert rb.apply_(model, HASHING, verbose=False).exchanged == ()


def test_a_stack_of_our_own_is_exchanged_in_a_penalty():
    schema = rb.data.Schema(tuple(rb.data.Field(name=name, rows=9) for name in "abc"))
    model = FM(schema, dim=3)
    model.penalised = list(model.backbone.tables.parameters())
    rb.apply_(model, LOW_RANK, where=lambda t: t.field == "a", verbose=False)
    assert sorted(map(id, model.penalised)) == sorted(map(id, model.backbone.tables.parameters()))
    rb.apply_(model, rb.PEP(init=-9.0), verbose=False)
    names = [name for name, _ in model.backbone.tables.named_parameters() if "levels" not in name]
    held = [
        name
        for name, p in model.backbone.tables.named_parameters()
        if any(p is one for one in model.penalised)
    ]
    assert held == names
    rb.merge_(model, verbose=False)
    assert sorted(map(id, model.penalised)) == sorted(map(id, model.backbone.tables.parameters()))


def test_check_optimizer_finds_an_old_table_outside_the_part_that_changed():
    model = nn.Sequential(Ranker())
    model.tables = [model[0].user]
    rb.apply_(model[0], HASHING, verbose=False)
    with pytest.raises(
        OptimizerError, match=r"'tables\[0\]' of the model holds a table that was replaced"
    ):
        rb.check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.tables = [model[0].user]
    rb.check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Scaled(nn.Module):
    """A backbone that reads a weight of the model around it."""

    def __init__(self, model):
        super().__init__()
        self.user = nn.Embedding(9, 4)
        self.around = [model]

    def forward(self, ids):
        return self.user(ids) * self.around[0].scale


class WithBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.backbone, self.head = Scaled(self), nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.backbone(ids))


def test_embedding_sets_copy_nothing_around_the_backbone():
    model = WithBackbone()
    rb.apply_(model, rb.MultiEmbedding(num_sets=3), verbose=False)
    assert [one.around[0] for one in model.backbone.sets] == [model] * 3
    model(IDS[:, 0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["optimizer", "parts", "weights"])
@pytest.mark.parametrize("ours", [True, False])
def test_embedding_sets_refuse_what_holds_the_backbone(ours, name):
    schema = rb.data.Schema((rb.data.Field(name="a", rows=9), rb.data.Field(name="b", rows=9)))
    model = DNN(schema, dim=3) if ours else WithBackbone()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.parts, model.weights = (model.backbone,), [*model.backbone.parameters()]
    for other in {"optimizer", "parts", "weights"} - {name}:
        delattr(model, other)
    backbone = model.backbone
    with pytest.raises(UnsupportedTableError, match=f"replaces parts of the model that '{name}"):
        rb.apply_(model, rb.MultiEmbedding(num_sets=2), verbose=False)
    assert model.backbone is backbone
    delattr(model, name)
    assert rb.apply_(model, rb.MultiEmbedding(num_sets=2), verbose=False)
