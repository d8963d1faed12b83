"""`rarebit compare` as a user meets it: what it prints, what it keeps, how it fails."""

import json
import shlex
from pathlib import Path

import pytest
import typer
from capabilities import needs_package
from rich.console import Console

import rarebit as rb
from rarebit.cli import screen
from rarebit.cli.app import app
from rarebit.cli.compare import show_study
from rarebit.cli.screen import StudyBars
from rarebit.study.results import CellResult, StudyResult, read_result
from rarebit.study.runs import RunRecord

SMALL = [
    "--model", "fm", "--set", "model.dim=4", "--set", "data.rows=1500", "--epochs", "1",
    "--seeds", "2", "--workers", "1", "--device", "cpu",
]  # fmt: skip
AT_ONCE = ["--minutes", "1e-9"]
"""The time is over before a run begins."""


def plan_in(folder):
    return json.loads(Path(folder, "study.json").read_text())


def test_a_comparison_is_printed_kept_and_shown_again(call):
    command = ["compare", "--methods", "baseline,low-rank", *SMALL]
    code, out, err = call(*command)
    assert code == 0, err
    for word in ("fm on synthetic-0", "narrow:dim=2", "best possible", "low-rank:rank=1: "):
        assert word in out
    for line in ("6 runs, 0 already finished", "6 of 6: ", ": low-rank:rank=1, seed 1: AUC "):
        assert line in err  # which run is the last to finish is not said
    assert "missing" not in out
    folder = "studies/fm-synthetic"
    assert f"Saved in {folder}. To show it again:" in out
    result = read_result(folder)
    [method] = result.cells[0].methods
    assert f"{method.runs[0].parameters:,}" in out
    assert result.cells[0].compare(0.0005)["low-rank:rank=1"].summary in out

    code, again, err = call("compare", "--show", folder)
    assert (code, err) == (0, "")
    assert again in out
    assert call("compare", "--show", f"{folder}/results.json")[1] == again
    other = call("compare", "--show", folder, "--control", "baseline")[1]
    compared = result.against("baseline").cells[0].compare(0.0005)["low-rank:rank=1"]
    assert compared.summary in other
    assert "narrow:dim=2" in other  # still a variant, and the control of nothing
    tenths = call("compare", "--show", folder, "--deciles")[1]
    assert "by tenths of the test rows, rarest first" in tenths
    first = result.cells[0].decile_differences(method)[0]
    assert f" {10_000 * first:+.0f} " in tenths.split("by tenths")[1]
    code, _, err = call("compare", "--show", folder, "--control", "narow:dim=2")
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no variant 'narow:dim=2'" in err

    code, out, err = call(*command)
    assert (code, err) == (0, "6 runs, 6 already finished\n")
    assert again in out
    assert tenths in call(*command, "--deciles")[1]

    code, _, err = call(*command, "--no-resume")
    assert (code, err.count("\n")) == (2, 1)
    assert f"'{folder}' holds runs already; resume them, or choose another" in err
    assert call(*command, "--no-resume", "--out", "new", *AT_ONCE)[0] == 1


def test_runs_that_are_missing_are_named_with_the_command_that_makes_them(call):
    command = ["compare", "--methods", "low-rank", *SMALL, "--out", "my study"]
    code, out, err = call(*command, *AT_ONCE, "--no-resume")
    assert code == 1
    assert "missing: baseline, seed 0: not run yet" in out
    assert out.count("\nmissing: ") == 5
    assert "and 1 more" in out
    assert "Saved in" not in out
    last = err.splitlines()[-1]
    start, _, resume = last.partition("; to resume: ")
    assert start == "rarebit: the study is incomplete: baseline, seed 0: not run yet and 5 more"
    assert shlex.split(resume)[1:] == [*command, *AT_ONCE]


PLAN = """
methods = ["low-rank", "hashing"]
seeds = 4
share = 0.375
model = "fm"
data = { rows = 500 }

[training]
epochs = 7
lr = 0.5
"""


