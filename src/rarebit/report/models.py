"""The sections of a run, a compressed run, its sizes, a pruning and a diagnosis."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rarebit.report.page import (
    Scale,
    Series,
    bars,
    chart,
    code,
    details,
    facts,
    figure,
    heading,
    paragraph,
    table,
    text,
    toml,
    verdict,
)
from rarebit.report.studies import MOST_LINES
from rarebit.settings import size
from rarebit.study.results import formatted
from rarebit.text import NOTHING, percent

MOST_FIELDS = 24
"""Small charts, one per field: the largest tables."""
MOST_BARS = 30
MOST_LOST = 0.02
"""What loses more AUC is in tables, not in charts: it would hide the rest."""


def run(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections of a run, and what compression lost where its tables are compressed."""
    settings, test, history = stored["settings"], stored["test"], stored["history"]
    log = _shown_log(settings["data"])
    methods = (
        "+".join(one["method"].replace("_", "-") for one in settings["methods"]) or "plain tables"
    )
    yield heading(f"{settings['model']['name']} on {log}", 1)
    yield paragraph(f"Methods: {methods}.", quiet=True)
    lost = stored.get("compressed")
    if lost:
        before, after = lost["before"], lost["after"]
        ratio = before["table_bytes"] / after["table_bytes"]
        change = _change(before["test_auc"], after["test_auc"])
        yield verdict(
            "good"
            if (_difference(before["test_auc"], after["test_auc"]) or 0) > -0.001
            else "doubt",
            f"{size(after['table_bytes'])} instead of {size(before['table_bytes'])} (1/{ratio:.1f}), test AUC {change}.",
        )
        names = {
            "bytes of tables": "table_bytes",
            "AUC, validation": "valid_auc",
            "AUC, test": "test_auc",
            "AUC, rarest fifth": "rarest_auc",
        }
        rows = [
            [
                what,
                *(
                    size(x[key]) if key == "table_bytes" else formatted(x[key], ".4f")
                    for x in (before, after)
                ),
                f"1/{ratio:.1f}" if key == "table_bytes" else _change(before[key], after[key]),
            ]
            for what, key in names.items()
        ]
        yield table(["figure", "before", "after", "difference"], rows, label="Before and after")
    else:
        rarest = test["rarest"]["auc"] if test.get("rarest") else None
        more = [f"On the rarest fifth of them: {rarest:.4f}."] if rarest is not None else []
        yield verdict(
            "none",
            f"Test AUC {formatted(test['overall']['auc'], '.4f')} on {test['overall']['rows']:,} rows.",
            *more,
        )
    shown = {
        "logloss": formatted(test["overall"]["logloss"], ".4f"),
        "PR-AUC": formatted(test["overall"]["pr_auc"], ".4f"),
        **(
            {"grouped AUC": formatted(test["grouped_auc"], ".4f")}
            if test.get("grouped_auc") is not None
            else {}
        ),
    }
    if test.get("ceiling"):
        shown["best possible AUC"] = formatted(test["ceiling"]["auc"], ".4f")
    shown |= {
        "weights": f"{stored['num_parameters']:,}",
        "bytes of tables": size(stored["table_bytes"]),
    }
    epochs = history["epochs"]
    if epochs:
        speeds = sorted(one["samples_per_second"] for one in epochs)
        shown["rows per second"] = f"{speeds[len(speeds) // 2]:,.0f}"
        shown["best epoch"] = f"{history['best_epoch'] or NOTHING} of {len(epochs)}"
    yield facts(shown)
    yield from _tenths(test.get("deciles") or [])
    yield from _curves(epochs, history["best_epoch"])
    yield from _memory(stored.get("tables") or [])
    yield heading("How to repeat it")
    yield facts(
        {name: str(value) for name, value in stored.get("versions", {}).items()}
        | {"seed": str(settings["training"]["seed"])}
    )
    yield code("rarebit train --config settings.toml")
    data = {**settings["data"]}
    if "folder" in data:
        data["folder"] = log
    yield details(
        "settings.toml: all settings", code(toml({**settings, "data": data})), settings=True
    )


