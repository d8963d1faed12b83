"""Refresh the measured figures in README.md and docs/ from benchmarks/results, or check them.

    python tools/pages.py            write every figure anew
    python tools/pages.py --check    change nothing; print a diff and fail if a figure is out of date

A comment after a figure names its source. The written figure gives the form: sign, decimals, and whether
a range, an interval or a spread is shown. For a new figure write any number of that form and run the script.

    A step takes 1.08<!-- gpu-pep/results/scheduled/ratio --> times as long.
    AUC changes by +0.0040 (+0.0014 to +0.0066)<!-- tail/ml-1m-ids: shrinkage+forgetting - tuned -->.

A comment above a table has one source per column, or `-` for a column of labels. Labels fill the sources: {0} is
the first word of the labels of a row. Where a comment follows a label, its words are used instead.
`<!-- figures as above -->` takes the sources of the table before.

    <!-- figures
    -
    tail/ml-1m-ids: {0}
    tail/ml-1m-ids: {0} - tuned
    -->
    | variant | AUC | difference |
    |---|---|---|
    | our method<!-- shrinkage+forgetting --> | 0.9038 ± 0.0002 | +0.0040 (+0.0014 to +0.0066) |

Sources:

    FILE/KEY/KEY                    a value in benchmarks/results/FILE.json; in a list, an index or NAME=VALUE;
                                    a list of numbers is one per seed
    STUDY/LOG: VARIANT              mean and spread over the seeds in study-STUDY.json
    STUDY/LOG: VARIANT - CONTROL    mean paired difference, with an interval corrected for all methods of the
                                    study; LOG may be * for the mean over all logs, and LOG~MODEL where a study
                                    has several models
    NAME                            a function in FIGURES

Options, each after ` | `:

    NAME                   another figure of the runs than auc; `decile 3`; `ledger NAME`
    alone                  an interval for this comparison alone; `one control` corrects as if all methods of the
                           study had this control; `averaged` is the interval of scores averaged over seeds
    model, seeds, size,
    start, trials,
    verdict, wins          a text in place of a number; so are `mean, wins` and `claim 0.001`, which judges a claim
    between LOW HIGH       the keys next to a stored value that hold its range
    below KEY              the difference to the key next to a stored value
    max, * 100, / 1e6, round -3

A number with four decimals must have a source.
"""

import argparse
import difflib
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rarebit.settings import size
from rarebit.study.results import CellResult, StudyResult
from rarebit.study.statistics import Comparison, judge

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
SHAPE = re.compile(
    rf"(?P<first>{NUMBER})(?:\s+±\s+(?P<spread>{NUMBER})|\s+to\s+(?P<to>{NUMBER})"
    rf"|\s+\((?P<low>{NUMBER})\s+to\s+(?P<high>{NUMBER})\))?"
)
FIGURE = re.compile(rf"(?<![\w.])({SHAPE.pattern})(?P<comment>\)?<!--\s(?P<source>[^>]+?)\s-->)")
TABLE = re.compile(
    r"^<!-- figures(?: as above -->|\n(?P<sources>.*?)\n-->)\n(?P<table>(?:\|[^\n]*\n)+)",
    re.MULTILINE | re.DOTALL,
)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LABEL = "-"


