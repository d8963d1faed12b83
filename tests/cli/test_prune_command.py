"""`rarebit prune` as a user meets it: what it prints, what it leaves, how it stops and fails."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rarebit as rb
from rarebit.cli.prune import _bytes, _numbers
from rarebit.errors import SettingsError
from rarebit.pruning.pruned import read_prune
from rarebit.tables.table import full_table

SMALL = [
    "--model", "fm", "--set", "model.dim=4", "--set", "data.rows=1200", "--epochs", "1",
    "--batch-size", "128", "--device", "cpu",
]  # fmt: skip
TOTAL = 4 * (12_003 + 2503 + 303 + 43 + 103 + 8 + 27 + 103)


def left(folder) -> int:
    tables = rb.load_model(folder).backbone.tables.tables()
    return sum(int((full_table(table) != 0).sum()) for table in tables)


def test_budgets_are_met_printed_and_kept(call):
    code, out, err = call("prune", "--budgets", "3_000, 500", *SMALL, "--no-plots", "--seed", "3")
    assert code == 0, err
    folder = Path("runs/fm-pruned-1")
    result = json.loads((folder / "prune.json").read_text())["result"]
    assert [left(folder / budget) for budget in ("3000", "500")] == [3000, 500]
    # a line for the whole model and one for each budget, with what was measured
    lines = [line.split() for line in out.splitlines()]
    whole, *rows = [line for line in lines if line and line[0] in {f"{TOTAL:,}", "3,000", "500"}]
    assert [whole[0], *(row[0] for row in rows)] == [f"{TOTAL:,}", "3,000", "500"]
    auc = result["unpruned"]["test"]["overall"]["auc"]
    assert (whole[1], f"{auc:.4f}" in whole) == ("100.0%", True)
    for row, budget in zip(rows, ("3000", "500"), strict=True):
        found = result["budgets"][budget]["test"]["overall"]["auc"]
        assert f"{found:.4f}" in row
        assert f"{found - auc:+.4f}" in row
        assert f"{int(budget) / TOTAL:.1%}" in row
    assert f"{result['budgets']['500']['test']['rarest']['auc']:.4f}" in rows[1]
    assert "pruned:keep=500" in out
    assert f"Saved in {folder}" in out
    assert f"predict --model {folder}/500" in out
    names = {path.name for path in folder.iterdir()}
    assert names == {"prune.json", "lock", "pruning", "unpruned", "3000", "500", "insight"}
    assert [path.name for path in (folder / "insight").iterdir()] == ["insight.json"]
    assert "How much each row kept: insight.json in" in out
    settings, pruning = read_prune(folder)
    assert (settings.model, settings.training.seed, settings.training.epochs) == ("fm", 3, 1)
    assert pruning.budgets == (3000, 500)
    code, _, err = call("predict", "--model", f"{folder}/500")
    assert code == 0, err


@pytest.mark.slow
def test_a_second_pruning_has_a_folder_of_its_own_and_none_is_written_over(call):
    Path("runs/fm-pruned-1").mkdir(parents=True)
    words = ["prune", "--sparsity", "0.99", "--prune-epochs", "1", *SMALL, "--no-plots"]
    code, out, err = call(*words)
    assert code == 0, err
    assert "Saved in runs/fm-pruned-2" in out
    assert left("runs/fm-pruned-2/604") == 604
    code, _, err = call(*words, "--out", "runs/fm-pruned-2")
    assert (code, err.count("\n")) == (2, 1)
    assert "holds a pruning already; resume it" in err


@pytest.mark.slow
def test_bytes_methods_and_start_are_asked_for(call):
    words = ["--bytes", "90kB", "--methods", "mlet:inner_dim=6", "--start", "trained"]
    code, _, err = call("prune", *words, *SMALL, "--no-plots", "--out", "here")
    assert code == 0, err
    settings, pruning = read_prune("here")
    assert settings.methods == (rb.MLET(inner_dim=6),)
    assert (pruning.num_bytes, pruning.start) == ((90_000,), "trained")
    [budget] = [path for path in Path("here").iterdir() if path.name.isdigit()]
    infos = rb.find_tables(rb.load_model(budget))
    assert sum(info.num_bytes for info in infos if info.width > 1) <= 90_000


def test_a_file_of_settings_is_read_and_options_win(call):
    Path("it.toml").write_text(
        '[model]\nname = "fm"\ndim = 4\n[data]\nrows = 1200\n[training]\nepochs = 3\nlr = 0.5\n'
    )
    words = ["--config", "it.toml", "--epochs", "1", "--lr", "0.25", "--budgets", "500"]
    code, _, err = call("prune", *words, "--out", "x", "--no-plots", "--device", "cpu")
    assert code == 0, err
    settings, _ = read_prune("x")
    assert (settings.model, dict(settings.model_settings)) == ("fm", {"dim": 4})
    assert (settings.training.epochs, settings.training.lr) == (1, 0.25)
    assert settings.data.rows == 1200


@pytest.mark.slow
def test_without_matplotlib_the_numbers_are_still_written(call, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = call("prune", "--budgets", "500", *SMALL, "--out", "here")
    assert code == 0
    assert "no plots: " in err
    assert "matplotlib" in err
    assert [path.name for path in Path("here/insight").iterdir()] == ["insight.json"]
    assert "insight.json in here/insight" in out


@pytest.mark.slow
def test_plots_are_made_where_they_can_be(call):
    pytest.importorskip("matplotlib")
    code, out, err = call("prune", "--budgets", "500", *SMALL, "--out", "here")
    assert code == 0, err
    made = {path.name for path in Path("here/insight").iterdir()}
    assert "insight.json" in made
    assert len(made) > 1
    assert all(name in out for name in made)


WRONG = {
    "no budget": ([], "pruning needs one of budgets"),
    "two kinds": (["--budgets", "9", "--sparsity", "0.9"], "got budgets and sparsity"),
    "too large": (["--budgets", TOTAL], f"a budget must be below the {TOTAL:,} entries"),
    "none left": (["--budgets", "0"], "a budget must be at least 1 entry, got 0"),
    "no number": (["--budgets", "9,many"], "--budgets takes numbers separated by commas"),
    "a fraction": (["--budgets", "9.5"], "--budgets takes numbers separated by commas"),
    "nothing": (["--budgets", ""], "--budgets takes numbers separated by commas"),
    "no share": (["--sparsity", "1.5"], "sparsity must lie in (0, 1), got sparsity=1.5"),
    "no size": (["--bytes", "2XB"], "--bytes takes numbers separated by commas, got '2XB'"),
    "too small": (["--bytes", "1kB"], "before the first entry is kept; allow more bytes"),
    "no start": (["--budgets", "9", "--start", "build"], "start"),
    "no mode": (["--budgets", "9", "--prune-tables", "sparse"], "tables"),
    "no epochs": (["--budgets", "9", "--prune-epochs", "0"], "epochs must be at least 1"),
    "two methods": (["--budgets", "9", "--methods", "mlet,pep"], "takes one combination"),
    "unsized": (["--budgets", "9", "--methods", "low-rank"], "low-rank needs its size here"),
    "pruned": (["--budgets", "9", "--methods", "pruned:keep=5"], "leave it out"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told_in_one_line(call, words, message):
    code, out, err = call("prune", *SMALL, *words, "--out", "here")
    assert (code, out) == (2, "")
    assert err.startswith("rarebit: ")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("here").exists()


def test_data_that_is_not_there_is_told(call):
    code, _, err = call("prune", "--data", "nowhere", "--budgets", "9", "--out", "here")
    assert (code, err.count("\n")) == (2, 1)
    assert "nowhere" in err
    assert not Path("here").exists()


BESIDE = {
    "--budgets": "9", "--sparsity": "0.9", "--bytes": "9MB", "--model": "fm", "--data": "synthetic",
    "--out": "x", "--config": "x.toml", "--methods": "pep", "--start": "random", "--epochs": "3",
    "--lr": "0.1", "--prune-tables": "dense", "--seed": "3", "--batch-size": "64", "--set": "model.dim=4",
}  # fmt: skip


@pytest.mark.parametrize("option", BESIDE)
def test_nothing_is_asked_for_beside_resume(call, option):
    code, _, err = call("prune", "--resume", "here", option, BESIDE[option])
    assert code == 2
    assert (
        f"{option} cannot be combined with --resume: the pruning in the folder has its own" in err
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* makes all rows of")
def test_learned_thresholds_may_be_given_more_epochs(call):
    learned = ["--methods", "pep:init=-4.0", "--set", "training.threshold_weight_decay=0.01"]
    words = ["prune", "--budgets", "1000", "--prune-epochs", "1", *learned, *SMALL, "--no-plots"]
    code, _, err = call(*words, "--out", "here")
    assert code == 2
    assert "have not met the budget of 1,000 entries in 1 epochs" in " ".join(err.split())
    code, _, err = call("prune", "--resume", "here", "--prune-epochs", "60", "--no-plots")
    assert code == 0, err
    assert rb.pruning.load_ticket("here/pruning/tickets/1000").num_kept <= 1000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* makes all rows of")
def test_the_spread_of_learned_thresholds_is_printed(call):
    learned = ["--methods", "pep:granularity=field:init=-4.3", "--prune-tables", "rowwise"]
    learned += [
        "--set",
        "training.threshold_weight_decay=1.0",
        "--prune-epochs",
        "9",
        "--lr",
        "0.02",
    ]
    code, out, err = call(
        "prune", "--budgets", "3000", *learned, *SMALL, "--no-plots", "--out", "x"
    )
    assert code == 0, err
    result = json.loads(Path("x/prune.json").read_text())["result"]["budgets"]["3000"]
    assert result["tables"] == "rowwise"
    assert 0 < result["std_s"] < 1
    assert "learned s" in out
    assert f"{result['mean_s']:.3f} ± {result['std_s']:.3f}" in out
    assert "pruned:keep=3000:epochs=9:tables=rowwise" in out.replace("\n", "")


@pytest.mark.slow
def test_a_schedule_ends_where_it_was_going_to(call):
    code, *_ = call("prune", "--budgets", "1000", *SMALL, "--no-plots", "--out", "here")
    assert code == 0
    code, _, err = call("prune", "--resume", "here", "--prune-epochs", "60")
    assert code == 2
    assert "only learned thresholds may be given more epochs" in " ".join(err.split())


def test_a_folder_that_holds_nothing_is_told(call):
    code, _, err = call("prune", "--resume", "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "'nowhere' holds no pruning: prune.json is missing" in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2MB", 2_000_000), ("2 mb", 2_000_000), ("500kB", 500_000), ("1.5GB", 1_500_000_000),
        ("77", 77), ("77B", 77), ("0.5KB", 500),
    ],
)  # fmt: skip
def test_sizes_are_read(text, expected):
    assert _bytes(text) == expected


@pytest.mark.parametrize("text", ["2M", "MB", "-2MB", "1.2.3MB", "2TB", "x2MB", "2MBx", ""])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError):
        _bytes(text)


def test_several_numbers_are_read():
    assert _numbers("--budgets", "30_000, 5", int) == (30_000, 5)
    assert _numbers("--sparsity", "0.9,0.99", float) == (0.9, 0.99)
    assert _numbers("--budgets", None, int) is None
    with pytest.raises(
        SettingsError, match=r"--budgets takes numbers separated by commas.*got '3,'"
    ):
        _numbers("--budgets", "3,", int)


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(rb.__file__).parents[1]), "TERM": "xterm"}


def interrupted(folder, words, sign):
    """Start a pruning on a terminal, send Ctrl-C at a sign; return what was seen, and its exit code."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rarebit", "prune", *words],
        cwd=folder,
        stderr=terminal,
        stdout=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    os.close(terminal)
    seen = ""
    while sign not in seen:
        seen += os.read(controller, 4096).decode(errors="replace")
    process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(controller, 4096):
            seen += chunk.decode(errors="replace")
    except OSError:  # the other end is closed: how a terminal says that the process has ended
        pass
    os.close(controller)
    return seen, process.wait()


