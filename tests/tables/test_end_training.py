"""When training is over, what only training needs is folded, and nothing else."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import UnsupportedTableError
from rarebit.models.fm import FM
from rarebit.tables.apply import end_training_

HASHING, LOW_RANK, MLET = rb.Hashing(buckets=7), rb.LowRank(rank=2), rb.MLET(inner_dim=8)

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)
IDS = torch.tensor([[3, 19, 0], [3, 3, 12]])


def holding(*methods: rb.Method, table: nn.Module | None = None) -> nn.Module:
    model = nn.ModuleList([table or nn.Embedding(20, 5, padding_idx=3)])
    for method in methods:
        rb.apply_(model, method, verbose=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def test_a_product_is_a_plain_table_with_the_same_rows():
    model = holding(MLET)
    product = model[0]
    before = product(IDS).detach()
    end_training_(model)
    assert type(model[0]) is nn.Embedding
    assert model[0].padding_idx == 3
    assert_close(model[0](IDS).detach(), before, atol=1e-6, rtol=1e-6)
    assert torch.equal(model[0].weight, product.merge().weight)


@pytest.mark.parametrize("method", [HASHING, LOW_RANK, rb.Quantize()], ids=str)
def test_what_is_served_as_it_is_stays_untouched(method):
    model = holding(method)
    table, rows = model[0], model[0](IDS)
    end_training_(model)
    assert model[0] is table
    assert torch.equal(model[0](IDS), rows)


@pytest.mark.parametrize("method", [LOW_RANK, rb.Quantize()], ids=str)
def test_a_table_that_is_served_as_it_is_says_so(method):
    table = method.wrap(nn.Embedding(20, 5))
    assert table.served() is table


def test_a_plain_model_stays_untouched():
    model = holding()
    table = model[0]
    end_training_(model)
    assert model[0] is table


@pytest.mark.parametrize("inside", [MLET, rb.research.ProductStart(inner_dim=8)], ids=str)
def test_hashing_stays_around_what_is_folded(inside):
    model = holding(HASHING, inside)
    before = model[0](IDS).detach()
    end_training_(model)
    [info] = rb.find_tables(model)
    assert info.methods == (str(HASHING),)
    assert info.num_parameters == 7 * 5
    assert type(model[0].inner) is nn.Embedding
    assert_close(model[0](IDS).detach(), before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("methods", [(HASHING, LOW_RANK), (HASHING, rb.Quantize())], ids=str)
def test_what_hashing_wraps_is_kept_where_it_is_served(methods):
    model = holding(*methods)
    before = rb.find_tables(model)
    rows = model[0](IDS)
    end_training_(model)
    assert rb.find_tables(model) == before
    assert torch.equal(model[0](IDS), rows)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_is_a_bag_of_the_same_kind_again(mode):
    bag = nn.EmbeddingBag(20, 5, mode=mode, padding_idx=3)
    model = holding(MLET, table=bag)
    before = model[0](IDS).detach()
    end_training_(model)
    assert type(model[0]) is nn.EmbeddingBag
    assert (model[0].mode, model[0].padding_idx) == (mode, 3)
    assert_close(model[0](IDS).detach(), before, atol=1e-6, rtol=1e-6)


def test_fields_of_a_stack_are_folded_where_they_must_be():
    model = FM(rb.data.Schema(FIELDS), dim=5)
    for name, method in (("user", MLET), ("tags", MLET), ("item", LOW_RANK)):
        rb.apply_(model.backbone, method, where=lambda t, n=name: t.field == n, verbose=False)
    ids = torch.cat([torch.randint(f.rows, (8, f.max_length)) for f in FIELDS], dim=1)
    tables = model.backbone.tables
    before = tables(ids).detach()
    end_training_(model)
    assert_close(tables(ids).detach(), before, atol=1e-6, rtol=1e-6)
    methods = {info.name: info.methods for info in rb.find_tables(tables)}
    assert methods == {"user": (), "tags": (), "item": (str(LOW_RANK),)}
    assert len(tables.stacks) == 2


def test_a_second_call_changes_nothing():
    model = holding(HASHING, MLET)
    end_training_(model)
    table = model[0]
    end_training_(model)
    assert model[0] is table


@pytest.mark.parametrize("trained", [True, False])
def test_a_frozen_table_stays_frozen_and_the_mode_stays(trained):
    model = holding(MLET).requires_grad_(trained).eval()
    end_training_(model)
    assert model[0].weight.requires_grad is trained
    assert not model[0].training


@dataclass(frozen=True, kw_only=True)
class Scaffold(rb.Method):
    """A method of a user's own that only training needs."""

    training_only = True

    def wrap(self, base):
        return ScaffoldTable(
            self,
            base,
            num_embeddings=base.num_embeddings,
            embedding_dim=base.embedding_dim,
            padding_idx=base.padding_idx,
        )


class ScaffoldTable(rb.Table):
    def rows(self, ids):
        return 2 * self.inner(ids)


def test_a_method_of_ones_own_is_folded_as_it_says():
    model = holding(HASHING, Scaffold())
    before = model[0](IDS).detach()
    end_training_(model)
    assert rb.find_tables(model)[0].methods == (str(HASHING),)
    assert_close(model[0](IDS).detach(), before)


def test_a_wrapped_model_is_refused():
    with pytest.raises(UnsupportedTableError, match="is wrapped in DataParallel"):
        end_training_(nn.DataParallel(holding(MLET)))
