"""The bench of quantised lookups, on a small table."""

import pytest

from rarebit.bench import quantize
from rarebit.bench._frame import measure


def test_ratios_are_of_the_times_and_bytes_are_counted(monkeypatch):
    monkeypatch.setattr(quantize, "ROWS", 500)
    monkeypatch.setattr(quantize, "BATCH", 8)
    monkeypatch.setattr(
        quantize, "measure", lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2)
    )
    figures = quantize.run(lambda line: None)
    assert figures["ratio"] == pytest.approx(figures["int8_ms"] / figures["plain_ms"])
    assert figures["ratio_int4"] == pytest.approx(figures["int4_ms"] / figures["plain_ms"])
    assert figures["plain_bytes"] == 500 * 16 * 4
    assert figures["int8_bytes"] == 500 * 16 + 4
    assert figures["int4_bytes"] == 500 * 8 + 4


def test_all_sides_look_the_same_ids_up(monkeypatch):
    monkeypatch.setattr(quantize, "ROWS", 500)
    rows = []

    def measured(sides, budget):
        assert budget == quantize.BUDGET
        rows.extend({name: side() for name, side in sides.items()} for _ in range(3))
        return measure(sides, budget=0, warm_up=0, min_rounds=2)

    monkeypatch.setattr(quantize, "measure", measured)
    quantize.run(lambda line: None)
    for found in rows:
        assert found["plain"].shape == (4096, 26, 16)
        assert (found["int8"] - found["plain"]).abs().median() < 0.02
        assert (found["int4"] - found["plain"]).abs().median() < 0.3
    assert (rows[0]["plain"] - rows[1]["plain"]).abs().max() > 1.0
