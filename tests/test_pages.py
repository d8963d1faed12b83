"""The measured figures in README.md and docs/ are those in benchmarks/results."""

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

from rarebit.models import model_names
from rarebit.study.statistics import judge

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools/pages.py"


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("pages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pages"]


@pytest.fixture(scope="module")
def figure():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools/figure.py")))


def test_the_drawing_is_that_of_the_stored_results(figure):
    images = figure.images(json.loads(figure.RESULT.read_text("utf-8")))
    assert len(images) == 4
    assert {path: path.read_text("utf-8") for path in images} == images


def test_the_drawing_has_every_point(figure):
    """A log of two seeds: what is worked out by hand is what is drawn."""

    def cell(tables, seed, *points):
        names = ("compressor", "size", "table_bytes", "test_auc")
        found = [dict(zip(names, point, strict=True)) for point in points]
        return {"log": "frappe", "tables": tables, "seed": seed, "points": found}

    cells = [
        cell(
            "plain",
            seed,
            ("32 bits", None, 1600, 0.8 + seed),
            ("evidence coding", 8, 200, 0.79 + seed),
            ("int8", None, 400, 0.8 + seed),
            ("low rank", 8, 200, 0.7 + seed),
            ("pruning", 8, 210, 0.6 + seed),  # larger and worse than low rank
            ("coding without counts", 8, 200, 0.9 + seed),  # ours, not another compressor
        )
        for seed in (0, 0.002)
    ]
    cells += [cell("tail", 0, ("32 bits", None, 1600, 0.81), ("evidence coding", 8, 200, 0.805))]
    lines = figure.lines_of(figure.means(cells, "frappe"))
    expected = {
        "other": [(1600, 0.801), (400, 0.801), (200, 0.701)],
        "coded": [(1600, 0.801), (200, 0.791)],
        "tail": [(1600, 0.81), (200, 0.805)],
    }
    assert lines == {
        name: [pytest.approx(point) for point in line] for name, line in expected.items()
    }
    image = figure.draw({"cells": cells}, "dark")
    assert image.count("<polyline") == 3 + 3  # and the legend's
    ET.fromstring(image)  # noqa: S314  # our own


def test_every_figure_is_that_of_the_stored_results(pages):
    assert [
        f"{path.name}: {line}" for path in pages.PAGES for line in pages.problems_of(path)
    ] == []


def test_the_summary_of_the_evidence_counts_its_comparisons():
    page = (ROOT / "docs/evidence.md").read_text("utf-8")
    summary, rest = page.split("\n## ", 1)
    rows = re.findall(r"^\| \[(.*?)\]\(#.*?\) \| .*? \| (.*) \|$", summary, re.MULTILINE)
    assert len(rows) == 9
    kinds = {"**reproduced**": 0, "contradicted": 1, "open": 2, "not seen": 2}
    for claim, numbers in rows:
        table = rest.split(f"\n> {claim}.\n")[1].split("\n| log |")[1].partition("\n\n")[0]
        counts = [0, 0, 0, 0]
        for line in table.splitlines()[2:]:
            counts[kinds.get(line.split(" | ")[-1].removesuffix(" |"), 3)] += 1
        assert " | ".join(map(str, counts)) == numbers, claim


def test_a_changed_figure_is_found_and_refreshed(pages, tmp_path):
    page = (ROOT / "docs/studies.md").read_text("utf-8")
    changed = page.replace("0.8428 ± 0.0008", "0.8428 ± 0.0007").replace("20,000<", "20,001<")
    changed = changed.replace("+0.0021 (+0.0017 to +0.0026)", "+0.0022 (+0.0017 to +0.0027)")
    assert changed.count("+0.0022 (+0.0017 to +0.0027)") == 1
    assert pages.refreshed(changed) == page
    (tmp_path / "page.md").write_text(changed, "utf-8")
    lines = "\n".join(pages.problems_of(tmp_path / "page.md"))
    for figure in ("+0.0022 (+0.0017 to +0.0027)", "0.8428 ± 0.0007", "20,001<"):
        assert f"{figure}" in lines


