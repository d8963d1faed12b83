"""The bench of packed lookups, on a small table."""

from pathlib import Path

import pytest
import torch
from capabilities import reason
from torch import nn

from rarebit.bench import packed
from rarebit.bench._frame import measure
from rarebit.codes.packed import Pack, save_packed
from rarebit.codes.packed_lookup import packed_kernel


@pytest.mark.slow
def test_a_small_bench(monkeypatch):
    monkeypatch.setattr(packed, "ROWS", 5000)
    monkeypatch.setattr(packed, "BATCH", 8)
    zeros = []

    def measured(sides, budget):
        assert budget == packed.BUDGET
        found = [{name: side() for name, side in sides.items()} for _ in range(2)]
        for rows in found:  # the same ids in the same table, and others in the next turn
            assert rows["packed"].shape == (8, 39, 64)
            assert torch.equal(rows["packed"], rows["dense"])
        assert not torch.equal(found[0]["dense"], found[1]["dense"])
        zeros.append(float((found[0]["dense"] == 0).float().mean()))
        return measure(sides, budget=0, warm_up=0, min_rounds=2)

    monkeypatch.setattr(packed, "measure", measured)
    figures, names = packed.run(lambda line: None), list(packed.SPARSITIES)
    assert zeros == pytest.approx([0.9, 0.97, 0.99, 0.999, 0.9], abs=0.05)
    ratios = [figures[f"packed_ms_{name}"] / figures[f"dense_ms_{name}"] for name in names]
    assert figures["ratio"] == pytest.approx(max(ratios))
    sizes = [figures[f"bytes_{name}"] for name in names]
    assert sizes == sorted(sizes, reverse=True)
    assert 0.09 < sizes[0] / figures["dense_bytes"] < 0.17
    assert figures["dense_bytes"] == 5000 * 64 * 4
    over = [figures[f"bytes_over_bound_{name}"] for name in names]
    assert figures["bytes_over_bound"] == max(over) > 1.0
    assert figures["bytes_rows"] < figures["bytes_90"]
    assert figures["path"] == ("plain torch" if packed_kernel() is None else "compiled kernel")


def test_page_faults_tell_whether_memory_is_new():
    kept = torch.ones(1 << 24)
    assert packed._page_faults(lambda: kept.add_(1)) < 100
    assert packed._page_faults(lambda: torch.ones(1 << 24)) > 100


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason=reason("Linux", "no /proc"))
def test_a_process_tells_what_it_keeps_of_a_table(tmp_path):
    weight = torch.randn(100_000, 64)
    weight[torch.rand(100_000) < 0.7] = 0.0
    file = save_packed(Pack().wrap(nn.Embedding.from_pretrained(weight)), tmp_path / "table")
    small = save_packed(Pack().wrap(nn.Embedding.from_pretrained(weight[:1])), tmp_path / "small")
    told = packed.resident_bytes(file, small, 50_000)
    # a third of the rows that have values are looked up, and pages are read whole
    assert 0.5 * file.stat().st_size < told < 2 * file.stat().st_size + (24 << 20)


def test_the_bound_by_hand():
    weight = torch.zeros(80, 24)
    weight[3, :2] = 1.0
    weight[5, 4] = 1.0
    # three values and a byte each, two rows that are not empty, a bit for each of 80 rows
    assert packed.bound(weight) == 3 * 4 + 3 + 2 * 4 + 10
    weight[5] = 1.0  # 26 values: 2 rows of 24 bits are smaller than a byte each
    assert packed.bound(weight) == 26 * 4 + 6 + 2 * 4 + 10
