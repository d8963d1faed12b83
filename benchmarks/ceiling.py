"""How close each model comes to the best possible AUC on the built-in click log.

    python benchmarks/ceiling.py --seeds 3 --out benchmarks/results/ceiling.json

Settings and seeds are those of `rarebit train` as it comes: nothing is tuned on the test split.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

import rarebit as rb
from rarebit.machine import machine
from rarebit.models import model_names


def main() -> None:
    """Train every model with every seed, print a line each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=model_names())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    facts = machine()  # before the runs: the commit is that of the code that runs
    results = [
        measure(model, arguments.seeds, torch.device(arguments.device))
        for model in arguments.models
    ]
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    report = {
        "command": f"python benchmarks/ceiling.py --seeds {arguments.seeds}",
        "results": results,
        "machine": facts | {"device": device},
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(model: str, seeds: int, device: torch.device) -> dict[str, object]:
    """Return the test AUC of a model beside its ceiling, over all rows and the rarest fifth."""
    runs = [run(model, seed, device) for seed in range(seeds)]
    aucs = [result.test.auc for result in runs]
    rare = [result.test.rarest.auc for result in runs]
    test = runs[0].test
    row = {
        "model": model,
        "n": seeds,
        "auc": statistics.mean(aucs),
        "auc_spread": statistics.stdev(aucs) if seeds > 1 else None,
        "ceiling": test.ceiling.auc,
        "gap": test.ceiling.auc - statistics.mean(aucs),
        "rarest_auc": statistics.mean(rare),
        "rarest_ceiling": test.rarest_ceiling.auc,
        "rarest_gap": test.rarest_ceiling.auc - statistics.mean(rare),
        "epochs": [result.history.best_epoch for result in runs],
    }
    print(json.dumps(row), flush=True)
    return row


def run(model: str, seed: int, device: torch.device) -> rb.training.RunResult:
    """Train one model on the built-in click log as `rarebit train --seed` does."""
    settings = rb.RunSettings(model=model, training=rb.Training(seed=seed))
    return rb.run(settings, device=device, progress=False)


if __name__ == "__main__":
    main()
