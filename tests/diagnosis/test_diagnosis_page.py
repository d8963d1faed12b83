"""The example on docs/diagnosis.md runs, and the page names every figure and kind of finding."""

import re
import typing
from pathlib import Path

import torch
from torch import nn

import rarebit as rb
from rarebit.diagnosis import report as findings
from rarebit.diagnosis.diagnose import diagnose
from rarebit.diagnosis.measure import reweighting

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md").read_text("utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run(example):
    exec(compile(example, "docs/diagnosis.md", "exec"), {})  # noqa: S102  # our own page


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(EXAMPLES[0])
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:3] == ["table", "rows", "width"]
    assert out.splitlines()[-1].startswith("backbone.tables.user")
    assert (tmp_path / "diagnosis" / "diagnosis.json").exists()


def test_the_example_of_a_loop_runs(capsys):
    torch.manual_seed(0)
    _, example = EXAMPLES
    run(example)
    first, shared, abundance, *others = capsys.readouterr().out.splitlines()
    assert "directions" in first
    assert 0 < float(shared.removeprefix("shared with other ids: ")) <= 1
    assert 1 < float(abundance.removeprefix("information abundance: ")) <= 8
    assert len(others) == 3


def test_the_page_names_every_figure_of_a_product():
    table = rb.MLET(inner_dim=4).wrap(nn.Embedding(9, 2))
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert set(reweighting(table).to_mapping()) <= named


def test_the_page_names_every_figure():
    [table] = diagnose(
        nn.ModuleDict({"x": nn.Embedding(9, 2)}), counts={"x": torch.arange(9)}
    ).to_mapping()["tables"]
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert set(table) - named == {"name", "methods", "abundance_ratio"}


def test_the_page_lists_every_kind_of_finding():
    section = PAGE.split("## The findings")[1].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \|", section, re.MULTILINE)
    assert set(rows) - {"kind"} == set(typing.get_args(findings.Kind))
