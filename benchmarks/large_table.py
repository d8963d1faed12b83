"""Train a model with a table of fifty million rows, and print what memory that took.

    python benchmarks/large_table.py --out benchmarks/results/large-table.json

DeepFM with a table of 50,000,000 rows of 16 numbers (and one number a row of first order) and a few
small fields, lazily trained with row-wise Adagrad through `fit`, with validation and so with a copy
of the best weights. Ids are drawn as popular things are: a few often, most hardly ever.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from rarebit import Dataset, Training, fit
from rarebit.data import Field, Schema
from rarebit.machine import machine
from rarebit.models.deepfm import DeepFM
from rarebit.training import estimate_memory

DIM, FIELDS, STEPS, BATCH_SIZE = 16, 20, 100, 4096
GIB = 1 << 30


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=50_000_000, help="rows of the large table")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    names = ["item", *(f"field_{number}" for number in range(1, FIELDS))]
    sizes = [options.rows, *[1000] * (FIELDS - 1)]
    schema = Schema(tuple(Field(name=n, rows=r) for n, r in zip(names, sizes, strict=True)))
    train, valid = draw(schema, STEPS * BATCH_SIZE), draw(schema, BATCH_SIZE)
    torch.manual_seed(0)
    model = DeepFM(schema, dim=DIM)
    settings = Training(epochs=1, batch_size=BATCH_SIZE, tables="rowwise", optimizer="adagrad")
    estimate = estimate_memory(model, train, valid, settings=settings)
    print(estimate)
    built = peak_bytes()
    history = fit(model, train, valid, settings=settings, progress=False)
    result = {
        "table_rows": options.rows,
        "dim": DIM,
        "optimizer": "row-wise Adagrad",
        "table_bytes": estimate.tables,
        "estimated_bytes": estimate.total,
        "peak_bytes": peak_bytes(),
        "peak_bytes_before_training": built,
        "steps": history.epochs[0].steps,
        "samples_per_second": round(history.samples_per_second),
        "machine": machine() | {"memory_bytes": memory_bytes()},
    }
    print(f"peak memory of the process: {result['peak_bytes'] / GIB:.1f} GiB")
    print(f"of {result['machine']['memory_bytes'] / GIB:.1f} GiB of this machine")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def draw(schema: Schema, n: int) -> Dataset:
    """Return rows whose ids are popular, or not, by the third power of chance."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.tensor([field.rows for field in schema.fields])
    ids = (rows * torch.rand(n, len(rows), generator=generator, dtype=torch.float64) ** 3).int()
    return Dataset(schema, ids, label=torch.randint(2, (n,), generator=generator))


def peak_bytes() -> int:
    """Return the most memory this process has had, as Linux counts it."""
    return _kilobytes("/proc/self/status", "VmHWM:")


def memory_bytes() -> int:
    """Return the memory of this machine."""
    return _kilobytes("/proc/meminfo", "MemTotal:")


def _kilobytes(file: str, name: str) -> int:
    lines = Path(file).read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s")
