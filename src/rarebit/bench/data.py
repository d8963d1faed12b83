"""Preparing a raw click log, against the straightforward pandas program.

    ours     `prepare_source` with values counted over all rows, as pandas counts them
    pandas   read, count, map, save: `_pandas_program.py`

Both read the same generated log in Criteo's raw format and keep values seen 10 times. Each variant runs in
fresh processes, three times, in turns. A process reports how long its work took, without imports, and its
peak memory, with them. This process then opens the prepared folder, and reads it in shuffled batches with one
torch thread, including the time to draw their order.
"""

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any

import numpy as np
import torch

from rarebit.bench._frame import (
    FOLDER,
    BenchResult,
    Say,
    measure,
    run_python,
    timing_figures,
)
from rarebit.bench._raw_log import write_raw_log
from rarebit.data.dataset import Dataset
from rarebit.data.log_schema import Column, LogSchema, Split
from rarebit.data.order import shuffled_order
from rarebit.data.prepare import prepare as prepare_log
from rarebit.errors import MissingExtraError, import_extra

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
"""What each variant imports before its time starts: `prepare(log, folder)`, and what that will need."""
# The process reads its own peak: what wait4 reports of a child is never below the peak of its parent.
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
class Work:
    """What a process reports about its work."""

    seconds: float
    peak_bytes: int | None
    """Its peak memory; None if the system does not report it."""


def data(say: Say) -> BenchResult:
    """Measure both variants."""
    with tempfile.TemporaryDirectory() as folder:
        return compare(ROWS, Path(folder), say)


def compare(rows: int, folder: Path, say: Say) -> BenchResult:
    """Prepare a log of so many rows with both variants, and read what ours made of it."""
    for package, extra in {"polars": "data", "pandas": "test"}.items():
        if find_spec(package) is None:
            raise MissingExtraError(package, extra, "the bench of preparing data")
    log = folder / "log.tsv"
    write_raw_log(log, rows)
    say(f"data: {rows:,} rows, {log.stat().st_size / 1e6:.0f} MB, {ROUNDS} times per variant")
    work: dict[str, list[Work]] = {name: [] for name in SIDES}

    def variant(name: str) -> Callable[[], None]:
        return lambda: work[name].append(measured(SIDES[name], log, folder / name))

    measure({name: variant(name) for name in SIDES}, budget=0.0, warm_up=0, min_rounds=ROUNDS)
    return _figures(rows, work) | _reading(folder / "ours")


def prepare(log: Path, folder: Path) -> None:
    """Prepare a log as a user does, with the counts and the minimum count of the pandas program."""
    from rarebit.data.prepare import prepare_source

    prepare_source("criteo", log, folder, protocol="pep", bad_rows="stop")


