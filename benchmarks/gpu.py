"""How fast `fit` trains on a GPU: samples a second at the shape of Criteo, and at fifty million rows.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

39 fields, 967,795 values, shuffled on the device from data that lies there, bfloat16, no validation. A
speed is the median over the epochs after the first, which compiles and records the step.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from rarebit import Dataset, Training, fit
from rarebit.data import Field, Schema, SyntheticLog, generate
from rarebit.machine import machine
from rarebit.models import build_model
from rarebit.training.fit import Silence

EPOCHS = 4
DCN: dict[str, Any] = {"model": "dcn_v2", "dim": 10, "batch_size": 8192, "tables": "dense"}
DEEPFM: dict[str, Any] = {"model": "deepfm", "dim": 16, "batch_size": 8192, "tables": "dense"}
RUNS = [
    DCN,
    DCN | {"compile": False},
    DCN | {"compile": False, "cuda_graph": False},
    DCN | {"batch_size": 2048},
    DEEPFM,
    DEEPFM | {"tables": "rowwise"},
    DEEPFM | {"tables": "rowwise", "rows": 50_000_000},
]


def main() -> None:
    """Measure every run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the generated log")
    parser.add_argument("--repeat", type=int, default=8, help="times it is laid end to end")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="what this copy is of, where git does not know")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    log = generate(SyntheticLog(preset="criteo", rows=options.rows)).train
    data = Dataset(
        log.schema, log.ids.repeat(options.repeat, 1), label=log.label.repeat(options.repeat)
    ).to(options.device)
    results = []
    for run in RUNS:
        results.append(measure(data, options.device, **run))
        print(json.dumps(results[-1]), flush=True)
    facts = machine()
    facts["commit"] = options.commit or facts["commit"]
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    result = {"results": results, "rows": len(data), "machine": facts}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


class Complaints(Silence):
    """Prints what fit has to say but for the memory estimate."""

    def say(self, line: str) -> None:
        """Print it."""
        if not line.startswith("memory"):
            sys.stderr.write(line + "\n")


def measure(
    data: Dataset,
    device: str,
    *,
    model: str,
    dim: int,
    batch_size: int,
    tables: str,
    rows: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train and return the speed; `rows` spreads the ids of the largest fields over so many rows."""
    if rows is not None:
        data = spread(data, rows)
    torch.manual_seed(0)
    built = build_model(model, data.schema, {"dim": dim}).to(device)
    training = Training(
        epochs=EPOCHS,
        batch_size=batch_size,
        tables=tables,
        precision="bfloat16",
        **({"compile": True} | settings),
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    history = fit(built, data, settings=training, progress=Complaints())
    speeds = [epoch.samples_per_second for epoch in history.epochs[1:]]
    return {
        "model": model,
        "dim": dim,
        "batch_size": batch_size,
        "optimizer": "dense Adam" if tables == "dense" else "lazy Adam, by rows",
        "table_rows": sum(field.rows for field in data.schema.table_fields),
        "samples_per_second": round(statistics.median(speeds)),
        "slowest": round(min(speeds)),
        "fastest": round(max(speeds)),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        **settings,
    }


def spread(data: Dataset, rows: int) -> Dataset:
    """Return the same lookups over larger tables: every field's ids times the same factor."""
    fields = data.schema.table_fields
    factor = rows // sum(field.rows for field in fields) + 1
    larger = tuple(Field(name=field.name, rows=field.rows * factor) for field in fields)
    return Dataset(Schema(larger), data.ids * factor, label=data.label)


if __name__ == "__main__":
    main()
