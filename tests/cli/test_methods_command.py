"""What `rarebit methods` shows, at the widths of people's terminals."""

import io
import itertools
import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from rarebit.cli.methods import methods, methods_as_data, show_methods
from rarebit.technique import compositions, technique_class, technique_name, technique_names

CLASSES = [technique_class(name) for name in technique_names()]


def shown(width, encoding="utf-8"):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show_methods(to=Console(width=width, file=out, highlight=False))
    out.flush()
    return out.buffer.getvalue().decode(encoding)


def words(text):
    """Return a text on one line, as it was before it was wrapped."""
    return " ".join(text.split())


@pytest.fixture
def call():
    """Run the command beside another one, as it stands in `rarebit`."""
    app = typer.Typer()
    app.command()(methods)
    app.command(name="other")(lambda: None)
    return lambda *arguments: CliRunner().invoke(app, ["methods", *arguments])


@pytest.mark.parametrize("width", [80, 120])
def test_everything_that_a_method_says_is_shown(width):
    seen = shown(width)
    for method in CLASSES:
        assert f"{technique_name(method)}: {method.title}" in seen
        for text in (method.control, method.cost, method.applies, method.paper):
            assert text in words(seen), text


@pytest.mark.parametrize("width", [80, 120])
def test_every_pair_is_shown_with_its_verdict_allowed_ones_first(width):
    lines = shown(width).splitlines()
    found = []
    for (first, then), pair in compositions().items():
        start = f"{first}+{then}"
        [place] = [i for i, line in enumerate(lines) if line.startswith(f" {start} ")]
        verdict = "allowed" if pair.allowed else "refused"
        assert lines[place].split()[1] == verdict
        more = itertools.takewhile(lambda line: line.startswith(" " * 20), lines[place + 1 :])
        told = words(" ".join([lines[place], *more]))
        assert told == f"{start} {verdict} {pair.words}"
        found.append((place, pair.allowed))
    assert [allowed for _, allowed in sorted(found)] == sorted(
        (allowed for _, allowed in found), reverse=True
    )


@pytest.mark.parametrize("width", [50, 80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    lines = shown(width).splitlines()
    assert max(map(len, lines)) <= width


def test_the_control_is_explained():
    assert "narrow: plain tables made narrower until they have the same bytes" in shown(120)


def test_a_terminal_without_unicode_is_enough():
    assert "low-rank" in shown(80, encoding="ascii")


def test_json_has_the_same(call):
    result = call("--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data == methods_as_data()
    assert [one["name"] for one in data["methods"]] == [technique_name(one) for one in CLASSES]
    for one, method in zip(data["methods"], CLASSES, strict=True):
        for key in ("title", "paper", "control", "cost", "applies"):
            assert one[key] == getattr(method, key)
        assert one["knobs"] == {name: list(values) for name, values in method.knobs.items()}
    low_rank = next(one for one in data["methods"] if one["name"] == "low-rank")
    assert low_rank["settings"] == ["rank", "after_training"]
    pairs = {(one["first"], one["then"]): (one["allowed"], one["words"]) for one in data["pairs"]}
    assert pairs == {key: (pair.allowed, pair.words) for key, pair in compositions().items()}


def test_the_command_prints_the_list(call):
    result = call()
    assert result.exit_code == 0
    assert "low-rank: " in result.stdout
    assert "hashing+low-rank" in result.stdout


def test_a_knob_is_shown_with_its_values(monkeypatch):
    monkeypatch.setattr(technique_class("low_rank"), "knobs", {"rank": (4, 2)})
    assert "tuned         rank (4, 2)" in shown(80)
    low_rank = next(one for one in methods_as_data()["methods"] if one["name"] == "low-rank")
    assert low_rank["knobs"] == {"rank": [4, 2]}
