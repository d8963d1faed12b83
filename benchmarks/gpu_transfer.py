"""What harmless transfer adds to a training step on a GPU: DeepFM at the shape of Criteo, recorded and eager.

    python benchmarks/gpu_transfer.py --out benchmarks/results/gpu-transfer.json

Width 16, batches of 4096, lazy Adam, float32, data on the device, the adversarial loss on every table of more
than 100 rows. First both sides have their step recorded as a CUDA graph, then so with the transfer compiled,
then both are run operation by operation, as in a loop of one's own, without and with the transfer compiled. The
sides take turns; a time is the median over the rounds. Last comes how many kernels a step of each side starts.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rarebit import Dataset
from rarebit.data import SyntheticLog, generate
from rarebit.machine import machine
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.models import build_model
from rarebit.training.optimizers import optimizer
from rarebit.training.step import RecordedSteps, Steps, TrainingStep

BATCH, LR = 4096, 1e-3
WARM_UP = 20
"""Steps before any is timed: kernels are chosen, and the step is recorded."""
STEPS = {"recorded": 100, "compiled": 100, "eager": 40, "eager-compiled": 40}
"""Steps of a side in a round."""
MOST_KERNELS = 40
"""Names that are listed with `--kernels`."""


def main() -> None:
    """Measure both sides in each way and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=300_000, help="rows of the generated log")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each way")
    parser.add_argument("--ways", nargs="+", choices=[*STEPS], default=[*STEPS])
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    data = generate(SyntheticLog(preset="criteo", rows=options.rows)).train.to(options.device)
    results = {}
    for way in options.ways:
        sides = {
            "plain": Side(data, way, with_transfer=False),
            "transfer": Side(data, way, with_transfer=True),
        }
        results[way] = compare(sides, STEPS[way], options.seconds)
        for name, side in sides.items():
            results[way][f"{name}_kernels"] = side.count_kernels(listed=options.kernels)
        print(json.dumps({way: results[way]}), flush=True)
    facts: dict[str, Any] = dict(machine())
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    report = {"results": results, "batch_size": BATCH, "machine": facts}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


class Side:
    """A model in training, one step after the other."""

    def __init__(self, data: Dataset, way: str, *, with_transfer: bool) -> None:
        torch.manual_seed(0)
        model = build_model("deepfm", data.schema, {"dim": 16}).to(data.device)
        self.step = TrainingStep(model, optimizer(model, lr=LR, tables="rowwise"), say=complain)
        if with_transfer:
            counts = {name: count.cpu() for name, count in data.counts().items()}
            settings = HarmlessTransfer(compile=way.endswith("compiled"))
            self.step.backward = settings.start(model, counts=counts, say=complain).backward
        is_recorded = not way.startswith("eager") and data.device.type == "cuda"
        self.steps = (
            RecordedSteps(self.step, data, BATCH, complain)
            if is_recorded
            else Steps(self.step, data)
        )
        self.steps.start_epoch(data.order(seed=0, epoch=0).to(data.device))
        self.last = len(data) // BATCH * BATCH
        self.start = 0
        self.run(WARM_UP)
        if isinstance(self.steps, RecordedSteps):
            assert self.steps.graph is not None, "the step was not recorded"

    def run(self, number: int) -> None:
        """Take some steps, and wait for them."""
        for _ in range(number):
            self.steps(self.start, self.start + BATCH)
            self.start = (self.start + BATCH) % self.last
        wait()

    def count_kernels(self, *, listed: bool) -> int:
        """Return how many kernels and copies a step starts."""
        if not torch.cuda.is_available():
            return 0
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            self.run(1)
        kernels = [event for event in seen.events() if event.device_type.name == "CUDA"]
        if listed:
            table = seen.key_averages().table(
                sort_by="self_device_time_total", row_limit=MOST_KERNELS, max_name_column_width=90
            )
            sys.stderr.write(table + "\n")
        return len(kernels)


def compare(sides: dict[str, Side], number: int, seconds: float) -> dict[str, float]:
    """Return the time of a step of each side in milliseconds, and their ratio with its spread."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times["plain"]) < 3:
        for name, side in sides.items():
            times[name].append(1000 * timed(lambda side=side: side.run(number)) / number)
    ratios = sorted(t / p for t, p in zip(times["transfer"], times["plain"], strict=True))
    plain, transfer = (statistics.median(times[name]) for name in ("plain", "transfer"))
    return {
        "ratio": transfer / plain,
        "lowest_ratio": ratios[0],
        "highest_ratio": ratios[-1],
        "plain_ms": plain,
        "transfer_ms": transfer,
        "rounds": len(ratios),
    }


def timed(call: Callable[[], None]) -> float:
    """Return how long a call takes, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def complain(line: str) -> None:
    """Print what a step has to say."""
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
