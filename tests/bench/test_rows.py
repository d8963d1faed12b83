"""The lookups of the bench, and its names."""

import pytest
import torch

from rarebit.bench import rows
from rarebit.bench._frame import measure
from rarebit.training.row_kernel import row_kernel


@pytest.mark.parametrize("size", [60_000, 100_000])
def test_lookups_go_to_exactly_so_many_distinct_rows(size):
    ids = rows.draw_lookups(size, seed=1)
    assert len(ids) == rows.LOOKUPS
    assert len(ids.unique()) == rows.DISTINCT
    assert 0 <= int(ids.min()) < int(ids.max()) < size


def test_the_pattern_is_the_same_at_every_size():
    small, large = (rows.draw_lookups(size, seed=1) for size in (60_000, 100_000))
    patterns = [torch.unique(ids, return_counts=True)[1].sort().values for ids in (small, large)]
    assert torch.equal(*patterns)


def test_the_figures_are_named(monkeypatch):
    monkeypatch.setattr(rows, "SIZES", {"small": 50_000, "large": 60_000})
    monkeypatch.setattr(rows, "DRAWS", 1)
    monkeypatch.setattr(
        rows, "measure", lambda sides, budget: measure(sides, budget=0, warm_up=0, min_rounds=2)
    )
    figures = rows.run(lambda line: None)
    plain = figures["large_ms_plain"] / figures["small_ms_plain"]
    assert figures["ratio_plain"] == pytest.approx(plain)
    by_default = "ratio_plain" if row_kernel() is None else "ratio_compiled"
    assert figures["ratio"] == figures[by_default]
