"""Count the files of `src/rarebit` whose functions run in one step, run, prune, prepare and study.

    PYTHONPATH=src .venv/bin/python tools/files_touched.py            counts
    PYTHONPATH=src .venv/bin/python tools/files_touched.py prune      counts, and the files of a prune

A file counts when one of its functions is called; importing it does not count.
"""

import contextlib
import inspect
import io
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from torch.nn import functional as F

import rarebit as rb
from rarebit.data.prepare import prepare
from rarebit.models import build_model
from rarebit.pruning import PruneSettings, prune_run
from rarebit.study.plan import StudyPlan
from rarebit.training.run import run
from rarebit.training.settings import RunSettings, load_splits
from rarebit.training.step import Steps, TrainingStep

SRC = str(Path(rb.__file__).parent)
SETTINGS = RunSettings.from_mapping(
    {
        "model": {"name": "deepfm", "dim": 4},
        "data": {"rows": 2000},
        "training": {"epochs": 2, "batch_size": 256},
    }
)


def files_touched(call: Callable[[], object]) -> set[str]:
    """Return the files whose functions run during a call, in all its threads."""
    seen = set()

    def note(frame, event, _):  # noqa: ANN001, ANN202  # the signature of sys.setprofile
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:  # no module, no class body
            seen.add(code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {name.removeprefix(f"{SRC}/") for name in seen if name.startswith(SRC)}


def one_step() -> Callable[[], object]:
    """Return a call that makes one more training step."""
    train = load_splits(SETTINGS.data).train
    model = build_model("deepfm", train.schema, {"dim": 4})
    step = TrainingStep(model, rb.optimizer(model), F.binary_cross_entropy_with_logits)
    steps = Steps(step, train)
    steps.start_epoch(train.order(seed=0, epoch=1))
    steps(0, 256)
    return lambda: steps(256, 512)


def main(shown: list[str]) -> None:
    """Print the counts, and the files of what is named."""
    folder = Path(tempfile.mkdtemp())
    quiet = {"progress": False, "say": str}
    draw = random.Random(0).randrange  # noqa: S311  # a log, not a secret
    rows = [f"u{draw(200)},i{draw(90)},{draw(2)},{draw(1000) / 1000}" for _ in range(3000)]
    log = folder / "log.csv"
    log.write_text("\n".join(["user,item,click,price", *rows]) + "\n")
    plan = StudyPlan.from_mapping(
        {
            "methods": "low-rank",
            "model": {"name": "fm", "dim": 4},
            "data": {"rows": 2000},
            "training": {"epochs": 1},
            "seeds": 2,
        }
    )
    budgets = PruneSettings(budgets=(500,))
    calls = {
        "step": one_step(),
        "run": lambda: run(SETTINGS, folder=folder / "run", **quiet),
        "prune": lambda: prune_run(SETTINGS, budgets, folder=folder / "prune", **quiet),
        "prepare": lambda: prepare(log, folder / "prepared", label="click"),
        "study": lambda: rb.study(folder / "study", plan),
    }
    for name, call in calls.items():
        files = files_touched(call)
        print(f"{name:8} {len(files)}")
        if name in shown:
            print("\n".join(f"  {file}" for file in sorted(files)))


if __name__ == "__main__":
    main(sys.argv[1:])
