"""What thresholds add to a training step on a GPU: DeepFM at the shape of Criteo through `fit`, all recorded.

    python benchmarks/gpu_pep.py --out benchmarks/results/gpu-pep.json

Width 64, batches of 4096, lazy Adam, float32, the step recorded as a CUDA graph, data on the device. Plain
tables, one given threshold that rises in every step, and a learned one for each entry take turns, three times
each; a speed is the median over all epochs but each run's first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gpu_mlet import ROUNDS, figures, train
from torch import nn

from rarebit import PEP
from rarebit.data import SyntheticLog, generate
from rarebit.machine import machine
from rarebit.pruning import set_threshold_

DIM = 64
INIT = -5.0
RISE = 1e-6


def main() -> None:
    """Measure the three sides and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the generated log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    data = generate(SyntheticLog(preset="criteo", rows=options.rows)).train.to(options.device)
    speeds: dict[str, list[float]] = {"plain": [], "scheduled": [], "learned": []}
    for _ in range(ROUNDS):
        speeds["plain"] += train(data, "rowwise", None, dim=DIM)
        given = PEP(schedule="given")
        speeds["scheduled"] += train(data, "rowwise", given, dim=DIM, after_step=raise_threshold)
        speeds["learned"] += train(data, "rowwise", PEP(init=INIT), dim=DIM)
    facts: dict[str, Any] = dict(machine())
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    results = {side: figures(speeds, side) for side in ("scheduled", "learned")}
    report = {"results": results, "rows": len(data), "machine": facts}
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def raise_threshold(model: nn.Module, step: int) -> None:
    """Set the threshold somewhat higher than after the last step."""
    set_threshold_(model, RISE * step)


if __name__ == "__main__":
    main()
