"""Several embedding sets in every model: each set is a small model, and their features are averaged."""

import inspect
import re

import pytest
import torch
from torch import nn

from rarebit.data import Field, Schema
from rarebit.errors import SettingsError
from rarebit.interactions.basic import Block
from rarebit.models import build_model, model_class, model_names
from rarebit.models._base import MLP

M = 3
SMALL = {"dim": 4, "hidden": (24, 16), "dropout": 0.0, "batch_norm": False}
WITH_SETS = [name for name in model_names() if not model_class(name).why_no_sets]
WITHOUT = [name for name in model_names() if model_class(name).why_no_sets]

USER, ITEM = Field(name="user", rows=6), Field(name="item", rows=5)
TAGS = Field(name="tags", kind="multi", rows=7, max_length=3)
AGE = Field(name="age", kind="numeric")

with_sets = pytest.mark.parametrize("name", WITH_SETS)
normed_or_not = pytest.mark.parametrize("batch_norm", [False, True])


@pytest.fixture(params=[(USER, ITEM), (USER, AGE, TAGS)], ids=["ids", "every kind"])
def schema(request):
    return Schema(request.param)


def make(name, schema, **wanted):
    """Return a model with weights far from zero, in double precision."""
    known = inspect.signature(model_class(name)).parameters
    settings = {key: value for key, value in SMALL.items() if key in known}
    settings |= {key: value for key, value in wanted.items() if key != "batch_norm" or key in known}
    model = build_model(name, schema, settings).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def set_axes(many, one):
    """For each weight of the backbone, the axis along which M sets lie side by side, or None.

    It is the axis along which a model with M sets is M times as large as one with a single set.
    """
    axes = {}
    for name, single in one.backbone.state_dict().items():
        stacked = many.backbone.state_dict()[name]
        assert stacked.ndim == single.ndim, f"{name}: {stacked.shape} and {single.shape}"
        differ = [k for k in range(single.ndim) if stacked.shape[k] != single.shape[k]]
        assert len(differ) <= 1, f"{name}: {stacked.shape} and {single.shape}"
        assert all(stacked.shape[k] == M * single.shape[k] for k in differ)
        axes[name] = differ[0] if differ else None
    assert any(axis is not None for axis in axes.values())
    return axes


def averaged(features):
    if isinstance(features[0], tuple):
        return tuple(torch.stack(parts).mean(dim=0) for parts in zip(*features, strict=True))
    return torch.stack(features).mean(dim=0)


@with_sets
@normed_or_not
def test_several_sets_equal_a_loop_over_models_that_share_the_head(name, batch_norm, batch):
    many = make(name, batch.schema, num_sets=M, batch_norm=batch_norm)
    one = make(name, batch.schema, num_sets=1, batch_norm=batch_norm)
    axes, features = set_axes(many, one), []
    for index in range(M):
        for key, own in one.backbone.state_dict().items():
            stacked = many.backbone.state_dict()[key]
            axis = axes[key]
            own.copy_(stacked if axis is None else stacked.chunk(M, dim=axis)[index])
        features.append(one.backbone(batch))
    want = many.head(averaged(features))
    if many.wide is not None:
        want = want + many.wide(batch)
    torch.testing.assert_close(many(batch), want, rtol=1e-10, atol=1e-10)
    assert float(want.detach().std()) > 0.01  # the rows differ: the comparison means something


@with_sets
@normed_or_not
def test_the_order_of_the_sets_does_not_matter(name, batch_norm, batch):
    many = make(name, batch.schema, num_sets=M, batch_norm=batch_norm).float()
    axes = set_axes(many, make(name, batch.schema, num_sets=1, batch_norm=batch_norm))
    before, weights = many(batch), many.backbone.state_dict()
    moved = 0
    for key, axis in axes.items():
        if axis is not None:
            first, *rest = weights[key].clone().chunk(M, dim=axis)
            weights[key].copy_(torch.cat([*rest, first], dim=axis))
            moved += 1
    assert moved
    scale = float(before.detach().abs().max().clamp(min=1.0))
    torch.testing.assert_close(many(batch), before, rtol=0, atol=1e-6 * scale)


