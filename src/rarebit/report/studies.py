"""The sections of a study, an improvement and a backtest."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rarebit.report.page import (
    COLOURS,
    Interval,
    Kind,
    Scale,
    Series,
    chart,
    code,
    details,
    facts,
    figure,
    forest,
    heading,
    paragraph,
    short_size,
    table,
    toml,
    verdict,
)
from rarebit.settings import size
from rarebit.study.results import (
    TENTHS,
    CellResult,
    StudyResult,
    VariantResult,
    formatted,
    measured,
    with_spread,
)
from rarebit.study.statistics import Comparison
from rarebit.text import NOTHING

MOST_LINES = COLOURS
"""Lines in one chart; where there are more variants, those that differ most are drawn."""
GOOD: dict[str, Kind] = {"helps": "good", "hurts": "bad", "no difference": "none"}
MOST_ROWS = 40
"""Rows of the figure with all comparisons."""
FREQUENCY = "Difference to the control on tenths of the test rows, from the rarest values (1) to the most frequent (10)."


def study(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections of a study, the verdict first."""
    result = StudyResult.from_mapping(stored["study"])
    yield from _lead(result)
    yield from cells(result)
    yield from how(stored, "rarebit compare --plan study.toml", "study.toml", result.plan)


def cells(result: StudyResult) -> Iterator[str]:
    """Yield the sections of every model and log."""
    for cell in result.cells:
        yield heading(f"{cell.model} on {cell.data}")
        yield from _cell(cell, result.minimum_effect, cell.compare(result.minimum_effect))


def _lead(result: StudyResult) -> Iterator[str]:
    """Yield the title and the verdicts: in one sentence, or by how many there are of each."""
    names = {cell.data for cell in result.cells}, {cell.model for cell in result.cells}
    logs, of_models = (next(iter(n)) if len(n) == 1 else "" for n in names)
    models = of_models or f"{len(names[1])} models"
    yield heading(f"{models} on {logs or f'{len(names[0])} logs'}", 1)
    found = [(cell, cell.compare(result.minimum_effect)) for cell in result.cells]
    each = [(cell, method, every[method.name]) for cell, every in found for method in cell.methods]
    runs = sum(len(variant.runs) for cell in result.cells for variant in cell.variants)
    yield paragraph(
        f"{len({v.name for c in result.cells for v in c.variants})} variants, {runs} runs with paired seeds; validation "
        "rows pick, test rows report.",
        quiet=True,
    )
    missing = sum(len(cell.missing) for cell in result.cells)
    more = [f"{missing} runs of the plan are missing."] if missing else []
    if not each:
        yield verdict(
            "none", "Nothing is compared: there are no methods, only plain tables.", *more
        )
        return
    if len(each) == 1:
        yield verdict(_kind(each[0][2]), _sentence(*each[0]), *more)
        return
    helps, hurts, same = (
        [one for one in each if one[2].verdict == word]
        for word in ("helps", "hurts", "no difference")
    )
    counts = {"help": len(helps), "hurt": len(hurts), "make no difference": len(same)}
    decided = ", ".join(f"{n} {what}" for what, n in counts.items() if n) or "none is decided"
    open_ = len(each) - sum(counts.values())
    lead = f"Of {len(each)} comparisons, {decided}{f', {open_} open' if open_ and decided[0].isdigit() else ''}."
    each.sort(key=lambda one: one[2].mean if one[2].n else float("-inf"), reverse=True)
    several = len(found) > 1
    extremes = [_sentence(*one, several=several) for one in (each[0], each[-1]) if one[2].n]
    largest = [f"The {end}: {line}" for end, line in zip(("best", "worst"), extremes, strict=False)]
    kind: Kind = "doubt" if bool(helps) == bool(hurts) else "good" if helps else "bad"
    yield verdict(kind, lead, *largest, *more)
    if several:
        yield figure(
            "All comparisons, the best first",
            forest([_interval(*one, several=True) for one in each[:MOST_ROWS]], least=result.minimum_effect),
            note=f"The best {MOST_ROWS} of {len(each)}." if len(each) > MOST_ROWS else "",
        )  # fmt: skip


