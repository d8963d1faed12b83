"""A package from outside: its methods train, compare, resume, save and load, with an entry point or without."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import rarebit
from rarebit.errors import SettingsError
from rarebit.technique import needed_modules, technique_class

HERE = Path(__file__).resolve().parent
SOURCE = Path(rarebit.__file__).parents[1]
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]
GROUP = "rarebit.methods"


@dataclass(frozen=True)
class Watched(rarebit.TrainingMethod):
    """A method of this file."""

    def callback(self):
        """Return nothing of note."""
        return rarebit.Callback()


SMALL = ["--model", "fm", "--set", "model.dim=4", "--epochs", "2", "--device", "cpu"]


def python(*words, path, cwd, code=0):
    """Run Python where a folder is importable; return standard output and error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, words)],
        env=os.environ
        | {"PYTHONPATH": f"{path}{os.pathsep}{SOURCE}", "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds the package and its entry points, as an installer leaves them."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(HERE / "rarebit_gain", folder / "rarebit_gain")
    facts = folder / "rarebit_gain-0.1.dist-info"
    facts.mkdir()
    facts.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n"
    )
    points = [f"{name} = {place}" for name, place in PROJECT["entry-points"][GROUP].items()]
    facts.joinpath("entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points]))
    return folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A folder that holds the package without entry points."""
    folder = tmp_path_factory.mktemp("path")
    shutil.copytree(HERE / "rarebit_gain", folder / "rarebit_gain")
    return folder


IN_ONE_PROCESS = """
import sys
import torch
import rarebit as rb
from rarebit.technique import parse_techniques, technique_class, technique_names, technique_text

assert {"gain", "cooling"} <= set(technique_names())
assert "rarebit_gain" not in sys.modules  # a name alone imports nothing
settings = rb.RunSettings.from_mapping({
    "model": {"name": "fm", "dim": 4}, "data": {"rows": 1500},
    "training": {"epochs": 2, "patience": None},
    "methods": [{"method": "gain", "start": 2.0}, {"method": "cooling"}],
})
assert rb.RunSettings.from_mapping(settings.to_mapping()) == settings
found = rb.run(settings, folder="run", progress=False, say=len)
assert found.history.reports == {"cooling": {"cooled": 1}}
rates = [epoch.lr for epoch in found.history.epochs]
assert rates[1] == rates[0] / 2
model = rb.load_model("run")
assert "Gain(start=2.0)" in rb.find_tables(model)[0].methods
[expression] = parse_techniques("low-rank:rank=2+gain:start=0.5+cooling")
assert expression.text == "low-rank:rank=2+gain:start=0.5+cooling"
assert technique_text(technique_class("gain")(start=2.0)) == "gain:start=2.0"
"""


@pytest.mark.slow
def test_methods_of_entry_points_run_and_load_by_name(installed, tmp_path):
    python("-c", IN_ONE_PROCESS, path=installed, cwd=tmp_path)


@pytest.mark.slow
def test_they_keep_the_contract(installed, tmp_path):
    program = (
        "from rarebit.testing import check_method\n"
        "from rarebit_gain import Cooling, Gain\n"
        "check_method(Gain)\n"
        "check_method(Gain(start=0.5))\n"
        "check_method(Cooling(factor=0.9))\n"
    )
    python("-c", program, path=installed, cwd=tmp_path)


@pytest.mark.slow
def test_the_command_line_lists_trains_resumes_diagnoses_and_compares_them(installed, tmp_path):
    def rarebit_command(*words, code=0):
        return python("-m", "rarebit", *words, path=installed, cwd=tmp_path, code=code)

    listed = json.loads(rarebit_command("methods", "--json")[0])
    assert {"gain", "cooling"} <= {method["name"] for method in listed["methods"]}
    assert "one gain per table" in rarebit_command("methods")[0]
    train = ["train", *SMALL, "--rows", "1500", "--methods", "gain:start=2+cooling", "--out", "run"]
    rarebit_command(*train)
    whole = (tmp_path / "run" / "run.json").read_text("utf-8")
    assert json.loads(whole)["settings"]["methods"] == [
        {"method": "gain", "start": 2.0},
        {"method": "cooling", "factor": 0.5},
    ]
    out, _ = rarebit_command("train", "--resume", "run", "--epochs", "3")
    assert "3" in out
    assert "Tables of run" in rarebit_command("diagnose", "run")[0]
    compare = ["compare", "--methods", "baseline,gain,cooling", *SMALL, "--set", "data.rows=1500"]
    out, _ = rarebit_command(*compare, "--seeds", "2", "--workers", "2", "--out", "study")
    assert "gain" in out
    assert "cooling" in out
    _, error = rarebit_command("train", *SMALL, "--methods", "gian", code=2)
    assert "unknown method 'gian'; did you mean 'gain'?" in " ".join(error.split())


STUDY = """
import rarebit as rb
{definition}
found = rb.study(
    "study", methods="baseline,Gain:start=2.0", model={{"name": "fm", "dim": 4}}, data={{"rows": 1500}},
    training={{"epochs": 1}}, seeds=2, workers=2, device="cpu", progress=False)
assert found.is_complete, found
[cell] = found.cells
assert [(v.name, len(v.runs)) for v in cell.variants] == [("baseline", 2), ("Gain:start=2.0", 2)]
"""


@pytest.mark.slow
def test_an_imported_class_is_compared_in_worker_processes(imported, tmp_path):
    program = STUDY.format(definition="import rarebit_gain")
    python("-c", program, path=imported, cwd=tmp_path)
    # a script finds modules in its own folder, and so do the workers
    shutil.copytree(imported / "rarebit_gain", tmp_path / "scripts" / "rarebit_gain")
    (tmp_path / "scripts" / "compare.py").write_text(program.replace('"study"', '"second"'))
    python(tmp_path / "scripts" / "compare.py", path="", cwd=tmp_path)


def test_only_classes_without_an_entry_point_need_their_module():
    one = Watched()
    assert needed_modules([rarebit.LowRank(rank=2), one]) == [Watched.__module__]

    @dataclass(frozen=True)
    class Local(Watched):
        """Defined in a function."""

    with pytest.raises(SettingsError, match="cannot import Local, which is defined in a script"):
        needed_modules([one, Local()])


def test_an_entry_point_that_does_not_import_is_named(monkeypatch):
    broken = {"broken": ("no_such_module", "Broken"), "wrong": ("rarebit", "fit")}
    monkeypatch.setattr("rarebit.technique._foreign", lambda: broken)
    with pytest.raises(SettingsError, match="'broken' cannot be imported: No module named"):
        technique_class("broken")
    with pytest.raises(SettingsError, match="'wrong' is <function fit"):
        technique_class("wrong")


@pytest.mark.slow
def test_a_class_of_a_script_is_refused_before_anything_runs(imported, tmp_path):
    definition = (
        "import rarebit_gain.gain\nclass Gain(rarebit_gain.gain.Gain):\n    registered_name = 'own'"
    )
    program = STUDY.format(definition=definition).replace("Gain:start", "own:start")
    _, error = python("-c", program, path=imported, cwd=tmp_path, code=1)
    assert "cannot import Gain, which is defined in a script, a notebook or a function" in error
    assert not (tmp_path / "study").exists()


SAVE = """
import torch
import rarebit as rb
from rarebit_gain import Gain
model = torch.nn.Sequential(torch.nn.Embedding(9, 4))
rb.apply_(model, Gain(start=3.0), verbose=False)
rb.save_model(model, "model")
"""
LOAD = """
import torch
import rarebit as rb
{first}
model = rb.load_model("model", into=torch.nn.Sequential(torch.nn.Embedding(9, 4)))
assert model[0].gain == 3
"""


@pytest.mark.slow
def test_an_imported_class_is_found_by_its_name_and_missed_clearly(imported, tmp_path):
    python("-c", SAVE, path=imported, cwd=tmp_path)
    python("-c", LOAD.format(first="import rarebit_gain"), path=imported, cwd=tmp_path)
    _, error = python("-c", LOAD.format(first=""), path=imported, cwd=tmp_path, code=1)
    last = error.splitlines()[-1]
    assert last.startswith(
        "rarebit.errors.ModelFileError: 'model' names methods that cannot be read"
    )
    assert "unknown method 'rarebit_gain.gain:Gain'" in last
    assert "or its module must be imported first" in last
