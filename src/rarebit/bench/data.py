"""Preparing a raw click log, against the straightforward pandas program.

    ours     `prepare_source` with values counted over all rows, as pandas counts them
    pandas   read, count, map, save: `_pandas_program.py`

Both read the same generated log in Criteo's raw format and keep values seen 10 times. Each side runs in
a process of its own, three times, in turns. A process tells how long its work took, without imports,
and the most memory it ever had, with them. The prepared folder is then opened in this process, and read
in shuffled batches with one torch thread; drawing their order is counted, too.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from rarebit.bench._frame import FOLDER, BenchResult, Say, measure
from rarebit.bench._raw_log import write_raw_log
from rarebit.data.dataset import Dataset
from rarebit.data.order import shuffled_order
from rarebit.errors import MissingExtraError

__all__ = ["SIDES", "Told", "compare", "measured", "prepare", "run"]

ROWS, ROUNDS = 300_000, 3
BATCH_SIZE, EPOCHS, OPENINGS = 4096, 5, 11
SIDES = {
    "ours": (
        "import rarebit.data.raw.encode, rarebit.data.sources.criteo\n"
        "from rarebit.bench.data import prepare"
    ),
    # by its place: a process that imports rarebit has torch in its memory
    "pandas": f"sys.path.append({str(FOLDER)!r})\nimport pandas\nfrom _pandas_program import prepare",
}
"""What each side imports before its time begins: `prepare(log, folder)`, and what that will need."""
# The process reads its own peak: what wait4 tells of a child is never below the peak of its parent.
PROCESS = """
import json, sys, time
from pathlib import Path
{imports}
start = time.perf_counter()
prepare(Path(sys.argv[1]), Path(sys.argv[2]))
seconds, peak = time.perf_counter() - start, None
if (status := Path("/proc/self/status")).exists():
    peak = next(1024 * int(line.split()[1]) for line in status.open() if line.startswith("VmHWM:"))
print(json.dumps({{"seconds": seconds, "peak_bytes": peak}}))
"""


@dataclass(frozen=True)
class Told:
    """What a process told of its work."""

    seconds: float
    peak_bytes: int | None
    """The most memory that it had; None where the system does not say."""


def run(say: Say) -> BenchResult:
    """Measure both sides."""
    with tempfile.TemporaryDirectory() as folder:
        return compare(ROWS, Path(folder), say)


def compare(rows: int, folder: Path, say: Say) -> BenchResult:
    """Prepare a log of so many rows on both sides, and read what ours made of it."""
    for package, extra in {"polars": "data", "pandas": "test"}.items():
        if find_spec(package) is None:
            raise MissingExtraError(package, extra, "the bench of preparing data")
    log = folder / "log.tsv"
    write_raw_log(log, rows)
    say(f"data: {rows:,} rows, {log.stat().st_size / 1e6:.0f} MB, {ROUNDS} times on each side")
    told: dict[str, list[Told]] = {name: [] for name in SIDES}

    def side(name: str) -> Callable[[], None]:
        return lambda: told[name].append(measured(SIDES[name], log, folder / name))

    measure({name: side(name) for name in SIDES}, budget=0.0, warm_up=0, min_rounds=ROUNDS)
    return _figures(rows, told) | _reading(folder / "ours")


def prepare(log: Path, folder: Path) -> None:
    """Prepare a log as a user does, with the counts and the minimum count of the pandas program."""
    from rarebit.data.prepare import prepare_source

    prepare_source("criteo", log, folder, protocol="pep", bad_rows="stop")


def measured(imports: str, log: Path, folder: Path) -> Told:
    """Run `prepare(log, folder)` in a fresh process, with this rarebit; the folder is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    places = [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(  # noqa: S603  # code of this file
        [sys.executable, "-c", PROCESS.format(imports=imports), str(log), str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Told(**json.loads(done.stdout.splitlines()[-1]))


def _figures(rows: int, told: dict[str, list[Told]]) -> BenchResult:
    seconds = {
        name: statistics.median(one.seconds for one in rounds) for name, rounds in told.items()
    }
    peaks = {name: _median_peak(rounds) for name, rounds in told.items()}
    ours, pandas = peaks["ours"], peaks["pandas"]
    return {
        "ratio": seconds["pandas"] / seconds["ours"],
        "ratio_of": "time of the pandas program / time of ours",
        "memory_ratio": None if ours is None or pandas is None else ours / pandas,
        "rows": rows,
        **{f"{name}_seconds": median for name, median in seconds.items()},
        **{f"{name}_peak_mb": None if peak is None else peak / 1e6 for name, peak in peaks.items()},
        "rows_per_second": round(rows / seconds["ours"]),
        "rounds": ROUNDS,
    }


def _median_peak(rounds: list[Told]) -> float | None:
    peaks = [one.peak_bytes for one in rounds if one.peak_bytes is not None]
    return statistics.median(peaks) if peaks else None


def _reading(folder: Path) -> BenchResult:
    """Measure opening a prepared folder, and an epoch of its rows in shuffled batches."""
    opening = [_seconds(partial(Dataset.open, folder)) for _ in range(OPENINGS)]
    data, threads = Dataset.open(folder), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        epochs = [_seconds(partial(_epoch, data, number)) for number in range(EPOCHS)]
    finally:
        torch.set_num_threads(threads)
    return {
        "open_ms": 1000 * statistics.median(opening),
        "batches_rows_per_second": round(len(data) / statistics.median(epochs)),
    }


def _epoch(data: Dataset, number: int) -> None:
    for _ in data.batches(BATCH_SIZE, shuffled_order(len(data), seed=0, epoch=number)):
        pass


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
