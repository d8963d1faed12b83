import torch

from rarebit import Dataset
from rarebit.data import Field, Schema
from rarebit.models.fm import FM


def test_score_is_the_papers(schema, assert_equals_naive):
    def score(row):
        return row.first_order() + row.pairs()

    assert_equals_naive(FM(schema, dim=3), score)


def test_a_score_worked_by_hand():
    schema = Schema((Field(name="user", rows=2), Field(name="age", kind="numeric")))
    model = FM(schema, dim=2)
    with torch.no_grad():
        model.backbone.tables.stacks[0].embedding.weight.copy_(torch.tensor([[0.0, 0], [1, 2]]))
        model.backbone.numeric.copy_(torch.tensor([[3.0, -1.0]]))
        model.wide.tables.stacks[0].embedding.weight.copy_(torch.tensor([[0.0], [0.25]]))
        model.wide.numeric.copy_(torch.tensor([2.0]))
        model.wide.bias.copy_(torch.tensor(-1.0))
    # w_0 + w_user + w_age x + <v_user, v_age x> = -1 + 0.25 + 2 * 0.5 + (3 - 2) * 0.5
    assert model(Dataset(schema, [[1]], [[0.5]])[:]).tolist() == [0.75]
