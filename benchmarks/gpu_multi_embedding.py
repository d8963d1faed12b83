"""What several embedding sets cost on a GPU: DCN-V2 at the shape of Criteo through `fit`, both sides recorded.

    python benchmarks/gpu_multi_embedding.py --out benchmarks/results/gpu-multi-embedding.json

One set of width 100 and ten of width 10, batches of 8192, bfloat16, lazy Adam, the step recorded as a CUDA graph,
data on the device, and the same compiled by torch. They take turns, twice each; a speed is the median over all
epochs but each run's first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gpu_mlet import EPOCHS, figures

from rarebit import Dataset, MultiEmbedding, Training, apply_, fit
from rarebit.data import SyntheticLog, generate
from rarebit.machine import machine
from rarebit.models import build_model

NUM_SETS, DIM, BATCH = 10, 10, 8192
ROUNDS = 2


def main() -> None:
    """Measure both sides, as it is and compiled, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the generated log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    data = generate(SyntheticLog(preset="criteo", rows=options.rows)).train.to(options.device)
    facts: dict[str, Any] = dict(machine())
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    results = {}
    for name, compiled in (("recorded", False), ("recorded and compiled", True)):
        speeds: dict[str, list[float]] = {"plain": [], "multi": []}
        for _ in range(ROUNDS):
            for side, num_sets in (("plain", 1), ("multi", NUM_SETS)):
                speeds[side] += train(data, num_sets, compiled=compiled)
        results[name] = figures(speeds, "multi")
        report = {"results": results, "rows": len(data), "machine": facts}
        print(json.dumps(report, indent=1), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def train(data: Dataset, num_sets: int, *, compiled: bool) -> list[float]:
    """Train, and return the speed of every epoch but the first, which records the step."""
    torch.manual_seed(0)
    model = build_model("dcn_v2@me", data.schema, {"dim": NUM_SETS * DIM // num_sets})
    model = model.to(data.device)
    if num_sets > 1:
        apply_(model, MultiEmbedding(num_sets=num_sets), verbose=False)
    training = Training(
        epochs=EPOCHS, batch_size=BATCH, tables="rowwise", precision="bfloat16", compile=compiled
    )
    history = fit(model, data, settings=training, progress=False)
    return [epoch.samples_per_second for epoch in history.epochs[1:]]


if __name__ == "__main__":
    main()
