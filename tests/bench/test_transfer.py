"""The bench of harmless transfer, on a small log."""

import pytest
import torch

import rarebit as rb
from rarebit.bench import transfer
from rarebit.bench._frame import measure


@pytest.fixture
def data(monkeypatch):
    monkeypatch.setattr(transfer, "BATCH_SIZE", 256)
    return rb.generate(rb.SyntheticLog(rows=2000)).train


def test_both_sides_train_the_same_model_on_the_same_batches(data):
    plain, other = transfer.make_step(data), transfer.make_step(data, with_transfer=True)
    for name, value in plain.step.model.state_dict().items():
        assert torch.equal(other.step.model.state_dict()[name], value), name
    assert torch.equal(next(plain.batches).ids, next(other.batches).ids)
    plain(), other()
    ledger = other.step.backward.__self__.ledger.read()
    assert ledger["steps"] == 1
    assert sum(table["rows"] for table in ledger["tables"].values()) > 0
    embedding = "backbone.tables.stacks.0.embedding.weight"
    states = [side.step.model.state_dict()[embedding] for side in (plain, other)]
    assert not torch.equal(*states)


def test_the_figures_are_named(data, monkeypatch):
    monkeypatch.setattr(transfer, "generate", lambda log: rb.Splits(data, data, data))
    monkeypatch.setattr(
        transfer,
        "measure",
        lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2),
    )
    figures = transfer.run(lambda line: None)
    assert figures["ratio"] == pytest.approx(figures["transfer_ms"] / figures["plain_ms"])
