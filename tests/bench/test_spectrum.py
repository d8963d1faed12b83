"""The bench of singular values, on a small table."""

import pytest

from rarebit.bench import spectrum
from rarebit.bench._frame import measure


def test_both_sides_find_the_same_values_and_the_ratio_is_of_their_times(monkeypatch):
    monkeypatch.setattr(spectrum, "ROWS", 5_000)
    monkeypatch.setattr(
        spectrum, "measure", lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2)
    )
    figures = spectrum.run(lambda line: None)
    assert figures["ratio"] == pytest.approx(figures["torch_ms"] / figures["ours_ms"])
    assert 0 <= figures["relative_difference"] < 1e-12
