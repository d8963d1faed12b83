"""`rarebit update` as people call it."""

import json

import pytest

pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb


@pytest.fixture
def monday(call, tmp_path):
    """Return a folder with a run on Monday's log, and Tuesday's log."""
    for day, items in (("monday", 12), ("tuesday", 15)):
        rows = [f"u{n % 7},i{n * 7 % items},{n // 2 % 2}" for n in range(240)]
        (tmp_path / f"{day}.csv").write_text("user,item,click\n" + "\n".join(rows) + "\n")
    assert call("data", "prepare", "monday.csv", "--label", "click", "--out", "data")[0] == 0
    words = ("--model", "fm", "--data", "data", "--epochs", 1, "--out", "monday", "--threads", 1)
    assert call("train", *words)[0] == 0
    return tmp_path


def test_a_day_is_learned_shown_and_stored(call, monday):
    words = ("--model", "monday", "--data", "tuesday.csv", "--out", "tuesday", "--threads", 1)
    code, out, err = call("update", *words, "--like", "item=user")
    assert code == 0, err
    assert "A day of 240 rows" in out
    assert "AUC of monday" in out
    [line] = [line.split() for line in out.splitlines() if line.startswith(" item ")]
    assert line[2:6] == ["3", "0", "0", "0"]  # new, reused, dropped, waiting
    assert "rarebit update --model tuesday --data NEXT.parquet" in out
    stored = json.loads((monday / "tuesday" / "run.json").read_text())
    assert stored["update"]["result"]["fields"][1]["new"] == 3
    assert stored["update"]["like"] == {"item": "user"}
    assert call("predict", "--model", "tuesday", "--input", "tuesday.csv")[0] == 0
    assert rb.load_model(monday / "tuesday").schema["item"].rows == 18
    code, out, _ = call("update", "--resume", "tuesday", "--threads", 1)
    assert (code, "A day of 240 rows" in out) == (0, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "tuesday.csv"], "which run learns another day? Give its folder"),
        (["--model", "monday"], "which rows are new? Give the log of the day"),
        (["--model", "monday", "--data", "no.csv"], "'no.csv' does not exist"),
        (["--model", "data", "--data", "tuesday.csv"], "'data' holds no model"),
        (["--model", "monday", "--data", "tuesday.csv", "--like", "item"], "must be FIELD=GROUP"),
        (
            ["--model", "monday", "--data", "tuesday.csv", "--start", "zero"],
            "start must be unknown",
        ),
        (["--model", "monday", "--data", "tuesday.csv", "--min-count", 0], "min_count must be"),
        (["--resume", "monday"], "holds a run of rarebit train, no update"),
        (["--resume", "x", "--model", "monday"], "--model cannot be combined with --resume"),
    ],
)
def test_mistakes_are_one_line(call, monday, words, message):
    code, _, err = call("update", *words, "--threads", 1)
    assert code == 2
    assert message in err.splitlines()[-1]
    assert not (monday / "runs").exists()


def test_another_log_is_refused_by_its_columns(call, monday):
    (monday / "other.csv").write_text("user,click\nu1,0\nu2,1\n")
    code, _, err = call("update", "--model", "monday", "--data", "other.csv", "--threads", 1)
    assert code == 2
    assert "'item'" in err.splitlines()[-1]
