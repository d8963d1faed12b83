"""The bench of tables with thresholds, on a small log."""

import pytest
import torch

import rarebit as rb
from rarebit.bench import pep
from rarebit.bench._frame import measure
from rarebit.pruning.pep import PEP, count_nonzero, threshold_parameters


@pytest.fixture
def data():
    return rb.generate(rb.SyntheticLog(rows=4000)).train


def test_all_sides_train_the_same_model_on_the_same_batches(data, monkeypatch):
    monkeypatch.setattr(pep, "BATCH_SIZE", 256)
    methods = (None, PEP(schedule="given"), PEP(init=pep.INIT))
    plain, given, learned = (pep.make_step(data, method) for method in methods)
    rows = sum(field.rows for field in data.schema.table_fields)
    assert threshold_parameters(plain.step.model) == []
    assert threshold_parameters(given.step.model) == []
    [levels] = threshold_parameters(learned.step.model)
    assert levels.shape == (rows, 64)
    left = count_nonzero(learned.step.model) / levels.numel()
    assert 0.4 < left < 0.6
    heads = [side.step.model.head.state_dict() for side in (plain, given, learned)]
    for head in heads[1:]:
        assert all(torch.equal(head[name], heads[0][name]) for name in head)
    ids = [next(side.batches).ids for side in (plain, given, learned)]
    assert torch.equal(ids[0], ids[1])
    assert torch.equal(ids[0], ids[2])


def test_the_given_threshold_rises_in_every_step(data, monkeypatch):
    monkeypatch.setattr(pep, "BATCH_SIZE", 256)
    side = pep.make_step(data, PEP(schedule="given"))
    step, seen = pep._rising(side), []
    for _ in range(3):
        step()
        seen.append(side.step.model.backbone.tables.stacks[0].levels.value.unique().item())
    assert 0.0066 < seen[0] < seen[1] < seen[2] < 0.0068


def test_the_figures_are_named(data, monkeypatch):
    monkeypatch.setattr(pep, "generate", lambda log: rb.Splits(data, data, data))
    monkeypatch.setattr(pep, "BATCH_SIZE", 256)
    monkeypatch.setattr(
        pep, "measure", lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2)
    )
    figures = pep.run(lambda line: None)
    assert figures["ratio"] == pytest.approx(figures["scheduled_ms"] / figures["plain_ms"])
    assert figures["ratio_learned"] == pytest.approx(figures["learned_ms"] / figures["plain_ms"])
    rows = sum(field.rows for field in data.schema.table_fields)
    # a weight and two moments of 4 bytes; the first-order weights are plain on all sides
    assert figures["plain_bytes"] == figures["scheduled_bytes"] == 12 * rows * (64 + 1)
    assert figures["learned_bytes"] == 12 * rows * (2 * 64 + 1)
