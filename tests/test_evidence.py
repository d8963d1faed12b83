"""The page of evidence is what the stored studies give."""

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from rarebit.study.statistics import judge

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks/evidence.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_written_from_the_stored_studies():
    evidence = load()
    claims = tomllib.loads(evidence.CLAIMS.read_text("utf-8"))["claims"]
    assert evidence.page(claims) == evidence.PAGE.read_text("utf-8"), (
        "docs/evidence.md is old; run python benchmarks/evidence.py"
    )


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
def test_says_what_an_interval_means_for_a_claim(differences, at_least, verdict):
    found = judge({"mlet": differences})["mlet"]
    line = load().Line("log", "fm", "mlet", "baseline", found, at_least)
    assert line.verdict == verdict
    assert f"{found.mean:+.4f}" in str(line)
