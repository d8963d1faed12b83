"""Sub-embeddings against what the interactions themselves do with a table's rows."""

import math

import pytest
import torch
from capabilities import needs_cuda
from torch.nn import functional as F

from rarebit import LowRank, apply_
from rarebit.data import Field, Schema
from rarebit.diagnosis.diagnose import diagnose
from rarebit.models.dcn_v2 import DCNv2
from rarebit.models.deepfm import DeepFM
from rarebit.models.ffm import FFM
from rarebit.tables.apply import find_sites
from rarebit.tables.spectrum import information_abundance
from rarebit.tables.table import full_table

SCHEMA = Schema(
    (
        Field(
            name="price", kind="numeric"
        ),  # numbers come last in the model, wherever they are here
        Field(name="user", rows=40),
        Field(name="device", rows=2),
        Field(name="tags", kind="multi", rows=9, max_length=3),
    )
)
FIELDS, OTHERS = ("user", "device", "tags"), ("user", "device", "tags", "price")


def tables_of(model):
    """Return the rows of each field in the model's width, without padding."""
    collection = model.backbone.tables
    found = []
    for index, table in enumerate(collection.tables()):
        rows = full_table(table)
        if str(index) in collection.projections:
            rows = rows @ collection.projections[str(index)].detach()
        found.append(rows[1:] if table.padding_idx == 0 else rows)
    return found


