"""Benches of what surrounds training: checkpoints can be read, and imports run this rarebit."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import rarebit
from rarebit.bench import _frame, steps
from rarebit.bench import processes as runs
from rarebit.bench._frame import measure, run_python
from rarebit.data.synthetic import generate


@pytest.mark.slow
def test_the_figures_of_a_checkpoint(quick, monkeypatch):
    monkeypatch.setattr(steps, "generate", lambda log: generate(replace(log, rows=4000)))
    figures = runs.checkpoint(lambda line: None, steps=2)
    lost = (figures["checkpoint_ms"] - figures["plain_ms"]) / 1000
    assert figures["lost_seconds"] == pytest.approx(lost)
    assert figures["ratio"] == pytest.approx(1 + lost / 60)
    assert figures["checkpoint_megabytes"] > 100  # weights and both moments of 967,795 rows


@pytest.mark.slow
def test_a_fresh_process_imports_this_rarebit():
    printed = run_python("import rarebit; print(rarebit.__file__)")
    assert Path(printed.strip()) == Path(rarebit.__file__)


@pytest.mark.slow
def test_a_process_that_fails_is_an_error():
    with pytest.raises(subprocess.CalledProcessError):
        run_python("import rarebit.nowhere")


def test_what_the_processes_print_is_reported_without_warm_up(monkeypatch):
    printed = iter(["9", "1", "3", "2"])
    monkeypatch.setattr(runs, "run_python", lambda code: next(printed) if code == runs.BOTH else "")
    monkeypatch.setattr(
        _frame,
        "measure",
        lambda variants, budget, warm_up: measure(
            variants, budget=0, warm_up=warm_up, min_rounds=3
        ),
    )
    figures = runs.import_(lambda line: None)
    assert figures["import_seconds"] == 2
    assert figures["rounds"] == 3
    assert figures["ratio"] == pytest.approx(figures["rarebit_ms"] / figures["torch_ms"])
