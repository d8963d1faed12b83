"""The examples of the commands, and the commands of the README, run as they are written."""

import csv
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rarebit.cli.app import EXAMPLES, OF_COMMANDS, PANELS, app

ROOT = Path(__file__).resolve().parents[2]
LONG = {
    "serve models --port 8000": "it serves until it is stopped",
    "demo": "it trains for minutes",
    "demo --rows 20000 --seeds 2": "it trains for minutes",
    "bench train --json": "it measures for a minute",
}
"""Examples that other tests run, in a smaller form."""


def commands(text):
    return re.findall(r"^rarebit (\S.*)$", text, re.MULTILINE)


def quickstart():
    page = (ROOT / "README.md").read_text("utf-8")
    [block] = re.findall(r"## Quickstart: your own log\n.*?```console\n(.*?)```", page, re.DOTALL)
    return commands(block)


@pytest.fixture
def log(call):
    """A log of few users and items, some of them rare."""
    draw = random.Random(0)  # noqa: S311  # clicks, not secrets
    with Path("clicks.csv").open("w", newline="") as file:
        rows = [(int(draw.paretovariate(0.7)), int(draw.paretovariate(0.7))) for _ in range(1200)]
        lines = (
            [f"u{u % 300}", f"i{i % 200}", int(draw.random() < 0.3 + 0.4 * (u % 2))]
            for u, i in rows
        )
        csv.writer(file).writerows([["user", "item", "click"], *lines])


def run(call, line):
    if line.startswith("serve"):  # it starts processes, which are its own
        command = [sys.executable, "-m", "rarebit", *shlex.split(line)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code, out, err = call(*shlex.split(line))
    assert code == 0, f"rarebit {line}\n{err}"
    return out


def test_every_command_has_a_panel():
    names = [command.name for command in app.registered_commands]
    names += [group.name or group.typer_instance.info.name for group in app.registered_groups]
    assert sorted(names) == sorted(name for panel in PANELS.values() for name in panel)
    assert len(PANELS["Start here"]) == 5


@pytest.mark.slow
def test_the_quickstart_of_the_readme_runs(call, log):
    lines = quickstart()
    assert len(lines) >= 6
    for line in lines:
        out = run(call, line)
    assert "curl" in out
    assert Path("clicks.onnx").exists()


@pytest.mark.slow
def test_the_examples_run_in_the_order_of_the_help(call, log):
    for line in commands(EXAMPLES):
        run(call, line)
    for name in ("train", "compare", "diagnose", "report", "predict", "prune", "methods", "export"):
        for line in OF_COMMANDS[name]:
            run(call, line)
    for name in ("serve", "demo", "bench"):
        for line in OF_COMMANDS[name]:
            if line not in LONG:
                run(call, line)
