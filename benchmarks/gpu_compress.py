"""Lookups of coded and packed rows on a GPU, against `F.embedding` of float32: 4096 x 39 rows out of 1,000,000 x 16.

    python benchmarks/gpu_compress.py --out benchmarks/results/gpu-compress.json

The coded table takes a sixteenth of the bytes, the packed one has a tenth of the entries. Ids are drawn from all rows alike, and as often as
they were seen (the k-th id 1/k as often as the first). Lookups take turns and are recorded as CUDA graphs, so that the time is
the device's; a figure is the median over rounds of 100 lookups. Before that, the rows are compared with those of the CPU, bit by bit.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit import EvidenceCoding
from rarebit.codes import rows_triton
from rarebit.codes.packed import Pack
from rarebit.machine import machine
from rarebit.tables.apply import table_bytes

ROWS, WIDTH, BATCH, FIELDS, DRAWS, ROUNDS, LOOKUPS = 1_000_000, 16, 4096, 39, 8, 20, 100


@torch.no_grad()
def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--commit", help="what this copy is of, where git does not know")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, WIDTH, generator=draw)
    shares = 1 / torch.arange(1, ROWS + 1, dtype=torch.float64)
    counts = (40 * ROWS * shares / shares.sum()).long()
    plain = nn.Embedding.from_pretrained(weight)
    coded = EvidenceCoding(size="1/16", counts=counts).wrap(plain)
    few = weight * (torch.rand(weight.shape, generator=draw) < 0.1)
    packed = Pack().wrap(nn.Embedding.from_pretrained(few))
    shape = (BATCH, FIELDS)
    by_counts = torch.multinomial(shares, DRAWS * BATCH * FIELDS, replacement=True, generator=draw)
    draws = {
        "": [torch.randint(ROWS, shape, generator=draw) for _ in range(DRAWS)],
        "_by_counts": list(by_counts.view(DRAWS, *shape)),
    }
    expected = {name: table(draws[""][0]) for name, table in (("coded", coded), ("packed", packed))}
    sizes = {
        name: table_bytes(table)
        for name, table in (("plain", plain), ("coded", coded), ("packed", packed))
    }
    table = plain.cuda().weight
    variants: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda ids: F.embedding(ids, table),
        "coded": coded.cuda(),
        "packed": packed.cuda(),
    }
    results: dict[str, Any] = {}
    for name, rows in expected.items():
        assert torch.equal(variants[name](draws[""][0].cuda()).cpu(), rows), f"{name} rows differ"
    for draws_of, batches in draws.items():
        times = measure(variants, [ids.cuda() for ids in batches])
        results |= {f"{name}{draws_of}_microseconds": time for name, time in times.items()}
        for name in ("coded", "packed"):
            results[f"{name}{draws_of}_ratio"] = times[name] / times["plain"]
    facts = machine() | {"device": torch.cuda.get_device_name()}
    facts["commit"] = options.commit or facts["commit"]
    kernel = "triton" if rows_triton.suits(table) else "plain torch"
    report = {"results": results, "bytes": sizes, "path": kernel, "machine": facts}
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(
    variants: dict[str, Callable[[Tensor], Tensor]], batches: list[Tensor]
) -> dict[str, float]:
    """Return the microseconds of a lookup."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, look_up in variants.items():
        for ids in batches:
            look_up(ids)  # compiles
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for turn in range(LOOKUPS):
                look_up(batches[turn % len(batches)])
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(ROUNDS + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(1000 * start.elapsed_time(end) / LOOKUPS)
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    main()