def _sentence(
    cell: CellResult, method: VariantResult, found: Comparison, *, several: bool = False
) -> str:
    where = f" on {cell.data}, {cell.model}" if several else ""
    seen = ""
    if found.why and found.n > 1:
        seen = f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f}), "
    return f"{method.name}, against {method.control}{where}: {seen}{found.summary}."


def _kind(found: Comparison) -> Kind:
    return GOOD.get(found.verdict, "doubt")


def _cell(cell: CellResult, least: float, found: Mapping[str, Comparison]) -> Iterator[str]:
    if cell.methods:
        yield figure(
            "Difference in test AUC to the control, paired by seed",
            forest([_interval(cell, m, found[m.name]) for m in cell.methods], least=least),
            note=f"Intervals over seeds, corrected for {len(found)} method{'s' * (len(found) > 1)}; shaded: less than {least:g}, "
            "too small to matter.",
        )
        doubts = {one.why: one.verdict for one in found.values() if one.why}
        if doubts:
            lines = [[kind, why] for why, kind in doubts.items()]
            yield details(
                f"Why {len(doubts)} comparison{'s have' if len(doubts) > 1 else ' has'} no verdict",
                table(["doubt", "what to do"], lines, words=["what to do"], label="Doubts"),
            )
    yield heading("All variants", 3)
    yield variants(cell)
    yield from _charts(cell)
    if cell.missing:
        lines = [[line] for line in cell.missing]
        yield details(
            f"{len(cell.missing)} runs are missing", table(["run"], lines, label="Missing runs")
        )
    yield from _figures(cell)


def _interval(
    cell: CellResult, method: VariantResult, found: Comparison, *, several: bool = False
) -> Interval:
    has = found.n > 1
    return Interval(
        name=method.name,
        against=f"{method.control}{f' on {cell.data}, {cell.model}' if several else ''}",
        mean=found.mean if found.n else 0.0,
        low=found.low if has else None,
        high=found.high if has else None,
        tag=found.verdict if found.n else "not run",
        kind=_kind(found),
    )


def variants(cell: CellResult) -> str:
    """Return the figures of every variant: mean and standard deviation over seeds."""
    has_abundance = any(variant.figures("abundance") for variant in cell.variants)
    figures = measured(cell)
    header = [
        "variant",
        "settings tried",
        "seeds",
        *figures,
        "tables",
        "best epoch",
        "time",
    ]
    header += ["abundance"] if has_abundance else []
    rows = []
    for one in cell.variants:
        ratio = cell.time_ratio(one)
        row = [
            one.name,
            one.num_trials,
            len(one.runs),
            *(with_spread(one.figures(name).values()) for name in figures.values()),
            size(one.runs[0].table_bytes) if one.runs else NOTHING,
            formatted(_mean(one, "best_epoch"), ".1f"),
            NOTHING if ratio is None else f"x {ratio:.2f}",
        ]
        rows.append(
            row + ([with_spread(one.figures("abundance").values(), 2)] if has_abundance else [])
        )
    if cell.ceiling is not None:
        best = [formatted(x, ".4f") for x in (cell.ceiling.auc, cell.ceiling.rarest_auc)]
        rows.append(["best possible", "", "", *best, *[""] * (len(header) - 5)])
    return table(header, rows, label=f"Variants on {cell.data}")


