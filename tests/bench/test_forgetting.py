"""The bench of forgetting, on a small log."""

import pytest

import rarebit as rb
from rarebit.bench import forgetting
from rarebit.bench._frame import measure


def test_an_epoch_has_so_many_steps_and_one_forgetting(monkeypatch):
    data = rb.generate(rb.SyntheticLog(rows=6000)).train
    monkeypatch.setattr(forgetting, "generate", lambda log: rb.Splits(data, data, data))
    monkeypatch.setattr(
        forgetting,
        "measure",
        lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2),
    )
    figures = forgetting.run(lambda line: None)
    assert figures["steps_of_an_epoch"] == 245  # of 4096 rows, out of a million
    in_steps = figures["forget_ms"] / figures["step_ms"]
    assert figures["ratio"] == pytest.approx(1 + in_steps / 245)