@pytest.mark.parametrize("section", ["How good they are", "How fast they are"])
def test_every_model_has_its_figures(section):
    page = (ROOT / "docs/models.md").read_text("utf-8")
    table = page.split(f"## {section}\n")[1].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(model_names())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a gain of +0.0012", "+0.0012 has no source"),
        ("a gain of +1.352<!-- bench-rows/ratio -->", None),
        ("a gain<!-- bench-rows/ratio -->", "<!-- bench-rows/ratio --> has no figure"),
        ("`+0.0012`", None),
    ],
)
def test_a_figure_needs_a_source_and_a_source_a_figure(pages, text, problem, tmp_path):
    (tmp_path / "page.md").write_text(text, "utf-8")
    assert pages.problems_of(tmp_path / "page.md") == ([] if problem is None else [problem])


@pytest.mark.parametrize(
    ("written", "source", "expected"),
    [
        ("0.1", "bench-rows/ratio", "1.4"),
        ("+0.10", "bench-rows/ratio | * 100", "+135.20"),
        ("1,000", "faults/kills | * 100", "10,000"),
        ("91,111", "peers/samples_per_second/fuxictr | round -3", "27,000"),
        ("0.00 ± 0.00", "models-frappe/results/model=fm/auc | * 100", "94.27 ± 0.01"),
        ("0.0 to 1.0", "models-frappe/results/model=fm/seeds", "0.0 to 2.0"),
        ("0.0 ± 1.0", "models-frappe/results/model=fm/seeds", "1.0 ± 1.0"),
        ("0.0", "tail/book-crossing: baseline | best_epoch", "1.0"),
        ("", "pep-ml-1m/ml-1m: baseline | size", "1.1 MB"),
    ],
)
def test_a_figure_keeps_the_form_that_is_written(pages, written, source, expected):
    assert pages.rewritten(written, source) == expected


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        ("1.0", "bench-rows/rate", "KeyError"),
        ("1.0", "tail/nowhere: baseline", "IndexError"),
        ("1.0", "tail/ml-1m-ids: baseline | best_epochs", "unknown option 'best_epochs'"),
        ("one", "bench-rows/ratio", "'one' has no number to replace"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(pages, text, source, message):
    with pytest.raises(SystemExit, match=re.escape(f"<!-- {source} -->: ")) as error:
        pages.rewritten(text, source)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("differences", "at_least", "verdict"),
    [
        ([0.003, 0.0031, 0.0029], 0.0, "**reproduced**"),
        ([-0.003, -0.0031, -0.0029], 0.0, "contradicted"),
        ([0.0001, -0.0001, 0.0], 0.0, "not seen"),
        ([0.01, -0.01, 0.0], 0.0, "open"),
        ([-0.0008, -0.0009, -0.0007], -0.002, "**reproduced**"),
        ([-0.0030, -0.0031, -0.0029], -0.002, "contradicted"),
    ],
)
def test_an_interval_judges_a_claim(pages, differences, at_least, verdict):
    assert pages.judged(judge({"mlet": differences})["mlet"], at_least) == verdict


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.stem
)
def test_a_result_names_its_commit_and_machine(path):
    result = json.loads(path.read_text("utf-8"))
    facts = result.get("machine", result)
    assert re.fullmatch(r"[0-9a-f]{40}", facts["commit"])
    assert facts["torch"]
    assert facts["device"]


def test_the_page_shows_the_stored_table_of_other_libraries():
    specification = importlib.util.spec_from_file_location(
        "strangers", ROOT / "benchmarks/strangers.py"
    )
    strangers = importlib.util.module_from_spec(specification)
    sys.modules["strangers"] = strangers  # dataclasses look there
    specification.loader.exec_module(strangers)
    stored = json.loads((ROOT / "benchmarks/results/strangers.json").read_text("utf-8"))
    assert strangers.table(stored["cells"]) in (ROOT / "docs/own-models.md").read_text("utf-8")
    assert stored["failed"] == 0
