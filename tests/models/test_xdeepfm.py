import pytest
import torch

from rarebit.data import Field, Schema
from rarebit.errors import SettingsError
from rarebit.interactions.basic import Block
from rarebit.models import build_model
from rarebit.models.xdeepfm import XDeepFM

BRANCHES = "backbone.interaction.branches"
SMALL = Schema((Field(name="user", rows=6), Field(name="age", kind="numeric")))


def compressed(row, fields, index=(), *, relu, split_half):
    """CIN's maps, x^{k+1}_h = sum_ij W^h_ij (x^k_i * x^0_j), two layers, summed over D."""
    maps, features = fields, []
    for layer in range(2):
        weight = row.weights[f"{BRANCHES}.0.weights.{layer}"][index]
        products = torch.stack([x * field for x in maps for field in fields])
        found = [w @ products for w in weight]
        if relu:
            bias = row.weights[f"{BRANCHES}.0.biases.{layer}"][index]
            found = [torch.clamp(x + b, min=0.0) for x, b in zip(found, bias, strict=True)]
        half = len(found) // 2 if split_half else 0
        features += found[half:] if layer == 0 else found
        maps = found[:half] if split_half else found
    return torch.stack([x.sum() for x in features])


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize(("relu", "split_half"), [(False, False), (True, False), (True, True)])
def test_score_is_the_papers(schema, first_order, relu, split_half, assert_equals_naive):
    def score(row):
        fields = row.embeddings()
        maps = compressed(row, fields, relu=relu, split_half=split_half)
        deep = row.network("head.mlp.layers", torch.cat(fields))
        wide = row.first_order() if first_order else 0.0
        return wide + row.weights["head.maps.weight"][0] @ maps + deep

    settings = {"cin_relu": relu, "split_half": split_half, "first_order": first_order}
    assert_equals_naive(XDeepFM(schema, dim=3, cin=(4, 3), hidden=(5, 4), **settings), score)


def test_score_of_several_sets_is_the_mean_of_maps_and_of_first_layers(schema, assert_equals_naive):
    def score(row):
        sets = list(zip(*(v.chunk(3) for v in row.embeddings()), strict=True))
        weight, bias = (row.weights[f"{BRANCHES}.1.1.{name}"] for name in ("weight", "bias"))
        maps = [
            compressed(row, fields, m, relu=True, split_half=False) for m, fields in enumerate(sets)
        ]
        hidden = [
            torch.clamp(weight[m] @ torch.cat(fields) + bias[m], min=0.0)
            for m, fields in enumerate(sets)
        ]
        shared = row.network("head.mlp.layers", sum(hidden) / 3)
        return row.weights["head.maps.weight"][0] @ (sum(maps) / 3) + shared

    model = XDeepFM(schema, dim=2, cin=(4, 3), cin_relu=True, hidden=(5, 4), first_order=False)
    assert_equals_naive(model.with_sets(3), score)


def test_presets_are_those_of_the_papers():
    me, mlet = (build_model(f"xdeepfm@{name}", SMALL) for name in ("me", "mlet"))
    assert [tuple(w.shape) for w in me.backbone.interaction.branches[0].weights] == [
        (16, 2 * 2),
        (16, 16 * 2),
    ]
    assert [tuple(w.shape) for w in mlet.backbone.interaction.branches[0].weights] == [
        (256, 2 * 2),
        (128, 128 * 2),
    ]
    assert (me.wide, me.backbone.tables.dim) == (None, 10)
    assert mlet.wide is not None
    units = [
        [layer.out_features for layer in model.head.mlp.layers if hasattr(layer, "out_features")]
        for model in (me, mlet)
    ]
    assert units == [[400, 400, 1], [256, 256, 1]]
    assert isinstance(me.head.mlp.layers[1], torch.nn.BatchNorm1d)
    assert me.head.mlp.layers[3].p == 0.2


def test_several_sets_take_a_layer_from_the_shared_network():
    model = build_model("xdeepfm@me", SMALL).with_sets(2)
    assert isinstance(model.backbone.interaction.branches[1][1], Block)
    assert model.head.mlp.layers[-1].in_features == 400
    assert sum(isinstance(layer, torch.nn.Linear) for layer in model.head.mlp.layers) == 2


def test_a_bad_network_of_products_is_refused():
    with pytest.raises(SettingsError, match="needs a layer, got none"):
        build_model("xdeepfm", SMALL, {"cin": []})
    with pytest.raises(SettingsError, match=r"layers of even size, except the last, got \(3, 3\)"):
        build_model("xdeepfm", SMALL, {"cin": [3, 3], "split_half": True})
