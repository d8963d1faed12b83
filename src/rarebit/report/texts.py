"""The sections of a text recipe: arms of training, their verdicts, and compressed tables."""

from collections.abc import Iterator, Mapping
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
from rarebit.report.studies import GOOD, how
from rarebit.settings import size
from rarebit.study.results import formatted, with_spread
from rarebit.text import NOTHING


def recipe(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections of the result of recipes/text, the verdict first."""
    metric, found = stored["metric"], stored["verdicts"]
    yield heading(stored["recipe"], 1)
    decided = [one for one in found if one["verdict"] in GOOD]
    lead = " ".join(
        f"{one['arm']}, compared with {one['control']}: {one['verdict']} ({one['mean']:+.2f})."
        for one in decided
    )
    missing = [f"{len(stored['missing'])} runs are missing."] if stored["missing"] else []
    kinds = {GOOD[one["verdict"]] for one in decided}
    kind: Kind = kinds.pop() if len(kinds) == 1 else "doubt"
    yield verdict(kind, lead or "No comparison has a verdict.", *missing)
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
    yield from how(stored, f"rarebit report {stored['recipe']}.json", None, {})
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
        dials = f"{dials} of {len(stored['tried'][arm])}"
    return [arm, str(len(runs)), *(with_spread(each, 2) for each in known), dials]


def _compressed(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield bytes against the metric, the means over seeds."""
    name, series, rows = stored["metric"]["name"], [], []
    for arm, runs in stored["results"].items():
        lists = [run["compressed"] for run in runs.values() if run.get("compressed")]
        points = []
        for each in zip(*lists, strict=True):
            score = sum(point["all"] for point in each) / len(each)
            bytes_ = sum(point["bytes"] for point in each) / len(each)
            points.append((bytes_, score))
            rows.append([arm, each[0]["compressor"], size(round(bytes_)), formatted(score, ".2f")])
        if points:
            series.append(Series(arm, sorted(points), colour=len(series)))
    if rows:
        yield heading("Compressed tables")
        yield figure(
            f"{name} on test by the bytes of the tables of words",
            chart(
                series,
                label=f"{name} by bytes",
                x=Scale.of_bytes([x for one in series for x, _ in one.points]),
                y_unit=name,
                lines=False,
            ),
        )
        yield table(["arm", "compressor", "bytes", name], rows, words=["compressor"], label="Bytes")
