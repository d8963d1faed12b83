"""Benches of what is added to a step: both sides train the same, and the figures are named."""

import pytest
import torch

from rarebit import RowGradients, sum_losses
from rarebit.bench import _steps, ema, row_gradients
from rarebit.bench._frame import measure


@pytest.fixture
def short(monkeypatch):
    for bench in (ema, row_gradients):
        monkeypatch.setattr(bench, "lazy_deepfm", lambda n: _steps.lazy_deepfm(n, rows=4000))
        monkeypatch.setattr(
            bench,
            "measure",
            lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2),
        )


def test_a_step_with_the_sum_rule_trains_the_same_bits():
    plain, rule = _steps.lazy_deepfm(2, rows=4000)
    rule.step.backward = RowGradients(rule.step.model, sum_losses).backward
    for _ in range(2):
        plain()
        rule()
    weights = [side.step.model.state_dict() for side in (plain, rule)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_figures_of_row_gradients(short):
    figures = row_gradients.run(lambda line: None)
    assert figures["ratio"] == pytest.approx(figures["rule_ms"] / figures["plain_ms"])


@pytest.mark.slow
def test_the_figures_of_averages(short):
    figures = ema.run(lambda line: None)
    assert figures["ratio"] == pytest.approx(figures["torch_ms"] / figures["ema_ms"])
    assert figures["ratio_plain"] == pytest.approx(figures["ema_ms"] / figures["plain_ms"])
