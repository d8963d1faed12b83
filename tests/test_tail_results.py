"""The figures of the tail, in its page and in the README, are those of the stored studies."""

import json
import re
import statistics
from pathlib import Path

import pytest

from rarebit.methods.forgetting import Forgetting
from rarebit.study.results import comparison_table, read_result, side_table
from rarebit.study.statistics import judge

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
README = (ROOT / "README.md").read_text("utf-8")
PAGE = (ROOT / "docs/tail.md").read_text("utf-8")
SECTION = re.search(r"^## What it gave$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)[1]
PROSE = " ".join(
    " ".join(line for line in SECTION.splitlines() if not line.startswith("|")).split()
)

TAIL, OTHERS, SEARCH = (
    read_result(RESULTS / f"study-{name}.json") for name in ("tail", "tail-others", "tail-search")
)
CELLS = {cell.data: cell for result in (TAIL, OTHERS) for cell in result.cells}
TITLES = {
    "ml-1m-ids": "ML-1M with ids",
    "book-crossing": "Book-Crossing",
    "ml-1m": "ML-1M, seven fields",
    "frappe": "Frappe",
    "criteo-80k": "Criteo-80k",
}
CHOSEN_ON = ("ml-1m-ids", "book-crossing")
LOOKED_AT_ONCE = ("ml-1m", "frappe", "criteo-80k")

BOTH, BOTH_100 = "shrinkage+forgetting", "shrinkage+forgetting:c=100.0"
RESTART, FORGETTING = "forgetting:c=0.0", "forgetting:c=100.0"
HALF = "fresh-tables:keep=0.5"
FORMS_OF_C = ("shrinkage", *(f"shrinkage:c={c}" for c in ("learned", "held-out", "first-pass")))
GROUPS = {
    "plain": ("baseline", "tuned"),
    "ours": (BOTH, BOTH_100),
    "shrinkage alone, by how c is found": FORMS_OF_C,
    "shrinkage alone, by what rows are drawn to": tuple(
        f"shrinkage:prior={prior}" for prior in ("zero", "hashed", "relatives")
    ),
    "forgetting alone": (RESTART, FORGETTING),
    "neighbours": (
        "row-rate:c=3.0",
        "id-dropout:c=0.3",
        "frequency-decay",
        "group-stopping:groups=10",
        "fresh-tables",
        HALF,
    ),
}


def machine(name):
    return json.loads((RESULTS / f"study-{name}.json").read_text("utf-8"))["machine"]


def interval(found):
    return f"({found.low:+.4f} to {found.high:+.4f})"


def change(found):
    return f"{found.mean:+.4f} {interval(found)}"


def in_study(log, name, control="tuned"):
    """Return a method against a side, corrected for all methods of its study."""
    return CELLS[log].against(control).compare(TAIL.minimum_effect)[name]


def pair(log, name, other, figure="auc"):
    """Return a side against another, by themselves."""
    ours, theirs = (CELLS[log].side(one).figures(figure) for one in (name, other))
    return judge({name: [ours[seed] - theirs[seed] for seed in ours]})[name]


def pairs(name, other):
    return [change(pair(log, name, other)) for log in CHOSEN_ON]


def rarest(log, name, control="tuned"):
    return pair(log, name, control, "rarest_auc").mean


def epochs(log, name):
    return statistics.fmean(run.best_epoch for run in CELLS[log].side(name).runs)


def searched(name):
    """Return the difference to the baseline on validation rows, on each log of the search."""
    return [
        cell.side(name).runs[0].valid_auc - cell.side("baseline").runs[0].valid_auc
        for cell in SEARCH.cells
    ]


def cells_of(log, name):
    """Return AUC, difference and rarest fifth as the tables of the study show them."""
    cell = CELLS[log]
    [shown] = [row for row in side_table(cell).rows if row[0] == name]
    judged = [row for row in comparison_table(cell, TAIL.minimum_effect).rows if row[0] == name]
    if not judged:
        return [shown[2], "", ""]
    [found] = judged
    assert found[1] == "tuned"
    return [shown[2], f"{found[2]} ({found[3]})", found[4]]


def line(*cells):
    return re.sub(r" +", " ", f"| {' | '.join(cells)} |")


def rows_of(text, header):
    """Return the lines of the table with this header, without its head."""
    [table] = re.findall(rf"^{re.escape(header)}\n\|[-|]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return table.splitlines()


def test_the_studies_are_whole():
    for result, seeds in ((TAIL, 5), (OTHERS, 5), (SEARCH, 1)):
        assert result.is_complete
        assert {len(side.runs) for cell in result.cells for side in cell.sides} == {seeds}
        assert {cell.model for cell in result.cells} == {"dcn_v2@me"}
        assert result.minimum_effect == TAIL.minimum_effect
    for cell in CELLS.values():
        assert len({side.runs[0].table_bytes for side in cell.sides}) == 1
        assert len(cell.side("tuned").trials) == 9


def test_every_side_of_the_study_is_in_the_table():
    wanted = []
    for group, names in GROUPS.items():
        wanted.append(line(f"**{group}**", *[""] * 6))
        wanted += [
            line(f"`{name}`", *(cell for log in CHOSEN_ON for cell in cells_of(log, name)))
            for name in names
        ]
    against = "against `tuned` | rarest fifth |"
    assert rows_of(SECTION, f"| | ML-1M with ids | {against} Book-Crossing | {against}") == wanted
    named = {name for names in GROUPS.values() for name in names}
    assert named == {side.name for side in CELLS["ml-1m-ids"].sides}


def test_every_side_on_the_other_logs_is_in_the_table():
    wanted = [
        line(TITLES[log], f"`{side.name}`", *cells_of(log, side.name))
        for log in LOOKED_AT_ONCE
        for side in CELLS[log].sides
    ]
    header = "| log | side | AUC | against `tuned` | rarest fifth |"
    assert rows_of(SECTION, header) == wanted


def test_every_tenth_of_the_test_rows_is_in_the_table():
    gains = {log: CELLS[log].decile_differences(CELLS[log].side(BOTH)) for log in TITLES}
    header = line("log", *map(str, range(1, 11)))
    assert rows_of(SECTION, header) == [
        line(TITLES[log], *(f"{gain:+.4f}" for gain in gains[log])) for log in TITLES
    ]
    assert [log for log in gains if min(gains[log]) > 0] == ["ml-1m-ids", "book-crossing", "ml-1m"]
    assert "All ten gain on the first three logs" in PROSE
    assert {*sorted(gains["book-crossing"])[:2]} == {gains["book-crossing"][i] for i in (0, -1)}
    assert "the rarest and the most frequent tenth gain least" in PROSE


def test_the_goals_are_told_as_they_are():
    first, second = (in_study(log, BOTH) for log in CHOSEN_ON)
    assert 0.004 - first.mean == pytest.approx(0.00002, abs=5e-6)
    assert second.low > 0.003
    few, many = (rarest(log, BOTH) for log in CHOSEN_ON)
    assert few < 0.005 < many
    others = [in_study(log, BOTH) for log in LOOKED_AT_ONCE]
    assert min(found.high for found in others) > 0
    three = f"{others[0].mean:+.4f}, {others[1].mean:+.4f}, {change(others[2])}"
    assert rows_of(SECTION, "| goal | found | |") == [
        line(
            "ML-1M with ids: +0.004",
            f"{first.mean:+.4f}; before rounding, {first.mean:.5f}",
            "missed by 0.00002, which five seeds cannot tell",
        ),
        line("Book-Crossing: +0.003", f"{second.mean:+.4f}", "reached"),
        line("rarest fifth, ML-1M with ids: +0.005", f"{few:+.4f}", "missed"),
        line("rarest fifth, Book-Crossing: +0.005", f"{many:+.4f}", "reached"),
        line("the other three logs: not below by more than the interval", three, "reached"),
    ]


def about_the_finding():
    gains = {log: in_study(log, BOTH) for log in TITLES}
    assert [log for log in TITLES if gains[log].verdict != "helps"] == ["criteo-80k"]
    assert gains["criteo-80k"].low < 0 < gains["criteo-80k"].high
    with_ids, without, books = (
        f"{gains[log].mean:.3f}" for log in ("ml-1m-ids", "ml-1m", "book-crossing")
    )
    assert with_ids == without
    yield (
        f"on four of five logs: by {with_ids} on ML-1M, with ids or without, by {books} on "
        "Book-Crossing, and by little on Frappe"
    )
    assert {model["dim"] for model in (*TAIL.plan["model"], *OTHERS.plan["model"])} == {16}
    assert {run.device for cell in CELLS.values() for run in cell.sides[0].runs} == {"NVIDIA H200"}
    yield "DCN-V2 of width 16, five paired seeds, one H200."
    yield f"{machine('tail')['runs_made']} runs are on the two logs"
    yield f"and {machine('tail-others')['runs_made']} on three logs that were looked at once"
    assert [len(CELLS[log].methods) for log in ("ml-1m-ids", "frappe")] == [17, 2]
    yield "corrected by Holm for 17 methods, or for two on the other logs"


def about_the_goals():
    tuned = pair("book-crossing", "tuned", "baseline").mean
    yield f"`tuned` is {-tuned:.4f} below the untuned baseline"
    untuned, rare = (
        in_study("book-crossing", BOTH, "baseline"),
        rarest("book-crossing", BOTH, "baseline"),
    )
    yield f"Against that baseline it is {change(untuned)}, and {rare:+.4f} on the rarest fifth"
    best = max((BOTH, BOTH_100, f"{BOTH}:c=10.0"), key=lambda name: sum(searched(name)))
    assert best == BOTH_100
    yield f"The c = {Forgetting().c:.0f} of forgetting was set before the search"
    ids, books = (in_study(log, BOTH_100).mean for log in CHOSEN_ON)
    yield f"c = 100, has {ids:+.4f} on ML-1M and {books:+.4f} on Book-Crossing"
    ids, books, frappe = (
        f"{rows.low:+.4f} to {rows.high:+.4f}"
        for rows in (CELLS[log].rows[BOTH] for log in (*CHOSEN_ON, "frappe"))
    )
    yield f"the gain is {ids} on ML-1M with ids, {books} on Book-Crossing, and none on Frappe ({frappe})"


def about_criteo():
    log = "criteo-80k"
    loss = pair(log, BOTH, "tuned", "rarest_auc")
    alone = in_study(log, "shrinkage")
    assert alone.high < 0
    rows = json.loads((RESULTS / "models-criteo-80k.json").read_text("utf-8"))["results"][0]["rows"]
    yield f"On Criteo-80k, with {rows[-1]:,} test rows, "
    yield (
        f"the rarest fifth loses {-loss.mean:.4f} {interval(loss)[:-1]}, not corrected), and shrinkage "
        f"alone {-alone.mean:.4f} of all rows"
    )
    plain, tuned = (CELLS[log].side(name).settings["training"] for name in ("baseline", "tuned"))
    assert tuned == {**plain, "lr": 2 * plain["lr"]}
    yield f"`tuned` doubles it, and gains {pair(log, 'tuned', 'baseline').mean:.4f}."
    alone, both = (change(in_study(log, name, "baseline")) for name in ("shrinkage", BOTH))
    yield f"shrinkage alone changes {alone}, and both together {both}."
    assert CELLS[log].side(BOTH).settings["training"]["lr"] == plain["lr"]


def about_the_parts():
    ids, books = pairs(RESTART, "baseline")
    yield f"gains {ids} over the baseline on ML-1M, and {books} on Book-Crossing"
    ids, books = pairs(FORGETTING, RESTART)
    yield f"with c = 100, adds {ids} and {books}; shrinkage"
    ids, books = pairs(BOTH_100, FORGETTING)
    yield f" on top of that {ids} and {books}. So on Book-Crossing each part gives something"
    told = {
        (log, name)
        for log in CHOSEN_ON
        for name, other in ((FORGETTING, RESTART), (BOTH_100, FORGETTING))
        if pair(log, name, other).low > 0
    }
    assert told == {("book-crossing", FORGETTING), ("book-crossing", BOTH_100)}
    ids, books = pairs(BOTH, RESTART)
    yield f"above the restart alone by {ids} and {books}."
    for log in CHOSEN_ON:
        assert rarest(log, FORGETTING) > max(rarest(log, BOTH), rarest(log, BOTH_100))
    ids, books = (rarest(log, FORGETTING) for log in CHOSEN_ON)
    yield f"is ahead of both together, at {ids:+.4f} and {books:+.4f} against `tuned`."


def about_the_prior():
    ids, books = pairs("shrinkage", "shrinkage:prior=zero")
    yield f"gives shrinkage {ids} and {books}, and nothing on the rarest fifth"
    for log in CHOSEN_ON:
        assert abs(rarest(log, "shrinkage", "shrinkage:prior=zero")) < 0.0002
    hashed = [in_study(log, "shrinkage:prior=hashed") for log in CHOSEN_ON]
    assert abs(hashed[0].mean - in_study("ml-1m-ids", "shrinkage").mean) < 0.0002
    assert abs(hashed[1].mean) < 0.0001
    relatives = [in_study(log, "shrinkage:prior=relatives") for log in CHOSEN_ON]
    assert relatives[0].verdict == "hurts"
    assert relatives[1].mean < 0 < relatives[1].high
    ids, books = (in_study(log, "row-rate:c=3.0").mean for log in CHOSEN_ON)
    rates = [sum(searched(f"row-rate:c={c}")) for c in ("3.0", "30.0", "100.0")]
    assert max(rates) == rates[0]
    yield f"`row-rate` at the best of three c, are at {ids:+.4f} and {books:+.4f}:"


def about_c():
    found = {
        c: statistics.fmean(searched(f"shrinkage:c={c}"))
        for c in ("typical", "held-out", "3.0", "first-pass", "learned", "100.0")
    }
    assert sorted(found, key=found.get, reverse=True) == list(found)
    typical, held_out, three, first_pass, learned, _ = (f"{gain:+.4f}" for gain in found.values())
    yield (
        f'`"typical"` gains {typical} over the baseline as a mean of both, `"held-out"` {held_out}, c = 3 '
        f'{three}, `"first-pass"` {first_pass} and `"learned"` {learned}.'
    )
    ids, books = searched("shrinkage:c=100.0")
    yield f"c = 100 gains {ids:+.4f} on ML-1M and loses {-books:.4f} on Book-Crossing"
    told = [name for name in FORMS_OF_C if all(in_study(log, name).low > 0 for log in CHOSEN_ON)]
    assert told == ["shrinkage"]


def about_tables_drawn_anew():
    ids, books = (in_study(log, "fresh-tables") for log in CHOSEN_ON)
    assert books.wins == books.n == 5
    yield f"in five of five seeds, by {books.mean:.4f} {interval(books)}: not enough for the interval"
    yield f"and {-ids.mean:.4f} is lost"
    assert min(in_study(log, name).low for log in CHOSEN_ON for name in (HALF, FORGETTING)) > 0
    ids, books = pairs(HALF, RESTART)
    yield f"is no better than to keep all of it: {ids} and {books} against the restart alone"
    ids, books = pairs(FORGETTING, HALF)
    yield f"it is {ids} and {books} above half of each row"


def about_the_cost():
    best = {log: (f"{epochs(log, BOTH):.1f}", f"{epochs(log, 'baseline'):.1f}") for log in TITLES}
    ids, books, seven, frappe, criteo = (f"{ours} for {plain}" for ours, plain in best.values())
    yield f"{later()} as late, as a mean over seeds: {ids} on ML-1M with ids, {books} on Book-Crossing"
    yield f"{seven} on ML-1M's seven fields, {frappe} on Frappe and {criteo} on Criteo-80k"
    last = {log: sum(run.best_epoch == 12 for run in CELLS[log].side(BOTH).runs) for log in TITLES}
    assert {result.plan["training"]["epochs"] for result in (TAIL, OTHERS)} == {12}
    yield "All had 12 epochs at most: two of five runs on Frappe were best in the twelfth"
    assert {log: runs for log, runs in last.items() if runs} == {"frappe": 2}
    times = [CELLS[log].time_ratio(CELLS[log].side(BOTH)) for log in TITLES]
    yield f"Training on a row takes {min(times):.2f} to {sorted(times)[-2]:.2f} times as long on four"
    assert max(times) == times[-1]
    yield f"it takes {times[-1]:.2f} times;"


def later():
    """Return how much later the best epoch comes, from log to log."""
    times = [epochs(log, BOTH) / epochs(log, "baseline") for log in TITLES]
    return f"best epoch comes {min(times):.1f} to {max(times):.1f} times"


ABOUT = (
    about_the_finding,
    about_the_goals,
    about_criteo,
    about_the_parts,
    about_the_prior,
    about_c,
    about_tables_drawn_anew,
    about_the_cost,
)


@pytest.mark.parametrize("about", ABOUT, ids=lambda about: about.__name__)
def test_the_page_says_what_the_studies_say(about):
    for words in about():
        assert words in PROSE


def test_no_figure_of_the_page_is_without_its_study():
    left = PROSE
    for about in ABOUT:
        for words in about():
            left = left.replace(words, "")
    assert re.findall(r"\d\.\d+", re.sub(r"`[^`]*`", "", left)) == []


def test_when_not_has_the_epochs_of_the_study():
    [when_not] = re.findall(r"^## When not$(.*)", PAGE, re.MULTILINE | re.DOTALL)
    assert f"so the {later()} as late" in " ".join(when_not.split())


def test_the_page_names_what_was_not_run():
    assert (ROOT / "recipes/tail-grid.toml").is_file()
    assert not (RESULTS / "study-tail-grid.json").exists()
    assert "DeepFM and AutoInt: `recipes/tail-grid.toml` is fixed, and not run" in PROSE


def test_the_readme_has_the_figures_of_the_study():
    wanted = []
    for log, title in TITLES.items():
        _, difference, rare = cells_of(log, BOTH)
        wanted.append(line(title, difference, rare))
    assert rows_of(README, "| log | AUC | on the rarest fifth |") == wanted
    words = " ".join(README.split())
    assert f"Its {later()} as late" in words
    for log in CHOSEN_ON:
        restart, whole = (in_study(log, name).mean for name in (RESTART, BOTH))
        assert restart > whole / 2
    assert (
        "shrinkage with forgetting gains on four of five logs; more than half of that, on the two where it was "
        "taken apart, comes from starting the optimizer again"
    ) in words
