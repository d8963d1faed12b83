import math

import pytest
import torch
from torch import nn

from rarebit.errors import SettingsError
from rarebit.interactions.self_attention import OneResidual, SelfAttention

SIZES = {"num_layers": 2, "num_heads": 2, "head_dim": 3}
FORMS = pytest.mark.parametrize("form", [SelfAttention, OneResidual])


def zero():
    return torch.zeros((), dtype=torch.float64)


def dot(x, y):
    return sum((a * b for a, b in zip(x, y, strict=True)), start=zero())


def affine(matrix, x, shift=None):
    """W x + b, number by number."""
    shift = [0.0] * len(matrix) if shift is None else shift
    return torch.stack([dot(row, x) + b for row, b in zip(matrix, shift, strict=True)])


def relu(x):
    return torch.stack([torch.clamp(number, min=0.0) for number in x])


def looked_at(queries, keys, values, divide_by):
    """For each field, the sum over k of softmax_k(<q_i, k_k>) v_k."""
    found = []
    for query in queries:
        strengths = [torch.exp(dot(query, key) / divide_by) for key in keys]
        total = sum(strengths, start=zero())
        parts = [
            strength / total * value for strength, value in zip(strengths, values, strict=True)
        ]
        found.append(sum(parts, start=torch.zeros_like(values[0])))
    return found


def attend(queries, keys, values, divide_by):
    """Head by head, then side by side."""
    heads = []
    for head in range(SIZES["num_heads"]):
        part = slice(head * SIZES["head_dim"], (head + 1) * SIZES["head_dim"])
        heads.append(
            looked_at(*([x[part] for x in all_] for all_ in (queries, keys, values)), divide_by)
        )
    return [torch.cat(parts) for parts in zip(*heads, strict=True)]


def naive_each(embeddings, weights):
    """One row `(F, D)` by equations 5 to 8."""
    fields = list(embeddings)
    for layer in range(SIZES["num_layers"]):
        query, key, value, residual = weights[f"layers.{layer}.weight"].chunk(4)
        seen = attend(*([affine(w, e) for e in fields] for w in (query, key, value)), 1.0)
        fields = [relu(s + affine(residual, e)) for s, e in zip(seen, fields, strict=True)]
    return torch.cat(fields)


def naive_once(embeddings, weights):
    """One row `(F, D)` as pytorch-fm writes it, with torch's MultiheadAttention spelled out."""
    fields = [affine(weights["project.weight"], e, weights["project.bias"]) for e in embeddings]
    for layer in range(SIZES["num_layers"]):
        matrices, shifts = (weights[f"into.{layer}.{n}"].chunk(3) for n in ("weight", "bias"))
        projected = (
            [affine(w, e, b) for e in fields] for w, b in zip(matrices, shifts, strict=True)
        )
        seen = attend(*projected, math.sqrt(SIZES["head_dim"]))
        out, shift = (weights[f"out_of.{layer}.{n}"] for n in ("weight", "bias"))
        fields = [affine(out, e, shift) for e in seen]
    weight, bias = weights["residual.weight"], weights["residual.bias"]
    own = [affine(weight, e, bias) for e in embeddings]
    return torch.cat([relu(e + r) for e, r in zip(fields, own, strict=True)])


NAIVE = {SelfAttention: naive_each, OneResidual: naive_once}


def build(form, dim=4, **options):
    made = form(dim, **SIZES, **options).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.6)
    return made


def assert_same(got, want, inputs, pull):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), inputs),
        torch.autograd.grad((want * pull).sum(), inputs),
        rtol=0,
        atol=1e-11,
    )


@FORMS
@pytest.mark.parametrize("num_fields", [1, 3])
def test_values_and_gradients_equal_the_papers_equations(form, num_fields):
    attention = build(form)
    x = torch.randn(3, num_fields, 4, dtype=torch.float64, requires_grad=True)
    weights = dict(attention.named_parameters())
    got, want = attention(x), torch.stack([NAIVE[form](row, weights) for row in x])
    assert got.shape == (3, num_fields * 6)
    assert bool((want == 0).any())
    assert bool((want > 0).any())
    assert_same(got, want, (x, *weights.values()), torch.randn_like(want))


