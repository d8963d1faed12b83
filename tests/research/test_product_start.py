"""A plain table that starts where MLET starts, and is trained as a plain table is."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.methods.mlet import MLET
from rarebit.models.fm import FM
from rarebit.research.product_start import ProductStart

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)


def started(model: nn.Module, method: rb.Method, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    rb.apply_(model, method, verbose=False)
    return model


@pytest.mark.parametrize(("inner_dim", "std"), [(64, 0.25), (8, 0.5)])
@pytest.mark.parametrize("padding", [None, 4])
def test_it_starts_at_the_merged_product_to_the_last_bit(inner_dim, std, padding):
    product = started(
        nn.Sequential(nn.Embedding(30, 6, padding_idx=padding)), MLET(inner_dim=inner_dim, std=std)
    )
    plain = started(
        nn.Sequential(nn.Embedding(30, 6, padding_idx=padding)),
        ProductStart(inner_dim=inner_dim, std=std),
    )
    rb.merge_(product, verbose=False)
    assert torch.equal(plain[0].weight, product[0].weight)
    assert bool(plain[0].weight.any())


def test_all_fields_of_a_model_start_at_the_products():
    product = started(FM(rb.data.Schema(FIELDS), dim=5), MLET(inner_dim=8))
    plain = started(FM(rb.data.Schema(FIELDS), dim=5), ProductStart(inner_dim=8))
    for model in (product, plain):
        rb.merge_(model, verbose=False)
    tables = [
        {n: p for n, p in model.named_parameters() if "backbone" in n} for model in (product, plain)
    ]
    assert tables[0]
    assert all(torch.equal(weight, tables[1][name]) for name, weight in tables[0].items())


def test_it_is_drawn_anew_with_another_seed_or_another_scale():
    drawn = [
        started(nn.Sequential(nn.Embedding(9, 4)), ProductStart(std=std), seed)[0].weight.detach()
        for seed, std in ((1, 0.25), (2, 0.25), (1, 0.5))
    ]
    assert not torch.equal(drawn[0], drawn[1])
    assert_close(2 * drawn[0], drawn[2])


def test_it_is_trained_as_a_plain_table():
    model = started(nn.Sequential(nn.Embedding(9, 4)), ProductStart())
    plain = nn.Sequential(
        nn.Embedding.from_pretrained(model[0].weight.detach().clone(), freeze=False)
    )
    for trained in (model, plain):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for ids in ([4, 1], [4, 4]):
            optimizer.zero_grad()
            trained(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
    assert torch.equal(model[0].weight, plain[0].weight)


def test_buckets_can_start_at_the_product():
    model = started(nn.Sequential(nn.Embedding(20, 3)), rb.Hashing(buckets=7))
    rows = started(model, ProductStart(inner_dim=5))[0].weight
    product = started(nn.Sequential(nn.Embedding(7, 3)), MLET(inner_dim=5))
    rb.merge_(product, verbose=False)
    assert torch.equal(rows, product[0].weight[torch.arange(20) % 7])
