"""Run a study: make the runs that are missing, side by side, and say what they show.

All sides of a seed have the same split, the same initial tables where shapes allow, and the same order of
rows. Each side gets the same number of trials; validation picks, test reports.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rarebit.errors import SettingsError, StudyError, StudyInterrupted
from rarebit.machine import machine
from rarebit.settings import require
from rarebit.storage.disk import file_lock
from rarebit.storage.files import write_json
from rarebit.study.cells import Cell, PlannedRun
from rarebit.study.plan import StudyPlan
from rarebit.study.pool import Answer, Pool, StudyLines, StudyProgress, StudySilence, Task
from rarebit.study.results import RESULTS, StudyResult
from rarebit.study.runs import stage_key
from rarebit.training.run import STAGE

__all__ = ["study"]

GPU_WORKERS = 1
"""Runs side by side on a GPU. Captured steps of one small run leave it no pauses: four runs side by side
take four times as long each (H200, recipes/compression-ml-1m.toml with --workers 4), and every process
has its own start to wait for."""


def study(
    folder: str | os.PathLike[str],
    plan: StudyPlan | None = None,
    *,
    minutes: float | None = None,
    workers: int | None = None,
    threads: int = 1,
    device: torch.device | str = "auto",
    keep_models: bool = False,
    progress: StudyProgress | bool = True,
    **values: Any,
) -> StudyResult:
    """Compare methods with paired seeds, each against its control, and return what was found.

    What is compared is a plan, or the same values by name: `methods`, `model`, `data`, `training`,
    `seeds`, ... Runs are kept in the folder, and a run that is there is not made again: the same call
    goes on where it was stopped. After so many `minutes` runs under way are written down and no more
    begin. Each run has `threads` threads of the CPU, so that its numbers do not depend on how many
    `workers` there are.

    >>> import tempfile
    >>> found = study(
    ...     tempfile.mkdtemp(), methods="baseline,low-rank", model={"name": "fm", "dim": 4},
    ...     data={"rows": 2000}, training={"epochs": 1}, seeds=2, device="cpu", progress=False)
    >>> [(side.name, len(side.runs)) for side in found.cells[0].sides]
    [('baseline', 2), ('narrow:dim=2', 2), ('low-rank:rank=1', 2)]
    """
    plan = _plan(plan, values)
    device = _device(device)
    require(minutes is None or minutes > 0, f"minutes must be above 0, got minutes={minutes}")
    require(workers is None or workers >= 1, f"workers must be at least 1, got workers={workers}")
    require(threads >= 1, f"threads must be at least 1, got threads={threads}")
    tell = (
        progress if not isinstance(progress, bool) else StudyLines() if progress else StudySilence()
    )
    facts = machine() | {"device": _device_name(device), "threads": threads}
    start = time.monotonic()
    deadline = None if minutes is None else start + 60 * minutes
    where = Path(folder)
    # a mistake in the plan or its data is told before anything is written
    failures: dict[str, str] = {}
    cells = [Cell(plan, settings, where, failures) for settings in plan.runs]
    with file_lock(_make_folder(where) / "lock"):
        write_json(where / "study.json", plan.to_mapping(), error=StudyError)
        with Pool(workers or _workers(device, threads), str(device), threads) as pool:
            runner = _Runner(pool, where, tell, deadline, failures, keep_models=keep_models)
            for stage in (Cell.tuning_runs, Cell.compared_runs):  # all cells before the next seed
                by_seed = ((cell, seed) for seed in cells[0].seeds for cell in cells)
                runner.make([run for cell, seed in by_seed for run in stage(cell, seed)])
        result = StudyResult(plan=plan.to_mapping(), cells=tuple(cell.result() for cell in cells))
        if result.is_complete:
            shutil.rmtree(where / STAGE, ignore_errors=True)
        took = {"minutes": round((time.monotonic() - start) / 60, 2), "runs_made": runner.made}
        values = {"machine": facts | took, "study": result.to_mapping()}
        write_json(where / RESULTS, values, error=StudyError)
    if pool.interrupted:
        raise StudyInterrupted(
            f"stopped; what is finished and what was under way is written to {str(where)!r}"
        )
    return result


class _Runner:
    """Makes the runs that are not there, and remembers which failed."""

    def __init__(
        self,
        pool: Pool,
        folder: Path,
        tell: StudyProgress,
        deadline: float | None,
        failures: dict[str, str],
        *,
        keep_models: bool,
    ) -> None:
        self.pool, self.folder, self.tell, self.deadline = pool, folder, tell, deadline
        self.failures, self.keep_models = failures, keep_models
        self.shared: set[str] = set()
        """First stages of pruning that several runs have together."""
        self.made = 0
        """Runs finished in this call."""

    def make(self, runs: Sequence[PlannedRun]) -> None:
        """Make runs side by side; one that several sides share is made once."""
        distinct = {run.folder.key: run for run in _makers_first(runs)}
        stages = Counter(stage_key(run.settings) for run in distinct.values())
        self.shared = {stage for stage, number in stages.items() if stage and number > 1}
        missing = {key: run for key, run in distinct.items() if not self._is_there(run)}
        if not distinct or self.pool.stopping.is_set():
            return
        self.tell.plan(len(distinct), len(distinct) - len(missing))
        self.pool.run(
            [Task(key, self._task(run)) for key, run in missing.items()],
            lambda answer: self._hear(missing[answer.task.key], answer),
            deadline=self.deadline,
        )

    def _is_there(self, run: PlannedRun) -> bool:
        return run.record is not None and (not self.keep_models or run.folder.model.exists())

    def _task(self, run: PlannedRun) -> dict[str, Any]:
        folder, stage = self.folder.absolute(), stage_key(run.settings)
        return {
            "folder": str(folder),
            "settings": run.settings.to_mapping(),
            "keep_model": self.keep_models,
            "pruning": str(folder / STAGE / stage) if stage in self.shared else None,
        }

    def _hear(self, run: PlannedRun, answer: Answer) -> None:
        match answer.values:
            case {"started": _}:
                self.tell.start(run.name)
            case {"done": _}:
                record = run.record
                assert record is not None, "a worker is done when its result is written"
                self.made += 1
                self.tell.finish(run.name, record)
            case {"failed": str(why)}:
                self.failures[run.folder.key] = why
                self.tell.fail(run.name, why)
            case {"epoch": _}:
                self.tell.epoch(run.name, answer.values)


def _makers_first(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return runs with those last in their seed that need a first stage which another one of it makes."""
    seeds = {run.settings.training.seed: None for run in runs}
    places = {seed: place for place, seed in enumerate(seeds)}
    made: set[str | None] = {None}
    order = []
    for run in runs:
        stage = stage_key(run.settings)
        order.append((places[run.settings.training.seed], stage is not None and stage in made))
        made.add(stage)
    return [runs[n] for n in sorted(range(len(runs)), key=order.__getitem__)]


def _plan(plan: StudyPlan | None, values: dict[str, Any]) -> StudyPlan:
    if plan is None:
        return StudyPlan.from_mapping(values)
    require(not values, f"a plan is given, and {', '.join(values)} besides: put it into the plan")
    return plan


def _device(device: torch.device | str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"device {device} was asked for, but torch sees no GPU here")
    return found


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _workers(device: torch.device, threads: int) -> int:
    if device.type == "cuda":
        return GPU_WORKERS
    return max((os.cpu_count() or 1) // threads, 1)


def _make_folder(folder: Path) -> Path:
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"cannot write to the folder {str(folder)!r}: {error.strerror}") from None
    return folder
