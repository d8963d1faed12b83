import pytest
import torch

from rarebit.data import Field, Schema
from rarebit.errors import SettingsError
from rarebit.models import build_model
from rarebit.models.final_mlp import FinalMLP

SCHEMA = Schema(tuple(Field(name=name, rows=9) for name in "abc"))


def stream(row, name, depth):
    x = torch.cat(row.embeddings())
    for layer in range(depth):
        weight, bias = (
            row.weights[f"backbone.interaction.{name}.{layer}.{n}"] for n in ("weight", "bias")
        )
        x = torch.stack(
            [torch.clamp(w @ x + b, min=0.0) for w, b in zip(weight, bias, strict=True)]
        )
    return x


def fused(row, x, y, num_heads):
    """b + w_x . x + w_y . y + sum over heads, i and j of x_i W_ij y_j."""
    weight, products = row.weights["head.linear.weight"][0], row.weights["head.products"]
    score = row.weights["head.linear.bias"][0]
    score = score + weight[: len(x)] @ x + weight[len(x) :] @ y
    wide, high = len(x) // num_heads, len(y) // num_heads
    for head in range(num_heads):
        for i in range(wide):
            for j in range(high):
                pair = x[head * wide + i] * y[head * high + j]
                score = score + products[head, i, j] * pair
    return score


@pytest.mark.parametrize("num_heads", [1, 2])
def test_score_is_the_papers(schema, num_heads, assert_equals_naive):
    def score(row):
        return fused(row, stream(row, "first", 2), stream(row, "second", 1), num_heads)

    settings = {"hidden": (5, 4), "second_hidden": (6,), "num_heads": num_heads}
    assert_equals_naive(FinalMLP(schema, dim=2, **settings), score)


def test_both_streams_have_the_same_layers_unless_told(schema, assert_equals_naive):
    def score(row):
        return fused(row, stream(row, "first", 1), stream(row, "second", 1), 1)

    assert_equals_naive(FinalMLP(schema, dim=2, hidden=(3,)), score)


def test_several_sets_average_each_stream_before_they_are_fused(batch):
    model = FinalMLP(batch.schema, dim=2, hidden=(5, 4), num_heads=2).with_sets(3).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    sets, means = model.backbone.embed(batch), []
    for blocks in (model.backbone.interaction.first, model.backbone.interaction.second):
        each = []
        for m in range(3):
            x = sets[m].flatten(1)
            for block in blocks:
                x = torch.relu(x @ block.weight[m].T + block.bias[m])
            each.append(x)
        means.append(sum(each) / 3)
    torch.testing.assert_close(model(batch), model.head(tuple(means)), rtol=1e-12, atol=1e-12)


def test_products_start_at_zero_and_are_learned(batch):
    model = FinalMLP(batch.schema, dim=2, hidden=(40,))
    assert not model.head.products.any()
    model(batch).sum().backward()
    assert bool(model.head.products.grad.any())


def test_the_preset_of_multi_embedding():
    model = build_model("final_mlp@me", SCHEMA)
    for blocks in (model.backbone.interaction.first, model.backbone.interaction.second):
        assert [block.weight.shape for block in blocks] == [(400, 30), (400, 400)]
        assert all(block.norm is not None and block.dropout.p == 0.2 for block in blocks)
    assert model.head.products.shape == (1, 400, 400)
    weight = model.backbone.tables.stacks[0].embedding.weight.detach()
    assert float(weight.abs().max()) == pytest.approx((6 / (27 + 10)) ** 0.5, rel=0.01)


def test_no_layer_is_removed_for_several_sets():
    streams = build_model("final_mlp@me", SCHEMA).with_sets(2).backbone.interaction
    assert [block.weight.shape for block in streams.first] == [(2, 400, 30), (2, 400, 400)]


def test_heads_that_do_not_divide_the_streams_are_refused():
    message = "num_heads must divide the width of both streams, got num_heads=3 for widths 4 and 6"
    with pytest.raises(SettingsError, match=message):
        FinalMLP(SCHEMA, hidden=(4,), second_hidden=(6,), num_heads=3)
    with pytest.raises(SettingsError, match="got num_heads=0"):
        FinalMLP(SCHEMA, hidden=(4,), num_heads=0)


def test_several_sets_without_a_hidden_layer_are_refused():
    with pytest.raises(SettingsError, match=r"need a hidden layer each, got hidden=\(\)"):
        FinalMLP(SCHEMA, hidden=(), num_sets=2)
