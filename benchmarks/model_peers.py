"""Training speed of every model that DeepCTR-Torch has, through each library's own `fit`.

    python benchmarks/model_peers.py --deepctr ENV/bin/python --out model-peers.json

39 fields of 967,795 values, d = 16, batch 4096, Adam at 1e-3, two threads, float32. Sizes are the
defaults of DeepCTR-Torch on both sides, but without its L2 penalties of whole tables, which `--l2` puts
back on its side. Sides take turns, each in a process of its own, as in `peers.py`, which says what is
measured. By model:

    ratio         ours with lazy Adam, which updates the rows of a batch, over theirs
    ratio_dense   ours with dense Adam, which updates whole tables as theirs does, over theirs
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers import JOB, THREADS, Side, show, speed, train, write_job

from rarebit.machine import machine

ROWS = 102_400
MODES = {"ratio": "rowwise", "ratio_dense": "dense"}
"""How our side updates its tables, by the name of the ratio."""


@dataclass(frozen=True)
class Pair:
    """One model in both libraries: ours by name, and what makes the two equal."""

    ours: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)


NEAR_ZERO = {"init": "normal", "std": 1e-4}
"""How DeepCTR-Torch starts tables."""
PAIRS = {
    "autoint": Pair("autoint@mlet", NEAR_ZERO),
    "dcn": Pair("dcn@mlet", NEAR_ZERO),
    "dcn_v2": Pair(
        "dcn_v2", {"num_layers": 2, "hidden": [128, 128]}, {"cross_parameterization": "matrix"}
    ),
    "deepfm": Pair("deepfm@mlet", NEAR_ZERO),
    "dnn": Pair("dnn", {"hidden": [256, 128]}),
    "fm": Pair("fm", {}, {"dnn_hidden_units": []}),
    "ipnn": Pair("ipnn", {"hidden": [128, 128]}),
    "nfm": Pair("nfm@mlet", NEAR_ZERO),
    "wide_deep": Pair("wide_deep@mlet", NEAR_ZERO),
    "xdeepfm": Pair("xdeepfm@mlet", NEAR_ZERO),
}
"""The presets of MLET's paper are the defaults of DeepCTR-Torch, up to the start of tables."""


def main() -> None:
    """Measure, print a line a process and a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--deepctr", required=True, help="the python of its environment")
    parser.add_argument("--models", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--rows", type=int, default=ROWS, help="training rows")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 100), metavar="N")
    parser.add_argument("--l2", action="store_true", help="with the L2 penalties of DeepCTR-Torch")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    facts = machine()  # before the runs: the commit is that of the code that runs
    results = measure(options.deepctr, options.models, options.rows, options.rounds, l2=options.l2)
    print(table(results))
    report = {
        "command": f"python benchmarks/model_peers.py --deepctr PYTHON --rows {options.rows} "
        f"--rounds {options.rounds}{' --l2' if options.l2 else ''}",
        "ratio_of": "samples/s of ours with lazy Adam / samples/s of DeepCTR-Torch",
        "job": JOB | {"rows": options.rows, "hidden": "the defaults of DeepCTR-Torch"},
        "results": results,
        "machine": facts,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(
    python: str, models: Sequence[str], rows: int, rounds: int, *, l2: bool
) -> list[dict[str, Any]]:
    """Train every side of every model so many times, taking turns."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {model: {} for model in models}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = write_job(folder, rows)
        for turn in range(rounds):
            for model in models:
                sides = list(sides_of(model, l2=l2).items())
                for label, side in sides if turn % 2 == 0 else sides[::-1]:
                    used = python if side.library == "deepctr" else sys.executable
                    result = train(folder, used, side, held_out)
                    runs[model].setdefault(label, []).append(result)
                    show(turn, f"{model}, {side.description}", result, rows)
    return [result_of(model, rows, sides) for model, sides in runs.items()]


def sides_of(model: str, *, l2: bool) -> dict[str, Side]:
    """Return DeepCTR-Torch's side of a model, and ours in each mode."""
    pair = PAIRS[model]
    theirs = {"model": model, "model_settings": dict(pair.theirs), "l2": l2}
    sides = {"deepctr": Side("deepctr", theirs, "DeepCTR-Torch, dense Adam")}
    for ratio, tables in MODES.items():
        ours = {"model": pair.ours, "model_settings": dict(pair.settings), "tables": tables}
        sides[ratio] = Side("rarebit", ours, f"ours, {tables} Adam")
    return sides


def result_of(
    model: str, rows: int, sides: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the ratios of a model, and what they are made of."""
    speeds = {label: speed(rows, runs) for label, runs in sides.items()}
    return {
        "model": model,
        **{ratio: speeds[ratio] / speeds["deepctr"] for ratio in MODES},
        "samples_per_second": {label: round(value) for label, value in speeds.items()},
        "auc": {label: runs[-1]["auc"][-1] for label, runs in sides.items()},
        "peak_memory_mb": {label: runs[-1]["peak_memory_mb"] for label, runs in sides.items()},
        "other_load": {label: [run["other_load"] for run in runs] for label, runs in sides.items()},
        "epoch_seconds": {
            label: [run["epoch_seconds"][-1] for run in runs] for label, runs in sides.items()
        },
        "settings": {label: runs[-1]["settings"]["model"] for label, runs in sides.items()},
        "versions": {label: runs[-1]["versions"] for label, runs in sides.items()},
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the ratios as a table, a line a model."""
    lines = ["| model | times as fast | with dense Adam | samples/s, theirs | ours |"]
    lines.append("|---" * 5 + "|")
    for result in results:
        speeds = result["samples_per_second"]
        lines.append(
            f"| `{result['model']}` | {result['ratio']:.1f} | {result['ratio_dense']:.1f} "
            f"| {speeds['deepctr']:,} | {speeds['ratio']:,} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
