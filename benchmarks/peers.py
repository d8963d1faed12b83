"""Training speed through each library's own `fit`: FuxiCTR, DeepCTR-Torch and ours, side by side.

    python benchmarks/peers.py --fuxictr ENV/bin/python --deepctr ENV/bin/python --out peers.json
    python benchmarks/peers.py --auc --out peers-auc.json

DeepFM, 39 fields of 967,795 values, d = 16, network 400-400, no dropout, no batch norm, no L2, batch
4096, Adam at 1e-3, two threads. Each library has an environment of its own, with the same torch, and
gets the same encoded rows. The sides take turns, each in a process of its own:

    samples/s    rows / wall time of the second epoch of one fit, shuffling and loading included;
                 evaluation, start and compilation (the first epoch) are left out. Medians of rounds
    AUC          of each library's own `predict`, on held-out rows, after each epoch
    memory       most that the training process held from the first epoch on
    other load   share of the processors that other processes took while the side ran

FuxiCTR is measured with several settings of its loader; its fastest counts. Ours that counts is
lazy: only the rows of a batch are updated (row-wise Adam), where both peers update whole tables.
The other sides of ours show how much of the ratio that is.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rarebit as rb
from rarebit.machine import OtherLoad, machine
from rarebit.training.metrics import auc, logloss

ROWS, HELD_OUT = 819_200, 200_000
JOB = {"dim": 16, "hidden": [400, 400], "lr": 1e-3, "batch_size": 4096, "epochs": 2}
THREADS = 2
BAR = 0.001
"""How far the AUC in bfloat16 may lie from that in float32."""
SCRIPTS = Path(__file__).resolve().parent / "peers"


@dataclass(frozen=True)
class Side:
    """One way to train, and the options of its library."""

    library: str
    options: Mapping[str, Any]
    description: str


DENSE = "ours, float32 dense"
ROWWISE = "ours, float32 rowwise"
OURS = "ours, bfloat16 rowwise compiled"
SIDES = {
    "fuxictr": Side(
        "fuxictr",
        {"data_format": "npz", "num_workers": 0},
        "FuxiCTR, npz loader in the training process; dense Adam, float32",
    ),
    "fuxictr, worker": Side(
        "fuxictr",
        {"data_format": "npz", "num_workers": 1},
        "FuxiCTR, npz loader in one process of its own (its default); dense Adam, float32",
    ),
    "fuxictr, parquet": Side(
        "fuxictr",
        {"data_format": "parquet", "num_workers": 1},
        "FuxiCTR, parquet loader, whose own processes are in other_load; dense Adam, float32",
    ),
    "deepctr": Side("deepctr", {}, "DeepCTR-Torch, data as arrays; dense Adam, float32"),
    DENSE: Side("rarebit", {}, "ours, dense Adam, float32"),
    ROWWISE: Side("rarebit", {"tables": "rowwise"}, "ours, lazy Adam, float32"),
    OURS: Side(
        "rarebit",
        {"tables": "rowwise", "precision": "bfloat16", "compile": True},
        "ours, lazy Adam, bfloat16, compiled",
    ),
}


@dataclass(frozen=True)
class HeldOut:
    """What the scores of the held-out rows are compared with."""

    label: torch.Tensor
    probability: torch.Tensor

    def ceiling(self) -> dict[str, float | None]:
        """Return what no model can pass but by luck."""
        truth = torch.logit(self.probability.double(), eps=1e-12)
        return {"auc": auc(truth, self.label), "logloss": logloss(truth, self.label)}


def main() -> None:
    """Measure, print a line a process, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fuxictr", help="the python of an environment with fuxictr")
    parser.add_argument("--deepctr", help="the python of an environment with deepctr-torch")
    parser.add_argument("--rows", type=int, help=f"training rows, {ROWS:,}; with --auc, of the log")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 100), metavar="N")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--auc", action="store_true", help="compare the AUC of ours instead")
    parser.add_argument("--seeds", type=int, default=3, help="for --auc")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    facts = machine()  # before the runs: the commit is that of the code that runs
    if arguments.auc:
        report = compare_auc(arguments.seeds, arguments.rows)
    else:
        pythons = {"rarebit": sys.executable}
        pythons |= {name: getattr(arguments, name) for name in ("fuxictr", "deepctr")}
        missing = {
            SIDES[name].library for name in arguments.sides if not pythons[SIDES[name].library]
        }
        if missing:
            parser.error(
                f"say where the python of {' and '.join(sorted(missing))} is, or name --sides"
            )
        report = compare_speed(pythons, arguments.sides, arguments.rows or ROWS, arguments.rounds)
    report["machine"] = facts
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


