import pytest
import torch

from rarebit.data import Field, Schema
from rarebit.models import build_model
from rarebit.models.ipnn import IPNN

THREE = Schema(
    (
        Field(name="user", rows=6),
        Field(name="item", rows=5),
        Field(name="age", kind="numeric"),
    )
)


def products(v):
    return torch.stack([v[i] @ v[j] for i in range(len(v)) for j in range(i + 1, len(v))])


def test_score_is_the_papers(schema, assert_equals_naive):
    def score(row):
        v = row.embeddings()
        return row.network("head.layers", torch.cat([*v, products(v)]))

    assert_equals_naive(IPNN(schema, dim=3, hidden=(5, 4)), score)


@pytest.mark.parametrize("flat_in_sets", [False, True])
def test_score_of_several_sets_has_products_and_a_layer_a_set(
    schema, flat_in_sets, assert_equals_naive
):
    def score(row):
        weight, bias = (row.weights[f"backbone.interaction.1.{n}"] for n in ("weight", "bias"))
        hidden = 0.0
        for m, v in enumerate(zip(*(v.chunk(3) for v in row.embeddings()), strict=True)):
            features = torch.cat([*v, products(v)]) if flat_in_sets else products(v)
            hidden = hidden + torch.clamp(weight[m] @ features + bias[m], min=0.0) / 3
        return row.network("head.layers", hidden)

    model = IPNN(schema, dim=2, hidden=(5, 4), flat_in_sets=flat_in_sets)
    assert_equals_naive(model.with_sets(3), score)


@pytest.mark.parametrize(("preset", "width"), [("me", 3), ("me_flat", 3 * 10 + 3)])
def test_presets_differ_in_what_a_set_gives(preset, width):
    one = build_model(f"ipnn@{preset}", THREE)
    linear = [layer for layer in one.head.layers if isinstance(layer, torch.nn.Linear)]
    assert [layer.in_features for layer in linear] == [3 * 10 + 3, 400, 400]
    assert (one.wide, one.settings["dropout"], one.settings["init"]) == (None, 0.2, "xavier")
    assert isinstance(one.head.layers[1], torch.nn.BatchNorm1d)
    several = one.with_sets(4)
    block = several.backbone.interaction[1]
    assert tuple(block.weight.shape) == (4, 400, width)
    linear = [layer for layer in several.head.layers if isinstance(layer, torch.nn.Linear)]
    assert [layer.in_features for layer in linear] == [400, 400]


def test_one_field_is_scored_by_its_products_too():
    schema = Schema((Field(name="user", rows=6),))
    model = IPNN(schema, dim=2, hidden=(3,), flat_in_sets=False, num_sets=2)
    assert tuple(model.backbone.interaction[1].weight.shape) == (2, 3, 1)