def _charts(cell: CellResult) -> Iterator[str]:
    shown = _most_telling(cell)
    rest = len(cell.variants) - len(shown)
    note = f" {rest} more variants are in the table of all figures." if rest > 0 else ""
    colours = {one.name: number for number, one in enumerate(shown)}
    tenths = []
    for one in shown:
        if one.control is None:
            continue
        places = [(n + 1.0, d) for n, d in enumerate(cell.decile_differences(one)) if d is not None]
        tips = [f"{one.name}, tenth {x:.0f}: {y:+.4f}" for x, y in places]
        if places:
            tenths.append(Series(one.name, places, tips, colours[one.name]))
    if tenths:
        yield figure(
            "Where it helps: AUC by frequency",
            chart(
                tenths,
                label=_said(tenths, "difference in AUC by tenths"),
                x=Scale.counting(TENTHS),
                y_unit="AUC minus that of the control",
                x_unit="tenth of the test rows, rarest first",
                zero=True,
            ),
            note=FREQUENCY + note,
        )
    curves = []
    for one in shown:
        points = curve(one)
        tips = [f"{one.name}, epoch {x:.0f}: {y:.4f}" for x, y in points]
        if points:
            curves.append(
                Series(one.name, points, tips, colours[one.name], int(one.control is None))
            )
    if any(len(one.points) > 1 for one in curves):
        last = int(max(x for one in curves for x, _ in one.points))
        yield figure(
            "Learning curves",
            chart(
                curves,
                label=_said(curves, "validation AUC by epoch"),
                x=Scale.counting(last),
                y_unit="validation AUC",
                x_unit="epoch",
            ),
            note="Mean over the seeds that reached the epoch; controls are dashed. The best epoch's weights are kept."
            + note,
        )
    sizes = {one.runs[0].table_bytes for one in cell.variants if one.runs}
    if len(sizes) > 1:
        dots = [
            Series(
                one.name,
                [(float(one.runs[0].table_bytes), mean)],
                [f"{one.name}: {size(one.runs[0].table_bytes)}, AUC {mean:.4f}"],
                colours[one.name],
            )
            for one in shown
            if one.runs and (mean := _mean(one, "auc")) is not None
        ]
        yield figure(
            "Bytes of the tables against test AUC",
            chart(
                dots,
                label=_said(dots, "bytes and test AUC"),
                x=Scale.of_bytes(sizes),
                y_unit="test AUC",
                x_unit="bytes of all tables",
                lines=False,
            ),
            note="Mean over seeds. Up and to the left is better." + note,
        )


def _most_telling(cell: CellResult) -> list[VariantResult]:
    """Return the variants that charts show: controls, and the methods that differ most from theirs."""
    if len(cell.variants) <= MOST_LINES:
        return list(cell.variants)
    differs = {
        one.name: abs(cell.mean_difference(one, "auc") or 0.0) for one in cell.methods if one.runs
    }
    methods = sorted(cell.methods, key=lambda one: -differs.get(one.name, 0.0))
    used = [one.control for one in methods[: MOST_LINES - 2]]
    controls = [one for one in cell.variants if one.control is None and one.name in used][:2]
    chosen = {one.name for one in (*controls, *methods[: MOST_LINES - len(controls)])}
    return [one for one in cell.variants if one.name in chosen]


def curve(variant: VariantResult) -> list[tuple[float, float]]:
    """Return the mean validation AUC after each epoch, over the seeds that reached it; none of older results."""
    found = [[auc for auc in run.valid_aucs if auc is not None] for run in variant.runs]
    last = max(map(len, found), default=0)
    return [
        (epoch + 1.0, statistics.fmean(aucs[epoch] for aucs in found if len(aucs) > epoch))
        for epoch in range(last)
    ]


def _figures(cell: CellResult) -> Iterator[str]:
    """Yield every run and every setting that was tried, to unfold."""
    names = {
        "AUC": "auc",
        "rarest fifth": "rarest_auc",
        "valid AUC": "valid_auc",
        "logloss": "logloss",
    }
    rows = [
        [
            variant.name,
            run.seed,
            *(formatted(getattr(run, name), ".5f") for name in names.values()),
            run.best_epoch,
            run.epochs,
            f"{run.parameters:,}",
            f"{run.table_bytes:,}",
            f"{run.microseconds_a_row:.1f}",
        ]
        for variant in cell.variants
        for run in variant.runs
    ]
    header = [
        "variant",
        "seed",
        *names,
        "best epoch",
        "epochs",
        "weights",
        "bytes of tables",
        "us per row",
    ]
    yield details(f"All {len(rows)} runs", table(header, rows, label="Runs"))
    header = ["method", "control", *map(str, range(1, TENTHS + 1))]
    tenths = [
        [one.name, one.control, *(formatted(d, "+.4f") for d in cell.decile_differences(one))]
        for one in cell.methods
        if one.runs
    ]
    if tenths:
        yield details(
            "Differences by frequency",
            paragraph(FREQUENCY, quiet=True),
            table(header, tenths, words=["control"], label="Differences by frequency"),
        )
    tried = [(variant, trial) for variant in cell.variants for trial in variant.trials]
    if tried:
        header = ["variant", *tried[0][1].settings, "valid AUC"]
        rows = [
            [
                v.name,
                *(NOTHING if x is None else x for x in trial.settings.values()),
                formatted(trial.valid_auc, ".5f"),
            ]
            for v, trial in tried
        ]
        yield details(
            f"{len(tried)} settings tried on validation rows",
            table(header, rows, words=["methods"], label="Settings tried"),
        )


