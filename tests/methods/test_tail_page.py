"""The example on docs/tail.md runs, and the page names every form of shrinkage and every neighbour."""

import re
from pathlib import Path

import pytest

from rarebit.methods.shrinkage import PRIORS, RULES
from rarebit.technique import technique_names

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tail.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/tail.md", "exec"), {})  # noqa: S102  # our own page
    assert "backbone.tables" in capsys.readouterr().out


def test_there_is_an_example():
    assert len(EXAMPLES) == 1


@pytest.mark.parametrize("form", [*RULES, *PRIORS])
def test_every_form_has_a_line_in_a_table(form):
    assert re.search(rf'^\| `"{form}"` \|', PAGE, flags=re.MULTILINE)


def test_the_methods_it_names_are_there():
    named = re.findall(r"methods\.md#([a-z-]+)\)", PAGE)
    assert len(named) > 4
    assert set(named) <= set(technique_names())
