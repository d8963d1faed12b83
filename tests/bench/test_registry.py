"""A bench is a file: found by its name, and run by it."""

import importlib
import json
from pathlib import Path

import pytest

from rarebit import bench
from rarebit.bench import bench_names, run_bench
from rarebit.errors import SettingsError

FILES = sorted(Path(bench.__file__).parent.glob("[!_]*.py"))


def test_every_file_is_a_bench():
    assert len(FILES) >= 2
    assert bench_names() == sorted(file.stem.removesuffix("_") for file in FILES)
    assert {"import", "train"} <= set(bench_names())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_bench_can_be_run(file):
    module = importlib.import_module(f"rarebit.bench.{file.stem}")
    assert "run" in module.__all__
    assert callable(module.run)


@pytest.mark.parametrize("name", bench_names())
def test_a_bench_is_run_by_its_name(name, monkeypatch):
    file = {file.stem.removesuffix("_"): file.stem for file in FILES}[name]
    module = importlib.import_module(f"rarebit.bench.{file}")
    monkeypatch.setattr(module, "run", lambda say: {"ratio": 2.0, "ratio_of": say("hello")})
    result = run_bench(name, say=lambda line: line)
    assert (result["bench"], result["ratio"], result["ratio_of"]) == (name, 2.0, "hello")
    assert json.loads(json.dumps(result)) == result


def test_an_unknown_bench_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match="unknown bench 'trian'; did you mean 'train'"):
        run_bench("trian")


@pytest.mark.parametrize("name", ["_frame", "import_", "nonsense"])
def test_what_is_no_bench_is_refused(name):
    with pytest.raises(SettingsError, match=f"unknown bench '{name}'"):
        run_bench(name)
