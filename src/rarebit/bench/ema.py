"""A training step that averages its weights, against the same step without, and against torch's way.

    plain    DeepFM at the shape of Criteo with lazy Adam, as `fit` trains it
    ema      the same with `EMA`: exact, and only the rows of the step are touched
    torch    the same with torch's `AveragedModel`, which walks every row in every step

A measured unit is one step of 1024 rows.
"""

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rarebit.bench._frame import BenchResult, Say, measure, timing_figures
from rarebit.bench._steps import lazy_deepfm
from rarebit.training.ema import EMA

__all__ = ["run"]

BUDGET = 20.0
DECAY = 0.999


def run(say: Say) -> BenchResult:
    """Measure the three steps."""
    say(f"ema: {BUDGET:.0f} s")
    plain, ours, torchs = lazy_deepfm(3)
    EMA(ours.step.model, ours.step.optimizer, DECAY)
    averaged = AveragedModel(torchs.step.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def by_torch() -> None:
        torchs()
        averaged.update_parameters(torchs.step.model)

    times = measure({"plain": plain, "ema": ours, "torch": by_torch}, budget=BUDGET)
    return {
        "ratio": times["torch"].median / times["ema"].median,
        "ratio_of": "time of a step averaged by torch / time of a step averaged by ours",
        "ratio_plain": times["ema"].median / times["plain"].median,
        **timing_figures(times),
    }
