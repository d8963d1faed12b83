"""Harmless transfer in its paper's cell: paired splits, both protocols, and runs that are not made twice."""

import importlib.util
import json
import statistics
import sys
from pathlib import Path

import pytest
import torch
from capabilities import needs_package

import rarebit as rb
from rarebit.ema import EMA

ROOT = Path(__file__).resolve().parents[2]
pytestmark = needs_package("scipy")


def load(path):
    name = f"benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


protocol = load(ROOT / "benchmarks/transfer_protocol.py")
ARMS = ["baseline", "harmless-transfer:fields=zip:absent=all"]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Return a prepared log of 1500 rows whose clicks depend on the zip code."""
    folder = tmp_path_factory.mktemp("log")
    generator = torch.Generator().manual_seed(0)
    codes = (torch.rand(1500, generator=generator) ** 3 * 60).long()
    ages = torch.randint(5, (1500,), generator=generator)
    noise = torch.rand(1500, generator=generator) < 0.3
    clicks = ((codes % 3 == 0) ^ noise).long()
    rows = zip(codes.tolist(), ages.tolist(), clicks.tolist(), strict=True)
    lines = "\n".join(f"z{code},a{age},{click}" for code, age, click in rows)
    (folder / "log.csv").write_text(f"zip,age,click\n{lines}\n")
    rb.prepare(folder / "log.csv", folder / "log", label="click")
    return folder / "log"


def run(monkeypatch, log, folder, *more):
    out = folder / "report.json"
    given = ["--data", log, "--models", "fm", "--keep", 60, "--methods", *ARMS, "--splits", 2]
    given += ["--epochs", 2, "--every", 1, "--pruning-epochs", 1, "--device", "cpu"]
    given += ["--training", '{"batch_size": 128}', "--runs", folder / "runs", "--out", out, *more]
    monkeypatch.setattr(sys, "argv", ["transfer_protocol.py", *map(str, given)])
    protocol.main()
    return json.loads(out.read_text())


def stored(folder):
    return [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*.json"))]


def test_arms_share_split_and_mask_and_no_run_is_made_twice(monkeypatch, log, tmp_path, capsys):
    report = run(monkeypatch, log, tmp_path)
    assert report["missing"] == 0
    assert [(found["arm"], found["n"]) for found in report["results"]] == [(a, 2) for a in ARMS]
    assert len(list((tmp_path / "runs/masks").iterdir())) == 2
    [against] = report["results"][1]["against"].values()
    runs = {(one["what"]["arm"], one["what"]["split"]): one for one in stored(tmp_path)}
    for way in ("auc", "best_on_test"):
        values = [runs[ARMS[1], split][way] - runs[ARMS[0], split][way] for split in (0, 1)]
        assert against[way]["mean"] == pytest.approx(statistics.fmean(values))
    assert [point["epoch"] for point in report["results"][0]["curve"]] == [1, 2]
    assert report["results"][0]["accuracy"] is None
    assert 0 <= report["results"][1]["accuracy"] <= 1
    assert "| fm | 60 | baseline | 2 |" in capsys.readouterr().out
    monkeypatch.setattr(protocol, "train", None)  # would fail
    monkeypatch.setattr(protocol, "pruned", None)
    assert run(monkeypatch, log, tmp_path) == report


def test_a_slice_without_time_makes_nothing_and_the_next_one_goes_on(monkeypatch, log, tmp_path):
    found = run(monkeypatch, log, tmp_path, "--minutes", -1)
    assert (found["missing"], found["results"]) == (4, [])
    one = run(monkeypatch, log, tmp_path, "--splits", 1)
    assert one["missing"] == 0
    assert one["results"][1]["against"] == {"baseline": {"auc": None, "best_on_test": None}}
    # the next run would take as long as the longest so far
    assert run(monkeypatch, log, tmp_path, "--minutes", 1e-9)["missing"] == 2


@pytest.mark.slow
def test_validation_picks_a_learning_rate_of_each_arm_on_the_first_split(
    monkeypatch, log, tmp_path
):
    report = run(monkeypatch, log, tmp_path, "--lr", 1e-6, 0.03)
    runs = stored(tmp_path)
    assert len(runs) == 2 * 2 + 2
    assert [(found["lr"], found["edge"]) for found in report["results"]] == 2 * [([0.03], True)]
    assert {one["what"]["training"]["lr"] for one in runs if one["what"]["split"] == 1} == {0.03}


def test_figures_are_those_of_averaged_weights_by_both_protocols(log):
    train, valid, test = protocol.load(str(log), 3, "cpu")
    assert [len(part) for part in (train, valid, test)] == [1200, 150, 150]
    torch.manual_seed(0)
    model = rb.models.build_model("fm", train.schema, {"dim": 2})
    optimizer = rb.optimizer(model, lr=0.05)
    ema = EMA(model, optimizer, 0.9)
    curve = protocol.Curve(model, ema, (train, valid, test), 1)
    rb.fit(
        model,
        train,
        epochs=2,
        batch_size=64,
        optimizer=optimizer,
        callbacks=[curve],
        progress=False,
    )
    assert [point["epoch"] for point in curve.points] == [1, 2]
    with ema.applied():
        found, scores = rb.evaluate(model, test), rb.predict(model, test)
        assert curve.points[-1]["valid_auc"] == rb.evaluate(model, valid).auc
    assert curve.points[-1]["test_auc"] == found.auc
    assert curve.points[-1]["test_logloss"] == pytest.approx(found.logloss)
    parts = []
    for start in (0, 64, 128):
        part, labels = scores[start : start + 64], test.label[start : start + 64]
        high, low = part[labels == 1], part[labels == 0]
        wins = (high[:, None] > low).double() + 0.5 * (high[:, None] == low)
        parts.append(wins.mean().item())
    assert curve.points[-1]["batch_auc"] == pytest.approx(sum(parts) / 3)


def test_an_arm_with_other_tables_is_refused(log):
    options = protocol.parse(["--data", str(log)])
    one = protocol.job(options, ("deepfm", 60), 0, "low-rank:rank=2", 0.1)
    with pytest.raises(rb.errors.SettingsError, match="an arm is a method of training on the same"):
        protocol.train(one, protocol.load(str(log), 0, "cpu"), None)
