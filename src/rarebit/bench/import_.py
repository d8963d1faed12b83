"""The time of `import rarebit` beyond `import torch`, each time in a fresh process.

    torch     a process that imports torch
    rarebit   a process that imports torch, then rarebit, and tells how long the second took

Both include the start of Python.
"""

import os
import statistics
import subprocess
import sys

from rarebit.bench._frame import FOLDER, BenchResult, Say, measure, timing_figures

__all__ = ["run"]

BUDGET = 25.0
TORCH = "import torch"
BOTH = """
import time, torch
start = time.perf_counter()
import rarebit
print(time.perf_counter() - start)
"""


def run(say: Say) -> BenchResult:
    """Measure the import."""
    say(f"import: fresh processes, {BUDGET:.0f} s")
    told: list[float] = []
    sides = {
        "torch": lambda: _python(TORCH),
        "rarebit": lambda: told.append(float(_python(BOTH))),
    }
    # The first process may have to compile the files, so one round of warm-up is needed.
    times = measure(sides, budget=BUDGET, warm_up=1)
    counted = told[-len(times["rarebit"].seconds) :]
    return {
        "ratio": times["rarebit"].median / times["torch"].median,
        "ratio_of": "time of a process that imports torch and rarebit / one that imports torch",
        "import_seconds": statistics.median(counted),
        **timing_figures(times),
    }


def _python(code: str) -> str:
    """Run code in a fresh process, with this rarebit, and return what it printed."""
    places = [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(  # noqa: S603  # code of this file
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout
