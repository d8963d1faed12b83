"""What the page of the tail says of a restart, and of our method with the others, is what the studies gave."""

import json
import re
import statistics
from pathlib import Path

import pytest

from rarebit.study.results import comparison_table, read_result, side_table

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


def test_the_page_has_what_forgetting_adds_to_an_epoch():
    figures = json.loads((ROOT / "benchmarks/results/bench-forgetting.json").read_text("utf-8"))
    words = " ".join(section("Forgetting").split())
    assert f"an epoch of a million rows takes {figures['ratio']:.3f} times as long" in words


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


COMBINED = read_result(ROOT / "benchmarks/results/study-tail-combined.json")
WITH_OTHERS = section("With the other methods")


def test_the_page_has_every_side_with_the_other_methods():
    [cell] = COMBINED.cells
    assert COMBINED.is_complete
    judged = {row[0]: row for row in comparison_table(cell, COMBINED.minimum_effect).rows}
    for shown in side_table(cell).rows:
        name, seeds, auc, size = shown[0], shown[1], shown[2], shown[6]
        assert seeds == "5"
        cells = ["", ""]
        if name in judged:
            _, control, mean, ends, rarest, *_ = judged[name]
            assert control == "tuned"
            cells = [f"{mean} ({ends})", rarest]
        line = f"| `{name}` | {auc} | {' | '.join(cells)} | {size} |"
        assert re.sub(r" +", " ", line) in WITH_OTHERS


def test_the_page_says_which_goals_are_reached_with_the_others():
    [cell] = COMBINED.cells
    found = cell.compare(COMBINED.minimum_effect)
    alone = found["shrinkage+forgetting"].mean
    reached = {name for name in found if found[name].low > 0.006}
    assert reached == {
        "mlet:inner_dim=32:init=keep+shrinkage+forgetting",
        "multi-embedding+shrinkage+forgetting",
    }
    assert found["shrinkage+harmless-transfer:loss=mmd:scale=0.1+forgetting"].mean < alone
    small = [name for name in found if "pruned" in name]
    plain = cell.side("baseline").runs[0].table_bytes
    for name in small:
        assert all(10 * run.table_bytes <= plain for run in cell.side(name).runs)
    best = max(found[name].mean for name in small)
    assert f"at a tenth of the bytes is missed by {-best:.4f}." in WITH_OTHERS
    assert not (ROOT / "benchmarks/results/study-tail-tenth.json").exists()
