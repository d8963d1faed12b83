"""A small study, beside the same runs in a plain loop.

    loop     six runs of DeepFM, one after the other in this process, with all threads
    study    the same runs by `study`: worker processes of one thread each, checkpoints, scores on disk

`ratio` is the loop's time over the study's: what running side by side gains after starting processes and
keeping everything. Both read the same generated log.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rarebit.bench._frame import BenchResult, Say, measure, timing_figures
from rarebit.data.dataset import Splits
from rarebit.study.plan import StudyPlan
from rarebit.study.study import study
from rarebit.training.fit import fit
from rarebit.training.metrics import evaluate
from rarebit.training.run import start_model
from rarebit.training.settings import load_splits

__all__ = ["run"]

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


def run(say: Say) -> BenchResult:
    """Measure a study and a loop over its runs."""
    say(f"study: {ROUNDS} rounds of {SEEDS} runs each way")
    splits = load_splits(PLAN.runs[0].data)
    with _studies() as by_study:
        sides = {"loop": lambda: _loop(splits), "study": by_study}
        times = measure(sides, budget=0.0, warm_up=0, min_rounds=ROUNDS)
    return {
        "ratio": times["loop"].median / times["study"].median,
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


@contextmanager
def _studies() -> Iterator[Callable[[], None]]:
    """Give a function that makes the whole study, in a new folder each time."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        yield lambda: _whole(Path(folder) / str(next(numbers)))


def _whole(folder: Path) -> None:
    result = study(folder, PLAN, device="cpu", progress=False)
    assert result.is_complete, "half a study would be twice as fast"
