import pytest
import torch

from rarebit.models.dcn_v2 import DCNv2


@pytest.mark.parametrize("num_layers", [1, 2])
def test_score_is_the_papers(schema, num_layers, assert_equals_naive):
    def score(row):
        first = crossed = torch.cat(row.embeddings())
        weight, bias = (row.weights[f"backbone.interaction.{n}"] for n in ("weight", "bias"))
        for layer in range(num_layers):
            linear = [w @ crossed + b for w, b in zip(weight[layer], bias[layer], strict=True)]
            crossed = first * torch.stack(linear) + crossed
        return row.network("head.layers", crossed)

    assert_equals_naive(DCNv2(schema, dim=2, num_layers=num_layers, hidden=(4,)), score)