def _shown_log(data: Mapping[str, Any]) -> str:
    """Return the folder of a log as a colleague may see it: below the present folder, or its name."""
    folder = data.get("folder")
    if folder is None:
        return f"synthetic-{data.get('seed', 0)}"
    path = Path(folder)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _tenths(deciles: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    points = [(n + 1.0, one["auc"]) for n, one in enumerate(deciles) if one["auc"] is not None]
    if points:
        line = Series("test AUC", points, [f"tenth {x:.0f}: {y:.4f}" for x, y in points])
        yield figure(
            "AUC by frequency",
            chart(
                [line],
                label=f"Chart: {_listed(points)}",
                x=Scale.counting(len(deciles)),
                y_unit="test AUC",
                x_unit="tenth of the test rows, rarest first",
                legend=False,
            ),
            note="Test rows in ten groups, from those with the rarest values to those with the most frequent.",
        )


def _curves(epochs: Sequence[Mapping[str, Any]], best: int | None) -> Iterator[str]:
    points = [(float(one["epoch"]), one["valid"]["auc"]) for one in epochs if one["valid"]]
    if len(points) < 2:
        return
    line = Series("validation AUC", points, [f"epoch {x:.0f}: {y:.4f}" for x, y in points])
    losses = [(float(one["epoch"]), one["train_loss"]) for one in epochs]
    loss = Series("training loss", losses, [f"epoch {x:.0f}: {y:.4f}" for x, y in losses], 1)
    x = Scale.counting(int(points[-1][0]))
    yield figure(
        "Learning curves",
        chart(
            [line],
            label=f"Chart: {_listed(points)}",
            x=x,
            y_unit="validation AUC",
            x_unit="epoch",
            legend=False,
        ),
        chart(
            [loss],
            label=f"Chart: {_listed(losses)}",
            x=x,
            y_unit="training loss",
            x_unit="epoch",
            legend=False,
        ),
        note=f"The weights of epoch {best} are kept." if best else "",
    )
    rows = [
        [
            one["epoch"],
            f"{one['train_loss']:.5f}",
            formatted(one["valid"]["auc"], ".5f"),
            formatted(one["valid"]["logloss"], ".5f"),
            f"{one['lr']:g}",
            f"{one['seconds']:.1f}",
        ]
        for one in epochs
        if one["valid"]
    ]
    yield details(
        "Epochs",
        table(
            ["epoch", "training loss", "valid AUC", "valid logloss", "learning rate", "seconds"],
            rows,
            label="Epochs",
        ),
    )


def _memory(tables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what each field costs: its tables together."""
    fields: dict[str, int] = {}
    rows: dict[str, int] = {}
    for one in tables:
        name = one["name"].rpartition(".")[2]
        fields[name] = fields.get(name, 0) + one["num_bytes"]
        rows[name] = one["rows"]
    total = sum(fields.values())
    if not total:
        return
    ordered = sorted(fields, key=lambda name: -fields[name])
    shown = {name: float(fields[name]) for name in ordered[:MOST_BARS]}
    labels = {name: f"{size(fields[name])}, {percent(fields[name] / total)}" for name in ordered}
    rest = len(ordered) - len(shown)
    yield figure(
        "What each field costs in memory",
        bars(shown, labels),
        note=f"{size(total)} in all."
        + (f" {rest} smaller fields are in the table below." if rest else ""),
    )
    lines = [
        [name, f"{rows[name]:,}", f"{fields[name]:,}", percent(fields[name] / total, 1)]
        for name in ordered
    ]
    yield details("Fields", table(["field", "rows", "bytes", "of all"], lines, label="Fields"))


def frontier(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sizes of one run, and what they cost."""
    yield heading(f"Sizes of {stored['run']}", 1)
    plain, points = stored["plain"], stored["points"]
    yield from _best_points(plain, points)
    yield from _frontier(plain, points)
    yield heading("How to repeat it")
    yield facts(
        {
            k: str(v)[:10] if k == "commit" else str(v)
            for k, v in stored["machine"].items()
            if v is not None
        }
    )
    yield code(f"rarebit compress {stored['run']} --frontier")


def _best_points(plain: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the smallest tables that lose next to nothing."""
    changes = [
        (p, _difference(plain["test_auc"], p["test_auc"]))
        for p in points
        if p["table_bytes"] < plain["table_bytes"]
    ]
    small = [(p, change) for p, change in changes if change is not None and change >= -0.001]
    if not small:
        yield verdict("doubt", "No compressor keeps the test AUC within 0.001.")
        return
    best, change = min(small, key=lambda one: int(one[0]["table_bytes"]))
    ratio = plain["table_bytes"] / best["table_bytes"]
    yield verdict(
        "good",
        f"{best['compressor']} keeps the test AUC within 0.001 in 1/{ratio:.0f} of the bytes: {size(best['table_bytes'])} instead of {size(plain['table_bytes'])}, AUC {change:+.4f}.",
        "The smallest such size of all compressors, on one seed.",
    )


def _frontier(plain: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in points:
        if one["test_auc"] is not None and one["test_auc"] > (plain["test_auc"] or 0.0) - MOST_LOST:
            lines.setdefault(one["compressor"], []).append(
                (float(one["table_bytes"]), one["test_auc"])
            )
    series = [
        Series(
            name,
            sorted(of),
            [f"{name}: {size(x)}, AUC {y:.4f}" for x, y in sorted(of)],
            number,
            number // MOST_LINES,
        )
        for number, (name, of) in enumerate(lines.items())
    ]
    here = (
        Series(
            "plain tables",
            [(float(plain["table_bytes"]), plain["test_auc"])],
            [f"plain tables: {size(plain['table_bytes'])}, AUC {plain['test_auc']:.4f}"],
            7,
        )
        if plain["test_auc"] is not None
        else None
    )
    series += [here] if here else []
    if series:
        xs = [x for one in series for x, _ in one.points]
        yield figure(
            "Bytes against test AUC",
            chart(
                series,
                label=f"Chart: bytes against test AUC. {'; '.join(f'{one.name} {_listed(one.points)}' for one in series)}",
                x=Scale.of_bytes(xs),
                y_unit="test AUC",
                x_unit="bytes of all tables",
            ),
            note=f"Up and to the left is better. What loses more than {MOST_LOST:g} is in the table only.",
        )
    rows = [
        [
            one["compressor"],
            size(one["table_bytes"]),
            f"1/{plain['table_bytes'] / one['table_bytes']:.1f}",
            *(_change(plain[k], one[k]) for k in ("valid_auc", "test_auc", "rarest_auc")),
        ]
        for one in sorted(points, key=lambda one: -one["table_bytes"])
    ]
    yield heading("Change of AUC by size")
    yield table(
        ["compressor", "tables", "of plain", "validation", "test", "rarest fifth"],
        rows,
        label="Sizes",
    )


def frontiers(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sizes on several logs: means over seeds of the difference to plain tables."""
    cells = stored["cells"]
    logs = list(dict.fromkeys(cell["log"] for cell in cells))
    seeds = {cell["seed"] for cell in cells}
    yield heading(f"Compression on {len(logs)} logs", 1)
    yield paragraph(
        f"Mean of {len(seeds)} paired seeds, against plain 32-bit tables of the same seed.",
        quiet=True,
    )
    lost = {}
    for log in logs:
        curves = stored["differences"][log]
        lost[log] = (
            statistics.fmean(curves["plain-evidence-coding"]["16"]["test_auc"])
            if "16" in curves.get("plain-evidence-coding", {})
            else None
        )
    known = {log: loss for log, loss in lost.items() if loss is not None}
    if known:
        lead = ", ".join(f"{log} {change:+.4f}" for log, change in known.items())
        good = sum(change > -0.001 for change in known.values())
        yield verdict(
            "good" if good else "doubt",
            f"At 1/16 of the bytes, evidence coding keeps the test AUC within 0.001 on {good} of {len(known)} logs.",
            f"Change of test AUC: {lead}.",
        )
    for log in logs:
        yield heading(log)
        lines: dict[str, list[tuple[float, float]]] = {}
        rows = []
        for name, sizes in stored["differences"][log].items():
            for divisor, figures in sizes.items():
                change = statistics.fmean(figures["test_auc"])
                rarest = statistics.fmean(figures["rarest_auc"])
                lines.setdefault(name, []).append((float(divisor), change))
                rows.append(
                    [
                        name,
                        f"1/{divisor}" if divisor != "1" else NOTHING,
                        f"{change:+.4f}",
                        f"{min(figures['test_auc']):+.4f} to {max(figures['test_auc']):+.4f}",
                        f"{rarest:+.4f}",
                    ]
                )
        kept = {name: [(x, y) for x, y in of if y > -MOST_LOST] for name, of in lines.items()}
        shown = [(name, of) for name, of in kept.items() if len(lines[name]) > 2 and of]
        series = [
            Series(name, of, [f"{name} at 1/{x:.0f}: {y:+.4f}" for x, y in of], number)
            for number, (name, of) in enumerate(shown[:MOST_LINES])
        ]
        divisors = sorted({x for one in series for x, _ in one.points})
        if series:
            scale = Scale(
                divisors[0] * 0.8,
                divisors[-1] * 1.25,
                tuple(divisors),
                True,
                {x: f"1/{x:.0f}" for x in divisors},
            )
            yield figure(
                "Change of test AUC by size",
                chart(
                    series,
                    label=f"Chart: change of AUC on {log}",
                    x=scale,
                    y_unit="test AUC minus that of plain tables",
                    x_unit="of the bytes",
                    zero=True,
                ),
                note=f"What loses more than {MOST_LOST:g} is in the table only.",
            )
        yield details(
            "All figures",
            table(
                ["tables and compressor", "size", "test AUC", "range", "rarest fifth"],
                rows,
                label=f"Sizes on {log}",
            ),
        )
    yield heading("How to repeat it")
    yield facts(
        {
            k: str(v)[:10] if k == "commit" else str(v)
            for k, v in stored["machine"].items()
            if v is not None
        }
    )


def pruning(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the budgets of a pruning."""
    settings, result = stored["settings"], stored["result"]
    whole, entries = result["unpruned"], result["entries"]
    budgets = {int(name): found for name, found in result["budgets"].items()}
    yield heading(f"{settings['model']['name']} on {_shown_log(settings['data'])}, pruned", 1)

    def auc(found: Mapping[str, Any], part: str = "overall") -> float | None:
        return found["test"][part]["auc"] if found["test"].get(part) else None

    smallest = min(budgets)
    change = _difference(auc(whole), auc(budgets[smallest]))
    yield verdict(
        "none" if change is None else "good" if change > -0.001 else "doubt",
        f"{percent(smallest / entries, 1)} of the entries left: test AUC {_change(auc(whole), auc(budgets[smallest]))}.",
        "One seed means little: rarebit compare compares with magnitude pruning over several.",
    )
    everything = [(entries, whole), *sorted(budgets.items(), reverse=True)]
    points = [(float(found["table_bytes"]), auc(found)) for _, found in everything]
    line = Series("pruned", sorted((x, y) for x, y in points if y is not None), [], 0)
    if line.points:
        tips = [f"{size(x)}: AUC {y:.4f}" for x, y in line.points]
        yield figure(
            "Bytes against test AUC",
            chart(
                [Series("", line.points, tips)],
                label=f"Chart: {_listed(line.points)}",
                x=Scale.of_bytes(x for x, _ in line.points),
                y_unit="test AUC",
                x_unit="bytes of all tables",
            ),
        )
    rows = [
        [
            f"{kept:,}",
            percent(kept / entries, 1),
            size(found["table_bytes"]),
            formatted(auc(found), ".4f"),
            "" if found is whole else _change(auc(whole), auc(found)),
            formatted(auc(found, "rarest"), ".4f"),
            found["best_epoch"] or NOTHING,
        ]
        for kept, found in everything
    ]
    yield table(
        [
            "entries left",
            "of all",
            "tables",
            "test AUC",
            "against unpruned",
            "rarest fifth",
            "best epoch",
        ],
        rows,
        label="Budgets",
    )
    yield heading("How to repeat it")
    kept = ",".join(map(str, budgets))
    yield code(
        f"rarebit prune --config settings.toml --budgets {kept} --start {stored['pruning']['start']}"
    )
    data = {**settings["data"]}
    if "folder" in data:
        data["folder"] = _shown_log(data)
    yield details(
        "settings.toml: all settings", code(toml({**settings, "data": data})), settings=True
    )


def diagnosis(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wasted in tables, and their spectra and norms by field."""
    tables, findings = stored["tables"], stored["findings"]
    total = sum(one["num_bytes"] for one in tables)
    wasted = sum(one["wasted_bytes"] for one in findings)
    yield heading(f"{len(tables)} tables, {size(total)}", 1)
    if findings:
        at_most = (
            f", which waste about {size(min(wasted, total))} of {size(total)}" if wasted else ""
        )
        yield verdict(
            "doubt", f"{len(findings)} problem{'s' * (len(findings) > 1)} found{at_most}."
        )
        rows = [
            [
                one["table"].rpartition(".")[2],
                one["kind"],
                size(one["wasted_bytes"]) if one["wasted_bytes"] else NOTHING,
                one["problem"],
                one["advice"],
            ]
            for one in findings
        ]
        yield table(
            ["table", "kind", "bytes", "problem", "advice"],
            rows,
            words=["kind", "problem", "advice"],
            label="Problems",
        )
    else:
        yield verdict("good", "No problem found, as far as that is known.")
    for line in stored["excused"]:
        yield paragraph(line, quiet=True)
    wide = sorted((one for one in tables if one["width"] > 1), key=lambda one: -one["num_bytes"])
    shown = wide[:MOST_FIELDS]
    rest = f" The {MOST_FIELDS} largest of {len(wide)} tables." if len(wide) > MOST_FIELDS else ""
    spectra = [_small(one, _spectrum(one)) for one in shown if one["spectrum"]]
    if spectra:
        yield figure(
            "Spectra by field",
            f'<div class="small">{"".join(spectra)}</div>',
            note="Singular values, each as a share of the largest, from the first direction to the last. A steep fall: few directions do all "
            f"the work.{rest}",
        )
    norms = [_small(one, _norms(one)) for one in shown if len(one["norm_by_count"]) > 1]
    if norms:
        yield figure(
            "Norms by field",
            f'<div class="small">{"".join(norms)}</div>',
            note=f"Mean norm of the rows by how often training saw their id, from never to often.{rest}",
        )
    yield from _memory(tables)
    header = [
        "table",
        "rows",
        "width",
        "bytes",
        "abundance",
        "of random",
        "rank",
        "dead",
        "never trained",
        "seen once",
        "norm by count",
        "methods",
    ]
    rows = [
        [
            one["name"].rpartition(".")[2],
            f"{one['rows']:,}",
            one["width"],
            size(one["num_bytes"]),
            *(
                formatted(one[k], ".2f")
                for k in ("information_abundance", "random_abundance", "stable_rank")
            ),
            f"{one['dead_rows']:,}",
            *(
                NOTHING if one[k] is None else f"{one[k]:,}"
                for k in ("never_trained_rows", "seen_once_rows")
            ),
            formatted(one["norm_correlation"], "+.2f"),
            ", ".join(one["methods"]) or NOTHING,
        ]
        for one in tables
    ]
    yield heading("All tables")
    yield table(header, rows, words=["methods"], label="Tables")
    if stored["left_alone"]:
        rows = [[one["name"], one["reason"]] for one in stored["left_alone"]]
        yield details(
            f"{len(rows)} tensors were not measured",
            table(["tensor", "why"], rows, words=["why"], label="Not measured"),
        )


def _small(one: Mapping[str, Any], drawn: str) -> str:
    return f'<div><p class="title">{text(one["name"].rpartition(".")[2])}</p>{drawn}</div>'


def _spectrum(one: Mapping[str, Any]) -> str:
    largest = one["spectrum"][0] or 1.0
    points = [(n + 1.0, value / largest) for n, value in enumerate(one["spectrum"])]
    line = Series("", points, [f"direction {x:.0f}: {y:.3f}" for x, y in points])
    label = f"Chart: spectrum of {one['name']}: {_listed(points)}"
    return chart(
        [line], label=label, x=_few(len(points)), y=Scale(0.0, 1.05, (0.0, 0.5, 1.0)), legend=False
    )


def _norms(one: Mapping[str, Any]) -> str:
    bins = one["norm_by_count"]
    points = [(float(n), value["mean_norm"]) for n, value in enumerate(bins)]
    tips = [
        f"seen {b['least']:,} to {b['most']:,} times: norm {b['mean_norm']:.3g}, {b['rows']:,} rows"
        for b in bins
    ]
    label = f"Chart: norms of {one['name']} by count: {_listed(points)}"
    last = len(bins) - 1
    names = {0.0: f"{bins[0]['least']:,}", float(last): f"{bins[last]['least']:,}"}
    x = Scale(-0.3, last + 0.3, tuple(names), names=names)
    top = 1.08 * max(y for _, y in points) or 1.0
    y = Scale(0.0, top, Scale.around([0.0, top], most=3).ticks)
    y = Scale(0.0, top, tuple(tick for tick in y.ticks if 0 <= tick <= top))
    return chart([Series("", points, tips, 1)], label=label, x=x, y=y, legend=False)


def _few(last: int) -> Scale:
    """Return a scale of directions with two or three ticks."""
    ticks = sorted({1.0, float(max(last // 2, 1)), float(last)})
    return Scale(0.5, max(last, 2) + 0.5, tuple(ticks))


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _change(before: float | None, after: float | None) -> str:
    change = _difference(before, after)
    return formatted(None if change is None else round(change, 4) + 0.0, "+.4f")  # no -0.0000


def _listed(points: Sequence[tuple[float, float]]) -> str:
    """Return points as text for those who do not see them."""
    shown = points if len(points) <= 12 else [points[0], points[len(points) // 2], points[-1]]
    return ", ".join(f"{x:g}: {y:.4g}" for x, y in shown)
