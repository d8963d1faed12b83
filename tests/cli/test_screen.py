"""The terminal: progress that keeps moving, names of any kind, help and completion without torch."""

import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.console import Console

import rarebit
from rarebit.cli import screen
from rarebit.study.results import read_result

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(rarebit.__file__).parents[1]), "TERM": "xterm"}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(code, rows, columns=80):
    """Run Python with a terminal of this size as standard error; return what was written to it."""
    controller, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {k: v for k, v in ENVIRONMENT.items() if k not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=terminal, env=environment) as process:
        os.close(terminal)
        seen = b""
        try:
            while chunk := os.read(controller, 65536):
                seen += chunk
        except OSError:  # how a terminal says that the other end is closed
            pass
    os.close(controller)
    assert process.returncode == 0, seen.decode()
    return seen.decode()


EPOCHS = """
from types import SimpleNamespace
from rarebit.cli.screen import RunBars
with RunBars() as bars:
    bars.rows(500, 500)
    for epoch in range(1, 41):
        bars.start_epoch(epoch, 40, 100)
        bars.advance(100)
        valid = SimpleNamespace(auc=0.5 + epoch / 100)
        bars.finish_epoch(SimpleNamespace(epoch=epoch, train_loss=0.5, valid=valid))
"""


def test_progress_moves_on_when_there_are_more_epochs_than_lines():
    seen = on_a_terminal(EPOCHS, rows=10)
    for epoch in range(1, 41):
        assert f"epoch {epoch}/40" in seen  # the bar
        assert f"epoch {epoch}: loss 0.5000, valid AUC {0.5 + epoch / 100:.4f}" in seen
    assert "..." not in seen  # how rich cuts what is higher than the terminal


RUNS = """
from types import SimpleNamespace
from rarebit.cli.screen import StudyBars
with StudyBars() as bars:
    bars.plan(15, 0)
    for number in range(15):
        bars.start(f"run {number}")
    for number in range(15):
        bars.fail(f"run {number}", "no")
        bars.bars.refresh()
"""


def test_more_active_runs_than_lines_are_shown_in_turn():
    seen = on_a_terminal(RUNS, rows=10)
    assert "..." not in seen
    assert all(re.search(rf"run {number} +━", ESCAPES.sub("", seen)) for number in range(15))


NAMES = ["[/b]", "[red]x", "\x1b[2J", "a\nb", "\u202eabc", "\x9b2J", ":smile:", "\udcff"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_without_markup_and_control_characters(name, capsys):
    shown = "".join(c for c in name if c.isprintable() or c in "\n\udcff").replace("\udcff", "?")
    screen.console.print(name)
    screen.line(name)
    screen.figures(name, {name: name})
    screen.table([name, "x"], [[name, name]], title=name, note=name)
    with screen.RunBars() as bars:
        bars.say(name)
    screen.errors.print(name)
    out, err = capsys.readouterr()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out + err)
    lines = 2  # of text as it is; in a table, a name is one line
    assert out.count(shown) >= lines
    assert out.count(shown.replace("\n", " ")) >= 6
    assert err.count(shown) == 2


def test_a_bar_may_have_any_name():
    with screen.StudyBars() as bars:
        bars.plan(1, 0)
        bars.start("[/b]")
        to = Console(width=60, record=True, file=io.StringIO())
        to.print(bars.bars.get_renderable())
    assert "[/b]" in to.export_text()


def test_a_log_with_hostile_names_goes_all_the_way(call):
    names = ["[/b]", "[red]x", "\x1b[2J"]
    rows = [f"a{n % 7},b{n % 5},c{n % 3},{n % 2}" for n in range(60)]
    Path("log.csv").write_text("\n".join([",".join([*names, "click"]), *rows]) + "\n")
    for words in (
        ["data", "prepare", "log.csv", "--label", "click", "--out", "data"],
        ["data", "show", "data"],
        ["train", "--data", "data", "--model", "fm", "--epochs", "1", "--out", "run"],
        ["diagnose", "run"],
        ["predict", "--model", "run", "--input", "log.csv"],
    ):
        code, out, err = call(*words)
        assert code == 0, err
        assert "\x1b" not in out + err
        if words[0] in ("data", "diagnose"):
            assert all(name.strip("\x1b") in out for name in names)