def main() -> None:
    """Refresh the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="only print what differs, and fail")
    if not parser.parse_args().check:
        for path in PAGES:
            path.write_text(refreshed(path.read_text("utf-8")), encoding="utf-8")
    problems = [f"{path.name}: {line}" for path in PAGES for line in problems_of(path)]
    if problems:
        sys.exit("\n".join([*problems, "refresh the figures with python tools/pages.py"]))


def problems_of(path: Path) -> list[str]:
    """Return a diff to the stored results, four-decimal numbers without source, and the reverse."""
    page = path.read_text("utf-8")
    lines = page.splitlines(), refreshed(page).splitlines()
    rest = FIGURE.sub("", TABLE.sub("", CODE.sub("", page)))
    return [
        *difflib.unified_diff(*lines, "page", "stored results", lineterm="", n=0),
        *(f"{number} has no source" for number in re.findall(r"[-+]?\d\.\d{4}\b", rest)),
        *(f"{text} has no figure" for text in re.findall("<!--.*?-->", rest, re.DOTALL)),
    ]


def refreshed(page: str) -> str:
    """Return a page with its figures written anew."""
    new, end, sources = "", 0, []
    for found in TABLE.finditer(page):
        sources = found["sources"].splitlines() if found["sources"] else sources
        header, rule, *rows = found["table"].splitlines()
        lines = [header, rule, *(_row(row, sources) for row in rows)]
        new += _text(page[end : found.start()]) + page[found.start() : found.start("table")]
        new += "\n".join(lines) + "\n"
        end = found.end()
    return new + _text(page[end:])


def _text(text: str) -> str:
    """Return a text with every figure that has a comment written anew."""
    return FIGURE.sub(lambda found: rewritten(found[1], found["source"]) + found["comment"], text)


def _row(row: str, sources: Sequence[str]) -> str:
    cells = [cell.strip() for cell in row.removeprefix("|").removesuffix("|").split("|")]
    if len(cells) != len(sources):
        sys.exit(f"{len(sources)} sources for {len(cells)} columns: {row}")
    columns = list(zip(cells, sources, strict=True))
    words = [word for cell, source in columns if source == LABEL for word in _words(cell)]
    texts = [_cell(cell, source, words) for cell, source in columns]
    return re.sub(" +", " ", f"| {' | '.join(texts)} |")


def _cell(cell: str, source: str, words: Sequence[str]) -> str:
    if source == LABEL or cell in {"", "-"}:
        return cell
    return _text(cell) if "<!--" in cell else rewritten(cell, source.format(*words))


def _words(label: str) -> list[str]:
    """Return what a label gives to the sources of its row: the words of its comment, or itself."""
    comment = re.search("<!-- (.*?) -->", label)
    return comment[1].split() if comment else [label.strip("`*")]


def rewritten(text: str, source: str) -> str:
    """Return a text with its figure replaced by what is stored, in the same form."""
    source = " ".join(source.split())
    try:
        whole = _as_text(source)
        if whole is None and not SHAPE.search(text):
            sys.exit(f"<!-- {source} -->: {text!r} has no number to replace")
        return whole or SHAPE.sub(lambda found: _filled(found, source), text, count=1)
    except (LookupError, ValueError, StopIteration) as error:
        sys.exit(f"cannot read <!-- {source} -->: {error!r}")


def _filled(found: re.Match[str], source: str) -> str:
    text, start = found[0], found.start()
    parts = {"to": "high", "high": "high", "low": "low", "spread": "spread", "first": "mean"}
    if found["to"]:
        parts["first"] = "low"
    for group, part in parts.items():
        if found[group]:  # from the end, so that positions stay
            number = _like(found[group], value(source, part))
            text = text[: found.start(group) - start] + number + text[found.end(group) - start :]
    return text


def _like(written: str, number: float) -> str:
    """Return a number with the sign and the decimals of a written one."""
    sign = "+" if written[0] in "+-" else ""
    return f"{number:{sign},.{len(written.partition('.')[2])}f}"


# Sources


def _split(source: str) -> tuple[str, list[str]]:
    """Return address and options of a source."""
    address, *options = source.split(" | ")
    known = {*RUN_FIGURES, *OPERATIONS, *OTHER_OPTIONS}
    for option in options:
        if option not in known and option.split()[0] not in known:
            raise ValueError(f"unknown option {option!r}")
    return address, options


OTHER_OPTIONS = {
    *("alone", "averaged", "below", "between", "claim", "decile", "ledger", "max", "mean, wins"),
    *("model", "one control", "seeds", "size", "start", "trials", "verdict", "wins"),
}


def value(source: str, part: str) -> float:
    """Return the mean, low, high or spread that a source names."""
    address, options = _split(source)
    if address in FIGURES:
        found = FIGURES[address]()[part]
    elif ": " in address:
        found = _of_study(address, options, part)
    else:
        found = _of_file(address, options, part)
    for option in options:
        operation, _, number = option.partition(" ")
        if operation in OPERATIONS:
            found = OPERATIONS[operation](found, float(number))
    return found


OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "*": lambda found, number: found * number,
    "/": lambda found, number: found / number,
    "round": lambda found, number: round(found, int(number)),
}


@functools.cache
def stored(name: str) -> Any:
    """Return a stored result."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def _of_file(address: str, options: Sequence[str], part: str) -> float:
    file, *keys, last = address.split("/")
    place = functools.reduce(_step, keys, stored(file))
    seeds = _step(place, last)
    if isinstance(seeds, list):
        return _parts(seeds)[part]
    if part == "spread":
        last = f"{last}_spread" if f"{last}_spread" in place else last.replace("_auc", "_spread")
    for option in options:
        name, *others = option.split()
        if name == "between" and part != "mean":
            last = others[0 if part == "low" else 1]
        if name == "below":
            return float(place[others[0]] - place[last])
    return float(_step(place, last))


