"""The examples on docs/methods.md run, and the page names every method, setting and pair."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from rarebit.technique import compositions, technique_class, technique_name, technique_names

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
CLASSES = {
    technique_name(technique_class(name)): technique_class(name) for name in technique_names()
}


def section_of(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].partition("\n## ")[0]


def test_there_is_an_example_for_each_method_and_one_for_a_run():
    assert len(EXAMPLES) == len(CLASSES) + 1


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/methods.md", "exec"), {})  # noqa: S102  # our own page


@pytest.mark.parametrize("name", CLASSES)
def test_a_method_has_a_section_with_its_settings(name):
    section = section_of(name)
    for field in dataclasses.fields(CLASSES[name]):
        assert f"`{field.name}`" in section, field.name
    for word in ("Use it", "Not", "Control", "Settings", "Goes with"):
        assert f"**{word}**" in section
    assert f"| [`{name}`](#{name}) | `{CLASSES[name].__name__}` |" in PAGE


def test_the_table_of_pairs_is_the_declared_one():
    names = re.search(r"\| first, then → \| (.*) \|", PAGE)[1].replace("`", "").split(" | ")
    assert sorted(names) == sorted(CLASSES)
    told = {}
    for first in names:
        [line] = re.findall(rf"^\| `{first}` \| (.*) \|$", PAGE, flags=re.MULTILINE)
        told |= {(first, then): word for then, word in zip(names, line.split(" | "), strict=True)}
    for first, then in itertools.product(names, repeat=2):
        allowed = compositions()[first, then] is None
        late = CLASSES[first].training_only and then == "low-rank" and not allowed
        expected = "after training" if late else "yes" if allowed else "no"
        assert told[first, then] == expected, (first, then)
