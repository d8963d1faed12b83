"""What forgetting adds to an epoch: all rows are written once, and the optimizer starts again with them.

    step        a step of DeepFM at the shape of Criteo, width 16, with lazy Adam, as `fit` trains it
    forget      `forget_` on the same model

967,795 values have a row of their own; an epoch is taken to have a million rows, in steps of 4096. Longer
ones have less of it.
"""

import math

from rarebit.bench._frame import BenchResult, OtherLoad, Say, measure, timing_figures
from rarebit.bench.shrinkage import BATCH_SIZE, make_step
from rarebit.bench.train import ROWS
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.methods.forgetting import forget_

__all__ = ["run"]

BUDGET = 20.0
"""Seconds for both sides."""
EPOCH = 1_000_000
"""Rows of an epoch."""


def run(say: Say) -> BenchResult:
    """Measure a step and the forgetting between two epochs."""
    data = generate(SyntheticLog(preset="criteo", rows=ROWS)).train
    say(f"forgetting: two sides, {BUDGET:.0f} s")
    step, counts = make_step(data), data.counts()
    step()  # the optimizer has a state from here on
    model, optimizer = step.step.model, step.step.optimizer
    load = OtherLoad()
    times = measure(
        {"step": step, "forget": lambda: forget_(model, optimizer, counts)}, budget=BUDGET
    )
    steps = math.ceil(EPOCH / BATCH_SIZE)
    in_steps = times["forget"].median / times["step"].median
    return {
        "ratio": (steps + in_steps) / steps,
        "ratio_of": "time of an epoch of a million rows with forgetting / without",
        "forget_in_steps": in_steps,
        "steps_of_an_epoch": steps,
        "other_load_steps": load.share(),
        **timing_figures(times),
    }
