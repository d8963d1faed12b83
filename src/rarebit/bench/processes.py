"""What surrounds training: importing the package, checkpoints, and studies of many runs."""

import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rarebit.bench._frame import BenchResult, Say, compare, measure, run_python, timing_figures
from rarebit.bench.steps import SMALL_BATCH, NextStep, criteo_log, deepfm_step
from rarebit.data.dataset import Splits
from rarebit.study.plan import StudyPlan
from rarebit.study.study import study as run_study
from rarebit.training.checkpoints import CheckpointFolder, Checkpoints, StopRequests
from rarebit.training.fit import Silence, TrainingLoop, fit
from rarebit.training.metrics import evaluate
from rarebit.training.run import start_model
from rarebit.training.settings import Training, load_splits
from rarebit.training.step import Steps

STEPS = 100
"""Enough steps to write a checkpoint."""
TORCH = "import torch"
BOTH = """
import time, torch
start = time.perf_counter()
import rarebit._api
print(time.perf_counter() - start)
"""
SEEDS, ROUNDS = 6, 3
PLAN = StudyPlan.from_mapping(
    {
        "methods": "baseline",
        "model": {"name": "deepfm", "hidden": [128, 128]},
        "data": {"rows": 300_000},
        "training": {"epochs": 3, "tables": "rowwise"},
        "seeds": SEEDS,
    }
)


def checkpoint(say: Say, *, steps: int = STEPS, budget: float = 60.0) -> BenchResult:
    """What one checkpoint per minute costs training: steps of DeepFM with lazy Adam, batch size 1024.

    `checkpoint` starts one before its first step and has it on disk after its last. The difference is the
    training time that a checkpoint takes: copying the state between two steps, and writing it while training
    runs. `ratio` is a minute with one checkpoint over a minute without.
    """
    say(f"checkpoint: {budget:.0f} s")
    data = criteo_log()
    plain, written = (deepfm_step(data, batch_size=SMALL_BATCH) for _ in range(2))

    def some() -> None:
        for _ in range(steps):
            plain()

    with tempfile.TemporaryDirectory() as folder:
        variants = {"plain": some, "checkpoint": _with_checkpoint(written, steps, Path(folder))}
        times, figures = compare(variants, budget=budget)
        num_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    lost = times["checkpoint"].median - times["plain"].median
    return {
        "ratio": 1.0 + lost / 60.0,
        "ratio_of": "a minute of training with one checkpoint / without",
        "lost_seconds": lost,
        "checkpoint_megabytes": num_bytes / 2 / 1e6,  # two are kept
        **figures,
    }


def _with_checkpoint(step: NextStep, steps: int, folder: Path) -> Callable[[], None]:
    loop = TrainingLoop(Steps(step.step, step.data), None, Training(), Silence())
    checkpoints = Checkpoints(
        CheckpointFolder(folder), {}, StopRequests(), minutes=1.0, say=Silence().say
    )
    numbers = itertools.count()

    def some() -> None:
        loop.batch = next(numbers)  # each checkpoint needs another name
        checkpoints.save(loop)
        for _ in range(steps):
            step()
        checkpoints.wait()

    return some


def import_(say: Say, *, budget: float = 25.0) -> BenchResult:
    """The time of `import rarebit` beyond `import torch`, each in fresh processes.

    Both include the start of Python. `import_seconds` is what the second import takes by itself.
    """
    say(f"import: fresh processes, {budget:.0f} s")
    printed: list[float] = []
    variants: dict[str, Callable[[], object]] = {
        "torch": lambda: run_python(TORCH),
        "rarebit": lambda: printed.append(float(run_python(BOTH))),
    }
    # the first process may have to compile the files, so one warm-up round is needed
    times, figures = compare(variants, budget=budget, warm_up=1)
    counted = printed[-len(times["rarebit"].seconds) :]
    return {
        "ratio": times["rarebit"] / times["torch"],
        "ratio_of": "time of a process that imports torch and rarebit / one that imports torch",
        "import_seconds": statistics.median(counted),
        **figures,
    }


def study(say: Say) -> BenchResult:
    """A small study of six runs of DeepFM, against a loop over the same runs.

    `loop` trains them one after the other in this process, with all threads; `study` in worker processes of
    one thread each, with checkpoints and scores on disk. The ratio is the gain of parallel runs, minus starting
    processes and writing results. Both read the same generated log.
    """
    say(f"study: {ROUNDS} rounds of {SEEDS} runs per variant")
    splits, numbers = load_splits(PLAN.runs[0].data), itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        variants = {
            "loop": lambda: _loop(splits),
            "study": lambda: _study(Path(folder) / str(next(numbers))),
        }
        times = measure(variants, budget=0.0, warm_up=0, min_rounds=ROUNDS)
    return {
        "ratio": times["loop"] / times["study"],
        "ratio_of": "time of a loop over the runs / time of the study",
        "runs": SEEDS,
        **timing_figures(times),
    }


def _loop(splits: Splits) -> None:
    settings, counts = PLAN.runs[0], splits.train.counts()
    for seed in range(SEEDS):
        this = replace(settings, training=replace(settings.training, seed=seed))
        model = start_model(this, splits.train.schema)
        fit(model, splits.train, splits.valid, settings=this.training, progress=False)
        evaluate(model, splits.test, counts=counts)


def _study(folder: Path) -> None:
    result = run_study(folder, PLAN, device="cpu", progress=False)
    assert result.is_complete, "half a study would take half the time"