def measured(imports: str, log: Path, folder: Path) -> Work:
    """Run `prepare(log, folder)` in a fresh process, with this rarebit, into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    printed = run_python(PROCESS.format(imports=imports), log, folder)
    return Work(**json.loads(printed.splitlines()[-1]))


def _figures(rows: int, work: Mapping[str, list[Work]]) -> BenchResult:
    seconds = {name: median(one.seconds for one in rounds) for name, rounds in work.items()}
    peaks: dict[str, float | None] = {}
    for name, rounds in work.items():
        known = [one.peak_bytes for one in rounds if one.peak_bytes is not None]
        peaks[name] = median(known) if known else None
    ours, pandas = peaks["ours"], peaks["pandas"]
    return {
        "ratio": seconds["pandas"] / seconds["ours"],
        "ratio_of": "time of the pandas program / time of ours",
        "memory_ratio": None if ours is None or pandas is None else ours / pandas,
        "rows": rows,
        **{f"{name}_seconds": middle for name, middle in seconds.items()},
        **{f"{name}_peak_mb": None if peak is None else peak / 1e6 for name, peak in peaks.items()},
        "rows_per_second": round(rows / seconds["ours"]),
        "rounds": ROUNDS,
    }


def _reading(folder: Path) -> BenchResult:
    """Measure opening a prepared folder, and an epoch of its rows in shuffled batches."""
    opening = repeat(lambda: Dataset.open(folder, verify=False), number=1, repeat=OPENINGS)
    rows, threads = Dataset.open(folder), torch.get_num_threads()
    numbers = itertools.count()

    def epoch() -> None:
        for _ in rows.batches(BATCH_SIZE, shuffled_order(len(rows), seed=0, epoch=next(numbers))):
            pass

    torch.set_num_threads(1)
    try:
        epochs = repeat(epoch, number=1, repeat=EPOCHS)
    finally:
        torch.set_num_threads(threads)
    return {
        "open_ms": 1000 * median(opening),
        "batches_rows_per_second": round(len(rows) / median(epochs)),
    }


def update(say: Say, *, rows: int = 1_000_000, rounds: int = 3) -> BenchResult:
    """A day of 1,000,000 rows and 5 % new items through `update`, against `prepare` and `run` on the same rows.

    Both read the file, encode it, train DCN-V2 with row-wise Adam in one pass over all rows and write a model. `update` also
    extends the vocabulary, grows tables and optimizer, and scores rows before and after the day for its report.
    `ratio_epoch` compares rows trained per second with `run` in an epoch over 80 % of the rows, which scores the rest.
    """
    from rarebit.training.run import run
    from rarebit.training.settings import RunSettings
    from rarebit.training.update import update as learn_day

    pl = import_extra("polars", "data", "reading raw logs")
    sizes = {"user": 200_000, "item": 100_000, "shop": 5000, "kind": 300, "hour": 24, "device": 6}
    draw = np.random.default_rng(0)

    def write(path: Path, first: int) -> Path:
        columns: dict[str, Any] = {
            name: np.floor(size * draw.random(rows) ** 3).astype(np.int64)
            for name, size in sizes.items()
        }
        columns["item"] += first
        columns["click"] = (draw.random(rows) < 0.2 + 0.1 * (columns["kind"] % 3)).astype(np.int8)
        pl.DataFrame(columns).write_parquet(path)
        return path

    def trained(log: Path, out: Path, *, one_pass: bool) -> None:
        prepare_log(log, out / "data", schema=schema)
        values = {
            "model": {"name": "dcn_v2", "dim": 16},
            "data": {"folder": str(out / "data")},
            "training": {"epochs": 1, "tables": "rowwise", "one_pass": one_pass},
        }
        run(RunSettings.from_mapping(values), folder=out, progress=False, say=lambda _: None)

    columns = tuple(Column(name=name) for name in sizes)
    schema = LogSchema(label="click", columns=columns, split=Split(kind="order"))
    with tempfile.TemporaryDirectory() as place:
        folder, numbers = Path(place), itertools.count()
        say(f"update: {3 * rounds} trainings on {rows:,} rows")
        monday = write(folder / "monday.parquet", 0)
        tuesday = write(folder / "tuesday.parquet", sizes["item"] // 20)
        trained(monday, folder / "monday", one_pass=False)
        variants = {
            "train": lambda: trained(tuesday, folder / f"train-{next(numbers)}", one_pass=True),
            "epoch": lambda: trained(tuesday, folder / f"epoch-{next(numbers)}", one_pass=False),
            "update": lambda: learn_day(
                folder / "monday", tuesday, folder / f"update-{next(numbers)}", progress=False
            ),
        }
        times = measure(variants, budget=0.0, warm_up=0, min_rounds=rounds)
    return {
        "ratio": times["train"] / times["update"],
        "ratio_of": "speed of update / speed of prepare and run in one pass, on the same rows",
        "ratio_epoch": times["epoch"] / times["update"] / schema.split.shares[0],
        "rows": rows,
        **timing_figures(times),
    }
