"""What `rarebit improve` answers on logs of a user's own: what it tried, what it chose, AUC and bytes.

    python benchmarks/improve.py data/frappe data/ml-1m-ids --minutes 30 --runs studies/improve \
        --out benchmarks/results/improve.json

Each log is one call of `rb.improve`, as the command line makes it. A call that was stopped goes on; a log that is in the result
is replaced. The control is plain tables, tuned on as many settings; `difference` is that of what was proven, better or not.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import rarebit as rb
from rarebit.machine import OtherLoad, machine
from rarebit.storage.files import read_json
from rarebit.study.improve import PLAN, RESULT
from rarebit.study.plan import StudySettings
from rarebit.study.statistics import judge


def main() -> None:
    """Improve each log, print, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("data", nargs="+", type=Path, help="folders made by rarebit data prepare")
    add("--model", default="dcn_v2")
    add("--size", default="1/16", help="bytes of all tables")
    add("--minutes", type=float, default=30.0, help="for each log")
    add("--runs", type=Path, default=Path("studies/improve"), help="where runs and pages are kept")
    add("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    facts = machine()  # before the runs: the commit is that of the code that runs
    logs = read_json(options.out)["logs"] if options.out and options.out.exists() else []
    for data in options.data:
        load, folder = OtherLoad(), options.runs / data.name
        found = rb.improve(
            data=data, model=options.model, size=options.size, minutes=options.minutes, folder=folder
        )  # fmt: skip
        print(found)
        if found.outcome == "stopped":
            continue  # the same command goes on
        entry = {"log": data.name, **summary(found, folder), "other_load": load.share()}
        entry["machine"] = facts
        logs = [one for one in logs if one["log"] != data.name] + [entry]
        if options.out is not None:
            text = json.dumps({"machine": facts, "logs": logs}, indent=1) + "\n"
            options.out.write_text(text, encoding="utf-8")


def summary(found: rb.Improvement, folder: Path) -> dict[str, Any]:
    """Return an answer, what was tried for it, and the figures behind it."""
    stored, plan = read_json(folder / RESULT), read_json(folder / PLAN)
    [cell] = found.result.cells
    figures = {
        figure: {one.name: cell.differences(one, figure) for one in cell.methods}
        for figure in ("auc", "rarest_auc")
    }
    compared = {
        figure: judge(values, minimum_effect=StudySettings().minimum_effect)
        for figure, values in figures.items()
    }
    variants = [
        {
            "name": one.name,
            "test_auc": list(one.figures("auc").values()),
            "mean": statistics.fmean(one.figures("auc").values()),
            "table_bytes": one.runs[0].table_bytes,
        }
        for one in cell.variants
    ]
    return {
        "outcome": found.outcome,
        "verdict": found.verdict,
        "caveats": list(found.caveats),
        "methods": plan["methods"],
        "trials": plan["trials"],
        "seeds": plan["seeds"],
        "minutes": stored["machine"]["minutes"],
        "race": stored["improvement"]["race"],
        "variants": variants,
        "difference": [  # the coded control, and then the coded winner
            {
                "name": one.name,
                **{
                    figure: {
                        "mean": found[one.name].mean,
                        **{end: ends(getattr(found[one.name], end)) for end in ("low", "high")},
                        "n": len(figures[figure][one.name]),
                    }
                    for figure, found in compared.items()
                },
            }
            for one in cell.methods
        ],
    }


def ends(value: float) -> float | None:
    """Return the end of an interval; None for one without end, of a single pair."""
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main()