def _step(place: Any, key: str) -> Any:
    """Return what a key names, or in a list an index or NAME=VALUE."""
    if isinstance(place, Mapping):
        return place[key]
    name, is_pair, wanted = key.partition("=")
    return next(one for one in place if str(one[name]) == wanted) if is_pair else place[int(key)]


def _of_study(address: str, options: Sequence[str], part: str) -> float:
    cells, variant, control = _addressed(address)
    cell, figure = cells[0], _figure(options)
    ledgers = [option.removeprefix("ledger ") for option in options if option.startswith("ledger ")]
    if ledgers:
        means = cell.ledger(variant, LEDGER[ledgers[0]])
        part = "high" if "max" in options else part
        return {"mean": statistics.fmean, "low": min, "high": max}[part](means)
    if "averaged" in options:
        return float(cell.values["rows"][variant][part])
    if figure in FIRST_RUN:
        return cell.figures(variant, figure)[0]
    if part == "mean":
        return statistics.fmean(one.gain(variant, control, figure) for one in cells)
    if part == "spread":
        return statistics.stdev(cell.figures(variant, figure))
    return float(getattr(_compared(cell, variant, control, options), part))


def _addressed(address: str) -> tuple[list["Cell"], str, str]:
    place, _, pair = address.partition(": ")
    study, _, log = place.partition("/")
    log, _, model = log.partition("~")
    variant, _, control = pair.partition(" - ")
    cells = [one for one in cells_of(study) if log in ("*", one.log)]
    return [one for one in cells if model in ("", one.values["model"])], variant, control


def _figure(options: Sequence[str]) -> str:
    for option in options:
        if option in RUN_FIGURES or option.startswith("decile "):
            return option
    return "auc"


FIRST_RUN = {"parameters", "table_bytes"}
RUN_FIGURES = FIRST_RUN | {
    *("abundance", "best_epoch", "rarest_auc", "rarest_pr_auc", "frequent_pr_auc", "valid_auc"),
    *("logloss", "whole_abundance"),
}


def _compared(cell: "Cell", variant: str, control: str, options: Sequence[str]) -> Comparison:
    if "alone" in options:
        return cell.alone(variant, control, _figure(options))
    return cell.corrected(variant, control, one_control="one control" in options)


def _as_text(source: str) -> str | None:
    """Return what a source gives as a text; None if it is a number."""
    address, options = _split(source)
    cells, variant, control = _addressed(address) if ": " in address else ([], "", "")
    for option in options:
        name, _, number = option.partition(" ")
        if name == "size":
            return size(cells[0].runs(variant)[0]["table_bytes"])
        if name == "model":
            return f"`{cells[0].values['model']}`"
        if name == "seeds":
            return str(len(cells[0].runs(variant)))
        if name in ("start", "trials"):
            both = [cells[0].result.variant(one) for one in (variant, control)]
            figures = [one.start if name == "start" else one.num_trials for one in both]
            return " / ".join("-" if figure is None else f"{figure:.2g}" for figure in figures)
        if name == "verdict":
            return _compared(cells[0], variant, control, options).verdict
        if name == "claim":
            return judged(_compared(cells[0], variant, control, options), float(number))
        if option in {"wins", "mean, wins"}:
            found = cells[0].alone(variant, control)
            mean = f"{found.mean:+.4f}, " if option == "mean, wins" else ""
            return f"{mean}{found.wins} of {found.n}"
    return None


