"""Harmless transfer as a user meets it: trained by name, gone on with, and its ledger shown."""

import json
from pathlib import Path

import pytest

from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.training.run import read_reports, read_run

SMALL = [
    "--model",
    "fm",
    "--set",
    "model.dim=4",
    "--rows",
    "2000",
    "--epochs",
    "1",
    "--device",
    "cpu",
]


@pytest.fixture
def trained(call):
    """The folder of a run with a transfer."""
    code, _, err = call("train", "--methods", "harmless-transfer:alpha=3", *SMALL, "--out", "here")
    assert code == 0, err
    return Path("here")


def test_methods_are_given_by_name_and_kept_with_the_run(trained):
    assert read_run(trained).methods == (HarmlessTransfer(alpha=3.0),)
    written = json.loads((trained / "run.json").read_text("utf-8"))
    assert list(written["reports"]) == ["harmless-transfer"]
    assert written["reports"] == read_reports(trained)
    assert "reports" not in written["history"]


def test_a_run_that_is_gone_on_with_has_one_ledger(call, trained):
    steps = read_reports(trained)["harmless-transfer"]["steps"]
    code, _, err = call("train", "--resume", str(trained), "--epochs", "2")
    assert code == 0, err
    assert read_reports(trained)["harmless-transfer"]["steps"] == 2 * steps


def test_the_ledger_is_shown_by_diagnose(call, trained):
    code, out, _ = call("diagnose", str(trained))
    assert code == 0
    words = "Harmless transfer: rare rows|opposed|realised|met|strength|accuracy|Lambda: |alpha"
    for word in [*words.split("|"), "transfer steps, mean main loss "]:
        assert word in out
    table = read_reports(trained)["harmless-transfer"]["tables"]["backbone.tables.user"]
    assert f"{table['rows']:,}" in out
    shown = json.loads(call("diagnose", str(trained), "--json")[1])
    assert shown["reports"] == read_reports(trained)


def test_a_run_without_a_transfer_has_no_ledger(call):
    assert call("train", *SMALL, "--out", "plain")[0] == 0
    out = call("diagnose", "plain")[1]
    assert "Harmless transfer" not in out
    assert "reports" not in json.loads(call("diagnose", "plain", "--json")[1])


def test_a_model_that_was_saved_by_hand_is_diagnosed_without(call, trained):
    (trained / "run.json").unlink()
    code, out, _ = call("diagnose", str(trained))
    assert (code, "Harmless transfer" in out) == (0, False)


MISTAKES = {
    "several": (
        ["--methods", "baseline,hashing:buckets=9"],
        "--methods takes one combination here, got 2",
    ),
    "no size": (["--methods", "hashing"], "hashing needs its size here, got 'hashing'"),
    "unknown": (["--methods", "harmles-transfer"], "did you mean 'harmless-transfer'?"),
    "pair": (["--methods", "pep+harmless-transfer"], "still being learned; prune"),
    "field": (["--methods", "harmless-transfer:fields=itm", *SMALL], "did you mean 'item'?"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told(call, words, message):
    code, _, err = call("train", *words)
    assert (code, message in err) == (2, True), err


def test_resume_takes_no_other_methods(call, trained):
    code, _, err = call("train", "--resume", str(trained), "--methods", "baseline")
    assert (code, "--methods cannot be combined with --resume" in err) == (2, True)


def test_baseline_is_no_method(call):
    assert call("train", "--methods", "baseline", *SMALL, "--out", "here")[0] == 0
    assert read_run("here").methods == ()
