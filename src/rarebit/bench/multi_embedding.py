"""A training step of several embedding sets, against the same step of one set of the same width.

    single    DCN-V2 of the multi-embedding paper at the shape of Criteo, width 100, with lazy Adam
    multi     the same with ten sets of width 10, each with its own cross network

A measured unit is one step of 256 rows; 967,795 values have a row of their own. The tables are of the same
bytes; the cross networks are not: a matrix of one set has a hundredth of the entries of the single one, and
there are ten of them.
"""

import torch

from rarebit.bench._frame import BenchResult, OtherLoad, Say, measure, timing_figures
from rarebit.bench._steps import NextStep
from rarebit.bench.train import LR, ROWS, sliced
from rarebit.data.dataset import Dataset
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.methods.multi_embedding import MultiEmbedding
from rarebit.models import build_model
from rarebit.tables.apply import apply_
from rarebit.training.optimizers import optimizer
from rarebit.training.step import TrainingStep

__all__ = ["make_step", "run"]

NUM_SETS, DIM, BATCH_SIZE = 10, 10, 256
BUDGET = 60.0
"""Seconds for both sides."""


def run(say: Say) -> BenchResult:
    """Measure both steps."""
    data = generate(SyntheticLog(preset="criteo", rows=ROWS)).train
    say(f"multi-embedding: two sides, {BUDGET:.0f} s")
    sides = {"single": make_step(data, num_sets=1), "multi": make_step(data, num_sets=NUM_SETS)}
    load = OtherLoad()
    times = measure(sides, budget=BUDGET)
    figures: BenchResult = {
        "ratio": times["multi"].median / times["single"].median,
        "ratio_of": "time of a step with ten embedding sets / time of a step with one as wide, lazy Adam",
        "other_load_steps": load.share(),
        **timing_figures(times),
    }
    for side, step in sides.items():
        parameters = step.step.model.parameters()
        figures[f"{side}_weights"] = sum(parameter.numel() for parameter in parameters)
    return figures


def make_step(data: Dataset, *, num_sets: int) -> NextStep:
    """Return a step of DCN-V2 with one set of width 100 or ten of width 10, with its own batches."""
    torch.manual_seed(0)
    model = build_model("dcn_v2@me", data.schema, {"dim": NUM_SETS * DIM // num_sets})
    if num_sets > 1:
        apply_(model, MultiEmbedding(num_sets=num_sets), verbose=False)
    step = TrainingStep(model, optimizer(model, lr=LR, tables="rowwise"))
    return NextStep(step, data, sliced(data, BATCH_SIZE))