def assert_equal(matrix, expected):
    assert (matrix.fields, matrix.others) == (FIELDS, OTHERS)
    for row, line in zip(matrix.abundance, expected, strict=True):
        numbers = [math.nan if value is None else value for value in row]
        assert numbers == pytest.approx(line, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("widths", [{}, {"user": 3, "tags": 1}])
def test_ffm_splits_a_row_into_what_each_field_meets(widths):
    model = FFM(SCHEMA, dim=2, std=1.0, widths=widths)
    [matrix] = diagnose(model).sub_embeddings
    expected = []
    for i, rows in enumerate(tables_of(model)):
        # what the machine multiplies the vector of field j by, is what field i shows to j
        vectors = torch.ones(len(rows), 4, 8)
        vectors[:, i] = rows
        vectors.requires_grad_()
        model.backbone.interaction(vectors).sum().backward()
        expected.append(
            [
                math.nan if i == j else information_abundance(vectors.grad[:, j, 2 * i : 2 * i + 2])
                for j in range(4)
            ]
        )
    assert_equal(matrix, expected)
    assert (matrix.kind, matrix.name) == ("FFM", "backbone.interaction")
    assert matrix.embedding_set is None


def crossed(network, rows, i, j, dim):
    """Return what a cross network of one layer multiplies the ones of field j by, for rows of field i."""
    with_rows = torch.zeros(len(rows), 4, dim)
    with_rows[:, j] = 1.0
    without = with_rows.clone()
    with_rows[:, i] += rows
    outputs = [network(x).unflatten(-1, (4, dim))[:, j] for x in (with_rows, without)]
    if i == j:  # x_j is no longer ones there: take the matrix product alone
        return F.linear(
            (with_rows - without).flatten(1), network.weight[0], torch.zeros(4 * dim)
        ).unflatten(-1, (4, dim))[:, j]
    return outputs[0] - outputs[1]


@pytest.mark.parametrize("widths", [{}, {"user": 2}])
def test_dcn_v2_projects_a_row_for_each_field(widths):
    model = DCNv2(SCHEMA, dim=3, num_layers=1, hidden=(4,), std=1.0, widths=widths)
    [matrix] = diagnose(model).sub_embeddings
    with torch.no_grad():
        expected = [
            [
                information_abundance(crossed(model.backbone.interaction, rows, i, j, dim=3))
                for j in range(4)
            ]
            for i, rows in enumerate(tables_of(model))
        ]
    assert_equal(matrix, expected)
    assert matrix.kind == "DCN-V2"


def test_only_the_first_layer_counts():
    model = DCNv2(SCHEMA, dim=3, num_layers=2, hidden=(4,))
    before = diagnose(model).sub_embeddings
    with torch.no_grad():
        model.backbone.interaction.weight[1].normal_()
    assert diagnose(model).sub_embeddings == before
    with torch.no_grad():
        model.backbone.interaction.weight[0].normal_()
    assert diagnose(model).sub_embeddings != before


def test_each_embedding_set_has_a_matrix_of_its_own():
    model = DCNv2(SCHEMA, dim=3, num_layers=2, hidden=(4,), num_sets=2, std=1.0)
    found = diagnose(model).sub_embeddings
    assert [matrix.embedding_set for matrix in found] == [0, 1]
    weight = model.backbone.interaction[0].weight.detach()
    for number, matrix in enumerate(found):
        expected = []
        for i, rows in enumerate(tables_of(model)):
            own = rows[:, 3 * number : 3 * number + 3]
            blocks = [weight[number, 0, 3 * j : 3 * j + 3, 3 * i : 3 * i + 3] for j in range(4)]
            expected.append([information_abundance(own @ block.T) for block in blocks])
        assert_equal(matrix, expected)


def test_rows_of_a_method_are_those_that_count():
    model = FFM(SCHEMA, dim=2, std=1.0)
    apply_(model, LowRank(rank=1), where=lambda t: t.name == "backbone.tables.user", verbose=False)
    [matrix] = diagnose(model).sub_embeddings
    assert matrix.abundance[0][1:] == pytest.approx((1, 1, 1), abs=1e-5)
    assert matrix.abundance[1][0] > 1.01


def test_sums_leave_out_what_is_not_there():
    [matrix] = diagnose(FFM(SCHEMA, dim=2)).sub_embeddings
    values = matrix.abundance
    assert matrix.field_sums[1] == pytest.approx(values[1][0] + values[1][2] + values[1][3])
    assert matrix.other_sums[0] == pytest.approx(values[1][0] + values[2][0])
    assert matrix.other_sums[3] == pytest.approx(values[0][3] + values[1][3] + values[2][3])
    assert matrix.to_mapping()["field_sums"] == list(matrix.field_sums)


def test_the_fields_that_keep_and_leave_least_are_named():
    model = DCNv2(SCHEMA, dim=3, num_layers=1, hidden=(4,), std=1.0)
    [sites] = [[site for site in find_sites(model) if site.info.field == "tags"]]
    with torch.no_grad():
        sites[0].table.weight[:] = torch.randn(9, 1) * torch.randn(3)
        model.backbone.interaction.weight[0, 9:] = torch.randn(3, 1)  # to price: all alike
    [matrix] = diagnose(model).sub_embeddings
    assert "keeps least when it meets others is tags (mean IA 1.0)" in str(matrix)
    assert "leaves others least is price (mean IA 1.0)" in str(matrix)


def test_a_table_that_is_not_finite_has_none():
    model = FFM(SCHEMA, dim=2)
    with torch.no_grad():
        model.backbone.tables.tables()[1].weight[0, 0] = float("nan")
    [matrix] = diagnose(model).sub_embeddings
    assert matrix.abundance[1] == (None,) * 4
    assert matrix.field_sums[1] == 0
    assert None not in matrix.abundance[0][1:]


@needs_cuda
def test_a_gpu_finds_the_same():
    for model in (FFM(SCHEMA, dim=2), DCNv2(SCHEMA, dim=3, hidden=(4,), widths={"user": 2})):
        [here], [there] = diagnose(model).sub_embeddings, diagnose(model.cuda()).sub_embeddings
        assert there.field_sums == pytest.approx(here.field_sums, rel=1e-9)


def test_other_models_have_none():
    assert diagnose(DeepFM(SCHEMA, dim=2, hidden=(4,))).sub_embeddings == ()
