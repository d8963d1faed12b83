"""The figures of harmless transfer, in its page and in the README, are those of the stored studies."""

import json
import re
import statistics
from pathlib import Path

import pytest

from rarebit.study.results import read_result, side_table
from rarebit.study.statistics import judge

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def stored(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text("utf-8"))


def test_the_page_of_transfer_has_the_perplexities_of_wikitext():
    page = (ROOT / "docs/transfer.md").read_text("utf-8")
    found = {arm: runs["0"] for arm, runs in stored("wikitext")["results"].items() if runs}
    assert len(found) == 5
    for arm, run in found.items():
        valid, test = run["valid"], run["test"]
        figures = (
            f"{valid['all']:.1f} | {test['all']:.1f} | {test['head']:.1f} | {test['tail']:,.0f}"
        )
        told = "| |"
        if run["ledger"] is not None:
            table = run["ledger"]["tables"]["embedding"]
            told = f"{table['opposed']:.0%} | {table['realised_over_promised']:.0%} |"
        assert f"| `{arm}` | {figures} | {told.replace('%', ' %')}" in page


TRANSFERS = {
    "plain-sum": "adversarial, plain sum at its best weight",
    "harmless-transfer": "adversarial, with the barrier",
    "plain-sum:loss=relatives": "relatives, plain sum at its best weight",
    "harmless-transfer:loss=relatives": "relatives, with the barrier",
}


@pytest.mark.parametrize("name", TRANSFERS)
def test_the_page_of_transfer_has_the_study_on_generated_logs(name):
    page = (ROOT / "docs/transfer.md").read_text("utf-8")
    result = read_result(ROOT / "benchmarks/results/study-harmless-transfer-generator.json")
    assert result.is_complete
    for cell in result.cells:
        ours, plain = cell.side(name), cell.side("baseline")
        pairs = {
            figure: [
                value - plain.figures(figure)[seed] for seed, value in ours.figures(figure).items()
            ]
            for figure in ("auc", "rarest_auc")
        }
        found = judge({name: pairs["auc"]}, minimum_effect=result.minimum_effect)[name]
        tables = [
            t for run in ours.runs for t in run.reports["harmless-transfer"]["tables"].values()
        ]
        right = [table["discriminator_accuracy"] for table in tables]
        told = "" if None in right else f"{statistics.fmean(right):.0%}".replace("%", " %")
        line = (
            f"| {TRANSFERS[name]} | {statistics.fmean(ours.figures('auc').values()):.4f} "
            f"| {found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f}) "
            f"| {statistics.fmean(pairs['rarest_auc']):+.4f} | {told} |"
        )
        assert line in page


SEARCHED = {
    "adversarial, discriminator at 1": ("", ":lr=1.0"),
    "adversarial, discriminator at 20": ("", ":lr=20.0"),
    "relatives, weight 0.1": (":loss=relatives", ":scale=0.1"),
    "relatives, weight 1": (":loss=relatives", ""),
    "relatives, weight 10": (":loss=relatives", ":scale=10.0"),
    "MMD, weight 0.1": (":loss=mmd", ":scale=0.1"),
    "MMD, weight 1": (":loss=mmd", ""),
    "moments, weight 1": (":loss=moments", ""),
}


def test_the_page_of_transfer_has_what_was_looked_for():
    page = (ROOT / "docs/transfer.md").read_text("utf-8")
    result = read_result(ROOT / "benchmarks/results/study-harmless-transfer-search.json")
    pairs = []
    for words, (loss, dial) in SEARCHED.items():
        figures = []
        for cell in result.cells:
            plain, barrier, plain_sum = (
                cell.side(name).runs[0].valid_auc
                for name in (
                    "baseline",
                    f"harmless-transfer{loss}{dial}",
                    f"harmless-transfer{loss}:rule=sum{dial}",
                )
            )
            figures += [barrier - plain, plain_sum - plain]
            pairs.append((barrier - plain, plain_sum - plain))
        assert f"| {words} | {' | '.join(f'{figure:+.4f}' for figure in figures)} |" in page
    lossy = [barrier > plain_sum for barrier, plain_sum in pairs if plain_sum <= -0.001]
    assert f"behind the barrier in {sum(lossy)} of {len(lossy)} cases" in page


TRANSFER_PAGE = (ROOT / "docs/transfer.md").read_text("utf-8")
GOALS = {
    "recorded": ("recorded as a CUDA graph", 1.35),
    "compiled": ("recorded, and the transfer compiled", 1.35),
    "eager": ("operation by operation", 1.10),
}


