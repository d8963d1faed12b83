"""All models beside DeepCTR-Torch: the same sizes on both sides, and the right ratios."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import rarebit as rb
from rarebit.models import build_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model_peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # where a script finds its neighbours
    path = ROOT / "benchmarks/model_peers.py"
    spec = importlib.util.spec_from_file_location("benchmark_model_peers", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("peers")


SCHEMA = rb.data.Schema(tuple(rb.data.Field(name=f"C{i}", rows=5) for i in range(4)))

# the defaults of DeepCTR-Torch 0.3.0, by our names
DEFAULTS = {
    "autoint": {"hidden": [256, 128], "num_layers": 3, "num_heads": 2, "head_dim": 8},
    "dcn": {"hidden": [128, 128], "num_layers": 2},
    "dcn_v2": {"hidden": [128, 128], "num_layers": 2},
    "deepfm": {"hidden": [256, 128]},
    "dnn": {"hidden": [256, 128]},
    "fm": {},
    "ipnn": {"hidden": [128, 128]},
    "nfm": {"hidden": [128, 128]},
    "wide_deep": {"hidden": [256, 128]},
    "xdeepfm": {"hidden": [256, 256], "cin": [256, 128], "split_half": True, "cin_relu": True},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_our_side_has_the_sizes_of_theirs(name, model_peers):
    pair = model_peers.PAIRS[name]
    model = build_model(pair.ours, SCHEMA, {"dim": 16, **pair.settings})
    assert (model.settings | DEFAULTS[name] | {"dim": 16}) == model.settings
    assert model.settings.get("dropout", 0.0) == 0.0
    assert not model.settings.get("batch_norm", False)


def test_every_pair_is_checked(model_peers):
    assert set(model_peers.PAIRS) == set(DEFAULTS)


def test_sides_are_theirs_and_ours_in_both_modes(model_peers):
    sides = model_peers.sides_of("fm", l2=True)
    assert sides["deepctr"].options == {
        "model": "fm",
        "model_settings": {"dnn_hidden_units": []},
        "l2": True,
    }
    ours = [sides[ratio].options["tables"] for ratio in ("ratio", "ratio_dense")]
    assert ours == ["rowwise", "dense"]
    assert [side.library for side in sides.values()] == ["deepctr", "rarebit", "rarebit"]


def run_of(seconds):
    same = {"auc": [0.5, 0.6], "peak_memory_mb": 1, "other_load": None, "versions": {}}
    return same | {"epoch_seconds": [9.0, seconds], "settings": {"model": {}}}


def test_a_ratio_is_of_medians(model_peers):
    sides = {
        "deepctr": [run_of(x) for x in (4.0, 40.0, 3.0)],
        "ratio": [run_of(x) for x in (1.0, 2.0, 0.1)],
        "ratio_dense": [run_of(2.0)],
    }
    result = model_peers.result_of("fm", 100, sides)
    assert (result["ratio"], result["ratio_dense"]) == (4.0, 2.0)
    assert result["samples_per_second"] == {"deepctr": 25, "ratio": 100, "ratio_dense": 50}
    assert json.loads(json.dumps(result)) == result
    assert "| `fm` | 4.0 | 2.0 | 25 | 100 |" in model_peers.table([result])


def test_rounds_take_turns_and_use_each_librarys_python(model_peers, monkeypatch):
    asked = []

    def train(folder, python, side, held_out):
        asked.append((python, side.options["model"], side.options.get("tables")))
        return run_of(1.0)

    monkeypatch.setattr(model_peers, "train", train)
    monkeypatch.setattr(model_peers, "write_job", lambda folder, rows: None)
    monkeypatch.setattr(model_peers, "show", lambda *arguments: None)
    model_peers.measure("theirs", ["fm"], 100, 2, l2=False)
    once = [("theirs", "fm", None)] + [
        (sys.executable, "fm", tables) for tables in ("rowwise", "dense")
    ]
    assert asked == once + once[::-1]


@pytest.mark.slow
def test_ours_trains_the_model_it_is_asked_for(model_peers, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    peers = sys.modules["peers"]
    job = {"dim": 2, "hidden": [8], "lr": 1e-2, "batch_size": 256, "epochs": 1}
    held_out = peers.write_job(tmp_path, 500, job)
    side = model_peers.sides_of("nfm", l2=False)["ratio"]
    result = peers.train(tmp_path, sys.executable, side, held_out)
    assert result["settings"]["model"]["hidden"] == [128, 128]
    assert result["settings"]["model"]["dim"] == 2
    assert result["settings"]["fit"]["tables"] == "rowwise"
    assert "model" not in result["settings"]["fit"]
