import pytest
import torch

from rarebit.data import Field, Schema
from rarebit.errors import SettingsError
from rarebit.models import build_model
from rarebit.models.dcn import DCN

BRANCHES = "backbone.interaction.branches"
SMALL = Schema((Field(name="user", rows=6), Field(name="age", kind="numeric")))


def crossed(row, first, num_layers, index=()):
    """x_L, by x_{l+1} = x_0 (w_l . x_l) + b_l + x_l."""
    weight, bias = (row.weights[f"{BRANCHES}.0.{name}"][index] for name in ("weight", "bias"))
    x = first
    for layer in range(num_layers):
        x = first * (weight[layer] @ x) + bias[layer] + x
    return x


def last_hidden(row, x, layers):
    """h_L: the network without its last layer."""
    for layer in layers:
        weight, bias = (row.weights[f"head.mlp.layers.{layer}.{n}"] for n in ("weight", "bias"))
        x = torch.clamp(weight @ x + bias, min=0.0)
    return x


@pytest.mark.parametrize("num_layers", [1, 3])
def test_score_is_the_papers(schema, num_layers, assert_equals_naive):
    def score(row):
        first = torch.cat(row.embeddings())
        deep = last_hidden(row, first, layers=(0, 2))
        out = [row.weights[f"head.{name}.weight"][0] for name in ("cross", "mlp.layers.4")]
        both = torch.cat([crossed(row, first, num_layers), deep])
        return torch.cat(out) @ both + row.weights["head.mlp.layers.4.bias"][0]

    assert_equals_naive(DCN(schema, dim=2, num_layers=num_layers, hidden=(5, 4)), score)


def test_score_of_several_sets_has_a_cross_network_and_a_layer_a_set(schema, assert_equals_naive):
    def score(row):
        sets = [torch.cat(one) for one in zip(*(v.chunk(3) for v in row.embeddings()), strict=True)]
        weight, bias = (row.weights[f"{BRANCHES}.1.1.{name}"] for name in ("weight", "bias"))
        cross = sum(crossed(row, first, 2, m) for m, first in enumerate(sets)) / 3
        hidden = sum(
            torch.clamp(weight[m] @ first + bias[m], min=0.0) for m, first in enumerate(sets)
        )
        deep = row.network("head.mlp.layers", hidden / 3)
        return row.weights["head.cross.weight"][0] @ cross + deep

    assert_equals_naive(DCN(schema, dim=2, num_layers=2, hidden=(5, 4)).with_sets(3), score)


def test_preset_is_that_of_the_paper():
    model = build_model("dcn@mlet", SMALL)
    assert tuple(model.backbone.interaction.branches[0].weight.shape) == (2, 2 * 16)
    layers = [layer for layer in model.head.mlp.layers if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [128, 128, 1]


def test_a_cross_network_needs_a_layer():
    with pytest.raises(SettingsError, match="num_layers must be at least 1, got num_layers=0"):
        build_model("dcn", SMALL, {"num_layers": 0})
