"""What the page of the tail says of a restart, and of our method with the others, is what the studies gave."""

import re
import statistics
from pathlib import Path

import pytest

from rarebit.study.results import read_result

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/tail.md").read_text("utf-8")
RESTARTS = {
    name: read_result(ROOT / f"benchmarks/results/study-{name}.json")
    for name in ("tail-restart", "tail-restart-decay")
}


def section(title):
    return re.search(rf"^## {title}$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)[1]


def gain(cell, name):
    differences = cell.differences(cell.side(name), "auc")
    wins = sum(difference > 0 for difference in differences)
    return f"{statistics.fmean(differences):+.4f}, {wins} of {len(differences)}"


def test_the_studies_of_a_restart_are_whole():
    for result, decay in zip(RESTARTS.values(), (0.0, 1e-5), strict=True):
        assert result.is_complete
        assert result.plan["training"]["weight_decay"] == decay
        assert {len(side.runs) for cell in result.cells for side in cell.sides} == {3}


@pytest.mark.parametrize(
    ("study", "number", "log", "decay"),
    [
        ("tail-restart", 0, "generated", "0"),
        ("tail-restart-decay", 0, "generated", "1e-5"),
        ("tail-restart", 1, "Book-Crossing", "0"),
    ],
)
def test_the_page_has_what_a_restart_gives(study, number, log, decay):
    cell = RESTARTS[study].cells[number]
    assert ("book-crossing" in cell.data) == (log == "Book-Crossing")
    gains = " | ".join(gain(cell, name) for name in ("forgetting:c=0.0", "forgetting"))
    assert f"| {log} | {decay} | {gains} |" in section("A restart is a forgetting")


def test_without_decay_the_first_epoch_is_the_best_again():
    books = RESTARTS["tail-restart"].cells[1]
    for name in ("baseline", "forgetting:c=0.0"):
        assert {run.best_epoch for run in books.side(name).runs} == {1}
