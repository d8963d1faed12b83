"""The benchmark of studies: every way makes the same runs."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_way_makes_the_same_runs(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("studies", ROOT / "benchmarks/studies.py")
    studies = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(studies)
    out = tmp_path / "studies.json"
    words = "studies.py synthetic --rows 3000 --epochs 1 --seeds 2 --rates 1 --device cpu --ways together,one --out"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(out)])
    studies.main()
    stored = json.loads(out.read_text())
    [found] = stored["results"]
    assert found["runs"] == 6
    assert found["speedup_over_one"] == pytest.approx(
        found["one_seconds"] / found["together_seconds"], abs=0.01
    )
    # batch normalisation after one epoch magnifies the rounding of a stack
    assert found["largest_auc_difference_one"] < 0.02
    assert stored["machine"]["commit"]
