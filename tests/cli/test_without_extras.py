"""Every command where only the core and the extra `cli` are installed: it works, or names the extra in one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_group

import rarebit
from rarebit.cli.app import app

ROOT = Path(rarebit.__file__).parents[2]
STORED = ROOT / "benchmarks" / "results" / "study-compression-ml-1m.json"
NOT_INSTALLED = """
from importlib.machinery import PathFinder

find, optional = PathFinder.find_spec, {
    *("matplotlib", "onnxruntime", "orjson", "pandas", "polars", "pyarrow", "starlette", "uvicorn")
}

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in optional else find(name, path, target)

PathFinder.find_spec = find_spec
"""
"""These packages are not found, as if they were not installed."""
CALL_ALL = """
import contextlib, io, json, sys
from rarebit.__main__ import main

found = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["rarebit", *words.split()]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stopped:
            found.append([words, stopped.code or 0, err.getvalue()])
print(json.dumps(found))
"""
SMALL = "--model fm --epochs 1 --set data.rows=1200 --set model.dim=2 --device cpu"
WALK = {
    f"train {SMALL} --out run": "",
    "predict --model run --out scores.csv": "",
    "diagnose run": "",
    "diagnose run --out figures --no-plots": "",
    "diagnose run --out figures": "plots",
    "compress run --size 1/4 --out small": "",
    "improve --data synthetic --size nonsense": "none",
    "report run": "",
    "export run --ids --out run.onnx": "export",
    "export run --ids --to pt2 --out run.pt2": "",
    "methods": "",
    f"compare --show {STORED}": "",
    "data prepare log.csv --label click --out log": "data",
    "data prepare --source ml-1m --from . --out ml-1m": "data",
    "data schema log.csv --label click": "data",
    "data show nothing": "none",
    "reshard run": "none",
    "data count log.csv --schema schema.toml --out counts": "data",
    "data merge counts --out merged": "data",
    "data encode counts --out merged": "data",
    "update --model run --data log.csv --out next": "data",
    "backtest log.csv --label click --time day": "data",
    "bench data": "data",
    "serve nothing.onnx": "serve",
}
"""Commands in this order, and the extra that each needs."""
SLOW = {
    "compress run --frontier --out sizes": "",  # which reports that it draws no plots
    f"prune {SMALL} --budgets 500 --out pruned": "",  # which reports that it draws no plots
    f"compare --methods baseline,hashing:buckets=50 {SMALL} --seeds 2": "",
    "demo --rows 1500 --seeds 2": "",
    "bench import": "",
}


def walk(folder, python, before, commands):
    """Call commands in one process; each works, or names its extra in one line."""
    (folder / "log.csv").write_text("user,click\n" + "ann,0\nbob,1\n" * 20)
    (folder / "schema.toml").write_text('label = "click"\n\n[[columns]]\nname = "user"\n')
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", before + CALL_ALL, json.dumps(list(commands))],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words, code, err in json.loads(done.stdout):
        assert code == (2 if commands[words] else 0), (words, err)
        if commands[words] in ("data", "export", "plots", "serve"):
            message = rf"rarebit: .* needs the package '\w+', which is not installed; .*\[{commands[words]}\]'\n"
            assert re.fullmatch(message, err), (words, err)


def test_the_walk_has_every_command():
    called = {words.split()[0] for words in WALK | SLOW}
    group = get_group(app)
    assert set(group.commands) == called
    parts = {words.split()[1] for words in WALK if words.startswith("data")}
    assert set(group.commands["data"].list_commands(None)) == parts


@pytest.mark.slow
def test_every_command_works_or_names_its_extra(tmp_path):
    walk(tmp_path, sys.executable, NOT_INSTALLED, WALK)


@pytest.mark.slow
def test_every_command_in_an_environment_with_the_core_and_the_command_line(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [packages] = (tmp_path / "venv").glob("lib/*/site-packages")
    wanted = subprocess.run(
        [sys.executable, "-c", NEEDED], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for path in filter(None, wanted):
        (packages / Path(path).name).symlink_to(path)
    walk(tmp_path, tmp_path / "venv" / "bin" / "python", "", WALK | SLOW)


NEEDED = """
import importlib.metadata as metadata, re
from packaging.requirements import Requirement

todo, seen, files = ["numpy", "safetensors", "torch", "rich", "typer", "scipy"], set(), set()
while todo:
    name = todo.pop()
    if name in seen:
        continue
    seen.add(name)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    files |= {found.locate_file(file.parts[0]) for file in found.files or () if ".." not in file.parts}
    needs = map(Requirement, found.requires or ())
    todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
print(*files, sep="\\n")
"""
"""Prints the files and folders of the packages that the core and the command line need."""