@FORMS
def test_sets_with_layers_of_their_own_equal_a_loop_over_sets(form):
    stacked, one = build(form, num_sets=3), build(form)
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    loop = []
    for index in range(3):
        weights = {name: weight[index] for name, weight in stacked.named_parameters()}
        loop.append(torch.func.functional_call(one, weights, x[index]))
    want = torch.stack(loop)
    assert_same(stacked(x), want, (x, *stacked.parameters()), torch.randn_like(want))


@FORMS
def test_sets_that_share_layers_equal_a_loop_over_sets(form):
    attention = build(form)
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64)
    want = torch.stack([attention(one) for one in x])
    torch.testing.assert_close(attention(x), want, rtol=0, atol=1e-12)


@FORMS
def test_a_field_looks_at_all_fields_of_its_row_and_at_no_other_row(form):
    attention = build(form)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    changed = x.clone()
    changed[0, 1] += 1.0
    difference = (attention(changed) - attention(x)).unflatten(-1, (3, 6))
    assert bool(difference[0].any(dim=-1).all())
    assert not difference[1].any()


def test_one_residual_is_torchs_own_attention_between_two_projections():
    attention = build(OneResidual)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    fields = attention.project(x)
    for into, out_of in zip(attention.into, attention.out_of, strict=True):
        torchs = nn.MultiheadAttention(6, 2, batch_first=True).double()
        weights = {"in_proj_weight": into.weight, "in_proj_bias": into.bias}
        weights |= {"out_proj.weight": out_of.weight, "out_proj.bias": out_of.bias}
        torchs.load_state_dict(weights)
        fields, _ = torchs(fields, fields, fields, need_weights=False)
    want = torch.relu(fields + attention.residual(x)).flatten(1)
    torch.testing.assert_close(attention(x), want, rtol=0, atol=1e-12)


def test_one_residual_starts_as_torchs_own_attention():
    made = OneResidual(16, num_layers=1, num_heads=2, head_dim=32)
    torchs = nn.MultiheadAttention(64, 2)
    for mine, torchs_own in [
        (made.into[0].weight, torchs.in_proj_weight),
        (made.out_of[0].weight, torchs.out_proj.weight),
        (made.project.weight, nn.Linear(16, 64).weight),
    ]:
        ours, theirs = mine.detach(), torchs_own.detach()
        assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.05)
        assert float(ours.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=0.01)
    assert not made.into[0].bias.any()
    assert not made.out_of[0].bias.any()


def test_each_part_of_a_layer_starts_within_xaviers_bound():
    weight = SelfAttention(16, num_layers=1, num_heads=2, head_dim=16).layers[0].weight.detach()
    assert weight.shape == (4 * 32, 16)
    assert float(weight.abs().max()) == pytest.approx((6 / 48) ** 0.5, rel=0.01)


@FORMS
def test_dropout_acts_in_training_only(form):
    attention = build(form, dropout=0.5)
    x = torch.randn(8, 5, 4, dtype=torch.float64)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))
    weights = dict(attention.named_parameters())
    torch.testing.assert_close(attention(x)[0], NAIVE[form](x[0], weights), rtol=0, atol=1e-12)


@FORMS
@pytest.mark.parametrize("name", ["dim", "num_layers", "num_heads", "head_dim"])
def test_sizes_below_one_are_refused(form, name):
    sizes = {"dim": 4, **SIZES} | {name: 0}
    with pytest.raises(SettingsError, match=f"{name} must be at least 1, got {name}=0"):
        form(**sizes)


@FORMS
def test_a_dropout_of_one_is_refused(form):
    with pytest.raises(SettingsError, match=r"attention_dropout must lie in \[0, 1\), got .*=1.0"):
        form(4, **SIZES, dropout=1.0)
