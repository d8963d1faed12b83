"""A training step with harmless transfer, against the same step without.

    plain       DeepFM at the shape of Criteo, width 16, with lazy Adam, as `fit` trains it
    transfer    the same with the adversarial loss and the barrier on every table of more than 100 rows

A measured unit is one step of 4096 rows; 967,795 values have a row of their own. Which rows are frequent is
found before: the top fifth of those that the log has.
"""

import torch

from rarebit.bench._frame import BenchResult, OtherLoad, Say, measure, timing_figures
from rarebit.bench._steps import NextStep
from rarebit.bench.train import DIM, HIDDEN, LR, ROWS, sliced
from rarebit.data.dataset import Dataset
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.models.deepfm import DeepFM
from rarebit.training.optimizers import optimizer
from rarebit.training.step import TrainingStep

__all__ = ["make_step", "run"]

BATCH_SIZE = 4096
BUDGET = 30.0
"""Seconds for both sides."""


def run(say: Say) -> BenchResult:
    """Measure both steps."""
    data = generate(SyntheticLog(preset="criteo", rows=ROWS)).train
    say(f"transfer: two sides, {BUDGET:.0f} s")
    steps = {"plain": make_step(data), "transfer": make_step(data, with_transfer=True)}
    load = OtherLoad()
    times = measure(steps, budget=BUDGET)
    return {
        "ratio": times["transfer"].median / times["plain"].median,
        "ratio_of": "time of a step with harmless transfer / time of a plain step, both with lazy Adam",
        "other_load_steps": load.share(),
        **timing_figures(times),
    }


def make_step(data: Dataset, *, with_transfer: bool = False) -> NextStep:
    """Return a step of DeepFM that gets its own batches, with a transfer or without."""
    torch.manual_seed(0)
    model = DeepFM(data.schema, dim=DIM, hidden=HIDDEN)
    step = TrainingStep(model, optimizer(model, lr=LR, tables="rowwise"))
    if with_transfer:
        step.backward = HarmlessTransfer().start(model, counts=data.counts()).backward
    return NextStep(step, data, sliced(data, BATCH_SIZE))
