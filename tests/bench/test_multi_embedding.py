"""The bench of several embedding sets, on a small log."""

import pytest
import torch

import rarebit as rb
from rarebit.bench import multi_embedding
from rarebit.bench._frame import measure
from rarebit.sets.sets import sets_of


@pytest.fixture
def data():
    return rb.generate(rb.SyntheticLog(rows=2000)).train


def test_both_sides_have_the_same_tables_and_the_same_batches(data):
    single = multi_embedding.make_step(data, num_sets=1)
    multi = multi_embedding.make_step(data, num_sets=10)
    assert sets_of(single.step.model) is None
    assert sets_of(multi.step.model).num_sets == 10
    widths = [
        {info.width for info in rb.find_tables(side.step.model.backbone)}
        for side in (single, multi)
    ]
    assert widths == [{100}, {100}]
    assert torch.equal(next(single.batches).ids, next(multi.batches).ids)


def test_the_figures_are_named(data, monkeypatch):
    monkeypatch.setattr(multi_embedding, "generate", lambda log: rb.Splits(data, data, data))
    monkeypatch.setattr(
        multi_embedding,
        "measure",
        lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2),
    )
    figures = multi_embedding.run(lambda line: None)
    assert figures["ratio"] == pytest.approx(figures["multi_ms"] / figures["single_ms"])
    assert figures["multi_weights"] < figures["single_weights"]
