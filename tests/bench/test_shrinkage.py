"""The bench of shrunk tables, on a small log."""

import pytest
import torch

import rarebit as rb
from rarebit.bench import shrinkage
from rarebit.bench._frame import measure
from rarebit.methods.shrinkage import AUTO


@pytest.fixture
def data():
    return rb.generate(rb.SyntheticLog(rows=2000)).train


def test_all_sides_train_the_same_model_on_the_same_batches(data, monkeypatch):
    monkeypatch.setattr(shrinkage, "BATCH_SIZE", 256)
    sides = [shrinkage.make_step(data, method) for method in (None, rb.Shrinkage(), rb.RowRate())]
    heads = [side.step.model.head.state_dict() for side in sides]
    assert all(torch.equal(head[name], heads[0][name]) for head in heads for name in head)
    first = [next(side.batches).ids for side in sides]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])
    methods = [{info.methods for info in rb.find_tables(side.step.model)} for side in sides]
    assert methods == [{()}, {(str(rb.Shrinkage(c=AUTO)),)}, {(str(rb.RowRate()),)}]


def test_the_figures_are_named(data, monkeypatch):
    monkeypatch.setattr(shrinkage, "generate", lambda log: rb.Splits(data, data, data))
    monkeypatch.setattr(shrinkage, "BATCH_SIZE", 256)
    monkeypatch.setattr(
        shrinkage,
        "measure",
        lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2),
    )
    figures = shrinkage.run(lambda line: None)
    assert figures["ratio"] == pytest.approx(figures["shrunk_ms"] / figures["plain_ms"])
    assert figures["ratio_row_rate"] == pytest.approx(figures["row_rate_ms"] / figures["plain_ms"])
