"""The bench of deltas: a small model, and the same steps."""

import pytest

from rarebit.bench import serving
from rarebit.data.synthetic import PRESETS


@pytest.mark.slow
def test_the_figures_of_a_delta(monkeypatch):
    columns = [column for column in PRESETS["criteo"] if column.num_values < 5000][:4]
    monkeypatch.setitem(PRESETS, "criteo", columns)
    figures = serving.delta(lambda line: None, rounds=1)
    assert figures["failed_requests"] == 0
    assert figures["requests"] > 0
    assert figures["delta_megabytes"] < figures["whole_megabytes"]
    assert figures["ratio"] == figures["delta_megabytes"] / figures["changed_megabytes"]
