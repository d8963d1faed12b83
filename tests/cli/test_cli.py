"""The command line as a user meets it: what it prints, what it leaves, how it fails."""

import csv
import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stored import tensors_file

import rarebit as rb
from rarebit.cli import options as opt
from rarebit.cli.train import epoch_hint
from rarebit.training.run import read_run

SMALL = ["--rows", "3000", "--epochs", "1"]


def auc_in(text):
    return re.search(r"AUC +│ +([\d.]+)", text)[1]


def test_help_names_the_sections_of_a_settings_file(call):
    _, out, _ = call("train", "--help")
    words = " ".join(out.replace("│", " ").split())
    assert "[model], [data], [training], [[methods]]" in words


def test_help_shows_commands_and_examples(call):
    code, out, _ = call("--help")
    assert code == 0
    for word in (
        "demo",
        "compare",
        "train",
        "predict",
        "bench",
        "Start here",
        "rarebit compare --data",
    ):
        assert word in out


def test_version(call):
    assert call("--version")[:2] == (0, f"{rb.__version__}\n")


def test_train_prints_a_table_and_leaves_a_model(call):
    code, out, err = call("train", "--model", "fm", *SMALL, "--out", "here")
    assert code == 0
    for row in ("AUC", "best any model", "rarest fifth", "logloss", "parameters", "samples/s"):
        assert row in out
    assert "epoch 1" in err
    names = {"checkpoints", "lock", "model.json", "report.html", "run.json"}
    names.add(tensors_file(Path("here")).name)
    assert {path.name for path in Path("here").iterdir()} == names


