"""The sections of a text recipe: arms of training, their verdicts, and compressed tables."""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from rarebit.report.page import (
    Interval,
    Kind,
    Scale,
    Series,
    chart,
    code,
    facts,
    figure,
    forest,
    heading,
    paragraph,
    table,
    verdict,
)
from rarebit.report.studies import GOOD, MOST_LINES, how
from rarebit.settings import size
from rarebit.study.results import formatted, with_spread
from rarebit.text import NOTHING


def recipe(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections of the result of recipes/text, the verdict first."""
    metric, found = stored["metric"], stored["verdicts"]
    yield heading(stored["recipe"], 1)
    decided = [one for one in found if one["verdict"] in GOOD]
    lines = [
        f"{one['arm']}, compared with {one['control']}: {one['mean']:+.2f}, {one['verdict']}."
        for one in (decided or found)
        if one["mean"] is not None
    ]
    missing = [f"{len(stored['missing'])} runs are missing."] if stored["missing"] else []
    kinds = {GOOD[one["verdict"]] for one in decided}
    kind: Kind = kinds.pop() if len(kinds) == 1 else "doubt"
    lead = [lines.pop(0)] if decided else ["No comparison has a verdict."]
    yield verdict(kind, *lead, *lines[:MOST_LINES], *missing)
    better = "more" if metric["higher"] else "less"
    yield paragraph(
        f"{metric['name']}, where {better} is better. Validation picks, test reports; all arms of a seed have the same initial "
        "weights and batches.",
        quiet=True,
    )
    if known := [one for one in found if one["mean"] is not None]:
        yield figure(
            f"Difference in {metric['name']} on test to the control, paired by seed (above zero is better)",
            forest([_interval(one) for one in known], least=metric["least"]),
            note=f"Intervals over seeds, corrected for their number; shaded: less than {metric['least']:g}.",
        )
    yield heading("All arms")
    yield table(
        ["arm", "seeds", "validation", "test", *metric["parts"], "picked"],
        [_arm(stored, arm) for arm in stored["results"]],
        words=["picked"],
        label="All arms",
    )
    yield from _compressed(stored)
    yield from how(stored, stored["command"], None, {})
    text = {name: str(value) for name, value in stored["facts"]["text"].items()}
    yield facts({name: value[:12] for name, value in text.items()})
    yield code("\n".join(f"{name}: {value}" for name, value in stored["facts"]["schedule"].items()))


def _interval(one: Mapping[str, Any]) -> Interval:
    low, high = one["low"], one["high"]
    kind = GOOD.get(one["verdict"], "doubt")
    return Interval(one["arm"], one["control"], one["mean"], low, high, one["verdict"], kind)


def _arm(stored: Mapping[str, Any], arm: str) -> list[str]:
    runs, picked = list(stored["results"][arm].values()), stored["picked"][arm]
    scores = [[run["valid"]["all"] for run in runs]]
    scores += [[run["test"][part] for run in runs] for part in ("all", *stored["metric"]["parts"])]
    known = [[score for score in each if score is not None] for each in scores]
    dials = NOTHING
    if picked is not None:
        dials = ", ".join(f"{name} x{value:.3g}" for name, value in picked.items())
        dials = f"{dials} ({len(stored['tried'][arm])} tried)"
    return [arm, str(len(runs)), *(with_spread(each, 2) for each in known), dials]


def _compressed(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield bytes against the metric, the means over seeds; a chart of the first arm, and all in a table."""
    name, rows = stored["metric"]["name"], []
    points: dict[str, list[tuple[float, float]]] = {}
    for arm, runs in stored["results"].items():
        lists = [run["compressed"] for run in runs.values() if run.get("compressed")]
        for each in zip(*lists, strict=True):
            bytes_, score = (fmean([point[key] for point in each]) for key in ("bytes", "all"))
            compressor = each[0]["compressor"]
            rows.append([arm, compressor, size(round(bytes_)), formatted(score, ".2f")])
            if arm == rows[0][0]:
                points.setdefault(compressor.partition(" 1/")[0], []).append((bytes_, score))
    if not rows:
        return
    yield heading("Compressed tables")
    yield figure(
        f"{name} on test by the bytes of the tables of words: {rows[0][0]}",
        chart(
            [Series(n, sorted(each), colour=c) for c, (n, each) in enumerate(points.items())],
            label=f"{name} by bytes",
            x=Scale.of_bytes([x for each in points.values() for x, _ in each]),
            y_unit=name,
        ),
    )
    yield table(["arm", "compressor", "bytes", name], rows, words=["compressor"], label="Bytes")
