import torch

from rarebit import Dataset
from rarebit.data import Field, Schema
from rarebit.models import build_model
from rarebit.models.ffm import FFM


def test_score_is_the_papers(schema, assert_equals_naive):
    dim = 3

    def score(row):
        rows = row.embeddings()
        v = [[vectors[j * dim : (j + 1) * dim] for j in range(len(rows))] for vectors in rows]
        pairs = [(i, j) for i in range(len(rows)) for j in range(i + 1, len(rows))]
        return sum((v[i][j] @ v[j][i] for i, j in pairs), start=row.first_order())

    assert_equals_naive(FFM(schema, dim=dim), score)


def test_a_score_worked_by_hand():
    schema = Schema((Field(name="user", rows=2), Field(name="age", kind="numeric")))
    model = FFM(schema, dim=1)
    with torch.no_grad():
        model.backbone.tables.stacks[0].embedding.weight.copy_(torch.tensor([[0.0, 0], [9, 2]]))
        model.backbone.numeric.copy_(torch.tensor([[3.0, 9.0]]))
        model.wide.tables.stacks[0].embedding.weight.copy_(torch.tensor([[0.0], [0.25]]))
        model.wide.numeric.copy_(torch.tensor([2.0]))
        model.wide.bias.copy_(torch.tensor(-1.0))
    # w_0 + w_user + w_age x + v_user^age v_age^user x = -1 + 0.25 + 2 * 0.5 + 2 * 3 * 0.5
    assert model(Dataset(schema, [[1]], [[0.5]])[:]).tolist() == [3.25]


def test_one_table_holds_the_vectors_for_all_fields(schema):
    model = build_model("ffm@me", schema)
    (stack,) = model.backbone.tables.stacks
    assert stack.embedding.weight.shape[1] == 8 * len(schema.fields)
    assert model.settings["dim"] == 8
    assert model.wide is not None
