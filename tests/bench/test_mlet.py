"""The bench of tables trained as products, on a small log."""

import pytest
import torch

import rarebit as rb
from rarebit.bench import mlet
from rarebit.bench._frame import measure
from rarebit.methods.mlet import MLET
from rarebit.research import factorized_tables


@pytest.fixture
def data():
    return rb.generate(rb.SyntheticLog(rows=4000)).train


def test_both_sides_train_the_same_model_on_the_same_batches(data, monkeypatch):
    monkeypatch.setattr(mlet, "BATCH_SIZE", 256)
    plain, product = mlet.make_step(data, "rowwise"), mlet.make_step(data, "rowwise", MLET())
    assert not factorized_tables(plain.step.model)
    tables = factorized_tables(product.step.model)
    assert len(tables) == len(data.schema.table_fields)
    assert {tuple(table.projection.shape) for table in tables.values()} == {(64, 16)}
    heads = [side.step.model.head.state_dict() for side in (plain, product)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert torch.equal(next(plain.batches).ids, next(product.batches).ids)


def test_the_figures_are_named(data, monkeypatch):
    monkeypatch.setattr(mlet, "generate", lambda log: rb.Splits(data, data, data))
    monkeypatch.setattr(mlet, "BATCH_SIZE", 256)
    monkeypatch.setattr(
        mlet, "measure", lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2)
    )
    figures = mlet.run(lambda line: None)
    for end in ("", "_dense"):
        ratio = figures[f"mlet_ms{end}"] / figures[f"plain_ms{end}"]
        assert figures[f"ratio{end}"] == pytest.approx(ratio)
        rows = sum(field.rows for field in data.schema.table_fields)
        fields = len(data.schema.table_fields)
        # a weight and two moments of 4 bytes; the first-order weights are plain on both sides
        assert figures[f"plain_bytes{end}"] == 12 * rows * (16 + 1)
        assert figures[f"mlet_bytes{end}"] == 12 * (rows * (64 + 1) + fields * 64 * 16)
