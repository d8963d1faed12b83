import pytest
import torch
from torch import nn

from rarebit.models import build_model
from rarebit.models.nfm import NFM, Evened


def pooled(v):
    """Sum over i < j of v_i * v_j."""
    pairs = [(i, j) for i in range(len(v)) for j in range(i + 1, len(v))]
    return sum((v[i] * v[j] for i, j in pairs), start=torch.zeros_like(v[0]))


@pytest.mark.parametrize("hidden", [(), (5, 4)])
def test_score_is_the_papers(schema, hidden, assert_equals_naive):
    def score(row):
        return row.first_order() + row.network("head.layers", pooled(row.embeddings()))

    assert_equals_naive(NFM(schema, dim=3, hidden=hidden), score)


@pytest.mark.parametrize("num_sets", [None, 2])
def test_pooled_features_are_normalised_before_the_network(batch, num_sets):
    model = NFM(batch.schema, dim=3, hidden=(5, 4), batch_norm=True, std=1.0, num_sets=num_sets)
    seen = []
    for module in model.modules():
        if isinstance(module, Evened):
            module.register_forward_hook(lambda _, inputs, output: seen.append((*inputs, output)))
    model(batch)
    [(before, after)] = seen
    spread, mean = torch.std_mean(before, dim=-2, correction=0, keepdim=True)
    want = (before - mean) / (spread.square() + 1e-5).sqrt()
    torch.testing.assert_close(after, want, rtol=1e-4, atol=1e-5)
    assert after.shape == ((7, 3) if num_sets is None else (2, 7, 3))


def test_dropout_comes_behind_the_norm_and_in_training_only():
    evened = Evened(1000, dropout=0.25, batch_norm=True)
    x = torch.randn(4, 1000)
    normed = nn.BatchNorm1d(1000)(x)
    dropped = evened(x)
    kept = dropped != 0
    assert float(kept.float().mean()) == pytest.approx(0.75, abs=0.03)
    torch.testing.assert_close(dropped[kept], normed[kept] / 0.75)
    assert bool((evened.eval()(x) != 0).all())


def test_the_preset_has_the_papers_depths(schema):
    model = build_model("nfm@mlet", schema)
    shapes = [tuple(layer.weight.shape) for layer in model.head.layers if hasattr(layer, "weight")]
    assert shapes == [(128, 16), (128, 128), (1, 128)]
