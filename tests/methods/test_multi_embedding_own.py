"""Multi-embedding on models of a user's own: copies of the backbone, and the mean of their features."""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import ModelFileError, NoTableError, UnsupportedTableError
from rarebit.methods.multi_embedding import MultiEmbedding
from rarebit.sets.copies import AveragedSets, draw_anew_, mean_of_features

M = 3
IDS = torch.tensor([[1, 4], [8, 0], [3, 3], [0, 6]])


class Pair(NamedTuple):
    deep: torch.Tensor
    product: torch.Tensor


class Backbone(nn.Module):
    """Two tables, their product, and a layer over both; returns what it is asked for."""

    def __init__(self, returns="dict"):
        super().__init__()
        self.user = nn.Embedding(9, 4)
        self.item = nn.Embedding(7, 4, padding_idx=0)
        self.layer = nn.Sequential(nn.Linear(8, 5), nn.ReLU())
        self.returns = returns
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.01)
        with torch.no_grad():
            self.item.weight[0] = 0.0

    def forward(self, ids, scale=1.0):
        user, item = self.user(ids[:, 0]), self.item(ids[:, 1])
        deep = scale * self.layer(torch.cat([user, item], dim=1))
        product = user * item
        return {
            "tensor": deep,
            "tuple": (deep, product),
            "list": [deep, (product,)],
            "named": Pair(deep, product),
            "dict": {"deep": deep, "rest": {"product": product, "seen": ids[:, 0] > 0, "no": None}},
            "ordered": OrderedDict(deep=deep, product=product),
            "text": "features",
        }[self.returns]


class Model(nn.Module):
    def __init__(self, returns="dict"):
        super().__init__()
        self.bias = nn.Embedding(9, 1)
        self.backbone = Backbone(returns)
        self.head = nn.Linear(5, 1)

    def forward(self, ids):
        features = self.backbone(ids, scale=2.0)
        return self.head(features["deep"]).squeeze(-1) + self.bias(ids[:, 0]).squeeze(-1)


def with_sets(model, **settings):
    rb.apply_(model, MultiEmbedding(**{"num_sets": M} | settings), verbose=False)
    return model


def leaves(features):
    if isinstance(features, torch.Tensor) or features is None:
        return [features]
    parts = features.values() if isinstance(features, dict) else features
    return [leaf for part in parts for leaf in leaves(part)]


@pytest.mark.parametrize("returns", ["tensor", "tuple", "list", "named", "dict", "ordered"])
def test_features_are_the_mean_of_the_sets_tensor_by_tensor(returns):
    model = with_sets(Model(returns).double())
    sets = [one(IDS, scale=2.0) for one in model.backbone.sets]
    found = model.backbone(IDS, scale=2.0)
    assert type(found) is type(sets[0])
    for leaf, *parts in zip(leaves(found), *map(leaves, sets), strict=True):
        if leaf is None or leaf.dtype == torch.bool:
            assert leaf is parts[0] or torch.equal(leaf, parts[0])
        else:
            assert_close(leaf, (parts[0] + parts[1] + parts[2]) / 3, rtol=1e-12, atol=1e-12)
    if isinstance(found, dict):
        assert list(found) == list(sets[0])


def test_gradients_are_those_of_the_mean():
    model = with_sets(Model("tensor").double())
    pull = torch.randn(4, 5, dtype=torch.float64)
    found = torch.autograd.grad(
        (model.backbone(IDS) * pull).sum(), list(model.backbone.parameters())
    )
    expected = [
        gradient / M
        for one in model.backbone.sets
        for gradient in torch.autograd.grad((one(IDS) * pull).sum(), list(one.parameters()))
    ]
    assert_close(list(found), expected, rtol=1e-12, atol=1e-12)


def test_one_set_is_the_model_itself():
    model = Model()
    before = model(IDS)
    with_sets(model, num_sets=1)
    assert_close(model(IDS), before, rtol=0, atol=0)


def test_the_first_set_is_the_backbone_and_the_head_is_not_touched():
    model = Model()
    backbone, head, weights = model.backbone, model.head, dict(model.named_parameters())
    values = {name: weight.detach().clone() for name, weight in weights.items()}
    with_sets(model)
    assert model.backbone.sets[0] is backbone
    assert model.head is head
    for name, weight in weights.items():
        assert torch.equal(weight, values[name]), name
    assert model.bias.weight is weights["bias.weight"]


def test_the_others_are_drawn_anew_with_the_spread_of_the_tables():
    torch.manual_seed(3)
    big = Model()
    big.backbone.user = nn.Embedding.from_pretrained(0.01 * torch.randn(5000, 4), freeze=False)
    first, *others = with_sets(big).backbone.sets
    for one in others:
        assert not bool((one.user.weight == first.user.weight).any())
        assert not bool((one.layer[0].weight == first.layer[0].weight).any())
        assert float(one.user.weight.detach().std()) == pytest.approx(0.01, rel=0.03)
        assert not bool(one.item.weight[0].any())
        assert one.item.weight[1:].all()
    assert not torch.equal(others[0].user.weight, others[1].user.weight)


