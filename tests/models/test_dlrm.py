import pytest
import torch

from rarebit import Dataset
from rarebit.data import Field, Schema
from rarebit.errors import SettingsError
from rarebit.models import build_model
from rarebit.models.dlrm import DLRM

USER = Field(name="user", rows=6)
ITEM = Field(name="item", rows=5)
NUMBERS = tuple(Field(name=f"n{i}", kind="numeric") for i in range(13))


def bottom(row, num_layers):
    """The vector of all numbers: every layer of the bottom ends in max(x, 0)."""
    x = torch.tensor(row.numbers(), dtype=torch.float64)
    for layer in range(num_layers):
        weight, bias = (row.weights[f"backbone.bottom.{layer}.{n}"] for n in ("weight", "bias"))
        x = torch.clamp(weight @ x + bias, min=0.0)
    return x


def features(rows, vector):
    """The bottom's vector, where there is one, and the products of all vectors."""
    v = [*vector, *rows]
    pairs = [v[i] @ v[j] for i in range(len(v)) for j in range(i + 1, len(v))]
    return torch.cat([*vector, torch.stack(pairs)])


def test_score_is_the_papers(schema, assert_equals_naive):
    def score(row):
        vector = [bottom(row, 3)] if schema.numeric_fields else []
        return row.network("head.layers", features(row.table_rows("backbone"), vector))

    assert_equals_naive(DLRM(schema, dim=3, bottom=(6, 5), hidden=(5, 4)), score)


def test_score_of_several_sets_has_a_vector_of_the_bottom_a_set(schema, assert_equals_naive):
    def score(row):
        weight, bias = (row.weights[f"backbone.interaction.1.{n}"] for n in ("weight", "bias"))
        rows = [v.chunk(3) for v in row.table_rows("backbone")]
        vectors = bottom(row, 2).chunk(3) if schema.numeric_fields else ()
        hidden = 0.0
        for m in range(3):
            x = features([v[m] for v in rows], [vectors[m]] if vectors else [])
            hidden = hidden + torch.clamp(weight[m] @ x + bias[m], min=0.0) / 3
        return row.network("head.layers", hidden)

    assert_equals_naive(DLRM(schema, dim=2, bottom=(6,), hidden=(8, 4)).with_sets(3), score)


@pytest.mark.parametrize(
    ("preset", "widths"), [("mlet", [512, 256, 128, 16]), ("mlet_avazu", [256, 128, 16])]
)
def test_presets_have_the_depths_of_the_paper(preset, widths):
    model = build_model(f"dlrm@{preset}", Schema((USER, *NUMBERS, ITEM)))
    assert [block.weight.shape[0] for block in model.backbone.bottom] == widths
    assert model.backbone.bottom[0].weight.shape[1] == 13
    linear = [layer for layer in model.head.layers if isinstance(layer, torch.nn.Linear)]
    assert [layer.in_features for layer in linear] == [16 + 3, 512, 256]  # v_0 and three products


def test_numbers_have_no_vectors_of_their_own():
    with_numbers = DLRM(Schema((USER, *NUMBERS)), dim=4)
    assert "backbone.numeric" not in with_numbers.state_dict()
    assert DLRM(Schema((USER, ITEM)), dim=4).backbone.bottom is None


def test_one_table_alone_is_scored_by_its_product_with_itself():
    schema = Schema((USER,))
    model = DLRM(schema, dim=2, hidden=())
    with torch.no_grad():
        model.backbone.tables.stacks[0].embedding.weight[3] = torch.tensor([3.0, 4.0])
        model.head.layers[0].weight.fill_(2.0)
        model.head.layers[0].bias.fill_(1.0)
    assert model(Dataset(schema, [[3]])[:]).tolist() == [51.0]


def test_a_bottom_layer_without_units_is_refused():
    with pytest.raises(SettingsError, match="hidden layers need at least 1 unit, got 0"):
        build_model("dlrm", Schema((USER, *NUMBERS)), {"bottom": [4, 0]})
