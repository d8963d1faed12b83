"""Benches that measure two rounds, and a small log in place of Criteo's."""

import pytest

import rarebit as rb
from rarebit.bench import _frame, steps


@pytest.fixture
def quick(monkeypatch):
    """Measure two rounds of each variant, whatever the budget."""
    measure = _frame.measure

    def two_rounds(variants, *, warm_up=0, **options):
        return measure(variants, budget=0, warm_up=0, min_rounds=2)

    monkeypatch.setattr(_frame, "measure", two_rounds)
    monkeypatch.setattr(steps, "measure", two_rounds)


@pytest.fixture
def log(monkeypatch):
    """Return the small log that benches train on."""
    data = rb.data.generate(rb.data.SyntheticLog(rows=2000)).train
    monkeypatch.setattr(steps, "generate", lambda wanted: rb.data.Splits(data, data, data))
    return data