def test_a_plan_is_read_and_options_win(call):
    Path("study.toml").write_text(PLAN)
    words = ["--seeds", "3", "--lr", "0.25", "--set", "data.noise=0.5", "--set", "model.dim=4"]
    more = ["--trials", "2", "--control", "baseline", "--set", "training.monitor=logloss"]
    code, _, err = call("compare", "--plan", "study.toml", *words, *more, *AT_ONCE, "--out", "x")
    assert code == 1, err
    found = plan_in("x")
    assert found["methods"] == ["low-rank", "hashing"]
    chosen = [found[name] for name in ("seeds", "share", "trials", "control")]
    assert chosen == [3, 0.375, 2, "baseline"]
    assert found["model"] == [{"name": "fm", "dim": 4}]
    assert [(log["rows"], log["noise"]) for log in found["data"]] == [(500, 0.5)]
    training = found["training"]
    assert (training["epochs"], training["lr"], training["monitor"]) == (7, 0.25, "logloss")


def test_several_models_and_a_setting_for_all(call):
    words = ["--model", "fm, dnn", "--data", "synthetic", "--set", "data.rows=500"]
    code, out, err = call(
        "compare", "--methods", "baseline", *words, "--set", "model.dim=4", *AT_ONCE
    )
    assert code == 1, err
    found = plan_in("studies/models-synthetic")
    assert found["model"] == [{"name": "fm", "dim": 4}, {"name": "dnn", "dim": 4}]
    assert [log["rows"] for log in found["data"]] == [500]
    assert "missing: dnn on synthetic-0: baseline, seed 4: not run yet" in out


