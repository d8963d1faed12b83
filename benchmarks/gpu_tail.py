"""What the tail method adds to a training step on a GPU: DeepFM at the shape of Criteo through `fit`, both sides recorded.

    python benchmarks/gpu_tail.py --out benchmarks/results/gpu-tail.json

Width 16, batches of 4096, float32, lazy Adam, the step recorded as a CUDA graph, data on the device. Plain training and
`Tail` take turns, three times each; a speed is the median over all epochs but each run's first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gpu_mlet import EPOCHS, ROUNDS, figures

from rarebit import Dataset, Tail, Training, fit
from rarebit.data import SyntheticLog, generate
from rarebit.machine import machine
from rarebit.models import build_model


def main() -> None:
    """Measure both sides and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the generated log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    data = generate(SyntheticLog(preset="criteo", rows=options.rows)).train.to(options.device)
    speeds: dict[str, list[float]] = {"plain": [], "tail": []}
    for _ in range(ROUNDS):
        for name, side in speeds.items():
            side.extend(train(data, [Tail()] if name == "tail" else []))
    facts: dict[str, Any] = dict(machine())
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    report = {"results": figures(speeds, "tail"), "rows": len(data), "machine": facts}
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def train(data: Dataset, methods: list[Tail]) -> list[float]:
    """Train, and return the speed of every epoch but the first, which records the step."""
    torch.manual_seed(0)
    model = build_model("deepfm", data.schema, {"dim": 16}).to(data.device)
    settings = Training(epochs=EPOCHS, batch_size=4096, tables="rowwise")
    history = fit(model, data, settings=settings, callbacks=methods, progress=False)
    return [epoch.samples_per_second for epoch in history.epochs[1:]]


if __name__ == "__main__":
    main()