@pytest.mark.slow
def test_a_pruning_that_is_stopped_says_how_to_resume_and_does(tmp_path):
    words = [
        "--model", "fm", "--set", "model.dim=4", "--set", "data.rows=1500", "--epochs", "8",
        "--set", "training.patience=8", "--batch-size", "16", "--budgets", "3000,500",
        "--device", "cpu", "--out", "in here", "--no-plots",
    ]  # fmt: skip
    seen, code = interrupted(tmp_path, words, "epoch 2/8")
    assert code == 130
    assert "Traceback" not in seen
    again = shlex.split(" ".join(seen.split("To resume: ")[1].split()))[1:]
    options = ["--device", "cpu", "--no-plots"]
    threads = [] if "OMP_NUM_THREADS" in ENVIRONMENT else again[3:5]
    assert again == ["prune", "--resume", "in here", *threads, *options]
    assert not (tmp_path / "in here" / "500").joinpath("model.json").exists()
    done = subprocess.run(
        [sys.executable, "-m", "rarebit", *again],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "resumed from at-00000" in done.stderr
    assert [left(tmp_path / "in here" / budget) for budget in ("3000", "500")] == [3000, 500]


@pytest.mark.slow
def test_a_folder_with_brackets_is_shown_as_it_is(call):
    code, out, err = call("prune", "--budgets", "500", *SMALL, "--no-plots", "--out", "[red]here")
    assert code == 0, err
    assert "Saved in [red]here. To score data with the smallest model:" in out
    assert "insight.json in [red]here/insight" in out