LIGHT = """
import sys
from rarebit.__main__ import main
for words in (["--version"], ["--help"], ["train", "--help"], ["compare", "--help"], ["prune", "-h"]):
    sys.argv = ["rarebit", *words]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code
    assert "torch" not in sys.modules, words
"""


def test_version_and_help_do_not_import_torch():
    subprocess.run([sys.executable, "-c", LIGHT], env=ENVIRONMENT, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train --model de", ["deepfm"]),
        ("compare --model fm,deep", ["fm,deepfm"]),
        ("train --methods low-rank+has", ["low-rank+hashing"]),
        ("compare --methods base", ["baseline"]),
        ("predict --split te", ["test"]),
        ("train --device cu", ["cuda"]),
        ("data pre", ["prepare"]),
    ],
)
def test_a_shell_completes_names(words, expected, call, monkeypatch):
    monkeypatch.setenv("_RAREBIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"rarebit {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert call()[1].split() == expected


HEADER = ["method", "control", "interval", "rarest fifth", "verdict"]
ROWS = [
    ["hashing:buckets=2226+low-rank:rank=41", "narrow:dim=32", "+0.0033 to +0.0043", "+0.0021", "helps"],
    ["pep:init=-8.0+pruned:keep=30000:epochs=20", "baseline", "-0.0006 to +0.0034", "+0.0025", "too few seeds"],
]  # fmt: skip
WORDS = (
    "buckets=2226+ rank=41 init=-8.0+ keep=30000: dim=32 -0.0006 rarest fifth verdict helps seeds"
)


@pytest.mark.parametrize("width", [40, 60, 80, 110, 200])
def test_a_table_breaks_no_word_and_no_name(width):
    to = Console(width=width, file=io.StringIO())
    screen.table(HEADER, ROWS, title="Difference", note="that is all", left=["verdict"], to=to)
    shown = to.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for word in WORDS.split():
        assert re.search(rf"(^|[\s:+]){re.escape(word)}", shown), (word, shown)
    assert shown.startswith("Difference")
    assert shown.endswith("that is all\n")
    assert (ROWS[0][0] in shown) == (width in (40, 110, 200))  # a paragraph, or room for it


def test_a_table_is_as_wide_as_it_needs():
    to = Console(width=200, file=io.StringIO())
    screen.table(["a", "b"], [["x", "1 of 2"]], to=to)
    assert max(map(len, to.file.getvalue().splitlines())) == 11


@pytest.mark.parametrize("columns", ["60", "80"])
def test_a_study_fits_the_terminal(columns, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    results = Path(rarebit.__file__).parents[2] / "benchmarks" / "results"
    code, out, err = call("compare", "--show", results / "study-compression-ml-1m.json")
    assert code == 0, err
    before_missing = out.partition("missing:")[0].splitlines()
    assert max(map(len, before_missing)) <= int(columns)
    for word in ("verdict", "interval", "averaged", "narrow:", "buckets=2226+", "logloss"):
        assert word in out


STUDY = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "study-tail-combined.json"


def test_a_study_fits_80_columns_with_one_line_per_row_and_a_legend(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call("compare", "--show", STUDY, "--deciles")
    assert code == 0, err
    lines = out.splitlines()
    assert max(map(len, lines[: lines.index(next(x for x in lines if " = " in x))])) <= 80
    names = [variant.name for variant in read_result(STUDY).cells[0].variants]
    short = screen.short_names(names, Console(width=80))
    assert len({*short.values()}) == len(names)
    for name, one in short.items():
        assert sum(line.startswith(f" {one} ") for line in lines) >= 2
        assert (f"= {name}" in out) == (one != name)
    assert screen.short_names(names, Console(width=120)) == {name: name for name in names}


def test_short_names_stay_apart():
    names = [f"shrinkage:c={n}+pruned:keep=1000{n}+forgetting" for n in range(3)]
    assert [*screen.short_names(names, Console(width=80)).values()] == [
        "shrink+pruned+forget", "shrink+pruned+forget 2", "shrink+pruned+forget 3",
    ]  # fmt: skip