@pytest.mark.parametrize("way", GOALS)
def test_the_page_of_transfer_has_the_time_of_a_step_on_a_gpu(way):
    words, most = GOALS[way]
    found = stored("gpu-transfer")["results"][way]
    reached = "reached" if found["ratio"] <= most else "not reached"
    line = (
        f"| {words} | {found['plain_ms']:.2f} ms | {found['transfer_ms']:.2f} ms "
        f"| {found['ratio']:.2f} ({found['lowest_ratio']:.2f} to {found['highest_ratio']:.2f}) "
        f"| {found['transfer_kernels']} for {found['plain_kernels']} | {most:.2f}: {reached} |"
    )
    assert line in TRANSFER_PAGE


def test_the_page_of_transfer_says_which_goals_are_reached():
    found = stored("gpu-transfer")["results"]
    page = " ".join(TRANSFER_PAGE.split())
    assert [way for way, (_, most) in GOALS.items() if found[way]["ratio"] <= most] == ["compiled"]
    assert "recorded steps is reached only with `HarmlessTransfer(compile=True)`" in page
    assert "operation by operation is not reached" in page
    cpu = stored("bench-transfer")["ratio"]
    assert cpu <= 1.35
    assert f"on two CPU cores a step takes {cpu:.2f} times" in page


REAL = read_result(ROOT / "benchmarks/results/study-harmless-transfer.json")
ON = {cell.data: cell for cell in REAL.cells}
AT_10K = "pruned:keep=10000:epochs=12"
SIZES = {"baseline": "", AT_10K: f"{AT_10K}+"}
"""Plain training of each size, and how its arms begin."""
BOTH, NO_TRANSFER = "harmless-transfer", "harmless-transfer:scale=0.0"
SELECT_ALONE, LEXICO_ALONE = (
    "harmless-transfer:rule=sum:scale=0.01",
    "harmless-transfer:select=frequency",
)
ARMS = {
    "plain-sum:select=frequency": "plain sum at its best weight",
    "plain-sum": "selection, plain sum at its best weight",
    SELECT_ALONE: "select alone: selection, plain sum at 0.01",
    LEXICO_ALONE: "lexico alone: the barrier",
    BOTH: "**both: selection and barrier**",
    NO_TRANSFER: "the barrier, no transfer",
}
TITLES = {"ml-1m": "MovieLens-1M", "book-crossing": "Book-Crossing"}
REAL_PAGE = re.search(
    r"^### Click models: MovieLens-1M and Book-Crossing$(.*?)^### ",
    TRANSFER_PAGE,
    re.MULTILINE | re.DOTALL,
)[1]
REAL_WORDS = " ".join(REAL_PAGE.split())


def changes(log, name, plain, figure="auc"):
    theirs = ON[log].side(plain).figures(figure)
    return [value - theirs[seed] for seed, value in ON[log].side(name).figures(figure).items()]


def held_against(log, name, plain):
    return judge({name: changes(log, name, plain)}, minimum_effect=REAL.minimum_effect)[name]


def change(found):
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


def is_told(found):
    return found.low > 0 or found.high < 0


def column(log, plain):
    """Return the sides with as many entries as one of plain training."""
    names = {side.name for side in ON[log].sides}
    return [f"{SIZES[plain]}{arm}" for arm in ARMS if f"{SIZES[plain]}{arm}" in names]


def test_the_study_of_transfer_on_real_logs_is_whole():
    assert REAL.is_complete
    assert {len(side.runs) for cell in REAL.cells for side in cell.sides} == {5}
    runs = sum(len(side.runs) for cell in REAL.cells for side in cell.sides)
    assert f"{runs} runs of `deepfm@pep`" in REAL_WORDS
    assert {cell.model for cell in REAL.cells} == {"deepfm@pep"}


@pytest.mark.parametrize("log", TITLES)
@pytest.mark.parametrize("arm", ["plain training", *ARMS])
def test_the_page_of_transfer_has_the_study_on_real_logs(log, arm):
    shown = {row[0]: row[2] for row in side_table(ON[log]).rows}
    cells = []
    for plain, beginning in SIZES.items():
        name = plain if arm == "plain training" else f"{beginning}{arm}"
        cells.append(shown.get(name, ""))
        if name == plain or name not in shown:
            cells += ["", ""]
        else:
            rarest = statistics.fmean(changes(log, name, plain, "rarest_auc"))
            cells += [change(held_against(log, name, plain)), f"{rarest:+.4f}"]
    line = "|".join(["", ARMS.get(arm, arm), *cells, ""])
    [table] = re.findall(rf"^\| {TITLES[log]} \| all.*?\n\n", REAL_PAGE, re.MULTILINE | re.DOTALL)
    assert line in re.sub(r" *\| *", "|", table)


