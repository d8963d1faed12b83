"""The measured figures in README.md and docs/ are those in benchmarks/results."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

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


def check(*paths):
    command = [sys.executable, SCRIPT, "--check", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_figure_is_that_of_the_stored_results():
    done = check()
    assert done.returncode == 0, done.stderr


def test_a_changed_figure_is_found_and_refreshed(pages, tmp_path):
    page = (ROOT / "docs/tail.md").read_text("utf-8")
    changed = page.replace("+0.0092 (+0.0052 to +0.0131)", "+0.0093 (+0.0052 to +0.0132)")
    changed = changed.replace("0.7509 ± 0.0008", "0.7509 ± 0.0007").replace(
        "1.4 to 4.2<", "1.5 to 4.2<"
    )
    assert pages.refreshed(changed) == page != changed
    (tmp_path / "page.md").write_text(changed, "utf-8")
    done = check(tmp_path / "page.md")
    assert done.returncode == 1
    assert "+0.0093 (+0.0052 to +0.0132)" in done.stderr


@pytest.mark.parametrize("section", ["How good they are", "How fast they are"])
def test_every_model_has_its_figures(section):
    page = (ROOT / "docs/models.md").read_text("utf-8")
    table = page.split(f"## {section}\n")[1].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(model_names())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a gain of +0.0012", "+0.0012 has no source"),
        ("a gain of +0.001<!-- bench-rows/ratio -->", None),
        ("a gain<!-- bench-rows/ratio -->", "<!-- bench-rows/ratio --> has no figure"),
        ("`+0.0012`", None),
    ],
)
def test_a_figure_needs_a_source_and_a_source_a_figure(pages, text, problem):
    assert pages.problems_of(text) == ([] if problem is None else [problem])


@pytest.mark.parametrize(
    ("written", "source", "expected"),
    [
        ("0.1", "bench-rows/ratio", "1.4"),
        ("+0.10", "bench-rows/ratio | * 100", "+135.20"),
        ("1,000", "kills/kills | * 100", "10,000"),
        ("91,111", "peers/samples_per_second/fuxictr | round -3", "27,000"),
        ("0.00 ± 0.00", "models-frappe/results/model=fm/auc | * 100", "94.27 ± 0.01"),
        ("0.0", "tail/book-crossing: baseline | best_epoch", "1.0"),
        ("", "pep-ml-1m/ml-1m: baseline | size", "1.1 MB"),
    ],
)
def test_a_figure_keeps_the_form_that_is_written(pages, written, source, expected):
    assert pages.rewritten(written, source) == expected


def test_an_unknown_source_is_named(pages):
    with pytest.raises(SystemExit, match="bench-rows/rate --> is not in the stored results"):
        pages.rewritten("1.0", "bench-rows/rate")


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
