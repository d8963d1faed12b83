"""What multi-embedding is held against: sets that share an interaction, and sets held alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import UnsupportedTableError
from rarebit.methods.multi_embedding import MultiEmbedding
from rarebit.models import build_model, model_class, model_names
from rarebit.research.aligned_sets import AlignedSets, pattern_variance, squared_patterns
from rarebit.research.shared_sets import SharedSets

M, K = 3, 4
SCHEMA = rb.data.Schema(
    (
        rb.data.Field(name="user", rows=6),
        rb.data.Field(name="age", kind="numeric"),
        rb.data.Field(name="item", rows=5),
    )
)
WITH_SETS = [name for name in model_names() if not model_class(name).why_no_sets]


def make(name="dcn_v2", method=None, **settings):
    settings = (
        {"dim": K, "hidden": (8, 6)} | ({"bottom": (8,)} if name == "dlrm" else {}) | settings
    )
    model = build_model(name, SCHEMA, settings)
    if method is not None:
        rb.apply_(model, method, verbose=False)
    return model


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def batch_of(rows=9):
    ids = torch.stack([torch.randint(6, (rows,)), torch.randint(5, (rows,))], dim=1)
    return rb.Dataset(SCHEMA, ids, torch.randn(rows, 1), torch.arange(rows) % 2)[:]


@pytest.mark.parametrize("name", WITH_SETS)
def test_shared_sets_are_sets_whose_interactions_are_tied(name):
    """Equal to multi-embedding with M equal interactions; gradients are the sums over them."""
    shared = make(name, SharedSets(num_sets=M)).double()
    for parameter in shared.parameters():
        nn.init.normal_(parameter, std=0.5)
    tied, batch = make(name, MultiEmbedding(num_sets=M)).double(), batch_of()
    one = dict(shared.backbone.interaction.shared.named_parameters())
    repeats = {}
    with torch.no_grad():
        for key, parameter in tied.named_parameters():
            place = key.removeprefix("backbone.interaction.")
            if place == key:
                parameter.copy_(shared.get_parameter(key))
            else:
                axes = [
                    k for k in range(parameter.ndim) if parameter.shape[k] != one[place].shape[k]
                ]
                repeats[place] = axes[0]
                parameter.copy_(torch.cat([one[place]] * M, dim=axes[0]))
    got, want = shared(batch), tied(batch)
    assert_close(got, want, rtol=1e-10, atol=1e-10)
    got.square().sum().backward()
    want.square().sum().backward()
    for key, parameter in shared.named_parameters():
        place = key.removeprefix("backbone.interaction.shared.")
        if place == key:
            expected = tied.get_parameter(key).grad
        else:
            gradient = tied.get_parameter(f"backbone.interaction.{place}").grad
            expected = sum(gradient.chunk(M, dim=repeats[place]))
        assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-9)


def test_shared_sets_have_the_tables_of_several_sets_and_the_network_of_one():
    shared, several = make(method=SharedSets(num_sets=M)), make(method=MultiEmbedding(num_sets=M))
    one = make().with_sets(1)
    tables = [
        sum(p.numel() for p in m.backbone.tables.parameters()) for m in (shared, several, one)
    ]
    numeric = [m.backbone.numeric.numel() for m in (shared, several, one)]
    assert tables == [132, 132, 44]
    assert numeric == [12, 12, 4]
    rest = [
        num_parameters(model) - t - n
        for model, t, n in zip((shared, several, one), tables, numeric, strict=True)
    ]
    assert rest[0] == rest[2]
    interaction = sum(p.numel() for p in one.backbone.interaction.parameters())
    assert rest[1] == rest[2] + (M - 1) * interaction


def test_shared_sets_are_for_models_of_ours():
    model = nn.Module()
    model.backbone, model.head = nn.Sequential(nn.Embedding(9, 4)), nn.Linear(4, 1)
    with pytest.raises(UnsupportedTableError, match=r"needs a model of Rarebit, .* Module"):
        rb.apply_(model, SharedSets())


def naive_patterns(weight, num_fields):
    width = weight.shape[-1] // num_fields
    found = torch.zeros(num_fields, num_fields, dtype=weight.dtype)
    for i in range(num_fields):
        for j in range(num_fields):
            for a in range(width):
                for b in range(width):
                    found[i, j] += weight[i * width + a, j * width + b] ** 2
    return found


def naive_variance(weight, num_fields):
    sets, layers = weight.shape[:2]
    total, count = 0.0, 0
    for layer in range(layers):
        norms = [naive_patterns(weight[m, layer], num_fields) for m in range(sets)]
        for i in range(num_fields):
            for j in range(num_fields):
                values = [float(norm[i, j]) for norm in norms]
                mean = sum(values) / sets
                total += sum((value - mean) ** 2 for value in values) / (sets - 1)
                count += 1
    return total / count


@given(
    sets=st.integers(2, 4),
    layers=st.integers(1, 2),
    num_fields=st.integers(1, 3),
    width=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_the_variance_of_patterns_is_that_of_the_loop(sets, layers, num_fields, width, seed):
    torch.manual_seed(seed)
    wide = num_fields * width
    weight = torch.randn(sets, layers, wide, wide, dtype=torch.float64)
    assert_close(
        squared_patterns(weight[0, 0], num_fields), naive_patterns(weight[0, 0], num_fields)
    )
    expected = naive_variance(weight, num_fields)
    assert float(pattern_variance(weight, num_fields)) == pytest.approx(expected, rel=1e-10)


def test_sets_with_equal_norms_have_no_variance():
    weight = torch.randn(1, 2, 6, 6)
    turned = torch.cat(
        [weight, -weight, weight.flip(-1).unflatten(-1, (3, 2)).flip(-2).flatten(-2)]
    )
    assert float(pattern_variance(turned, 3)) == pytest.approx(0.0, abs=1e-6)
    assert float(pattern_variance(weight, 3)) == 0.0  # of one set


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_the_gradient_is_that_of_the_loss_with_the_penalty(weight):
    aligned = make(method=AlignedSets(num_sets=M, weight=weight)).double()
    plain, batch = make(method=MultiEmbedding(num_sets=M)).double(), batch_of()
    weights = {
        key.replace("interaction.interaction.", "interaction."): value
        for key, value in aligned.state_dict().items()
    }
    plain.load_state_dict(weights)
    label = batch.label.double()
    loss = F.binary_cross_entropy_with_logits(aligned(batch), label)
    expected = F.binary_cross_entropy_with_logits(plain(batch), label)
    assert_close(loss, expected, rtol=0, atol=0)  # what is told is the model's own loss
    cross = plain.backbone.interaction[0].weight
    penalty = weight * naive_variance(cross.detach(), 3)
    found = float(aligned.backbone.interaction.penalty().detach())
    assert found == pytest.approx(penalty, rel=1e-10)
    norms = cross.unflatten(-1, (3, K)).unflatten(-3, (3, K)).square().sum(dim=(-3, -1))
    loss.backward()
    (expected + weight * norms.var(dim=0).mean()).backward()
    gradients = [parameter.grad for parameter in aligned.parameters()]
    assert_close(
        gradients, [parameter.grad for parameter in plain.parameters()], rtol=1e-9, atol=1e-12
    )


def test_training_with_the_penalty_draws_the_patterns_to_one():
    spreads = {}
    for method in (MultiEmbedding(num_sets=M), AlignedSets(num_sets=M, weight=10.0)):
        torch.manual_seed(0)
        model, batch = make(method=method), batch_of()
        interaction = getattr(model.backbone.interaction, "interaction", model.backbone.interaction)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(30):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), batch.label.float()).backward()
            optimizer.step()
        spreads[type(method)] = float(pattern_variance(interaction[0].weight.detach(), 3))
    assert spreads[AlignedSets] < 0.2 * spreads[MultiEmbedding]


def test_in_evaluation_there_is_no_penalty():
    model, batch = make(method=AlignedSets(num_sets=M, weight=100.0)).eval(), batch_of()
    plain = make(method=AlignedSets(num_sets=M, weight=0.0)).eval()
    plain.load_state_dict(model.state_dict())
    found = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
    assert_close(found, torch.autograd.grad(plain(batch).sum(), list(plain.parameters())))


@pytest.mark.parametrize("name", [name for name in WITH_SETS if name != "dcn_v2"])
def test_models_without_a_matrix_a_pair_of_fields_have_no_patterns(name):
    model = make(name)
    with pytest.raises(UnsupportedTableError, match="needs a cross network with a matrix for each"):
        rb.apply_(model, AlignedSets())
    assert model.backbone.num_sets is None


def test_models_of_ones_own_have_no_patterns():
    with pytest.raises(UnsupportedTableError, match="as dcn_v2 has, got a Sequential"):
        rb.apply_(nn.Sequential(nn.Embedding(9, 4)), AlignedSets())
