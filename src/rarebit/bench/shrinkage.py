"""A training step of shrunk tables, against the same step of plain tables.

    plain       DeepFM at the shape of Criteo, width 16, with lazy Adam, as `fit` trains it
    shrunk      the same with `Shrinkage()` on every table, first-order weights among them
    row_rate    the same with `RowRate()`, which has no prior

A measured unit is one step of 4096 rows; 967,795 values have a row of their own.
"""

import torch

from rarebit.bench._frame import BenchResult, OtherLoad, Say, measure, timing_figures
from rarebit.bench._steps import NextStep
from rarebit.bench.train import DIM, HIDDEN, LR, ROWS, sliced
from rarebit.data.dataset import Dataset
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.methods._counts import set_counts_
from rarebit.methods.shrinkage import Shrinkage
from rarebit.models.deepfm import DeepFM
from rarebit.research.row_rate import RowRate
from rarebit.tables.apply import apply_
from rarebit.tables.table import Method
from rarebit.training.optimizers import optimizer
from rarebit.training.step import TrainingStep

__all__ = ["make_step", "run"]

BATCH_SIZE = 4096
BUDGET = 30.0
"""Seconds for all sides."""


def run(say: Say) -> BenchResult:
    """Measure the three steps."""
    data = generate(SyntheticLog(preset="criteo", rows=ROWS)).train
    say(f"shrinkage: three sides, {BUDGET:.0f} s")
    steps = {
        "plain": make_step(data),
        "shrunk": make_step(data, Shrinkage()),
        "row_rate": make_step(data, RowRate()),
    }
    load = OtherLoad()
    times = measure(steps, budget=BUDGET)
    plain = times["plain"].median
    return {
        "ratio": times["shrunk"].median / plain,
        "ratio_of": "time of a step of shrunk tables / time of a plain step, both with lazy Adam",
        "ratio_row_rate": times["row_rate"].median / plain,
        "other_load_steps": load.share(),
        **timing_figures(times),
    }


def make_step(data: Dataset, method: Method | None = None) -> NextStep:
    """Return a step of DeepFM that gets its own batches, with a method on its tables or without."""
    torch.manual_seed(0)
    model = DeepFM(data.schema, dim=DIM, hidden=HIDDEN)
    if method is not None:
        apply_(model, method, verbose=False)
        set_counts_(model, data.counts())
    step = TrainingStep(model, optimizer(model, lr=LR, tables="rowwise"))
    return NextStep(step, data, sliced(data, BATCH_SIZE))