def compare_speed(
    pythons: Mapping[str, str], names: Sequence[str], rows: int, rounds: int
) -> dict[str, Any]:
    """Train every side so many times, taking turns, and return medians and ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = write_job(folder, rows)
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in names}
        for turn in range(rounds):
            for side in names:
                result = train(folder, pythons[SIDES[side].library], SIDES[side], held_out)
                results[side].append(result)
                show(turn, side, result, rows)
    return report_of(results, rows, held_out)


def report_of(
    results: Mapping[str, Sequence[Mapping[str, Any]]], rows: int, held_out: HeldOut
) -> dict[str, Any]:
    """Return medians and ratios of what was measured, and all of it."""
    speeds = {side: speed(rows, runs) for side, runs in results.items()}
    return {
        "command": "python benchmarks/peers.py --fuxictr PYTHON --deepctr PYTHON "
        f"--rows {rows} --rounds {len(next(iter(results.values())))}",
        "measured": "samples/s of the second epoch of one fit, medians of the rounds",
        "model": "DeepFM, no dropout, no batch norm, no L2, Adam",
        "job": JOB | {"rows": rows, "held_out_rows": len(held_out.label)},
        "ceiling": held_out.ceiling(),
        **ratios(speeds),
        "samples_per_second": {side: round(value) for side, value in speeds.items()},
        "sides": {side: summary(SIDES[side], runs) for side, runs in results.items()},
    }


def write_job(folder: Path, rows: int, job: Mapping[str, Any] = JOB) -> HeldOut:
    """Generate the log once and write it for all libraries."""
    splits = rb.data.generate(rb.data.SyntheticLog(preset="criteo", rows=-(-rows * 10 // 8)))
    fields = {field.name: field.rows for field in splits.train.schema.table_fields}
    (folder / "job.json").write_text(json.dumps({**job, "fields": fields}))
    np.savez(folder / "train.npz", **arrays([splits.train], rows))
    np.savez(folder / "held_out.npz", **arrays([splits.valid, splits.test], HELD_OUT))
    label, probability = (
        torch.cat([getattr(splits.valid, name), getattr(splits.test, name)])[:HELD_OUT].clone()
        for name in ("label", "probability")
    )
    return HeldOut(label, probability)


def arrays(parts: Sequence[rb.Dataset], rows: int) -> dict[str, np.ndarray]:
    """Return the first rows of some splits as arrays."""
    return {
        name: torch.cat([getattr(part, name) for part in parts])[:rows].numpy()
        for name in ("ids", "label")
    }


def train(folder: Path, python: str, side: Side, held_out: HeldOut) -> dict[str, Any]:
    """Run one side in its own process and return what it measured."""
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    if side.library != "rarebit":
        environment.pop("PYTHONPATH", None)  # ours, not theirs
    script, answer = SCRIPTS / f"{side.library}_fit.py", folder / "result.json"
    answer.unlink(missing_ok=True)
    load = OtherLoad()
    done = subprocess.run(  # noqa: S603  # our own scripts
        [python, str(script), str(folder), json.dumps(side.options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{script.name} failed:\n{done.stdout[-4000:]}")
    other = load.share()
    result: dict[str, Any] = json.loads(answer.read_text())
    scores = [
        torch.from_numpy(np.load(folder / f"scores_{epoch}.npy"))
        for epoch in range(1, len(result["epoch_seconds"]) + 1)
    ]
    aucs = [auc(score, held_out.label) for score in scores]
    return result | {"auc": aucs, "other_load": other}


def speed(rows: int, runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the median of samples per second in the last epoch."""
    return statistics.median(rows / run["epoch_seconds"][-1] for run in runs)


def ratios(speeds: Mapping[str, float]) -> dict[str, float | str | None]:
    """Return how many times as fast as the fastest side of each peer ours is."""
    found: dict[str, float | str | None] = {
        "ratio_of": f"samples/s of {SIDES[OURS].description} / samples/s of the peer at its fastest"
    }
    for peer in ("fuxictr", "deepctr"):
        theirs = [value for side, value in speeds.items() if SIDES[side].library == peer]
        known = OURS in speeds and theirs
        found[f"ratio_{peer}"] = speeds[OURS] / max(theirs) if known else None
    return found


def summary(side: Side, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a side was, and what each of its rounds measured."""
    each = ("epoch_seconds", "peak_memory_mb", "train_loss", "auc", "other_load")
    return {
        "description": side.description,
        **{name: runs[-1][name] for name in ("threads", "versions", "settings")},
        "rounds": [{name: run[name] for name in each} for run in runs],
    }


def show(turn: int, side: str, result: Mapping[str, Any], rows: int) -> None:
    """Print a line a process."""
    other = "unknown" if result["other_load"] is None else f"{result['other_load']:.1%}"
    print(
        f"round {turn + 1}, {side}: {rows / result['epoch_seconds'][-1]:,.0f} samples/s, "
        f"{result['peak_memory_mb']} MB, loss {result['train_loss'][-1]:.4f}, "
        f"AUC {result['auc'][0]:.4f} then {result['auc'][-1]:.4f}, other load {other}",
        file=sys.stderr,
        flush=True,
    )


def compare_auc(seeds: int, rows: int | None) -> dict[str, Any]:
    """Train ours on the default log in each way and return how far the AUCs lie apart."""
    log = rb.data.SyntheticLog() if rows is None else rb.data.SyntheticLog(rows=rows)
    aucs: dict[str, list[float]] = {}
    for side in (DENSE, ROWWISE, OURS):
        for seed in range(seeds):
            training = rb.Training(seed=seed, **SIDES[side].options)
            test = rb.run(rb.RunSettings(data=log, training=training), progress=False).test
            aucs.setdefault(side, []).append(test.auc)
            print(f"{side}, seed {seed}: AUC {test.auc:.5f}", file=sys.stderr, flush=True)
    return {
        "command": f"python benchmarks/peers.py --auc --seeds {seeds} --rows {log.rows}",
        "log": dataclasses.asdict(log),
        "auc": aucs,
        "bar": BAR,
        "differences": {side: differences(aucs[OURS], aucs[side]) for side in (DENSE, ROWWISE)},
    }


def differences(ours: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Return the differences of two sides seed by seed, and whether their mean meets the bar."""
    each = [mine - theirs for mine, theirs in zip(ours, other, strict=True)]
    mean = statistics.mean(each)
    return {"mean": mean, "each": each, "within_bar": abs(mean) <= BAR}


if __name__ == "__main__":
    main()
