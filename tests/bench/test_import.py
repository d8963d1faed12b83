"""The import bench runs this rarebit in fresh processes."""

import subprocess
from pathlib import Path

import pytest

import rarebit
from rarebit.bench import import_
from rarebit.bench._frame import measure


@pytest.mark.slow
def test_a_fresh_process_imports_this_rarebit():
    printed = import_._python("import rarebit; print(rarebit.__file__)")
    assert Path(printed.strip()) == Path(rarebit.__file__)


@pytest.mark.slow
def test_a_process_that_fails_is_an_error():
    with pytest.raises(subprocess.CalledProcessError):
        import_._python("import rarebit.nowhere")


def test_what_the_processes_told_is_reported_without_warm_up(monkeypatch):
    told = iter(["9", "1", "3", "2"])
    monkeypatch.setattr(import_, "_python", lambda code: next(told) if code == import_.BOTH else "")
    monkeypatch.setattr(
        import_,
        "measure",
        lambda sides, budget, warm_up: measure(sides, budget=0, warm_up=warm_up, min_rounds=3),
    )
    figures = import_.run(lambda line: None)
    assert figures["import_seconds"] == 2
    assert figures["rounds"] == 3
    assert figures["ratio"] == pytest.approx(figures["rarebit_ms"] / figures["torch_ms"])