BASELINE = ["compare", "--methods", "baseline"]
MISTAKES = {
    "nothing": (["compare"], "nothing to compare; give --methods"),
    "model": ([*BASELINE, "--model", "deepfn"], "unknown model 'deepfn'; did you mean 'deepfm'?"),
    "method": (["compare", "--methods", "lowrank"], "did you mean 'low-rank'?"),
    "pair": (["compare", "--methods", "low-rank+hashing"], "low-rank+hashing is refused: "),
    "size": (["compare", "--methods", "low-rank:rank=900", *SMALL], "matched no table"),
    "data": ([*BASELINE, "--data", "clicks.csv"], "clicks.csv' holds no prepared log"),
    "control": (
        [*BASELINE, *SMALL, "--control", "narow"],
        "control must be own, narrow, matched-rate",
    ),
    "plan": (["compare", "--plan", "no.toml"], "'no.toml' does not exist"),
    "setting": ([*BASELINE, "--set", "training.lrr=3"], "did you mean 'lr'?"),
    "section": ([*BASELINE, "--set", "trainng.lr=3"], "did you mean 'training'?"),
    "assignment": ([*BASELINE, "--set", "lr"], "--set takes section.name=value"),
    "seed": ([*BASELINE, "--set", "training.seed=3"], "given by seeds and first_seed"),
    "seeds": ([*BASELINE, "--seeds", "0"], "seeds must be at least 1, got seeds=0"),
    "share": ([*BASELINE, "--share", "1"], "share must lie in (0, 1), got share=1.0"),
    "trials": ([*BASELINE, *SMALL, "--trials", "0"], "trials must be at least 1"),
    "minutes": ([*BASELINE, *SMALL, "--minutes", "0"], "minutes must be above 0"),
    "workers": ([*BASELINE, *SMALL, "--workers", "0"], "workers must be at least 1"),
    "device": ([*BASELINE, "--device", "tpu"], "device must be cpu, cuda or auto, got 'tpu'"),
    "out": ([*BASELINE, *SMALL, "--out", "/proc/no/such"], "cannot write to the folder"),
    "show": (["compare", "--show", "nowhere"], "there is no result of a study at 'nowhere'"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(call, words, message):
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("rarebit: ")
    assert err.count("\n") == 1
    assert not Path("studies").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods = [", "is not valid TOML"),
        ('methods = ["baseline"]\nseed = 3', "unknown setting 'seed'; did you mean 'seeds'?"),
        ('methods = ["baseline"]\n[[modle]]', "unknown setting 'modle'; did you mean 'model'?"),
        ('methods = ["baseline"]\n[model]\ndimm = 3', "did you mean 'dim'?"),
        ("seeds = 3", "a study needs methods = "),
    ],
)
def test_a_wrong_plan_is_told(call, text, message):
    Path("study.toml").write_text(text)
    code, _, err = call("compare", "--plan", "study.toml")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_a_wrong_file_to_show_is_told(call):
    Path("results.json").write_text("{}")
    code, _, err = call("compare", "--show", "results.json")
    assert (code, "'results.json' is not the result of a study" in err) == (2, True)


def test_every_option_is_explained(call):
    options = typer.main.get_command(app).commands["compare"].params
    assert len(options) >= 18
    _, out, _ = call("compare", "--help")
    for option in options:
        assert option.help, option.name
        assert option.opts[0] in out
    words = " ".join(out.replace("│", " ").split())
    assert "[[model]], [[data]], [training]" in words


def record(seed):
    return RunRecord(
        key="", seed=seed, auc=0.75, logloss=0.5, rarest_auc=None, valid_auc=0.7, parameters=9,
        table_bytes=36, best_epoch=1, epochs=2, microseconds_a_row=1.0, device="cpu", torch="",
        commit=None,
    )  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_show_the_runs_under_way(monkeypatch, capsys, terminal):
    errors = Console(stderr=True, highlight=False, force_terminal=terminal, width=120)
    monkeypatch.setattr(screen, "errors", errors)
    with StudyBars() as bars:
        bars.plan(3, 1)
        bars.start("baseline, seed 0")
        bars.start("baseline, seed 1")
        bars.epoch("baseline, seed 1", {"epoch": 1, "epochs": 2, "valid_auc": 0.71})
        bars.epoch("baseline, seed 0", {"epoch": 1, "epochs": 2, "valid_auc": None})
        descriptions = [task.description for task in bars.bars.tasks]
        assert descriptions == ["runs", "baseline, seed 0", "baseline, seed 1"]
        bars.finish("baseline, seed 1", record(1))
        bars.fail("baseline, seed 0", "why [not]")
        [task] = bars.bars.tasks
        assert (task.completed, task.total) == (3, 3)
    err = capsys.readouterr().err
    for line in (
        "3 runs, 1 already finished",
        "2 of 3: baseline, seed 1: AUC 0.7500, validation AUC 0.7000 (epoch 1 of 2)",
        "3 of 3: baseline, seed 0 failed: why [not]",
    ):
        assert line in err


@needs_package("matplotlib")
def test_a_result_can_be_drawn(call):
    stored = Path(__file__).parents[2] / "benchmarks/results/study-multi-embedding.json"
    code, out, err = call("compare", "--show", str(stored), "--plot", "plots/scaling.png")
    assert (code, err) == (0, "")
    assert "AUC by the size of the tables: plots/scaling.png" in out
    assert Path("plots/scaling.png").read_bytes().startswith(b"\x89PNG")


def test_few_lines_are_spent_on_what_is_missing(capsys):
    cell = CellResult(
        model="fm",
        data="clicks",
        checksum=None,
        variants=(),
        ceiling=None,
        rows={},
        missing=tuple(f"run {number}" for number in range(9)),
    )
    show_study(StudyResult(plan={"minimum_effect": 0.0005}, cells=(cell,)))
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("missing")][-1] == "missing: run 4"
    assert "and 4 more" in out


def test_the_same_in_python_is_a_function():
    assert rb.study.__module__ == "rarebit.study.study"