def judged(found: Comparison, at_least: float) -> str:
    """Return what a comparison says about the claim that a difference is at least so large."""
    if found.why:
        return found.verdict
    if found.low > at_least:
        return "**reproduced**"
    if found.high < at_least:
        return "contradicted"
    if found.verdict == "no difference" and at_least == 0:
        return "not seen"
    return "open"


# Studies


@dataclass(frozen=True, eq=False)
class Cell:
    """The runs of a study on one model and log."""

    values: Mapping[str, Any]
    minimum_effect: float
    result: CellResult

    @property
    def log(self) -> str:
        """The name of the log."""
        return str(self.values["data"])

    def runs(self, variant: str) -> list[Mapping[str, Any]]:
        """Return the runs of a variant, by seed."""
        [found] = [one["runs"] for one in self.values["sides"] if one["name"] == variant]
        return sorted(found, key=lambda run: int(run["seed"]))

    def figures(self, variant: str, figure: str) -> list[float]:
        """Return a figure of every run."""
        name, _, tenth = figure.partition(" ")
        if name == "decile":
            return [run["decile_aucs"][int(tenth) - 1] for run in self.runs(variant)]
        return [run[figure] for run in self.runs(variant)]

    def differences(self, variant: str, control: str, figure: str = "auc") -> list[float]:
        """Return the paired differences, seed by seed."""
        pairs = zip(self.figures(variant, figure), self.figures(control, figure), strict=True)
        return [ours - theirs for ours, theirs in pairs]

    def gain(self, variant: str, control: str, figure: str = "auc") -> float:
        """Return the mean paired difference, or without a control the mean."""
        if not control:
            return statistics.fmean(self.figures(variant, figure))
        return statistics.fmean(self.differences(variant, control, figure))

    def alone(self, variant: str, control: str, figure: str = "auc") -> Comparison:
        """Return a comparison by itself."""
        pairs = {variant: self.differences(variant, control, figure)}
        return judge(pairs, minimum_effect=self.minimum_effect)[variant]

    def corrected(self, variant: str, control: str, *, one_control: bool = False) -> Comparison:
        """Return a comparison, corrected for all methods of the study.

        Each other method is compared with its own control if this one is, and else with this control.
        """
        own = {one["name"]: one["control"] for one in self.values["sides"]}[variant]
        return _family(self, None if control == own and not one_control else control)[variant]

    def ledger(self, variant: str, figure: Callable[[Mapping[str, Any]], float]) -> list[float]:
        """Return a figure of the ledger of a transfer for each table, as a mean over seeds."""
        ledgers = [run["reports"]["harmless-transfer"]["tables"] for run in self.runs(variant)]
        return [statistics.fmean(figure(one[table]) for one in ledgers) for table in ledgers[0]]


@functools.cache
def _family(cell: Cell, control: str | None) -> Mapping[str, Comparison]:
    """Return all methods compared with their own controls, or with one control."""
    result = cell.result if control is None else cell.result.against(control)
    return result.compare(cell.minimum_effect)


LEDGER: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "accuracy": lambda table: table["discriminator_accuracy"],
    "opposed": lambda table: table["opposed"],
    "length": lambda table: table["transfer_norm"] / table["main_norm"],
    "near alpha": lambda table: sum(table["lambda"][end] for end in ("0.999", "1.001", "1.5")),
}


@functools.cache
def cells_of(study: str) -> list[Cell]:
    """Return the cells of a study."""
    values = stored(f"study-{study}")["study"]
    result = StudyResult.from_mapping(values)
    cells = zip(values["cells"], result.cells, strict=True)
    return [Cell(cell, result.minimum_effect, found) for cell, found in cells]


# Figures that no address can name


OURS, TRANSFER, PRUNED = "shrinkage+forgetting", "harmless-transfer", "pruned:keep=10000:epochs=12"


def _parts(numbers: Sequence[float]) -> dict[str, float]:
    found = {"mean": statistics.fmean(numbers), "low": min(numbers), "high": max(numbers)}
    return found | ({"spread": statistics.stdev(numbers)} if len(numbers) > 1 else {})


def _tail() -> list[Cell]:
    return [*cells_of("tail"), *cells_of("tail-others")]