def test_scores_that_cannot_be_written_whole_leave_those_of_before(call):
    call("train", "--model", "fm", *SMALL, "--out", "here")
    Path("scores.csv").write_text("scores of before\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # no file may grow beyond 100 bytes
    try:
        code, _, err = call("predict", "--model", "here", "--out", "scores.csv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    assert "cannot write 'scores.csv': the system reports 'File too large'" in err
    assert Path("scores.csv").read_text() == "scores of before\n"
    assert not list(Path.cwd().glob(".*"))


def test_predict_scores_the_saved_model_again(call):
    _, trained, _ = call("train", "--model", "fm", *SMALL, "--out", "here")
    code, out, _ = call("predict", "--model", "here", "--out", "scores.csv")
    assert code == 0
    assert auc_in(out) == auc_in(trained)
    with Path("scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 300
    assert all(0.0 < float(row["score"]) < 1.0 for row in rows)
    splits = rb.data.generate(rb.data.SyntheticLog(rows=3000))
    assert [int(row["label"]) for row in rows] == splits.test.label.int().tolist()
    expected = rb.predict(rb.load_model("here"), splits.test).sigmoid().tolist()
    assert [float(row["score"]) for row in rows] == pytest.approx(expected, abs=1e-6)


def test_a_settings_file_is_read_and_options_win(call):
    Path("run.toml").write_text(
        '[model]\nname = "dnn"\ndim = 4\nhidden = [8]\n'
        "[data]\nrows = 2000\n[training]\nepochs = 2\nlr = 0.5\n"
        '[[methods]]\nmethod = "hashing"\nbuckets = 50\n'
    )
    code, _, err = call(
        "train", "--config", "run.toml", "--epochs", "1", "--set", "training.lr=0.01",
        "--set", "training.monitor=logloss", "--out", "here",
    )  # fmt: skip
    assert code == 0, err
    assert "Hashing(buckets=50)" in err
    settings = json.loads(Path("here/run.json").read_text())["settings"]
    assert settings["model"] == {"name": "dnn", "dim": 4, "hidden": [8]}
    training = settings["training"]
    assert (training["epochs"], training["lr"], training["monitor"]) == (1, 0.01, "logloss")
    assert settings["methods"] == [{"method": "hashing", "buckets": 50}]


def test_runs_without_a_name_get_folders_of_their_own(call):
    for number in (1, 2):
        _, out, _ = call("train", "--model", "fm", *SMALL)
        assert f"runs/fm-{number}" in out
        assert Path(f"runs/fm-{number}/model.json").exists()


def test_the_same_seed_gives_the_same_run_and_another_one_another(call):
    weights = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        call("train", "--model", "fm", *SMALL, "--seed", seed, "--out", folder)
        weights.append(tensors_file(Path(folder)).read_bytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("best", "epochs", "words"),
    [(1, 1, ""), (2, 3, ""), (None, 3, ""), (3, 3, "--epochs"), (1, 3, "overfit rare rows")],
)
def test_the_best_epoch_may_suggest_something(best, epochs, words):
    hint = epoch_hint(best, epochs)
    assert words in hint
    assert bool(hint) == bool(words)


def test_a_log_with_a_tail_suggests_the_method_for_it_unless_a_run_has_methods(call):
    options = ("--model", "fm", *SMALL, "--out")
    _, out, _ = call("train", *options, "plain")
    assert "of ids seen less than 30 times: try --methods tail." in " ".join(out.split())
    _, out, _ = call("train", "--methods", "tail", *options, "tail")
    assert "try --methods" not in " ".join(out.split())


def test_one_pass_scores_all_rows_and_shows_every_tenth(call):
    code, out, err = call("train", "--model", "fm", "--rows", "2000", "--one-pass", "--out", "once")
    assert code == 0, err
    assert "in one pass over the built-in click log" in out
    [shown] = re.findall(r"before training on it: ([\d., ]+)\.", " ".join(out.split()))
    assert len(shown.split(", ")) == 10
    assert read_run("once").training.one_pass


def test_a_run_whose_last_epoch_was_the_best_says_so(call):
    code, out, _ = call("train", "--model", "fm", "--rows", "3000", "--epochs", 2, "--lr", 1e-4)
    assert code == 0
    assert "Weights of epoch 2 of 2" in out
    assert "more epochs may be better" in out


@pytest.mark.slow
def test_demo_says_what_to_try_next(call):
    code, out, _ = call("demo", "--rows", "2000", "--seeds", "1")
    assert code == 0
    for words in (
        "dcn_v2 on synthetic-0",
        "nothing is tuned",
        "Difference to the control",
        "What to try next",
    ):
        assert words in out
    code, shown, _ = call("compare", "--show", "studies/demo")
    assert code == 0
    assert shown in out


MISTAKES = {
    "model": (["train", "--model", "deepfn"], "unknown model 'deepfn'; did you mean 'deepfm'?"),
    "data": (["train", "--data", "criteo.csv"], "'criteo.csv' holds no prepared log"),
    "file": (["predict", "--model", __file__], "test_cli.py' holds no run"),
    "model file": (["diagnose", __file__, "--data", "x"], "--data needs the folder of a run"),
    "setting": (["train", "--set", "training.lrr=3"], "did you mean 'lr'?"),
    "section": (["train", "--set", "trainng.lr=3"], "did you mean 'training'?"),
    "model setting": (["train", "--set", "model.dimm=3"], "did you mean 'dim'?"),
    "type": (["train", "--set", "model.hidden=3"], "hidden must be a list, got 3"),
    "assignment": (["train", "--set", "lr"], "--set takes section.name=value"),
    "value": (["train", "--epochs", "0"], "epochs must be at least 1, got epochs=0"),
    "rows": (["train", "--rows", "0"], "rows"),
    "config": (["train", "--config", "no.toml"], "'no.toml' does not exist"),
    "device": (["train", "--device", "tpu"], "device must be cpu, cuda or auto, got 'tpu'"),
    "folder": (["train", *SMALL, "--out", "/proc/no/such"], "cannot write to the folder"),
    "run": (["predict", "--model", "nowhere"], "'nowhere' holds no run"),
    "split": (["predict", "--model", "x", "--split", "tset"], "did you mean 'test'?"),
    "bench": (["bench", "trian"], "did you mean 'train'?"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(call, words, message):
    code, out, err = call(*words)
    assert code == 2
    assert message in err
    assert err.startswith("rarebit: ")
    assert err.count("\n") == 1
    assert not out
    assert not Path("runs").exists()


def test_methods_in_a_settings_file_are_checked(call):
    Path("run.toml").write_text('[[methods]]\nmethod = "hasing"\n')
    code, _, err = call("train", "--config", "run.toml")
    assert (code, "did you mean 'hashing'?" in err) == (2, True)


@pytest.mark.parametrize("file", ["model.json", "run.json", "weights-*"])
def test_a_damaged_run_is_told(call, file):
    call("train", "--model", "fm", *SMALL, "--out", "here")
    [path] = Path("here").glob(file)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, _, err = call("predict", "--model", "here")
    assert (code, err.startswith("rarebit: ")) == (2, True)
    assert "damaged" in err


def test_a_model_is_refused_for_other_data(call):
    call("train", "--model", "fm", *SMALL, "--out", "here")
    run = json.loads(Path("here/run.json").read_text())
    run["settings"]["data"]["preset"] = "criteo"
    Path("here/run.json").write_text(json.dumps(run))
    code, _, err = call("predict", "--model", "here")
    assert (code, "the model was built for other data" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_says_how_to_resume_and_does(tmp_path, number, code):
    seen, returned = stop_in_epoch_2(tmp_path, number)
    assert returned == code
    assert "Traceback" not in seen
    assert "To resume: " in seen
    words = shlex.split(seen.split("To resume: ")[1])[1:]
    assert words[:3] == ["train", "--resume", "runs/fm-1"]
    more = [sys.executable, "-m", "rarebit", *words, "--epochs", "2"]
    done = subprocess.run(
        more, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resumed from at-000002-" in done.stderr
    assert "Saved in runs/fm-1" in done.stdout


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(rb.__file__).parents[1]), "TERM": "xterm"}


def stop_in_epoch_2(folder, number):
    """Start a long run on a terminal, send it a signal; return what was seen, and its exit code."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "rarebit", "train", "--model", "fm", "--rows", "50000"]
    process = subprocess.Popen(
        [*command, "--epochs", "1000", "--set", "training.patience=1000"],
        cwd=folder,
        stderr=terminal,
        stdout=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    os.close(terminal)
    seen = ""
    while "epoch 2/1000" not in seen:
        seen += os.read(controller, 4096).decode(errors="replace")
    process.send_signal(number)
    try:
        while chunk := os.read(controller, 4096):
            seen += chunk.decode(errors="replace")
    except OSError:  # the other end is closed: how a terminal says that the process has ended
        pass
    os.close(controller)
    return seen, process.wait()


def test_a_folder_with_a_run_is_not_trained_over(call):
    call("train", "--model", "fm", *SMALL, "--out", "here")
    code, _, err = call("train", "--model", "fm", *SMALL, "--out", "here")
    assert (code, "holds a run already; resume it" in err) == (2, True)


def test_resume_takes_no_other_settings_file_or_folder(call):
    call("train", "--model", "fm", *SMALL, "--out", "here")
    code, _, err = call("train", "--resume", "here", "--out", "there")
    assert (code, "--out cannot be combined with --resume" in err) == (2, True)
    code, _, err = call("train", "--resume", "nowhere")
    assert (code, "holds no run" in err) == (2, True)
    code, _, err = call("train", "--resume", "here", "--lr", "0.5")
    assert (code, "another run: settings.lr was" in err) == (2, True)


def test_threads_are_given_or_chosen_by_what_is_free(call, monkeypatch):
    code, _, err = call("train", "--model", "fm", *SMALL, "--threads", 2, "--out", "two")
    assert (code, torch.get_num_threads()) == (0, 2), err
    assert "CPU threads" not in err
    code, _, err = call("train", "--threads", 0)
    assert (code, err) == (2, "rarebit: --threads must be at least 1, got 0\n")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for share, line in ((0.0, "2"), (0.5, "1 of 2: other processes use the rest (--threads)")):
        monkeypatch.setattr(opt.LOAD, "share", lambda share=share: share)
        code, _, err = call("predict", "--model", "two")
        assert (code, err.splitlines()[0]) == (0, f"CPU threads: {line}")
        assert torch.get_num_threads() == int(line[0])


def test_tables_can_be_trained_by_rows(call, tmp_path):
    words = ["--model", "fm", "--rows", "2000", "--epochs", "1", "--tables", "rowwise"]
    words += ["--device", "cpu"]
    code, _, err = call("train", *words, "--out", str(tmp_path / "run"))
    assert code == 0
    assert "memory on cpu: " in err
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["training"]["tables"] == "rowwise"