def test_the_order_of_the_sets_does_not_matter():
    model = with_sets(Model())
    before = model(IDS)
    model.backbone.sets = nn.ModuleList([*model.backbone.sets[1:], model.backbone.sets[0]])
    assert_close(model(IDS), before, rtol=0, atol=1e-6)


def test_every_set_is_trained_and_they_stay_apart():
    model = with_sets(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        loss = (model(IDS) - torch.tensor([1.0, -1.0, 0.5, 2.0])).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    weights = [one.layer[0].weight for one in model.backbone.sets]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_a_projection_follows_each_set():
    model = with_sets(
        Model("tensor").double(), project=lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    )
    parts = zip(model.backbone.sets, model.backbone.projections, strict=True)
    expected = torch.stack([project(one(IDS)) for one, project in parts]).mean(dim=0)
    assert_close(model.backbone(IDS), expected)
    first, second, _ = model.backbone.projections
    assert first[0].weight.dtype == torch.float64
    assert not torch.equal(first[0].weight, second[0].weight)


def test_linear_sets_are_one_wide_set_unless_a_projection_follows():
    """The paper's reason: the mean of linear sets is one linear map of all rows side by side."""
    torch.manual_seed(1)
    linear, head = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5)), nn.Linear(5, 1)
    model = nn.Module()
    model.backbone, model.head = linear, head
    with_sets(model)
    wide = torch.cat([one[0].weight for one in model.backbone.sets], dim=1)
    matrix = torch.cat([one[1].weight for one in model.backbone.sets], dim=1) / M
    bias = sum(one[1].bias for one in model.backbone.sets) / M
    ids = torch.arange(9)
    assert_close(model.backbone(ids), wide[ids] @ matrix.T + bias)


def test_what_changed_is_told_for_all_sets_together(capsys):
    changes = rb.apply_(Model(), MultiEmbedding(num_sets=M))
    assert capsys.readouterr().out.splitlines() == [
        "MultiEmbedding(num_sets=3): 2 of 3 tables, 64 -> 192 weights stored",
        "  backbone.user  9 x 4, 36 -> 108",
        "  backbone.item  7 x 4, 28 -> 84",
        "  left alone, outside the backbone: bias",
    ]
    assert [info.num_bytes for info in changes.after] == [4 * 108, 4 * 84]


def test_tables_of_the_copies_take_methods_one_by_one():
    model = with_sets(Model())
    before = model(IDS)
    changes = rb.apply_(model, rb.MLET(inner_dim=6, init="keep"), verbose=False)
    assert len(changes.after) == 2 * M
    assert_close(model(IDS), before, atol=1e-5, rtol=1e-5)
    projections = [one.user.projection for one in model.backbone.sets]
    assert not torch.equal(projections[0], projections[1])
    rb.merge_(model, verbose=False)
    assert not rb.merge_(model, verbose=False)
    assert_close(model(IDS), before, atol=1e-5, rtol=1e-5)


def test_a_backbone_may_be_a_table():
    model = nn.Module()
    model.backbone, model.head = nn.Embedding(9, 4), nn.Linear(4, 1)
    changes = rb.apply_(model, MultiEmbedding(num_sets=M, project=nn.Tanh), verbose=False)
    assert [(info.name, info.num_parameters) for info in changes.after] == [("backbone", M * 36)]
    weights = [one.weight for one in model.backbone.sets]
    expected = sum(torch.tanh(weight) for weight in weights) / M
    assert_close(model.backbone(torch.arange(9)), expected)


class NotDrawn(Backbone):
    def __init__(self):
        super().__init__("tensor")
        self.layer.gain = nn.Parameter(torch.randn(3))


class Deterministic(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 5)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.table.weight.copy_(torch.linspace(-1, 1, 45).view(9, 5))

    def forward(self, ids):
        return self.table(ids[:, 0])


def test_a_weight_that_cannot_be_drawn_anew_is_named():
    model = Model()
    model.backbone = NotDrawn()
    backbone = model.backbone
    message = r"'backbone\.layer\.gain' would start equal in all .* give Sequential a reset_parameters\(\)"
    with pytest.raises(UnsupportedTableError, match=message):
        with_sets(model)
    assert model.backbone is backbone


def test_sets_that_start_equal_are_refused_by_name():
    model = Model()
    model.backbone = Deterministic()
    message = r"embedding sets 1 and 2 start equal, 'table\.weight' and all else"
    with pytest.raises(UnsupportedTableError, match=message):
        with_sets(model)
    once = nn.Linear(5, 5)
    message = "the projections of embedding sets 1 and 2 start equal, 'weight' and all else"
    with pytest.raises(UnsupportedTableError, match=message):
        with_sets(Model("tensor"), project=lambda: once)
    with pytest.raises(UnsupportedTableError, match=r"project must return a module, .* got a str"):
        with_sets(Model("tensor"), project=lambda: "mlp")