def how(
    stored: Mapping[str, Any], command: str, file: str | None, plan: Mapping[str, Any]
) -> Iterator[str]:
    """Yield how to repeat it, and what it was measured on."""
    yield heading("How to repeat it")
    machine = {k: v for k, v in stored.get("machine", {}).items() if v is not None}
    seeds = plan.get("seeds")
    first = plan.get("first_seed", 0)
    known = {"seeds": f"{first} to {first + seeds - 1}"} if isinstance(seeds, int) else {}
    known |= {name.replace("_", " "): str(value) for name, value in machine.items()}
    if "commit" in known:
        known["commit"] = known["commit"][:10]
    yield facts(known)
    yield code(command)
    if file is not None:
        yield details(f"{file}: all settings", code(toml(plan)), settings=True)


def improvement(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections of an improvement: what to do, why, and what was tried and dropped."""
    found = stored["improvement"]
    result = StudyResult.from_mapping(stored["study"])
    yield heading(f"{found['model']} on {found['log']}", 1)
    kinds: dict[str, Kind] = {
        "better": "good",
        "smaller": "good",
        "keep": "none",
        "stopped": "doubt",
    }
    yield verdict(kinds[found["outcome"]], found["verdict"], *found["caveats"])
    if found["figures"]:
        yield facts(found["figures"])
    yield heading("What the log says")
    yield table(
        ["fact", "value", "meaning"], found["facts"], words=["meaning", "value"], label="Facts"
    )
    rows = [[r["methods"], "yes" if r["tried"] else "no", r["why"]] for r in found["recipes"]]
    yield heading("What was worth trying", 3)
    yield table(["method", "tried", "why"], rows, words=["tried", "why"], label="Recipes")
    if found["race"]:
        yield heading("The race on validation rows", 3)
        yield paragraph(
            "Each round gives those that are left more settings and seeds. Nothing is stopped before its own patience, and "
            "plain tables get what the methods get.",
            quiet=True,
        )
        rows = [
            [
                one["round"],
                one["methods"],
                one["trials"],
                one["seeds"],
                formatted(one["valid_auc"], ".5f"),
                one["fate"],
            ]
            for one in found["race"]
        ]
        yield table(
            ["round", "method", "settings", "seeds", "valid AUC", "then"],
            rows,
            words=["method", "then"],
            label="Race",
        )
    if result.cells:
        yield heading("On the test rows, once")
        for cell in result.cells:
            # what is open about a search is in the lead: both sides had the same one
            yield from _cell(cell, result.minimum_effect, cell.judged(result.minimum_effect))
    yield from how(stored, found["command"], None, result.plan)
    yield details("The plan, fixed before the first run", code(toml(found["plan"])), settings=True)


def backtest(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections of a backtest."""
    values = stored["backtest"]
    control, plan = values["control"], values["plan"]
    policies, periods = values["policies"], values["periods"]
    against = {
        policy["name"]: one
        for policy in policies
        for one in policy["against"]
        if one["control"] == control
    }
    yield heading(f"{len(policies)} policies over {len(periods)} periods", 1)
    rows_scored = sum(period["rows"] for period in periods)
    yield paragraph(
        f"{rows_scored:,} rows, each scored before training on it; model {plan['model']['name']}.",
        quiet=True,
    )
    helps = [name for name, one in against.items() if one["auc"]["verdict"] == "helps"]
    best = max(against, key=lambda name: against[name]["auc"]["mean"] or 0.0, default=None)
    if best is None:
        yield verdict("none", "One policy: nothing is compared.")
    else:
        words = against[best]["auc"]["words"]
        kind = GOOD.get(against[best]["auc"]["verdict"], "doubt")
        more = [f"{len(helps)} of {len(against)} policies beat {control}."]
        missing = [f"{len(values['missing'])} runs are missing."] if values["missing"] else []
        yield verdict(kind, f"{best}, against {control}: {words}.", *more, *missing)
    for name, title in (("auc", "all rows"), ("young_auc", "rows with young ids")):
        lines = [
            Interval(
                policy,
                control,
                one[name]["mean"],
                one[name]["low"],
                one[name]["high"],
                one[name]["verdict"],
                GOOD.get(one[name]["verdict"], "doubt"),
            )
            for policy, one in against.items()
            if one[name]["mean"] is not None
        ]
        if lines:
            yield figure(
                f"Difference in AUC to {control}: {title}",
                forest(lines, least=plan["minimum_effect"]),
                note="Intervals over seeds, corrected for the number of policies.",
            )
    yield from _periods(policies, control, len(periods))
    header = [
        "policy",
        "seeds",
        "AUC",
        "young ids",
        "other rows",
        "logloss",
        "rows trained on",
        "seconds",
        "tables",
    ]
    rows = [
        [
            one["name"],
            one["n"],
            *(formatted(one[name], ".4f") for name in ("auc", "young_auc", "other_auc", "logloss")),
            formatted(one["trained_rows"], ",.0f"),
            formatted(one["seconds"], ".0f"),
            NOTHING if one["table_bytes"] is None else short_size(one["table_bytes"]),
        ]
        for one in policies
    ]
    yield heading("All policies")
    yield table(header, rows, label="Policies")
    facts_ = [
        [one["start"], f"{one['rows']:,}", f"{one['young_rows']:,}", f"{one['new_ids']:,}"]
        for one in periods
    ]
    yield details(
        "Periods", table(["start", "rows", "with young ids", "new ids"], facts_, label="Periods")
    )
    words = f"--policies {','.join(plan['policies'])} --methods {plan['methods']} --time {plan['time']} --by {plan['by']} --seeds {plan['seeds']}"
    label = f"--label {plan['label']} " if plan.get("label") else ""
    yield from how(stored, f"rarebit backtest LOG {label}{words}", None, plan)


def _periods(
    policies: Sequence[Mapping[str, Any]], control: str, num_periods: int
) -> Iterator[str]:
    """Yield the difference to the control in each period: the AUC itself moves far more from period to period."""
    means = {}
    for one in policies:
        lines = [run["period_aucs"] for run in one["runs"]]
        if lines and all(len(line) == num_periods and None not in line for line in lines):
            means[one["name"]] = [statistics.fmean(place) for place in zip(*lines, strict=True)]
    if control not in means:
        return
    theirs = means[control]
    x = Scale.counting(num_periods)
    absolute = Series(
        control,
        [(n + 1.0, auc) for n, auc in enumerate(theirs)],
        [f"{control}, period {n + 1}: {auc:.4f}" for n, auc in enumerate(theirs)],
    )
    yield figure(
        f"AUC of {control} in each period",
        chart(
            [absolute],
            label=_said([absolute], "AUC by period"),
            x=x,
            y_unit="AUC",
            x_unit="period",
            legend=False,
        ),
    )
    differs = sorted(
        (n for n in means if n != control),
        key=lambda n: -abs(statistics.fmean(means[n]) - statistics.fmean(theirs)),
    )
    lines = []
    for number, name in enumerate(differs[:MOST_LINES]):
        points = [
            (n + 1.0, a - b) for n, (a, b) in enumerate(zip(means[name], theirs, strict=True))
        ]
        tips = [f"{name}, period {x:.0f}: {y:+.4f}" for x, y in points]
        lines.append(Series(name, points, tips, number))
    if lines:
        yield figure(
            f"Difference to {control} in each period",
            chart(
                lines,
                label=_said(lines, "difference by period"),
                x=x,
                y_unit=f"AUC minus that of {control}",
                x_unit="period",
                zero=True,
            ),
            note="Mean over seeds.",
        )


def _mean(variant: VariantResult, name: str) -> float | None:
    values = list(variant.figures(name).values())
    return statistics.fmean(values) if values else None


def _said(series: Sequence[Series], what: str) -> str:
    """Return what a chart shows, for those who do not see it."""
    ends = "; ".join(
        f"{one.name} from {one.points[0][1]:.4f} to {one.points[-1][1]:.4f}"
        if len(one.points) > 1
        else f"{one.name} {one.points[0][1]:.4f}"
        for one in series
        if one.points
    )
    return f"Chart: {what}. {ends}."
