"""Benches of tables without a model, on small tables."""

from pathlib import Path

import pytest
import torch
from capabilities import reason
from torch import nn

from rarebit.bench import _frame, tables
from rarebit.codes.packed import Pack, packed_kernel, save_packed
from rarebit.training.optimizers import row_kernel


def quietly(bench, **options):
    return bench(lambda line: None, **options)


@pytest.fixture
def looked_up(quick, monkeypatch):
    """Collect the rows of the first turns of all variants."""
    measure, found = _frame.measure, []

    def measured(variants, **options):
        found.append([{name: one() for name, one in variants.items()} for _ in range(3)])
        return measure(variants, **options)

    monkeypatch.setattr(_frame, "measure", measured)
    return found


@pytest.mark.slow
def test_a_small_bench_of_packed_tables(looked_up):
    figures, names = quietly(tables.packed, num_rows=5000, batch=8), list(tables.SPARSITIES)
    for turns in looked_up:
        for rows in turns:  # the same ids in the same table, and others in the next turn
            assert rows["packed"].shape == (8, 39, 64)
            assert torch.equal(rows["packed"], rows["dense"])
        assert not torch.equal(turns[0]["dense"], turns[1]["dense"])
    zeros = [float((turns[0]["dense"] == 0).float().mean()) for turns in looked_up]
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
    assert tables.page_faults(lambda: kept.add_(1)) < 100
    assert tables.page_faults(lambda: torch.ones(1 << 24)) > 100


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason=reason("Linux", "no /proc"))
def test_a_process_reports_what_it_keeps_of_a_table(tmp_path):
    weight = torch.randn(100_000, 64)
    weight[torch.rand(100_000) < 0.7] = 0.0
    file = save_packed(Pack().wrap(nn.Embedding.from_pretrained(weight)), tmp_path / "table")
    small = save_packed(Pack().wrap(nn.Embedding.from_pretrained(weight[:1])), tmp_path / "small")
    kept = tables.resident_bytes(file, small, 50_000)
    # a third of the rows that have values are looked up, and pages are read whole
    assert 0.5 * file.stat().st_size < kept < 2 * file.stat().st_size + (24 << 20)


def test_the_bound_by_hand():
    weight = torch.zeros(80, 24)
    weight[3, :2] = 1.0
    weight[5, 4] = 1.0
    # three values and a byte each, two rows that are not empty, a bit for each of 80 rows
    assert tables.bound(weight) == 3 * 4 + 3 + 2 * 4 + 10
    weight[5] = 1.0  # 26 values: 2 rows of 24 bits are smaller than a byte each
    assert tables.bound(weight) == 26 * 4 + 6 + 2 * 4 + 10


def test_quantised_tables_look_up_the_ids_of_the_plain_one(looked_up):
    figures = quietly(tables.quantize, num_rows=500, batch=8)
    [turns] = looked_up
    for rows in turns:
        assert rows["plain"].shape == (8, 26, 16)
        assert (rows["int8"] - rows["plain"]).abs().median() < 0.02
        assert (rows["int4"] - rows["plain"]).abs().median() < 0.3
    assert (turns[0]["plain"] - turns[1]["plain"]).abs().max() > 1.0
    assert figures["ratio"] == pytest.approx(figures["int8_ms"] / figures["plain_ms"])
    assert figures["ratio_int4"] == pytest.approx(figures["int4_ms"] / figures["plain_ms"])
    assert figures["plain_bytes"] == 500 * 16 * 4
    assert figures["int8_bytes"] == 500 * 16 + 4
    assert figures["int4_bytes"] == 500 * 8 + 4


@pytest.mark.parametrize("size", [60_000, 100_000])
def test_lookups_go_to_exactly_so_many_distinct_rows(size):
    ids = tables.draw_lookups(size, seed=1)
    assert len(ids) == tables.LOOKUPS
    assert len(ids.unique()) == tables.DISTINCT
    assert 0 <= int(ids.min()) < int(ids.max()) < size


def test_the_pattern_is_the_same_at_every_size():
    small, large = (tables.draw_lookups(size, seed=1) for size in (60_000, 100_000))
    patterns = [torch.unique(ids, return_counts=True)[1].sort().values for ids in (small, large)]
    assert torch.equal(*patterns)


def test_the_figures_of_rows(quick):
    figures = quietly(tables.rows, small=50_000, large=60_000, draws=1)
    plain = figures["large_ms_plain"] / figures["small_ms_plain"]
    assert figures["ratio_plain"] == pytest.approx(plain)
    by_default = "ratio_plain" if row_kernel() is None else "ratio_compiled"
    assert figures["ratio"] == figures[by_default]


def test_both_ways_find_the_same_singular_values(quick):
    figures = quietly(tables.spectrum, num_rows=5_000)
    assert figures["ratio"] == pytest.approx(figures["torch_ms"] / figures["ours_ms"])
    assert 0 <= figures["relative_difference"] < 1e-12


def test_both_ways_to_grow_make_the_same_tensors(monkeypatch):
    made = {}

    def note(variants, first, second, meaning, *, budget):
        made.update({name: variant() for name, variant in variants.items()})
        return {"ratio": 1.0, "ratio_of": meaning}

    monkeypatch.setattr(tables, "ratios", note)
    figures = quietly(tables.grow, num_rows=500, new=20)
    assert figures["bytes"] == 3 * 500 * 16 * 4
    for ours, copied in zip(made["grow"], made["copy"], strict=True):
        assert ours.shape == (520, 16)
        assert torch.equal(ours[:500], copied[:500])
    assert not any(state[500:].any() for state in made["grow"][1:])
