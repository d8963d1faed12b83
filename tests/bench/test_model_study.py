"""The study of all models: paired seeds, runs that are not run twice, the right means."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from capabilities import needs_package

import rarebit as rb
from rarebit.models import model_names

ROOT = Path(__file__).resolve().parents[2]


def load(path):
    name = f"benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


study = load(ROOT / "benchmarks/models.py")

SMALL = ["--synthetic", "--rows", "2000", "--epochs", "1", "--batch", "256", "--device", "cpu"]


def run(monkeypatch, folder, *arguments):
    out = folder / "models.json"
    monkeypatch.setattr(sys, "argv", ["models.py", *SMALL, *arguments, "--out", str(out)])
    study.main()
    return json.loads(out.read_text())


def lines(folder):
    return [json.loads(line) for line in (folder / "models.jsonl").read_text().splitlines()]


def test_every_run_is_a_line_and_is_not_run_again(monkeypatch, tmp_path, capsys):
    first = run(monkeypatch, tmp_path, "--models", "lr,fm", "--seeds", "2")
    assert [(x["what"]["model"], x["what"]["training"]["seed"]) for x in lines(tmp_path)] == [
        ("lr", 0),
        ("fm", 0),
        ("lr", 1),
        ("fm", 1),
    ]
    monkeypatch.setattr(study, "train", None)  # would fail
    assert run(monkeypatch, tmp_path, "--models", "lr,fm", "--seeds", "2") == first
    assert [result["n"] for result in first["results"]] == [2, 2]
    assert "| synthetic | `fm` | 2 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other", [["--seeds", "2"], ["--lr", "0.1"], ["--dim", "4"], ["--rows", "3000"]]
)
def test_what_differs_is_run(monkeypatch, tmp_path, other):
    run(monkeypatch, tmp_path, "--models", "fm", "--seeds", "1")
    report = run(monkeypatch, tmp_path, "--models", "fm", "--seeds", "1", *other)
    assert len(lines(tmp_path)) == 2
    assert report["results"][0]["n"] == (2 if other[0] == "--seeds" else 1)


def test_no_run_starts_when_the_time_is_up(monkeypatch, tmp_path, capsys):
    report = run(monkeypatch, tmp_path, "--models", "fm", "--minutes", "-1")
    assert report["results"] == []
    assert "the time is up" in capsys.readouterr().err


def test_a_line_that_was_cut_off_is_run_again(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "--models", "lr", "--seeds", "1")
    path = tmp_path / "models.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:50])
    run(monkeypatch, tmp_path, "--models", "lr", "--seeds", "2")
    assert len(study.read_runs(path)) == 2


def test_a_seed_gives_the_same_run_whatever_ran_before(monkeypatch, tmp_path):
    (tmp_path / "other").mkdir()
    both = run(monkeypatch, tmp_path, "--models", "fm,dnn", "--seeds", "1")["results"]
    alone = run(monkeypatch, tmp_path / "other", "--models", "dnn", "--seeds", "1")["results"]
    assert both[1]["auc"] == alone[0]["auc"]


def test_the_ceiling_stands_beside_the_models(monkeypatch, tmp_path, capsys):
    [result] = run(monkeypatch, tmp_path, "--models", "lr", "--seeds", "1")["results"]
    assert result["ceiling"] > result["auc"]
    out = capsys.readouterr().out
    assert f"| synthetic | the true chances | | {100 * result['ceiling']:.2f} |" in out
    assert f"{100 * (result['ceiling'] - result['auc']):.2f}" in out


@needs_package("polars")
def test_a_prepared_log_is_opened_by_its_folder(monkeypatch, tmp_path):
    rows = "".join(f"u{i % 7},i{i % 5},{(i * i) % 3 % 2}\n" for i in range(600))
    (tmp_path / "clicks.csv").write_text("user,item,click\n" + rows)
    rb.prepare(tmp_path / "clicks.csv", tmp_path / "clicks", label="click")
    out = tmp_path / "models.json"
    arguments = ["--data", str(tmp_path / "clicks"), "--models", "lr", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["x", *arguments, *SMALL[3:], "--out", str(out)])
    study.main()
    [result] = json.loads(out.read_text())["results"]
    assert (result["set"], result["n"], result["ceiling"]) == ("clicks", 1, None)
    assert sum(result["rows"]) == 600


def test_settings_go_to_the_models_that_have_them():
    options = study.parse([*SMALL, "--dim", "8", "--model-settings", '{"dropout": 0.5}'])
    assert options.models == model_names()
    log = next(study.read_logs(options))
    settings = {what["model"]: what["settings"] for _, what in study.plan([log], options)}
    assert settings["lr"] == {}
    assert settings["fm"] == {"dim": 8}
    assert settings["dnn"] == {"dim": 8, "dropout": 0.5}


def test_a_preset_keeps_its_width_unless_another_is_given():
    options = study.parse([*SMALL, "--models", "fm@pep"])
    [what] = [what for _, what in study.plan(list(study.read_logs(options)), options)][:1]
    assert (what["model"], what["settings"]) == ("fm@pep", {})


def test_three_seeds_on_the_generated_log_and_five_on_others():
    assert study.parse(["--synthetic"]).seeds == 3
    assert study.parse(["--data", "x"]).seeds == 5


def test_a_report_without_a_log_is_refused(capsys):
    with pytest.raises(SystemExit):
        study.parse([])
    assert "--data DIR, or --synthetic" in capsys.readouterr().err


def test_means_and_spreads_are_over_the_seeds():
    runs = [{"auc": 0.8}, {"auc": 0.9}, {"auc": None}]
    found = study.summary("auc", runs)
    assert found["auc"] == pytest.approx(0.85)
    assert found["auc_spread"] == pytest.approx(0.0707, abs=1e-4)
    assert study.points(found, "auc") == "85.00 ± 7.07"
    assert study.points({"auc": None, "auc_spread": None}, "auc") == "-"


def test_a_run_that_fails_is_told_and_left_out(monkeypatch, tmp_path, capsys):
    report = run(monkeypatch, tmp_path, "--models", "dnn,lr", "--seeds", "1", "--lr", "1e30")
    assert [result["model"] for result in report["results"]] != ["dnn", "lr"]
    assert "synthetic, dnn, seed 0: " in capsys.readouterr().err


def test_the_command_says_what_was_run(monkeypatch, tmp_path):
    command = run(monkeypatch, tmp_path, "--models", "lr", "--seeds", "1")["command"]
    assert command.startswith("python benchmarks/models.py --synthetic --rows 2000 --models lr ")
    assert str(tmp_path) not in command
