"""What a checkpoint a minute costs training.

    plain        some steps of DeepFM at the shape of Criteo with lazy Adam, 1024 rows each
    checkpoint   the same steps, with one checkpoint begun before the first and on the disk after the last

The difference is the training time that one checkpoint takes: copying the state between two steps, and
writing it while training goes on. `ratio` is what one a minute makes of a minute.
"""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

from rarebit.bench._frame import BenchResult, Say, measure, timing_figures
from rarebit.bench._steps import NextStep, lazy_deepfm
from rarebit.training.checkpoints import CheckpointFolder, Checkpoints
from rarebit.training.loop import Silence, TrainingLoop
from rarebit.training.settings import Training
from rarebit.training.step import Steps
from rarebit.training.stopping import StopRequests

__all__ = ["run"]

BUDGET = 60.0
STEPS = 100
"""Steps in which a checkpoint is surely written."""


def run(say: Say) -> BenchResult:
    """Measure steps with and without a checkpoint."""
    say(f"checkpoint: {BUDGET:.0f} s")
    plain, written = lazy_deepfm(2)
    with tempfile.TemporaryDirectory() as folder:
        sides = {"plain": _steps(plain), "checkpoint": _with_checkpoint(written, Path(folder))}
        times = measure(sides, budget=BUDGET)
        num_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    lost = times["checkpoint"].median - times["plain"].median
    return {
        "ratio": 1.0 + lost / 60.0,
        "ratio_of": "a minute of training with one checkpoint / without",
        "lost_seconds": lost,
        "checkpoint_megabytes": num_bytes / 2 / 1e6,  # two are kept
        **timing_figures(times),
    }


def _steps(side: NextStep) -> Callable[[], None]:
    def some() -> None:
        for _ in range(STEPS):
            side()

    return some


def _with_checkpoint(side: NextStep, folder: Path) -> Callable[[], None]:
    train, steps = side.data, _steps(side)
    loop = TrainingLoop(Steps(side.step, train), None, Training(), Silence())
    checkpoints = Checkpoints(
        CheckpointFolder(folder), {}, StopRequests(), minutes=1.0, say=Silence().say
    )
    numbers = itertools.count()

    def some() -> None:
        loop.batch = next(numbers)  # a name of its own for each
        checkpoints.save(loop)
        steps()
        checkpoints.wait()

    return some
