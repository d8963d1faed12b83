"""Shrunk tables merged, saved, and with other methods before and after them."""

import pytest
import torch
from methods.shrunk_models import FIELDS, SCHEMA, WIDTH, C, counts_by_field, deepfm, ids_of
from torch import Tensor
from torch.testing import assert_close

import rarebit as rb
from rarebit.methods._shrinkage_counts import counts_of_rows
from rarebit.methods._shrinkage_parts import counted_in
from rarebit.methods.shrinkage import Shrinkage, ShrunkTable
from rarebit.models.dcn_v2 import DCNv2
from rarebit.tables.apply import end_training_
from rarebit.tables.table import full_table


def batch_of(rows: int = 16) -> rb.Batch:
    return rb.Dataset(SCHEMA, ids_of(rows))[:]


def naive_rows(own: Tensor, counts: Tensor, c: float, prior: Tensor) -> list[list[float]]:
    """Return the equation with loops over plain numbers."""
    rows = []
    for row, n in zip(own.tolist(), counts.tolist(), strict=True):
        weight = n / (n + c)
        rows.append(
            [weight * v + c / (n + c) * p for v, p in zip(row, prior.tolist(), strict=True)]
        )
    return rows


@pytest.mark.parametrize("c", [C, "learned", 7.0])
def test_merged_tables_have_the_same_rows_bit_by_bit(c):
    model, batch = deepfm(Shrinkage(counts=counts_by_field(), c=c)), batch_of()
    rows, scores = model.backbone.tables(batch.ids), model(batch)
    rb.merge_(model, verbose=False)
    assert torch.equal(model.backbone.tables(batch.ids), rows)
    assert torch.equal(model(batch), scores)
    assert all(not info.methods for info in rb.find_tables(model))


def test_after_training_the_tables_are_plain():
    model, batch = deepfm(Shrinkage(counts=counts_by_field(), c=3.0)), batch_of()
    scores = model(batch)
    end_training_(model)
    assert all(not info.methods for info in rb.find_tables(model))
    assert torch.equal(model(batch), scores)


def test_a_saved_model_has_its_counts_its_strengths_and_its_means(tmp_path):
    for c in (C, "learned", "estimated", "held-out"):
        model, batch = deepfm(Shrinkage(counts=counts_by_field(), c=c)), batch_of()
        copied = rb.load_model(rb.save_model(model, tmp_path))
        assert torch.equal(copied(batch), model(batch))
        assert rb.find_tables(copied) == rb.find_tables(model)
        for old, new in zip(
            model.backbone.tables.tables(), copied.backbone.tables.tables(), strict=True
        ):
            assert torch.equal(old.evidence.counts, new.evidence.counts)
            assert torch.equal(old.evidence.c, new.evidence.c)


def test_rows_of_a_product_are_shrunk():
    model, ids = deepfm(rb.MLET(inner_dim=8), Shrinkage(counts=counts_by_field(), c=3.0)), ids_of()
    for table in model.backbone.tables.tables():
        assert [type(method).__name__ for method in table.methods] == ["MLET", "Shrinkage"]
        counts = table.evidence.counts
        factors = table.inner
        product = (factors.inner.weight @ factors.projection).detach()
        if table.padding_idx is not None:
            product[table.padding_idx] = 0.0
        expected = torch.tensor(naive_rows(product, counts, 3.0, table.prior.mean))
        assert_close(table.rows(torch.arange(len(counts))), expected, atol=1e-5, rtol=1e-5)
    model.backbone.tables(ids).sum().backward()
    assert all(p.grad is not None for p in model.backbone.tables.parameters())


@pytest.mark.parametrize("then", [rb.PEP(init=-2.0), rb.Masked(), rb.Pruned(keep=60)])
def test_what_comes_then_works_on_the_shrunk_rows(then):
    model = deepfm(Shrinkage(counts=counts_by_field(), c=3.0))
    rows = [full_table(table) for table in model.backbone.tables.tables()]
    rb.apply_(model, then, verbose=False)
    for table, before in zip(model.backbone.tables.tables(), rows, strict=True):
        assert isinstance(table.inner, ShrunkTable)
        after = full_table(table)
        kept = after != 0
        if isinstance(then, rb.PEP):
            cut = before.abs() - torch.sigmoid(torch.tensor(-2.0))
            assert_close(after, before.sign() * cut.clamp(min=0.0))
        else:
            assert torch.equal(after[kept], before[kept])


def test_a_bucket_was_seen_as_often_as_all_its_ids_but_padding():
    counts = counts_by_field()
    model = deepfm(rb.Hashing(buckets=4), Shrinkage(counts=counts, c=3.0))
    for field, table in zip(FIELDS, model.backbone.tables.tables(), strict=True):
        expected = [0] * 4
        for i, n in enumerate(counts[field.name].tolist()):
            if not (field.kind == "multi" and i == 0):
                expected[i % 4] += n
        [shrunk] = counted_in(table)
        assert shrunk.evidence.counts.tolist() == expected


def test_each_set_is_shrunk_by_the_same_counts():
    counts = counts_by_field()
    model = DCNv2(SCHEMA, dim=WIDTH, hidden=(8,))
    rb.apply_(model, rb.MultiEmbedding(num_sets=3), verbose=False)
    rb.apply_(model, rb.Hashing(buckets=4), verbose=False)
    rb.apply_(model, Shrinkage(counts=counts, c=C), verbose=False)
    for field, table in zip(FIELDS, model.backbone.tables.tables(), strict=True):
        folded = counts_of_rows(table, counts[field.name])
        shrunk = counted_in(table)
        assert shrunk
        assert all(torch.equal(one.evidence.counts, folded) for one in shrunk)
        assert all(one.evidence.c.item() == C[field.name] for one in shrunk)


@pytest.mark.parametrize("then", [rb.PEP(), rb.Masked(), rb.Pruned(keep=60), rb.Quantize()])
@pytest.mark.parametrize("first", [[], [rb.MLET(inner_dim=8)]])
def test_a_saved_model_with_other_methods_comes_back(first, then, tmp_path):
    model = deepfm(*first, Shrinkage(counts=counts_by_field(), c=3.0))
    rb.apply_(model, then, verbose=False)
    copied, batch = rb.load_model(rb.save_model(model, tmp_path)), batch_of()
    assert torch.equal(copied(batch), model(batch))
    assert rb.find_tables(copied) == rb.find_tables(model)
