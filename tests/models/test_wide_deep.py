import pytest
import torch
from torch import nn

from rarebit.models import build_model
from rarebit.models.wide_deep import WideDeep


@pytest.mark.parametrize("hidden", [(), (5,), (4, 3)])
def test_score_is_the_papers(schema, hidden, assert_equals_naive):
    def score(row):
        return row.first_order() + row.network("head.layers", torch.cat(row.embeddings()))

    assert_equals_naive(WideDeep(schema, dim=2, hidden=hidden), score)


def test_the_preset_is_the_papers(schema):
    model = build_model("wide_deep@mlet", schema)
    width = 16 * len(schema.fields)
    linear = [layer for layer in model.head.layers if isinstance(layer, nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in linear] == [(256, width), (128, 256), (1, 128)]
    assert not any(isinstance(layer, nn.BatchNorm1d | nn.Dropout) for layer in model.head.layers)
