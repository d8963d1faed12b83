import torch

from rarebit import Dataset
from rarebit.data import Field, Schema
from rarebit.models.fm import FM
from rarebit.models.fwfm import FwFM


def test_score_is_the_papers(schema, assert_equals_naive):
    def score(row):
        v, r = row.embeddings(), row.weights["backbone.interaction.strength"]
        pairs = [(i, j) for i in range(len(v)) for j in range(i + 1, len(v))]
        assert len(r) == len(pairs)
        terms = [r[number] * (v[i] @ v[j]) for number, (i, j) in enumerate(pairs)]
        return sum(terms, start=row.first_order())

    assert_equals_naive(FwFM(schema, dim=3), score)


def test_it_starts_as_a_factorization_machine(batch):
    torch.manual_seed(1)
    plain = FM(batch.schema, dim=3, std=0.5)
    torch.manual_seed(1)
    weighted = FwFM(batch.schema, dim=3, std=0.5)
    torch.testing.assert_close(weighted(batch), plain(batch))


def test_a_score_worked_by_hand():
    schema = Schema((Field(name="user", rows=2), Field(name="item", rows=2)))
    model = FwFM(schema, dim=2)
    with torch.no_grad():
        rows = torch.tensor([[0.0, 0], [1, 2], [3, -1], [0, 0]])
        model.backbone.tables.stacks[0].embedding.weight.copy_(rows)
        model.backbone.interaction.strength.copy_(torch.tensor([-4.0]))
        model.wide.tables.stacks[0].embedding.weight.copy_(torch.tensor([[0.0], [1], [2], [0]]))
        model.wide.bias.copy_(torch.tensor(0.5))
    # w_0 + w_user + w_item + r <v_user, v_item> = 0.5 + 1 + 2 - 4 * (3 - 2)
    assert model(Dataset(schema, [[1, 0]])[:]).tolist() == [-0.5]