def _time(cell: Cell) -> float:
    """Return the training time per row relative to the baseline, the median over seeds."""
    ours, theirs = (cell.figures(name, "microseconds_a_row") for name in (OURS, "baseline"))
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _frequency(figure: str) -> list[float]:
    """Return what selection and barrier change, on both logs and with both sizes."""
    sizes = (("baseline", ""), (PRUNED, f"{PRUNED}+"))
    return [
        cell.gain(f"{prefix}{TRANSFER}", plain, figure)
        for cell in cells_of("harmless-transfer")
        for plain, prefix in sizes
    ]


def _rare_rows(table: str, prefix: str = "") -> list[float]:
    """Return how many rare rows of Book-Crossing a batch has, for each seed."""
    runs = cells_of("harmless-transfer")[1].runs(f"{prefix}{TRANSFER}")
    ledgers = [run["reports"][TRANSFER] for run in runs]
    return [one["tables"][f"backbone.tables.{table}"]["rows"] / one["steps"] for one in ledgers]


def _thresholds(place: int, budget: int, figure: str) -> dict[str, float]:
    """Return a figure of the learned thresholds when a budget was met, over the seeds."""
    runs = cells_of("pep")[place].runs(f"pep:init=-8.0+pruned:keep={budget}:epochs=60")
    reports = [run["reports"]["pruned"] for run in runs]
    return _parts(
        [len(one["train_loss"]) if figure == "epochs" else one[figure] for one in reports]
    )


def _entries() -> float:
    cell = cells_of("harmless-transfer")[1]
    plain, pruned = (cell.gain(name, "", "parameters") for name in ("baseline", PRUNED))
    return plain - pruned + 10_000


def _where_a_sum_loses() -> list[bool]:
    """Return for each plain sum that loses 0.001 or more whether the barrier loses less."""
    found = []
    for cell in cells_of("harmless-transfer-search"):
        for name in (one["name"] for one in cell.values["sides"] if ":rule=sum" in one["name"]):
            loss = cell.gain(name, "baseline", "valid_auc")
            barrier = cell.gain(name.replace(":rule=sum", ""), "baseline", "valid_auc")
            found += [barrier > loss] if loss <= -0.001 else []
    return found


FIGURES: Mapping[str, Callable[[], Mapping[str, float]]] = {
    "by definition": lambda: {"mean": 1.0},
    "tail epochs": lambda: _parts(
        [
            cell.gain(OURS, "", "best_epoch") / cell.gain("baseline", "", "best_epoch")
            for cell in _tail()
        ]
    ),
    "tail time": lambda: _parts([_time(cell) for cell in _tail()[:-1]]),
    "tail time on criteo-80k": lambda: _parts([_time(_tail()[-1])]),
    "tail methods": lambda: {
        "mean": sum(bool(one["control"]) for one in _tail()[0].values["sides"])
    },
    **{
        f"{figure} of thresholds, {cell} {budget}": functools.partial(
            _thresholds, place, int(budget), figure
        )
        for place, cell in enumerate(("fm", "deepfm"))
        for budget in ("30000", "20000")
        for figure in ("mean_s", "std_s", "epochs")
    },
    "one-pass adagrad over adam": lambda: {
        "mean": cells_of("tail-one-pass-adagrad")[0].gain("tuned", "", "auc")
        - cells_of("tail-one-pass")[0].gain("tuned", "", "auc")
    },
    "transfer runs": lambda: {
        "mean": sum(
            len(side["runs"]) for cell in cells_of(TRANSFER) for side in cell.values["sides"]
        )
    },
    "transfer, rarest fifth": lambda: _parts(_frequency("rarest_pr_auc")),
    "transfer, most frequent fifth": lambda: _parts(_frequency("frequent_pr_auc")),
    "rare users": lambda: _parts(_rare_rows("user")),
    "rare users, pruned": lambda: _parts(_rare_rows("user", f"{PRUNED}+")),
    "rare books": lambda: _parts(_rare_rows("isbn")),
    "rare books, pruned": lambda: _parts(_rare_rows("isbn", f"{PRUNED}+")),
    "entries of book-crossing": lambda: {"mean": _entries()},
    "barrier loses less": lambda: {"mean": sum(_where_a_sum_loses())},
    "plain sum loses": lambda: {"mean": len(_where_a_sum_loses())},
}


if __name__ == "__main__":
    main()
