"""A training step of tables with thresholds, against the same step of plain tables.

    plain        DeepFM at the shape of Criteo, width 64, with lazy Adam, as `fit` trains it
    scheduled    the same with one given threshold, which rises in every step
    learned      the same with a learned threshold for each entry

A measured unit is one step of 4096 rows; 967,795 values have a row of their own. `bytes` are those of the
weights and the optimizer's state of the tables. The thresholds cut a part of the entries from the start: an
entry that is cut is no cheaper in a step than another.
"""

from collections.abc import Callable

import torch

from rarebit.bench._frame import BenchResult, OtherLoad, Say, measure, timing_figures
from rarebit.bench._steps import NextStep
from rarebit.bench.train import HIDDEN, LR, ROWS, sliced
from rarebit.data.dataset import Dataset
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.models.deepfm import DeepFM
from rarebit.pruning.pep import PEP, set_threshold_
from rarebit.tables.apply import apply_
from rarebit.training.optimizers import optimizer
from rarebit.training.step import TrainingStep

__all__ = ["make_step", "run"]

DIM, BATCH_SIZE = 64, 4096
INIT = -5.0
"""A threshold of 0.0067, below which half of the entries start."""
RISE = 1e-6
"""How much the given threshold rises in a step."""
BUDGET = 40.0
"""Seconds for all sides."""


def run(say: Say) -> BenchResult:
    """Measure the three steps."""
    data = generate(SyntheticLog(preset="criteo", rows=ROWS)).train
    say(f"pep: three sides, {BUDGET:.0f} s")
    steps = {
        "plain": make_step(data),
        "scheduled": make_step(data, PEP(schedule="given")),
        "learned": make_step(data, PEP(init=INIT)),
    }
    load = OtherLoad()
    times = measure(steps | {"scheduled": _rising(steps["scheduled"])}, budget=BUDGET)
    plain = times["plain"].median
    figures: BenchResult = {
        "ratio": times["scheduled"].median / plain,
        "ratio_of": "time of a step with a given threshold / time of a plain step, both with lazy Adam",
        "ratio_learned": times["learned"].median / plain,
        "other_load_steps": load.share(),
    }
    figures |= timing_figures(times)
    return figures | {f"{side}_bytes": _table_bytes(step) for side, step in steps.items()}


def make_step(data: Dataset, method: PEP | None = None) -> NextStep:
    """Return a step of DeepFM that gets its own batches, with thresholds on its tables or without."""
    torch.manual_seed(0)
    model = DeepFM(data.schema, dim=DIM, hidden=HIDDEN)
    if method is not None:
        apply_(model, method, verbose=False)
    step = TrainingStep(model, optimizer(model, lr=LR, tables="rowwise"))
    return NextStep(step, data, sliced(data, BATCH_SIZE))


def _rising(step: NextStep) -> Callable[[], None]:
    """Return a step that is preceded by a threshold somewhat higher than the last."""
    threshold = float(torch.sigmoid(torch.tensor(INIT)))

    def next_step() -> None:
        nonlocal threshold
        threshold += RISE
        set_threshold_(step.step.model, threshold)
        step()

    return next_step


def _table_bytes(side: NextStep) -> int:
    """Return the bytes of tables and thresholds, and of what the optimizer keeps of them."""
    groups = [g for g in side.step.optimizer.param_groups if g["name"] != "network"]
    held = [parameter for group in groups for parameter in group["params"]]
    state = side.step.optimizer.state
    kept = [part for p in held for part in state[p].values() if part.dim() > 0]
    return sum(tensor.nbytes for tensor in [*held, *kept])
