"""The example on docs/diagnosis.md runs, and the page names every figure and kind of finding."""

import re
import typing
from pathlib import Path

import torch
from torch import nn

from rarebit.diagnosis import findings
from rarebit.diagnosis.diagnose import diagnose

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md").read_text("utf-8")


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(example, "docs/diagnosis.md", "exec"), {})  # noqa: S102  # our own page
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:3] == ["table", "rows", "width"]
    assert out.splitlines()[-1].startswith("backbone.tables.user")
    assert (tmp_path / "diagnosis" / "diagnosis.json").exists()


def test_the_page_names_every_figure():
    [table] = diagnose(
        nn.ModuleDict({"x": nn.Embedding(9, 2)}), counts={"x": torch.arange(9)}
    ).to_mapping()["tables"]
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert set(table) - named == {"name", "methods", "abundance_ratio"}


def test_the_page_lists_every_kind_of_finding():
    rows = re.findall(r"^\| ([a-z ]+) \|", PAGE.split("## The findings")[1], re.MULTILINE)
    assert set(rows) - {"kind"} == set(typing.get_args(findings.Kind))
