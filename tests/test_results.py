"""The figures in the README are those of the stored results."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
CEILING = json.loads((ROOT / "benchmarks/results/ceiling.json").read_text())
BENCH = json.loads((ROOT / "benchmarks/results/bench-train.json").read_text())


@pytest.mark.parametrize("result", CEILING["results"], ids=lambda result: result["model"])
def test_the_table_of_models_is_that_of_the_result(result):
    row = re.search(rf"^\| `{result['model']}` \|.*$", README, flags=re.MULTILINE)[0]
    expected = [
        f"{result['auc']:.4f} ± {result['auc_spread']:.4f}",
        f"{result['gap']:.4f}",
        f"{result['rarest_auc']:.4f}",
        f"{result['rarest_gap']:.4f}",
    ]
    assert [cell.strip() for cell in row.split("|")][-5:-1] == expected


def test_the_ratios_of_a_step_are_those_of_the_result():
    for key, words in {
        "ratio": "{:.1f} times as\nfast",
        "ratio_4096": "{:.1f} times at 4096",
    }.items():
        assert words.format(BENCH[key]) in README
    tuned = f"{BENCH['ratio_tuned']:.1f} and {BENCH['ratio_tuned_4096']:.1f} times as fast"
    assert tuned in README


@pytest.mark.parametrize("result", [CEILING["machine"], BENCH], ids=["ceiling", "bench"])
def test_a_result_names_its_commit_and_machine(result):
    assert re.fullmatch(r"[0-9a-f]{40}", result["commit"])
    assert result["torch"]
    assert result["device"]