def test_weights_that_start_at_a_constant_may_be_equal():
    model = Model("tensor")
    model.backbone.layer.append(nn.LayerNorm(5))
    model.backbone.register_parameter("gain", nn.Parameter(torch.ones(2)))
    assert len(with_sets(model).backbone.sets) == M


def test_a_backbone_may_draw_its_weights_itself():
    class Own(Backbone):
        def reset_parameters(self):
            nn.init.constant_(self.layer[0].bias, 7.0)
            nn.init.uniform_(self.user.weight, 2.0, 3.0)

    backbone = Own("tensor")
    draw_anew_(backbone)
    assert bool((backbone.layer[0].bias == 7.0).all())
    assert bool((backbone.user.weight >= 2.0).all())


def test_attention_is_drawn_anew():
    attention = nn.MultiheadAttention(8, 2)
    before = attention.in_proj_weight.detach().clone()
    draw_anew_(attention)
    assert not bool((attention.in_proj_weight == before).any())


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 1)


def test_a_model_must_name_its_backbone_and_its_head():
    message = r"must have \.backbone, .* and \.head, .*; Other has \.table, \.out"
    with pytest.raises(UnsupportedTableError, match=message):
        with_sets(Other())
    with pytest.raises(UnsupportedTableError, match="Embedding has no parts"):
        with_sets(nn.Embedding(9, 4))


def test_a_backbone_without_tables_is_refused():
    model = Model()
    model.backbone = nn.Linear(3, 3)
    with pytest.raises(NoTableError, match=r"the \.backbone of the model has none"):
        with_sets(model)


def test_tied_and_frozen_tables_are_refused():
    tied = Model()
    tied.head = nn.Linear(4, 9)
    tied.head.weight = tied.backbone.user.weight
    with pytest.raises(UnsupportedTableError, match=r"'backbone\.user': its weight is tied to"):
        with_sets(tied)
    frozen = Model()
    frozen.backbone.item.requires_grad_(requires_grad=False)
    with pytest.raises(UnsupportedTableError, match=r"'backbone\.item': it is not trained"):
        with_sets(frozen)


def test_sets_of_tables_with_a_method_or_with_sets_are_refused():
    model = Model()
    rb.apply_(model, rb.Hashing(buckets=5), verbose=False)
    with pytest.raises(UnsupportedTableError, match="multi-embedding goes before hashing"):
        with_sets(model)
    with pytest.raises(UnsupportedTableError, match="Model has several embedding sets already"):
        with_sets(with_sets(Model()))


def test_features_that_cannot_be_averaged_are_refused():
    model = with_sets(Model("text"))
    with pytest.raises(UnsupportedTableError, match=r"a backbone must return tensors, .* got str"):
        model.backbone(IDS)


def test_a_saved_model_is_read_into_a_fresh_one(tmp_path):
    model = with_sets(Model())
    rb.apply_(model, rb.MLET(inner_dim=6), verbose=False)
    rb.save_model(model, tmp_path)
    loaded = rb.load_model(tmp_path, into=Model())
    assert isinstance(loaded.backbone, AveragedSets)
    assert_close(loaded(IDS), model(IDS), rtol=0, atol=0)
    again = rb.load_model(tmp_path, into=with_sets(Model()))
    assert_close(again(IDS), model(IDS), rtol=0, atol=0)


def test_projections_must_be_there_before_they_are_read(tmp_path):
    def project():
        return nn.Sequential(nn.Linear(5, 5), nn.ReLU())

    model = with_sets(Model("tensor"), project=project)
    rb.save_model(model, tmp_path)
    with pytest.raises(ModelFileError, match="have projections of your own; apply_ it with the"):
        rb.load_model(tmp_path, into=Model("tensor"))
    loaded = rb.load_model(tmp_path, into=with_sets(Model("tensor"), project=project))
    assert_close(loaded.backbone(IDS), model.backbone(IDS), rtol=0, atol=0)


@given(
    num_sets=st.integers(1, 5),
    shape=st.lists(st.integers(0, 3), max_size=3),
    seed=st.integers(0, 1000),
)
def test_the_mean_is_that_of_each_number(num_sets, shape, seed):
    torch.manual_seed(seed)
    tensors = [torch.randn(shape, dtype=torch.float64) for _ in range(num_sets)]
    found = mean_of_features([(tensor, {"x": [tensor]}) for tensor in tensors])
    expected = sum(tensors) / num_sets
    assert_close(found[0], expected)
    assert_close(found[1]["x"][0], expected)
