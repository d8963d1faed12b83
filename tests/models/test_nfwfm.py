import pytest
import torch
from torch import nn

from rarebit.interactions.basic import Linear
from rarebit.interactions.field_pairs import FieldWeightedPooling
from rarebit.models import build_model
from rarebit.models.nfm import Evened
from rarebit.models.nfwfm import NFwFM


def pooled(v, weight):
    """Sum over all i and j, equal ones too, of w_ij (v_i * v_j)."""
    terms = [weight[i, j] * v[i] * v[j] for i in range(len(v)) for j in range(len(v))]
    return sum(terms, start=torch.zeros_like(v[0]))


@pytest.mark.parametrize("hidden", [(), (5, 4)])
def test_score_is_the_papers(schema, hidden, assert_equals_naive):
    def score(row):
        weight = row.weights["backbone.interaction.0.weight"]
        return row.network("head.layers", pooled(row.embeddings(), weight))

    assert_equals_naive(NFwFM(schema, dim=3, hidden=hidden, batch_norm=False), score)


def test_several_sets_are_the_mean_of_their_layers(schema, assert_equals_naive):
    def score(row):
        weights = row.weights
        v = [sets.unflatten(0, (2, -1)) for sets in row.embeddings()]  # (M, D) a field
        blocks = []
        for m in range(2):
            f = pooled([sets[m] for sets in v], weights["backbone.interaction.0.0.weight"][m])
            layer = [weights[f"backbone.interaction.1.{name}"][m] for name in ("weight", "bias")]
            blocks.append((layer[0] @ f + layer[1]).clamp(min=0))
        return row.network("head.layers", (blocks[0] + blocks[1]) / 2)

    model = NFwFM(schema, dim=3, hidden=(9, 7), batch_norm=False, num_sets=2)
    assert_equals_naive(model, score)


def test_the_preset_is_the_papers(schema):
    model = build_model("nfwfm@me", schema)
    assert model.wide is None
    pooling, evened = model.backbone.interaction
    assert isinstance(pooling, FieldWeightedPooling)
    assert isinstance(evened, Evened)
    assert (evened.norm.num_features, evened.dropout.p) == (50, 0.2)
    block = [Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout]
    assert [type(layer) for layer in model.head.layers] == [*block, *block, Linear]
    linear = [layer for layer in model.head.layers if isinstance(layer, nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in linear] == [(400, 50), (400, 400), (1, 400)]


def test_the_preset_with_sets_moves_a_layer_into_each_set(schema):
    model = build_model("nfwfm@me", schema, {"num_sets": 3})
    (pooling, evened), block = model.backbone.interaction
    assert tuple(pooling.weight.shape) == (3, len(schema.fields), len(schema.fields))
    assert evened.norm.num_features == 150
    assert tuple(block.weight.shape) == (3, 400, 50)
    linear = [layer for layer in model.head.layers if isinstance(layer, nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in linear] == [(400, 400), (1, 400)]
