"""A training step with a row rule attached, against the same step with plain `backward`.

    plain    DeepFM at the shape of Criteo with lazy Adam, as `fit` trains it
    rule     the same with the sum rule on its table: what the mechanism itself costs

Both train the same weights to the last bit; a measured unit is one step of 1024 rows.
"""

from rarebit.bench._frame import BenchResult, Say, measure, timing_figures
from rarebit.bench._steps import lazy_deepfm
from rarebit.row_gradients.seam import RowGradients, sum_losses

__all__ = ["run"]

BUDGET = 20.0


def run(say: Say) -> BenchResult:
    """Measure both steps."""
    say(f"row-gradients: {BUDGET:.0f} s")
    plain, rule = lazy_deepfm(2)
    rule.step.backward = RowGradients(rule.step.model, sum_losses).backward
    times = measure({"plain": plain, "rule": rule}, budget=BUDGET)
    return {
        "ratio": times["rule"].median / times["plain"].median,
        "ratio_of": "time of a step with the sum rule / time of a plain step",
        **timing_figures(times),
    }
