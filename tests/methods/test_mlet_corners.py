"""MLET with other precisions, frozen tables, row rules, files and half-precision networks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.methods.mlet import MLET
from rarebit.models.fm import FM

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)
IDS = torch.tensor([3, 0, 7, 3])


def test_a_row_rule_sees_rows_of_the_tables_width():
    torch.manual_seed(0)
    model = FM(rb.data.Schema(FIELDS), dim=5)
    rb.apply_(model.backbone, MLET(inner_dim=8), verbose=False)
    plain, shapes = copy.deepcopy(model), []

    def rule(ids, gradients):
        shapes.append((len(ids), *gradients.shape))
        return gradients.sum(dim=0)

    ids = torch.cat([torch.randint(f.rows, (16, f.max_length)) for f in FIELDS], dim=1)
    batch = rb.Dataset(rb.data.Schema(FIELDS), ids, torch.zeros(16, 0), torch.ones(16))[slice(None)]
    F.softplus(-plain(batch)).mean().backward()
    with rb.RowGradients(model, rule) as rows:
        rows.backward(F.softplus(-model(batch)).mean())
    assert shapes
    assert all(shape == (shape[0], 1, shape[0], 5) for shape in shapes)
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(found.grad, expected.grad, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("init", ["fresh", "keep"])
def test_factors_have_the_precision_of_their_table(dtype, init):
    plain = nn.Embedding(30, 4, dtype=dtype)
    table = MLET(inner_dim=8, init=init).wrap(plain)
    assert {parameter.dtype for parameter in table.parameters()} == {dtype}
    merged = table.merge()
    assert merged.weight.dtype == dtype
    assert_close(merged(IDS), table(IDS))
    if init == "keep":
        eps = torch.finfo(dtype).eps
        error = (table.weight - plain.weight).abs().max() / plain.weight.abs().max()
        assert float(error.detach()) < 8 * eps


@pytest.mark.parametrize("init", ["fresh", "keep"])
def test_a_frozen_table_has_frozen_factors_and_stays_frozen(init):
    plain = nn.Embedding(9, 4).requires_grad_(requires_grad=False)
    table = MLET(inner_dim=8, init=init).wrap(plain)
    assert not any(parameter.requires_grad for parameter in table.parameters())
    assert not table.merge().weight.requires_grad


def test_a_saved_product_is_the_same_product(tmp_path):
    model = FM(rb.data.Schema(FIELDS), dim=5)
    rb.apply_(model, rb.Hashing(buckets=9), where=lambda t: t.field == "user", verbose=False)
    rb.apply_(model, MLET(inner_dim=8), verbose=False)
    loaded = rb.load_model(rb.save_model(model, tmp_path))
    assert rb.find_tables(loaded) == rb.find_tables(model)
    stored = loaded.state_dict()
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())


def test_a_network_in_half_precision_does_not_round_the_product():
    table = MLET(inner_dim=8).wrap(nn.Embedding(30, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = table(IDS)
    assert torch.equal(rows, table(IDS))


@pytest.mark.parametrize("trained", [True, False])
def test_a_stack_of_products_is_trained_as_its_tables_were(trained):
    model = FM(rb.data.Schema(FIELDS), dim=5)
    model.backbone.requires_grad_(trained)
    rb.apply_(model.backbone, MLET(inner_dim=8), verbose=False)
    assert {parameter.requires_grad for parameter in model.backbone.parameters()} == {trained}
    for table in model.backbone.tables.tables():
        assert table.projection.requires_grad is trained