@pytest.mark.parametrize("log", TITLES)
def test_the_page_of_transfer_has_the_barrier_against_its_plain_sum(log):
    cells = [TITLES[log]]
    for plain, beginning in SIZES.items():
        name, plain_sum = f"{beginning}{BOTH}", f"{beginning}plain-sum"
        found = held_against(log, name, plain_sum)
        cells += [change(found), f"{found.wins} of {found.n}"]
        assert ON[log].side(name).control == plain_sum
        assert not is_told(ON[log].compare(REAL.minimum_effect)[name]), plain
    assert f"| {' | '.join(cells)} |" in REAL_PAGE
    assert "each method against its own control, none of the four is told" in REAL_WORDS


def test_the_page_of_transfer_has_what_was_confirmed():
    result = read_result(ROOT / "benchmarks/results/study-harmless-transfer-confirm.json")
    words = " ".join((ROOT / "docs/transfer.md").read_text("utf-8").split())
    name = "harmless-transfer:loss=mmd:scale=0.1"
    plain, own = (
        [change(cell.compare(result.minimum_effect)[name]) for cell in held.cells]
        for held in (result.against("baseline"), result)
    )
    assert [cell.data for cell in result.cells] == ["ml-1m", "book-crossing"]
    assert {run.seed for cell in result.cells for run in cell.side(name).runs} == {*range(200, 205)}
    assert f"AUC changes by {plain[0]} on ML-1M and by {plain[1]} on Book-Crossing" in words
    assert f"its own plain sum by {own[0]} and {own[1]}." in words


def test_the_page_of_transfer_says_what_selection_and_barrier_gain():
    small, large = (
        [held_against(log, f"{SIZES[plain]}{BOTH}", plain) for log in TITLES]
        for plain in (AT_10K, "baseline")
    )
    words = f"ML-1M's AUC changes by {change(small[0])} and that of Book-Crossing by {change(small[1])} at"
    assert words in REAL_WORDS
    assert f"and by {change(large[0])} and {change(large[1])} with all entries" in REAL_WORDS
    assert small[0].high < 0.003 < small[1].high
    assert "rules a gain of 0.003 out on ML-1M, and is too wide to do so on Book" in REAL_WORDS
    words = f"first {change(large[0])}, and {change(small[0])} with 10,000 entries"
    assert words.replace(" (", " in AUC (", 1) in " ".join(README.split())


def test_what_the_page_of_transfer_tells_from_plain_training():
    alone, corrected = set(), set()
    for log in TITLES:
        for plain in SIZES:
            pairs = {name: changes(log, name, plain) for name in column(log, plain)}
            found = judge(pairs, minimum_effect=REAL.minimum_effect)
            corrected |= {(log, name) for name in pairs if is_told(found[name])}
            alone |= {(log, name) for name in pairs if is_told(held_against(log, name, plain))}
    lost, gained = f"{AT_10K}+plain-sum", "plain-sum"
    assert alone == {
        *(("ml-1m", f"{lost}{select}") for select in ("", ":select=frequency")),
        *(("book-crossing", f"{gained}{select}") for select in ("", ":select=frequency")),
    }
    assert corrected == {("ml-1m", lost)}
    assert "both lose with 10,000 entries on ML-1M, and both gain with all entries on" in REAL_WORDS
    assert "one of these four is still told from zero, the loss with the selection" in REAL_WORDS


def test_every_arm_on_book_crossing_is_best_after_one_epoch():
    names = ["baseline", *column("book-crossing", "baseline")]
    best = {run.best_epoch for name in names for run in ON["book-crossing"].side(name).runs}
    assert best == {1}
    assert "every arm on Book-Crossing is best on validation rows after its first" in REAL_WORDS


def of_tables(log, name, figure):
    """Return the least and the largest of a figure of the ledger over the tables, each a mean over seeds."""
    ledgers = [run.reports["harmless-transfer"]["tables"] for run in ON[log].side(name).runs]
    means = [statistics.fmean(figure(ledger[table]) for ledger in ledgers) for table in ledgers[0]]
    return min(means), max(means)


