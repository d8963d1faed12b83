"""The cost of a checkpoint: what is written can be read, and the figures are named."""

import pytest

from rarebit.bench import _steps, checkpoint
from rarebit.bench._frame import measure


@pytest.mark.slow
def test_the_figures_of_a_checkpoint(monkeypatch):
    monkeypatch.setattr(checkpoint, "STEPS", 2)
    monkeypatch.setattr(checkpoint, "lazy_deepfm", lambda n: _steps.lazy_deepfm(n, rows=4000))
    monkeypatch.setattr(
        checkpoint,
        "measure",
        lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=3),
    )
    figures = checkpoint.run(lambda line: None)
    lost = (figures["checkpoint_ms"] - figures["plain_ms"]) / 1000
    assert figures["lost_seconds"] == pytest.approx(lost)
    assert figures["ratio"] == pytest.approx(1 + lost / 60)
    assert figures["checkpoint_megabytes"] > 100  # weights and both moments of 967,795 rows
