"""The benchmark of compressors: runs and coded tables that are made once, paired differences, tables and plots."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from capabilities import needs_cuda, needs_package

import rarebit as rb

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [needs_package("scipy"), needs_package("matplotlib")]


def load(path):
    name = f"benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compression = load(ROOT / "benchmarks/compression.py")


def prepared(folder):
    """Return a prepared log of 900 rows whose clicks depend on the item."""
    generator = torch.Generator().manual_seed(0)
    items = (torch.rand(900, generator=generator) ** 3 * 80).long()
    users = torch.randint(30, (900,), generator=generator)
    clicks = ((items % 3 == 0) ^ (torch.rand(900, generator=generator) < 0.2)).long()
    rows = zip(items.tolist(), users.tolist(), clicks.tolist(), strict=True)
    lines = "\n".join(f"i{item},u{user},{click}" for item, user, click in rows)
    (folder / "log.csv").write_text(f"item,user,click\n{lines}\n")
    rb.prepare(folder / "log.csv", folder / "log", label="click")
    return folder / "log"


def cell(tables, seed, *points):
    keys = ("compressor", "size", "table_bytes", "valid_auc", "test_auc", "rarest_auc")
    found = [dict(zip(keys, point, strict=True)) for point in points]
    return {"log": "clicks", "tables": tables, "seed": seed, "sizes": [8], "points": found}


CELLS = [
    cell("plain", 0, ("32 bits", None, 800, 0.7, 0.70, 0.6), ("int8", None, 200, 0.7, 0.69, 0.6)),
    cell("plain", 1, ("32 bits", None, 800, 0.7, 0.72, 0.6), ("int8", None, 200, 0.7, 0.69, 0.6)),
    cell("tail", 0, ("evidence coding", 8, 100, 0.7, 0.75, 0.6)),
    cell("tail", 7, ("evidence coding", 8, 100, 0.7, 0.95, 0.6)),  # no plain tables of this seed
    cell("hashing", 1, ("trained", 8, 90, 0.7, 0.62, 0.6)),
]


def test_differences_are_paired_by_seed_with_an_interval(tmp_path, capsys):
    (tmp_path / "stored.json").write_text(json.dumps({"cells": CELLS}))
    compression.main(["--show", str(tmp_path / "stored.json"), "--plot"])
    shown = capsys.readouterr().out
    lines = {line.split("  ")[0]: " ".join(line.split()) for line in shown.splitlines()}
    # the mean of -0.01 and -0.03, and t(0.975, 1) = 12.706 times 0.01
    assert "1/4 200 B" in lines["plain, int8"]
    assert "-0.0200 (-0.1471 to +0.1071)" in lines["plain, int8"]
    assert lines["plain, int8"].endswith(" 2")
    assert lines["tail, evidence coding"].endswith("+0.0000 +0.0500 +0.0000 1")
    assert "-0.1000" in lines["hashing, trained"]
    assert "plain, 32 bits" not in lines
    assert "(test AUC 0.7100)" in shown
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "frontier.svg").exists()


def test_differences_are_stored_by_log_compressor_and_size():
    found = compression.differences(CELLS)["clicks"]
    assert found["plain-int8"]["1"]["test_auc"] == [-0.01, -0.03]
    assert found["tail-evidence-coding"]["8"]["test_auc"] == [0.05]
    assert "plain-32-bits" not in found


def test_logs_or_a_stored_result_are_needed(capsys):
    with pytest.raises(SystemExit):
        compression.main([])
    assert "give logs with --data" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_and_codes_are_made_once_by_several_processes(tmp_path, capsys):
    log, out = prepared(tmp_path), tmp_path / "out"
    words = ["--data", str(log), "--seeds", "2", "--first-seed", "3", "--dim", "4", "--epochs", "2"]
    words += ["--workers", "2", "--threads", "1", "--device", "cpu", "--out", str(out)]
    words += ["--trained", "hashing,narrow", "--trained-sizes", "2", "--trained-seeds", "1"]
    compression.main([*words, "--sizes", "4"])
    report = json.loads((out / "compression.json").read_text())
    assert report["machine"]["torch"] == torch.__version__
    made = {(one["tables"], one["seed"]): one for one in report["cells"]}
    assert sorted(made) == [
        *(("hashing", 3), ("narrow", 3), ("plain", 3), ("plain", 4), ("tail", 3), ("tail", 4))
    ]
    [whole, *coded] = made["plain", 3]["points"]
    saved = json.loads((out / "runs/log-plain-3/run.json").read_text())
    assert whole["test_auc"] == round(saved["test"]["overall"]["auc"], 6)
    assert whole["table_bytes"] == saved["table_bytes"]
    assert all(
        point["table_bytes"] <= whole["table_bytes"] / 4 * 1.05 for point in coded if point["size"]
    )
    for name in ("hashing", "narrow"):
        small, rounded = made[name, 3]["points"]
        assert small["table_bytes"] <= whole["table_bytes"] / 2
        assert rounded["table_bytes"] <= whole["table_bytes"] / 8 * 1.05
        assert (small["size"], rounded["size"]) == (2, 8)
        assert abs(small["test_auc"] - rounded["test_auc"]) < 0.01
    assert {point["compressor"] for point in made["tail", 3]["points"]} >= {"int8", "int4"}
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/run.json")}
    compression.main([*words, "--sizes", "4,8"])
    again = json.loads((out / "compression.json").read_text())
    assert [one["sizes"] for one in again["cells"]] == [[2], [2], *[[4, 8]] * 4]
    points = next(one["points"] for one in again["cells"] if one["tables"] == "plain")
    assert points[: len(coded) + 1] == [whole, *coded]
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/run.json")} == before
    shutil.rmtree(out / "runs")  # finished cells do not need them
    capsys.readouterr()
    compression.main([*words, "--sizes", "4,8"])
    assert "tail, evidence coding" in capsys.readouterr().out
    assert not (out / "runs").exists()
    with pytest.raises(rb.errors.SettingsError, match="holds runs with other settings"):
        compression.main([*words, "--epochs", "3"])


@pytest.mark.slow
def test_a_task_that_fails_is_reported_and_the_others_are_made(tmp_path, capsys):
    log, out = prepared(tmp_path), tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    (out / "runs/log-plain-0").touch()  # where a folder is needed
    words = ["--data", str(log), "--seeds", "1", "--dim", "4", "--epochs", "1", "--sizes", "4"]
    with pytest.raises(SystemExit, match="log, plain, seed 0 failed"):
        compression.main([*words, "--device", "cpu", "--threads", "1", "--out", str(out)])
    [cell] = json.loads((out / "compression.json").read_text())["cells"]
    assert cell["tables"] == "tail"


@pytest.mark.slow
def test_time_runs_out_and_the_same_command_resumes(tmp_path, capsys):
    log, out = prepared(tmp_path), tmp_path / "out"
    words = ["--data", str(log), "--seeds", "1", "--dim", "4", "--sizes", "4", "--out", str(out)]
    words += ["--device", "cpu", "--threads", "1", "--epochs", "2"]
    compression.main([*words, "--minutes", "0.0001"])
    assert "2 of 2 tasks are left; the same command resumes" in capsys.readouterr().err
    compression.main(words)
    assert len(json.loads((out / "compression.json").read_text())["cells"]) == 2


@needs_cuda
@pytest.mark.slow
def test_all_of_the_plan_runs_on_a_gpu(tmp_path):
    log, out = prepared(tmp_path), tmp_path / "out"
    words = ["--data", str(log), "--seeds", "1", "--dim", "16", "--epochs", "1", "--sizes", "4"]
    small = ",".join(compression.TRAINED)
    words += ["--device", "cuda", "--workers", "2", "--trained", small, "--trained-sizes", "2"]
    compression.main([*words, "--out", str(out)])
    report = json.loads((out / "compression.json").read_text())
    assert report["machine"]["device"] == torch.cuda.get_device_name()
    assert {one["tables"] for one in report["cells"]} == {"plain", "tail", *compression.TRAINED}


def test_the_plan_keeps_to_its_budget(tmp_path):
    logs = [tmp_path / name for name in ("a", "b", "c", "d", "e")]
    options = compression.parse(["--data", *map(str, logs), "--trained", "plan"])
    runs = 2 * options.seeds + options.trained_seeds * len(compression.trained_tables(options))
    assert runs * len(logs) <= 400


def test_weights_are_rounded_to_eight_bits():
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 1))
    before, network = model[0].weight.detach().clone(), model[1].weight.detach().clone()
    assert compression.round_to_eight_bits_(model) == 50 * 4 + 4
    after = model[0].weight.detach()
    assert len(after.unique()) <= 255
    assert 0 < float((after - before).abs().max()) <= float(before.abs().max()) / 100
    assert torch.equal(model[1].weight, network)
