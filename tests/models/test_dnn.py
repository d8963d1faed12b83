import pytest
import torch

from rarebit.models.dnn import DNN


@pytest.mark.parametrize("hidden", [(), (5,), (4, 3)])
def test_score_is_the_papers(schema, hidden, assert_equals_naive):
    def score(row):
        return row.network("head.layers", torch.cat(row.embeddings()))

    assert_equals_naive(DNN(schema, dim=2, hidden=hidden), score)