def network_last(model):
    """Return the names of all weights, those of a set's own layer and of the network behind it last."""
    network = []
    for path, module in model.named_modules():
        layer_a_set = type(module) is nn.Sequential and isinstance(module[-1], Block)
        if layer_a_set or isinstance(module, MLP):
            start = f"{path}.{len(module) - 1}." if layer_a_set else f"{path}."
            network += [name for name, _ in model.named_parameters() if name.startswith(start)]
    return [name for name, _ in model.named_parameters() if name not in network] + network


@with_sets
@normed_or_not
def test_one_set_is_the_plain_model_with_its_first_layer_in_the_set(name, batch_norm, batch):
    plain = make(name, batch.schema, batch_norm=batch_norm)
    one = make(name, batch.schema, num_sets=1, batch_norm=batch_norm)
    with torch.no_grad():
        for theirs, ours in zip(network_last(plain), network_last(one), strict=True):
            source, target = plain.get_parameter(theirs), one.get_parameter(ours)
            assert source.numel() == target.numel(), f"{theirs} and {ours}"
            target.copy_(source.view_as(target))
    torch.testing.assert_close(one(batch), plain(batch), rtol=1e-10, atol=1e-10)


@with_sets
def test_sets_differ_from_the_start_and_each_learns(name, batch):
    many = make(name, batch.schema, num_sets=M)
    axes = set_axes(many, make(name, batch.schema, num_sets=1))
    many(batch).square().sum().backward()
    for key, parameter in many.backbone.named_parameters():
        if axes[key] is None:
            continue
        for index, gradient in enumerate(parameter.grad.chunk(M, dim=axes[key])):
            assert bool(gradient.any()), f"{key} of set {index} gets no gradient"
    fresh = build_model(name, batch.schema, {**many.settings, "init": "normal", "std": 0.1})
    first, second, _ = fresh.backbone.tables.tables()[0].weight.chunk(M, dim=1)
    assert not torch.equal(first, second)


@with_sets
@pytest.mark.parametrize(
    ("init", "fans"), [("xavier", (664, 664)), ("xavier_per_table", (604, 64))]
)
def test_each_set_starts_within_the_bound_of_its_own_table(name, init, fans):
    fields = (Field(name="user", rows=600), Field(name="shop", rows=60))
    model = build_model(name, Schema(fields), {"dim": 4, "num_sets": M, "init": init})
    for table, own in zip(model.backbone.tables.tables(), fans, strict=True):
        for part in table.weight.detach().chunk(M, dim=1):
            assert 0.95 * (6 / own) ** 0.5 < float(part.abs().max()) <= (6 / own) ** 0.5


@with_sets
def test_with_sets_gives_a_new_model_with_the_same_settings(name, schema):
    plain = make(name, schema, widths={"user": 3}, init="xavier")
    many = plain.with_sets(M)
    assert type(many) is type(plain)
    assert many.schema is plain.schema
    assert many.settings == {**plain.settings, "num_sets": M}
    assert plain.settings["num_sets"] is None
    assert many.backbone.num_sets == M


@pytest.mark.parametrize("name", WITHOUT)
def test_a_model_without_a_set_form_refuses_with_its_reason(name, schema):
    kind = model_class(name)
    assert "num_sets" not in inspect.signature(kind).parameters
    message = f"{kind.__name__} takes one embedding set: {kind.why_no_sets}"
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
        build_model(name, schema).with_sets(2)
    with pytest.raises(SettingsError, match="unknown setting 'num_sets'"):
        build_model(name, schema, {"num_sets": 2})


def test_linear_models_are_the_ones_without_a_set_form():
    assert WITHOUT == ["ffm", "fm", "fwfm", "lr"]


@with_sets
def test_fewer_than_one_set_is_refused(name, schema):
    with pytest.raises(SettingsError, match="num_sets must be at least 1, got num_sets=0"):
        build_model(name, schema).with_sets(0)
