"""A training step of tables trained as products, against the same step of plain tables.

    plain          DeepFM at the shape of Criteo, width 16, with lazy Adam, as `fit` trains it
    mlet           the same with `MLET(inner_dim=64)` on every table but the first-order weights
    plain_dense    both with dense Adam, which walks every row in every step
    mlet_dense

A measured unit is one step of 4096 rows; 967,795 values have a row of their own. `bytes` are those of the
weights and the optimizer's state of the tables.
"""

import torch

from rarebit.bench._frame import BenchResult, OtherLoad, Say, measure, timing_figures
from rarebit.bench._steps import NextStep
from rarebit.bench.train import DIM, HIDDEN, LR, ROWS, sliced
from rarebit.data.dataset import Dataset
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.methods.mlet import MLET
from rarebit.models.deepfm import DeepFM
from rarebit.tables.apply import apply_
from rarebit.training.optimizers import TableMode, optimizer
from rarebit.training.step import TrainingStep

__all__ = ["make_step", "run"]

INNER_DIM, BATCH_SIZE = 64, 4096
BUDGET = 20.0
"""Seconds for each kind of optimizer."""


def run(say: Say) -> BenchResult:
    """Measure both steps with both kinds of optimizer."""
    data = generate(SyntheticLog(preset="criteo", rows=ROWS)).train
    figures: BenchResult = {
        "ratio": None,
        "ratio_of": "time of a step with MLET / time of a plain step, both with lazy Adam",
    }
    modes: dict[str, TableMode] = {"": "rowwise", "_dense": "dense"}
    for end, tables in modes.items():
        say(f"mlet: {tables} Adam, {BUDGET:.0f} s")
        sides = {
            "plain": make_step(data, tables),
            "mlet": make_step(data, tables, MLET(inner_dim=INNER_DIM)),
        }
        load = OtherLoad()
        times = measure(sides, budget=BUDGET)
        figures[f"other_load_{tables}"] = load.share()
        figures[f"ratio{end}"] = times["mlet"].median / times["plain"].median
        figures |= timing_figures(times, end)
        for side, step in sides.items():
            figures[f"{side}_bytes{end}"] = _table_bytes(step)
    return figures


def make_step(data: Dataset, tables: TableMode, method: MLET | None = None) -> NextStep:
    """Return a step of DeepFM that gets its own batches, with a method on its tables or without."""
    torch.manual_seed(0)
    model = DeepFM(data.schema, dim=DIM, hidden=HIDDEN)
    if method is not None:
        apply_(model, method, verbose=False)
    step = TrainingStep(model, optimizer(model, lr=LR, tables=tables))
    return NextStep(step, data, sliced(data, BATCH_SIZE))


def _table_bytes(side: NextStep) -> int:
    """Return the bytes of the tables' weights and of what the optimizer keeps of them."""
    group = next(g for g in side.step.optimizer.param_groups if g["name"] == "tables")
    state = side.step.optimizer.state
    kept = [part for p in group["params"] for part in state[p].values() if part.dim() > 0]
    return sum(tensor.nbytes for tensor in [*group["params"], *kept])
