import torch

from rarebit.models.deepfm import DeepFM


def test_score_is_the_papers(schema, assert_equals_naive):
    def score(row):
        deep = row.network("head.mlp.layers", torch.cat(row.embeddings()))
        return row.first_order() + row.pairs() + deep

    assert_equals_naive(DeepFM(schema, dim=3, hidden=(5, 4)), score)
