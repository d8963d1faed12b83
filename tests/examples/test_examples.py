"""The examples run as they are, learn, tell what the transfer did, and change one line of a plain loop."""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capabilities import needs_package, slow_after

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
SAYS = {
    "compress_checkpoint": r"1,280,000 -> (7|8)\d,\d{3} bytes(.*\n)+.*the loaded model is equal: True",
    "backtest": r"Progressive AUC\n(.*\n)+Difference to grow",
    "dlrm_bags": r"3840000 bytes in 47\d{4}; the largest change of a score is 0\.",
    "feature_tables": r"'user': 'Embedding', 'item': 'Embedding', 'category': 'Embedding'",
    "matrix_factorisation": r"held-out loss: plain 0\.[56]\d+, tail 0\.[56]\d+",
    "serve_and_query": r"scores \[0\.[5-9]\d*, 0\.[0-4]\d*\]",
}
"""Examples of other methods, and what each prints at the end."""
WITHOUT_TRANSFER = {"torchrec_dlrm", *SAYS}
NAMES = sorted({path.stem for path in FOLDER.glob("[!_]*.py")} - WITHOUT_TRANSFER)
NEEDS = {"hugging_face": "transformers", "lightning_manual": "lightning"}
OURS = [name for name in NAMES if name not in NEEDS]
TRAININGS = {"tied_language_model": 3}
TABLES = {"own_loop": 2, "tied_language_model": 3}

each = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow, needs_package(NEEDS[name])]) for name in NEEDS]
    + [name if name == "own_loop" else pytest.param(name, marks=pytest.mark.slow) for name in OURS],
)


@functools.cache
def run(name):
    """Return what an example prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    flags = (
        [] if name in {*NEEDS, *WITHOUT_TRANSFER} else ["-W", "error"]
    )  # warnings of optional packages are theirs
    command = [sys.executable, *flags, str(FOLDER / f"{name}.py")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(name):
    sys.path.insert(0, str(FOLDER))  # where a script finds its neighbours
    try:
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("_shared", None)
    return module


def test_there_is_an_example_for_each_kind_of_loop():
    expected = ["ddp", "hugging_face", "lightning_manual", "own_loop", "tied_language_model"]
    assert expected == NAMES


@pytest.mark.parametrize("name", slow_after(SAYS))
def test_an_example_says_what_it_reached(name):
    output = run(name)
    assert re.search(SAYS[name], output), output
    losses = re.findall(r"loss (\S+) at first, (\S+) at last", output)
    assert all(float(last) < float(first) for first, last in losses)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_is_short(name):
    assert len((FOLDER / f"{name}.py").read_text("utf-8").splitlines()) < 80


@pytest.mark.slow
@each
def test_an_example_learns_and_tells_what_the_transfer_did(name):
    output = run(name)
    losses = re.findall(r"^loss (\S+) at first, (\S+) at last, (\d+) steps$", output, re.MULTILINE)
    assert len(losses) == TRAININGS.get(name, 1)
    for first, last, steps in losses:
        assert float(last) < 0.9 * float(first)
        assert int(steps) >= 50
    tables = re.findall(
        r": (\d+) updates of rare rows; the main loss opposed (\d+)% of them; "
        r"the optimizer realised (-?\d+)% of what the barrier promises$",
        output,
        re.MULTILINE,
    )
    assert len(tables) == TABLES.get(name, 1)
    for rows, opposed, realised in tables:
        assert int(rows) > 1000
        assert 0 < int(opposed) < 100
        assert 0 < int(realised) < 200


def test_own_loop_explains_an_item():
    assert re.search(
        r"id=900, count=\d+, side='rare', relatives=\(\(\d+, 0\.\d+\)", run("own_loop")
    )


@pytest.mark.slow
@needs_package("polars")
def test_the_notebooks_show_what_their_code_prints():
    """Up to its numbers, which differ between machines."""
    notebooks = list(FOLDER.glob("*.ipynb"))
    assert len(notebooks) == 2
    assert all('"stdout"' in notebook.read_text("utf-8") for notebook in notebooks)
    command = [sys.executable, str(ROOT / "tools/notebooks.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_both_processes_have_the_same_table():
    assert "the tables of both processes are equal: True" in run("ddp")


@pytest.mark.slow
@needs_package("fbgemm_gpu")
@needs_package("torchrec")
def test_torchrecs_own_model_trains_in_two_processes_and_ends_plain():
    output = run("torchrec_dlrm")
    first, last = re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)
    assert float(last) < 0.9 * float(first)
    [spread, plain] = re.findall(r"rows: loss (\S+)$", output, re.MULTILINE)
    assert float(spread) == pytest.approx(float(plain), abs=2e-6)
    assert "its tables: ['EmbeddingBag']" in output


@pytest.mark.parametrize("name", NAMES)
def test_one_line_is_changed(name):
    source = (FOLDER / f"{name}.py").read_text("utf-8")
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("backward")
    ]
    assert [call.removeprefix("self.") for call in calls] == ["transfer.backward"]
    [line] = [line for line in source.splitlines() if "transfer.backward(loss)  #" in line]
    assert re.search(r"# the only changed line; it was (loss\.|self\.manual_)backward\(", line)


@pytest.mark.slow
@needs_package("lightning")
@pytest.mark.filterwarnings("ignore")  # of lightning's own
def test_a_lightning_checkpoint_holds_the_transfer(tmp_path):
    example = load("lightning_manual")
    item, label = example.make_ratings()
    rows = torch.utils.data.TensorDataset(item[:3000], label[:3000])
    counts = item.bincount(minlength=example.ITEMS)

    def fit(epochs, path=None):
        torch.manual_seed(0)
        ratings = example.Ratings(counts)
        loader = torch.utils.data.DataLoader(rows, batch_size=example.BATCH)
        trainer = example.make_trainer(epochs)
        trainer.fit(ratings, loader, ckpt_path=path)
        return ratings, trainer

    whole, _ = fit(2)
    _, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again, _ = fit(2, tmp_path / "half.ckpt")
    assert len(again.losses) == 6
    assert again.transfer.ledger.read() == whole.transfer.ledger.read()
    assert torch.equal(again.model[0].weight, whole.model[0].weight)