def percent(ends):
    return f"{100 * ends[0]:.0f} to {100 * ends[1]:.0f} %"


def told_right(table):
    return table["discriminator_accuracy"]


def length(table):
    return table["transfer_norm"] / table["main_norm"]


def near_alpha(table):
    return sum(table["lambda"][end] for end in ("0.999", "1.001", "1.5"))


def test_the_page_of_transfer_says_why_from_the_ledger():
    still, moved, opposed = (
        [percent(of_tables(log, name, figure)) for log in TITLES]
        for name, figure in (
            (NO_TRANSFER, told_right),
            (BOTH, told_right),
            (BOTH, lambda table: table["opposed"]),
        )
    )
    assert f"tells {still[0]} of the rows right on ML-1M and {still[1]} on Book-" in REAL_WORDS
    assert f"it tells {moved[0]} and {moved[1]} right" in REAL_WORDS
    assert f"{opposed[0]} and {opposed[1]} of the rare rows are opposed" in REAL_WORDS
    ratios = [
        "{:.2f} to {:.2f}".format(*of_tables(log, name, length))
        for log, name in (
            ("ml-1m", BOTH),
            ("book-crossing", BOTH),
            ("ml-1m", f"{AT_10K}+{BOTH}"),
        )
    ]
    assert f"t is {ratios[0]} times as long as g on ML-1M and {ratios[1]} times on" in REAL_WORDS
    assert f"10,000 entries on ML-1M it is {ratios[2]} times as long" in REAL_WORDS
    large, small = (
        percent(of_tables("ml-1m", name, near_alpha)) for name in (BOTH, f"{AT_10K}+{BOTH}")
    )
    assert f"for {large} of the rare rows, and with 10,000 entries for {small}" in REAL_WORDS


def test_the_page_of_transfer_says_how_many_rare_rows_pruning_leaves():
    def in_a_batch(name, table):
        ledgers = [run.reports[BOTH] for run in ON["book-crossing"].side(name).runs]
        rows = [one["tables"][f"backbone.tables.{table}"]["rows"] / one["steps"] for one in ledgers]
        return f"{statistics.fmean(rows):.0f}"

    users, books = (
        (in_a_batch(f"{AT_10K}+{BOTH}", table), in_a_batch(BOTH, table))
        for table in ("user", "isbn")
    )
    words = f"{users[0]} rare user in place of {users[1]}, and {books[0]} rare books in place of"
    assert f"{words} {books[1]}." in REAL_WORDS
    weights = [ON["book-crossing"].side(name).runs[0].parameters for name in ("baseline", AT_10K)]
    entries = weights[0] - weights[1] + 10_000
    assert f"of Book-Crossing's {entries / 1e6:.1f} million entries" in REAL_WORDS


def test_the_page_of_transfer_says_what_the_barrier_and_the_selection_do_alone():
    idle = [change(held_against(log, NO_TRANSFER, "baseline")) for log in TITLES]
    assert f"again: {idle[0]} on ML-1M and {idle[1]} on Book-Crossing" in REAL_WORDS
    longest = of_tables("ml-1m", SELECT_ALONE, length)[1]
    moves = change(held_against("ml-1m", SELECT_ALONE, "baseline"))
    assert (
        f"at most {100 * longest:.1f} % as long as the main gradient, and AUC still moves by {moves}."
        in REAL_WORDS
    )


def test_the_page_of_transfer_has_both_ends_of_frequency():
    rarest, frequent = (
        sorted(
            statistics.fmean(changes(log, f"{beginning}{BOTH}", plain, figure))
            for log in TITLES
            for plain, beginning in SIZES.items()
        )
        for figure in ("rarest_pr_auc", "frequent_pr_auc")
    )
    assert (
        f"rarest fifth of the test rows by {rarest[0]:+.4f} to {rarest[-1]:+.4f}, and the most frequent "
        f"fifth by {frequent[0]:+.4f} to {frequent[-1]:+.4f}"
    ) in REAL_WORDS


def test_the_page_of_transfer_names_what_was_not_run():
    plain = statistics.fmean(ON["ml-1m"].side(AT_10K).figures("auc").values())
    assert f"ours is at {plain:.4f}, on [one split]" in REAL_WORDS
    assert REAL.plan["training"]["ema_decay"] is None
    for name in ("zip", "grid-adam", "grid-sgd", "grid-momentum"):
        assert (ROOT / f"recipes/harmless-transfer-{name}.toml").is_file()
        assert f"-{name}.toml`" in REAL_WORDS
