"""A bench is found and run by its name."""

import importlib
import inspect
import json
from pathlib import Path

import pytest

from rarebit import bench
from rarebit.bench import BENCHES, bench_names, run_bench
from rarebit.errors import SettingsError

FILES = sorted(file.stem for file in Path(bench.__file__).parent.glob("[!_]*.py"))


def function_name(name):
    return "import_" if name == "import" else name


def test_every_function_that_takes_say_alone_is_a_bench():
    found = set()
    for file in FILES:
        module = importlib.import_module(f"rarebit.bench.{file}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                parameters = list(inspect.signature(function).parameters.values())
                first, others = parameters[0] if parameters else None, parameters[1:]
                if (
                    first
                    and first.name == "say"
                    and all(one.kind is one.KEYWORD_ONLY for one in others)
                ):
                    found.add((name, file))
    assert found == {(function_name(name), file) for name, file in BENCHES.items()}
    assert bench_names() == sorted(BENCHES)
    assert len(BENCHES) >= 18


@pytest.mark.parametrize("name", bench_names())
def test_a_bench_is_run_by_its_name(name, monkeypatch):
    module = importlib.import_module(f"rarebit.bench.{BENCHES[name]}")
    fake = lambda say: {"ratio": 2.0, "ratio_of": say("hello")}  # noqa: E731  # in its place
    monkeypatch.setattr(module, function_name(name), fake)
    result = run_bench(name, say=lambda line: line)
    assert (result["bench"], result["ratio"], result["ratio_of"]) == (name, 2.0, "hello")
    assert json.loads(json.dumps(result)) == result


def test_an_unknown_bench_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match="unknown bench 'trian'; did you mean 'train'"):
        run_bench("trian")


@pytest.mark.parametrize("name", ["_frame", "import_", "steps", "nonsense"])
def test_what_is_no_bench_is_refused(name):
    with pytest.raises(SettingsError, match=f"unknown bench '{name}'"):
        run_bench(name)
