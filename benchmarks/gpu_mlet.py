"""What MLET adds to a training step on a GPU: DeepFM at the shape of Criteo through `fit`, both sides recorded.

    python benchmarks/gpu_mlet.py --out benchmarks/results/gpu-mlet.json

Width 16, inner width 64, batches of 4096, float32, the step recorded as a CUDA graph, data on the device. Plain
tables and MLET take turns, three times each; a speed is the median over all epochs but each run's first.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rarebit import MLET, Dataset, Method, Training, apply_, fit
from rarebit.data import SyntheticLog, generate
from rarebit.machine import machine
from rarebit.models import build_model

ROUNDS, EPOCHS = 3, 4


def main() -> None:
    """Measure both sides with both kinds of optimizer and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the generated log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    data = generate(SyntheticLog(preset="criteo", rows=options.rows)).train.to(options.device)
    results = {tables: compare(data, tables) for tables in ("rowwise", "dense")}
    facts: dict[str, Any] = dict(machine())
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    report = {"results": results, "rows": len(data), "machine": facts}
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def compare(data: Dataset, tables: str) -> dict[str, float]:
    """Return samples a second of both sides, and MLET's time over the plain one."""
    speeds: dict[str, list[float]] = {"plain": [], "mlet": []}
    for _ in range(ROUNDS):
        for name, side in speeds.items():
            side.extend(train(data, tables, MLET() if name == "mlet" else None))
    return figures(speeds, "mlet")


def figures(speeds: dict[str, list[float]], side: str) -> dict[str, float]:
    """Return how a side compares with the plain one: the time of its steps over that of plain ones."""
    plain, its = (statistics.median(speeds[name]) for name in ("plain", side))
    return {
        "ratio": plain / its,
        "plain_samples_per_second": plain,
        f"{side}_samples_per_second": its,
        "lowest_ratio": min(speeds["plain"]) / max(speeds[side]),
        "highest_ratio": max(speeds["plain"]) / min(speeds[side]),
    }


def train(
    data: Dataset,
    tables: str,
    method: Method | None,
    *,
    dim: int = 16,
    after_step: Callable[[nn.Module, int], None] | None = None,
) -> list[float]:
    """Train, and return the speed of every epoch but the first, which records the step."""
    torch.manual_seed(0)
    model = build_model("deepfm", data.schema, {"dim": dim}).to(data.device)
    if method is not None:
        apply_(model, method, verbose=False)
    training = Training(epochs=EPOCHS, batch_size=4096, tables=tables)
    after = None if after_step is None else functools.partial(after_step, model)
    history = fit(model, data, settings=training, after_step=after, progress=False)
    return [epoch.samples_per_second for epoch in history.epochs[1:]]


if __name__ == "__main__":
    main()
