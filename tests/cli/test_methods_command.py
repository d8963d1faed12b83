"""What `rarebit methods` shows, at the widths of people's terminals."""

import io
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
        assert f"{technique_name(method)}: {method.title}" in words(seen)
        for text in (method.control, method.cost, method.applies, method.paper):
            assert text in words(seen), text


@pytest.mark.parametrize("width", [80, 120])
def test_each_method_is_shown_with_what_may_follow_it(width):
    table = shown(width).split("may be followed by")[1]
    found, name = {}, None
    for line in table.splitlines()[2:]:
        name = line.split()[0] if line[1:2].strip() else name
        found.setdefault(name, "")
        found[name] += " " + line.strip().removeprefix(name)
    for one in technique_names():
        allowed = [
            then for (first, then), why in compositions().items() if first == one and not why
        ]
        assert [then for then in words(found[one]).split(", ") if then] == allowed


@pytest.mark.parametrize("width", [50, 80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    lines = shown(width).splitlines()
    assert max(map(len, lines)) <= width


def test_the_control_is_explained():
    assert "narrow: narrower plain tables with the same number of bytes" in shown(120)


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
    assert pairs == {key: (why is None, why or "") for key, why in compositions().items()}


def test_the_command_prints_the_list(call):
    result = call()
    assert result.exit_code == 0
    assert "low-rank: " in result.stdout
    assert "may be followed by" in result.stdout


def test_a_knob_is_shown_with_its_values(monkeypatch):
    monkeypatch.setattr(technique_class("low_rank"), "knobs", {"rank": (4, 2)})
    assert "tuned        rank (4, 2)" in shown(80)
    low_rank = next(one for one in methods_as_data()["methods"] if one["name"] == "low-rank")
    assert low_rank["knobs"] == {"rank": [4, 2]}
