import pytest
import torch

from rarebit.data import Field, Schema
from rarebit.errors import SettingsError
from rarebit.models import build_model
from rarebit.models.autoint import AutoInt

SCHEMA = Schema(tuple(Field(name=name, rows=9) for name in "abc"))
SIZES = {"dim": 2, "num_layers": 2, "num_heads": 2, "head_dim": 2}


def attended(row, fields):
    """Equations 5 to 8 of the paper: every field looks at every field, two layers, two heads."""
    for layer in range(2):
        name = f"backbone.interaction.branches.0.layers.{layer}.weight"
        query, key, value, residual = row.weights[name].chunk(4)
        new = []
        for own in fields:
            heads = []
            for head in (slice(0, 2), slice(2, 4)):
                pulls = [torch.exp((query[head] @ own) @ (key[head] @ e)) for e in fields]
                seen = [p * (value[head] @ e) for p, e in zip(pulls, fields, strict=True)]
                heads.append(sum(seen) / sum(pulls))
            new.append(torch.clamp(torch.cat(heads) + residual @ own, min=0.0))
        fields = new
    return torch.cat(fields)


def attention_score(row):
    weight, bias = (row.weights[f"head.attention.{n}"] for n in ("weight", "bias"))
    return weight[0] @ attended(row, row.embeddings()) + bias[0]


def test_score_is_the_papers(schema, assert_equals_naive):
    assert_equals_naive(AutoInt(schema, **SIZES), attention_score)


def test_hidden_layers_add_the_deep_part(schema, assert_equals_naive):
    def score(row):
        return attention_score(row) + row.network("head.mlp.layers", torch.cat(row.embeddings()))

    assert_equals_naive(AutoInt(schema, **SIZES, hidden=(4, 3)), score)


def test_first_order_weights_are_added(schema, assert_equals_naive):
    def score(row):
        return attention_score(row) + row.first_order()

    assert_equals_naive(AutoInt(schema, **SIZES, first_order=True), score)


@pytest.mark.parametrize("hidden", [(), (5, 4)])
@pytest.mark.parametrize("residual", ["each", "once"])
def test_several_sets_average_what_attention_makes_of_each(batch, hidden, residual):
    settings = {**SIZES, "hidden": hidden, "residual": residual}
    model = AutoInt(batch.schema, **settings).with_sets(3).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    sets = model.backbone.embed(batch)
    branches = model.backbone.interaction.branches
    weights = dict(branches[0].named_parameters())
    one = type(branches[0])(2, num_layers=2, num_heads=2, head_dim=2).double()
    each = [
        torch.func.functional_call(one, {n: w[m] for n, w in weights.items()}, sets[m])
        for m in range(3)
    ]
    want = model.head.attention(sum(each) / 3)[:, 0]
    if hidden:
        block = branches[1][1]
        layers = [
            torch.relu(sets[m].flatten(1) @ block.weight[m].T + block.bias[m]) for m in range(3)
        ]
        want = want + model.head.mlp(sum(layers) / 3)
    torch.testing.assert_close(model(batch), want, rtol=1e-12, atol=1e-12)


def test_the_preset_of_pep():
    model = build_model("autoint@pep", SCHEMA)
    attention, _ = model.backbone.interaction.branches
    assert model.wide is None
    assert attention.project.weight.shape == attention.residual.weight.shape == (64, 64)
    assert [layer.weight.shape for layer in attention.into] == 3 * [(192, 64)]
    assert (attention.num_heads, attention.dropout, attention.scale) == (2, 0.4, 32**-0.5)
    kinds = [type(layer).__name__ for layer in model.head.mlp.layers]
    assert kinds == [*2 * ["Linear", "BatchNorm1d", "ReLU", "Dropout"], "Linear"]
    assert [layer.out_features for layer in model.head.mlp.layers[::4]] == [100, 100, 1]
    bound = (6 / (27 + 64)) ** 0.5
    weight = model.backbone.tables.stacks[0].embedding.weight.detach()
    assert float(weight.abs().max()) == pytest.approx(bound, rel=0.01)


def test_the_preset_of_mlet():
    model = build_model("autoint@mlet", SCHEMA)
    attention, _ = model.backbone.interaction.branches
    assert [layer.weight.shape for layer in attention.layers] == 3 * [(64, 16)]
    assert attention.num_heads == 2
    assert [layer.out_features for layer in model.head.mlp.layers[::2]] == [256, 128, 1]
    assert model.wide is not None


def test_an_unknown_residual_is_refused():
    with pytest.raises(SettingsError, match="residual must be one of 'each', 'once', got 'none'"):
        build_model("autoint", SCHEMA, {"residual": "none"})


def test_a_dropout_of_one_is_refused_with_and_without_a_deep_part():
    for hidden in ((), (4,)):
        with pytest.raises(SettingsError, match=r"dropout must lie in \[0, 1\), got dropout=1.0"):
            build_model("autoint", SCHEMA, {"dropout": 1.0, "hidden": hidden})
