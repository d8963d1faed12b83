import pytest
import torch

from rarebit import Dataset
from rarebit.data import Field, Schema
from rarebit.errors import SettingsError
from rarebit.models import build_model
from rarebit.models.lr import LR


def test_score_is_the_papers(schema, assert_equals_naive):
    def score(row):
        row.weights = {name.replace("backbone.", "wide."): w for name, w in row.weights.items()}
        return row.first_order()

    assert_equals_naive(LR(schema), score)


def test_a_score_worked_by_hand():
    schema = Schema((Field(name="user", rows=2), Field(name="age", kind="numeric")))
    model = LR(schema)
    with torch.no_grad():
        model.backbone.tables.stacks[0].embedding.weight.copy_(torch.tensor([[0.5], [0.25]]))
        model.backbone.numeric.copy_(torch.tensor([2.0]))
        model.backbone.bias.copy_(torch.tensor(-1.0))
    assert model(Dataset(schema, [[1], [0]], [[0.5], [0.0]])[:]).tolist() == [0.25, -0.5]


def test_weights_start_as_wide_as_asked_for():
    schema = Schema((Field(name="user", rows=4000),))
    for name, spread in (("lr", 0.01), ("lr@pep", 1.0)):
        weight = build_model(name, schema).backbone.tables.stacks[0].embedding.weight.detach()
        assert float(weight.std()) == pytest.approx(spread, rel=0.05)


def test_it_has_no_width():
    with pytest.raises(SettingsError, match="model lr: unknown setting 'dim'"):
        build_model("lr", Schema((Field(name="user", rows=2),)), {"dim": 4})
