"""How long the runs of a study take: as stacked models, one after the other, and in four worker processes.

    python benchmarks/studies.py data/ml-1m-ids data/book-crossing --out benchmarks/results/studies.json

DCN-V2, five seeds of nine settings (learning rate, weight decay), a few epochs each; every way in a folder of its own. The AUCs
of all ways are compared: dropout draws other numbers in a stack on a GPU, so they agree there as two seeds do.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rarebit.machine import choose_device, machine
from rarebit.study.plan import StudyPlan
from rarebit.study.pool import Pool, StudyProgress
from rarebit.study.runs import MOST_TOGETHER, identify
from rarebit.study.study import PlannedRun, Runner
from rarebit.training.settings import RunSettings

WAYS = {"together": (1, MOST_TOGETHER), "one": (1, 1), "four": (4, 1)}
"""Worker processes, and runs in a stack."""
RATES, DECAYS = (3e-4, 1e-3, 3e-3), (0.0, 1e-6, 1e-5)


def planned(log: str, options: argparse.Namespace) -> list[RunSettings]:
    """Return the runs: every seed with every setting."""
    data = {"rows": options.rows} if log == "synthetic" else {"folder": log}
    plan = StudyPlan.from_mapping(
        {
            "methods": "baseline",
            "model": {"name": "dcn_v2@me", "dim": 16, "init": "normal", "dropout": options.dropout},
            "data": data,
            "training": {"epochs": options.epochs, "patience": options.epochs, "batch_size": 1024},
        }
    )
    base = identify(plan.runs[0])
    settings = itertools.product(RATES[: options.rates], DECAYS, range(options.seeds))
    return [
        replace(base, training=replace(base.training, lr=lr, weight_decay=decay, seed=seed))
        for lr, decay, seed in settings
    ]


def measure(way: str, runs: list[RunSettings], device: torch.device) -> tuple[float, list[float]]:
    """Return the seconds that all runs take, and their validation AUCs."""
    workers, together = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        planned_runs = [PlannedRun(Path(folder), run, str(n)) for n, run in enumerate(runs)]
        start = time.perf_counter()
        with Pool(workers, str(device), 1) as pool:
            runner = Runner(
                pool, Path(folder), StudyProgress(), None, failures := {}, False, together
            )
            runner.make(planned_runs)
        seconds = time.perf_counter() - start
        records = [run.read() for run in planned_runs]
        missing = [str(failure) for failure in failures.values()]
        assert all(records), f"{way}: {missing[:1]}"
        return seconds, [record.valid_auc for record in records if record is not None]


def main() -> None:
    """Measure every way on every log, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("logs", nargs="+", help='folders of prepared logs, or "synthetic"')
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=int, default=len(RATES), help="learning rates")
    parser.add_argument("--rows", type=int, default=300_000, help="of the synthetic log")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="what this copy is of, where git does not know")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    device, results = choose_device(options.device), []
    for log in options.logs:
        runs = planned(log, options)
        found: dict[str, Any] = {"log": Path(log).name, "runs": len(runs), "epochs": options.epochs}
        aucs: dict[str, list[float]] = {}
        for way in options.ways.split(","):
            seconds, aucs[way] = measure(way, runs, device)
            found[f"{way}_seconds"] = round(seconds, 1)
            print(json.dumps(found), flush=True)
        for way in aucs.keys() - {"together"}:
            if "together" in aucs:
                found[f"speedup_over_{way}"] = round(
                    found[f"{way}_seconds"] / found["together_seconds"], 2
                )
                pairs = zip(aucs["together"], aucs[way], strict=True)
                differences = [one - other for one, other in pairs]
                found[f"auc_difference_{way}"] = float(f"{statistics.fmean(differences):.2g}")
                found[f"largest_auc_difference_{way}"] = max(map(abs, differences))
        results.append(found)
        print(json.dumps(found), flush=True)
    facts = machine()
    facts["commit"] = options.commit or facts["commit"]
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name()
    if options.out is not None:
        text = json.dumps({"results": results, "machine": facts}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
