"""Steps of DeepFM on 10 million rows, in one process or as one of several: `python -m rarebit.bench._scale_program PLAN`.

The first process reads numbers of steps, one per line, and prints the seconds that all of them took.
"""

import os
import sys
import time

import torch
from torch import Tensor

from rarebit.data.dataset import Dataset
from rarebit.data.schema import Field, Schema
from rarebit.sharding.processes import (
    join_processes,
    leave_processes,
    processes_of,
    spread_,
)
from rarebit.training.fit import make_optimizer
from rarebit.training.run import start_model
from rarebit.training.settings import RunSettings, Training
from rarebit.training.step import Steps, TrainingStep

SIZES = (5_000_000, 3_000_000, 1_500_000, *[22_000] * 23)
"""Rows of the tables: 10 million in all."""
DIM, BATCH, ROWS = 16, 4096, 400_000
SETTINGS = RunSettings(
    model="deepfm",
    model_settings={"dim": DIM, "hidden": [400, 400, 400], "dropout": 0.0},
    training=Training(batch_size=BATCH, optimizer="adagrad", tables="rowwise"),
)


def log() -> Dataset:
    """Return rows whose ids are skewed as in a click log."""
    random = torch.Generator().manual_seed(0)
    columns = [(n * torch.rand(ROWS, generator=random).pow(3)).int() for n in SIZES]
    schema = Schema(tuple(Field(name=f"f{i}", rows=rows) for i, rows in enumerate(SIZES)))
    label = torch.rand(ROWS, generator=random).round()
    return Dataset(schema, torch.stack(columns, dim=1), None, label)


def say(value: object) -> None:
    """Tell whoever started this process."""
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


def main(plan: str) -> None:
    """Build, then run steps as asked."""
    torch.set_num_threads(1)
    data, spread = log(), "RANK" in os.environ
    if spread:
        join_processes()
    model = start_model(SETTINGS, data.schema, say=lambda _: None, in_pieces=spread)
    if spread:
        spread_(model, plan, whole_rows=True)  # type: ignore[arg-type]  # one of the names of plans
    steps = Steps(TrainingStep(model, make_optimizer(model, SETTINGS.training)), data)
    processes, epoch, at = processes_of(model), 1, ROWS
    steps.start_epoch(torch.arange(ROWS))
    say("ready")
    while True:
        asked = int(sys.stdin.readline() or 0) if processes.rank == 0 else 0
        asked = processes.largest(asked)
        if not asked:
            break
        start = time.perf_counter()
        for _ in range(asked):
            if at + BATCH > ROWS:
                order: Tensor = data.order(seed=0, epoch=epoch)
                steps.start_epoch(order)
                at, epoch = 0, epoch + 1
            steps(at, at + BATCH)
            at += BATCH
        processes.largest(0)  # all are done
        say(time.perf_counter() - start)
    leave_processes()


if __name__ == "__main__":
    main(sys.argv[1])
