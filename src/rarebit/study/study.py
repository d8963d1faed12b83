"""Run a study: find the runs that are missing, make them in parallel, and collect the result.

All variants of a seed have the same split, the same initial tables where shapes allow, and the same batch
order. Each variant gets the same number of trials, or the tables say so; validation picks, test reports.
"""

import dataclasses
import math
import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import DataError, StudyError, StudyInterrupted
from rarebit.machine import choose_device, default_workers, machine
from rarebit.settings import require, to_mapping
from rarebit.storage.files import file_lock, make_folder, write_json
from rarebit.study.plan import StudyPlan
from rarebit.study.pool import Pool, StudyLines, StudyProgress
from rarebit.study.results import (
    RESULTS,
    Ceiling,
    CellResult,
    StudyResult,
    Trial,
    VariantResult,
)
from rarebit.study.runs import (
    RunFolder,
    RunRecord,
    ensemble_record,
    identify,
    run_key,
    runs_together,
    stack_key,
    stage_key,
)
from rarebit.study.statistics import PairedAUC, delong, scipy_special
from rarebit.study.tuning import Search, search
from rarebit.study.variants import MeasuredRates, Variant, start_size, variants_of
from rarebit.technique import needed_modules, technique_text
from rarebit.training.metrics import evaluate_scores
from rarebit.training.run import STAGE
from rarebit.training.settings import MemoryLog, PreparedLog, RunSettings, study_splits

MEMBER_SEEDS = 1_000_000
"""The distance between the seeds of an ensemble's models; the first has the seed of the ensemble."""
ATTEMPTS = 3
"""How often a run is started whose process dies: out of memory is often over when fewer runs share it."""


def study(
    folder: str | os.PathLike[str],
    plan: StudyPlan | None = None,
    *,
    minutes: float | None = None,
    workers: int | None = None,
    threads: int = 1,
    together: int | Literal["auto"] = "auto",
    device: torch.device | str = "auto",
    keep_models: bool = False,
    progress: StudyProgress | bool = True,
    **values: Any,
) -> StudyResult:
    """Compare methods with paired seeds, each against its control, and return the result.

    Give a plan, or its values by name: `methods`, `model`, `data`, `training`, `seeds`, ... Finished runs are
    kept in the folder and never repeated: the same call resumes a study. After `minutes`, active runs are
    checkpointed and no others start. Each run has `threads` CPU threads, so its numbers do not depend on the
    number of `workers`. Up to `together` runs that differ in seed, rates and the like train as one stacked model, which a GPU does in
    a fraction of the time; "auto" is as many as fit on a GPU, and 1 on a CPU.

    >>> import tempfile
    >>> found = study(
    ...     tempfile.mkdtemp(), methods="baseline,low-rank", model={"name": "fm", "dim": 4},
    ...     data={"rows": 2000}, training={"epochs": 1}, seeds=2, workers=1, device="cpu",
    ...     progress=False)
    >>> [(variant.name, len(variant.runs)) for variant in found.cells[0].variants]
    [('baseline', 2), ('narrow:dim=2', 2), ('low-rank:rank=1', 2)]
    """
    if plan is None:
        plan = StudyPlan.from_mapping(values)
    else:
        require(not values, f"a plan is given, and also {', '.join(values)}: put it into the plan")
    require(minutes is None or minutes > 0, f"minutes must be above 0, got minutes={minutes}")
    require(workers is None or workers >= 1, f"workers must be at least 1, got workers={workers}")
    require(threads >= 1, f"threads must be at least 1, got threads={threads}")
    at_once = runs_together(together, device := choose_device(device))
    scipy_special()  # reports a missing package before any run
    if isinstance(progress, bool):
        progress = StudyLines() if progress else StudyProgress()
    is_gpu = device.type == "cuda"
    device_name = torch.cuda.get_device_name(device) if is_gpu else "cpu"
    facts = machine() | {"device": device_name, "threads": threads}
    workers = workers or default_workers(device, threads)
    start = time.monotonic()
    deadline = None if minutes is None else start + 60 * minutes
    where = Path(folder)
    # a mistake in the plan or its data is reported before anything is written
    failures: dict[str, Failure] = {}
    cells = [Cell(plan, settings, where, failures) for settings in plan.runs]
    try:
        make_folder(where / "runs")
    except OSError as error:
        raise StudyError(f"cannot write to the folder {str(where)!r}: {error.strerror}") from None
    with file_lock(where / "lock"):
        write_json(where / "study.json", plan.to_mapping(), error=StudyError)
        with Pool(workers, str(device), threads) as pool:
            runner = Runner(pool, where, progress, deadline, failures, keep_models, at_once)
            by_seed = [(cell, seed) for seed in cells[0].seeds for cell in cells]
            runner.tune(cells)
            runner.make([run for cell, seed in by_seed for run in cell.compared_runs(seed)])
        result = StudyResult(plan=plan.to_mapping(), cells=tuple(cell.result() for cell in cells))
        if result.is_complete:
            shutil.rmtree(where / STAGE, ignore_errors=True)
        took = {"minutes": round((time.monotonic() - start) / 60, 2), "runs_made": runner.made}
        stored = {"machine": facts | took, "study": result.to_mapping()}
        write_json(where / RESULTS, stored, error=StudyError)
    if pool.interrupted:
        raise StudyInterrupted(f"stopped; finished and active runs are saved in {str(where)!r}")
    return result


class Failure(NamedTuple):
    """How a run ended without a result."""

    kind: str
    """One of "diverged", which says something about its settings, "failed", and "died": its process was killed or crashed."""
    why: str


class PlannedRun(RunFolder):
    """A run of a variant with a seed, finished or not, and its folder."""

    def __init__(self, study: Path, settings: RunSettings, name: str) -> None:
        super().__init__(study, run_key(settings))
        self.settings, self.name = settings, name


class Cell:
    """A model on a log: its variants, the runs they need, and the result of the finished ones.

    `failures` has the failed runs by key, and changes while runs are made.
    """

    def __init__(
        self, plan: StudyPlan, base: RunSettings, folder: Path, failures: Mapping[str, Failure]
    ) -> None:
        self.settings, self.folder, self.failures = plan.settings, folder, failures
        self.is_alone = len(plan.runs) == 1
        self.model_name, self.log_name = (
            _clear_name(names(base), [names(run) for run in plan.runs])
            for names in (_model_names, _log_names)
        )
        self.name = f"{self.model_name} on {self.log_name}"
        self.base = identify(base)
        splits = study_splits(self.base)
        if not len(splits.valid):
            raise DataError(
                f"a study picks on validation rows, and {self.log_name} has none; prepare it again with some"
            )
        self.train, self.test, self.counts = splits.train, splits.test, splits.train.counts()
        rates = MeasuredRates(folder / "rates.json", splits.train)
        self.variants = variants_of(plan, self.base, splits.train.schema, rates, self.train)
        for variant in self.variants:
            needed_modules(variant.start.methods)  # reports what workers cannot import
        first = self.settings.first_seed
        self.seeds = range(first, first + self.settings.seeds)
        self.tuning_seeds = self.seeds[: self.settings.tuning_seeds]

    def tuning_runs(self, seed: int) -> Iterator[PlannedRun]:
        """Yield the runs of the next trials of every variant; none where all settings are picked."""
        if seed not in self.tuning_seeds:
            return
        found = [(one, self.search(one)) for one in self.variants if one.trials > 1]
        waiting = [(one, tried.trials) for one, tried in found if tried.best is None]
        for number in range(max((len(trials) for _, trials in waiting), default=0)):
            for variant, trials in waiting:
                if number < len(trials):
                    yield self._run(variant, trials[number], seed, number)

    def compared_runs(self, seed: int) -> Iterator[PlannedRun]:
        """Yield the runs of the picked settings, as far as they are known."""
        for variant in self.variants:
            picked = self.picked(variant)
            if picked is not None:
                yield from self.members(variant, picked, seed)

    def search(self, variant: Variant) -> Search:
        """Return what tuning has found for a variant so far."""
        return search(variant.start, variant.axes, variant.trials, self._valid_auc)

    def picked(self, variant: Variant) -> RunSettings | None:
        """Return the settings that are best on validation; None while a trial is missing."""
        if variant.trials == 1:
            return variant.start
        found = self.search(variant)
        return None if found.best is None else found.trials[found.best]

    def _valid_auc(self, settings: RunSettings) -> float | None:
        """Return the mean validation AUC over the tuning seeds; None while a run is missing.

        Settings that diverge are the worst: their learning rate is too high. Any other failure says nothing about
        the settings, so the run is missing.
        """
        runs = [
            PlannedRun(self.folder, _with_seed(settings, seed), "") for seed in self.tuning_seeds
        ]
        failures = [self.failures[run.key] for run in runs if run.key in self.failures]
        if any(failure.kind == "diverged" for failure in failures):
            return -math.inf
        aucs = [record.valid_auc for run in runs if (record := run.read())]
        return statistics.fmean(aucs) if len(aucs) == len(runs) else None

    def result(self) -> CellResult:
        """Return the result of the finished runs."""
        log = self.base.data
        variants = [self._variant_result(variant) for variant in self.variants]
        return CellResult(
            model=self.model_name,
            data=self.log_name,
            checksum=log.checksum if isinstance(log, PreparedLog) else None,
            variants=tuple(variants),
            ceiling=self._ceiling(),
            rows=self._averaged(variants),
            missing=tuple(self._missing()),
        )

    def _run(
        self, variant: Variant, settings: RunSettings, seed: int, trial: int | None = None
    ) -> PlannedRun:
        name = f"{variant.name}, seed {seed}"
        if not self.is_alone:
            name = f"{self.name}: {name}"
        if trial is not None:
            name += f", trial {trial + 1}"
        return PlannedRun(self.folder, _with_seed(settings, seed), name)

    def members(self, variant: Variant, settings: RunSettings, seed: int) -> list[PlannedRun]:
        """Return the runs of a variant with a seed: one, or those of an ensemble, each with its own seed."""
        seeds = [seed + number * MEMBER_SEEDS for number in range(variant.members)]
        return [self._run(variant, settings, one) for one in seeds]

    def _record(self, variant: Variant, settings: RunSettings, seed: int) -> RunRecord | None:
        """Return the record of a variant with a seed; an ensemble is evaluated by its mean score."""
        members = self.members(variant, settings, seed)
        found = [record for run in members if (record := run.read()) is not None]
        if len(found) < len(members):
            return None
        if len(found) == 1:
            return found[0]
        mean = torch.from_numpy(np.mean([run.scores() for run in members], axis=0))
        return ensemble_record(found, seed, evaluate_scores(mean, self.test, counts=self.counts))

    def _variant_result(self, variant: Variant) -> VariantResult:
        picked, found = self.picked(variant), self.search(variant)
        runs = [] if picked is None else [self._record(variant, picked, s) for s in self.seeds]
        shown = (variant.start if picked is None else picked).to_mapping()
        del shown["data"], shown["training"]["seed"]  # of the cell, and of each run
        is_tuned = picked is not None and variant.trials > 1
        return VariantResult(
            name=variant.name,
            control=variant.control,
            settings=shown,
            trials=tuple(map(self._trial, found.trials)) if is_tuned else (),
            runs=tuple(record for record in runs if record is not None),
            edge=found.edge if is_tuned else (),
            axes=tuple(axis.name for axis in variant.axes) if is_tuned else (),
            start=None if picked is None else start_size(picked, self.train),
        )

    def _trial(self, tried: RunSettings) -> Trial:
        names = ("lr", "table_lr", "weight_decay", "ema_epochs")
        settings = {name: getattr(tried.training, name) for name in names}
        settings["methods"] = "+".join(map(technique_text, tried.methods))
        auc = self._valid_auc(tried)
        return Trial(settings=settings, valid_auc=None if auc == -math.inf else auc)

    def _ceiling(self) -> Ceiling | None:
        """Return the AUC of the true click probabilities, where they are known."""
        if self.test.probability is None:
            return None
        truth = torch.logit(self.test.probability.double(), eps=1e-12)
        best = evaluate_scores(truth, self.test, counts=self.counts)
        return Ceiling(auc=best.auc, rarest_auc=best.rarest.auc if best.rarest else None)

    def _averaged(self, results: Sequence[VariantResult]) -> dict[str, PairedAUC]:
        """Return each method against its control by scores averaged over the seeds that both have."""
        planned = {variant.name: variant for variant in self.variants}
        seeds = {result.name: {run.seed for run in result.runs} for result in results}
        found = {}
        for name, variant in planned.items():
            both = seeds[name] & seeds.get(variant.control or "", set())
            if variant.control is not None and both:
                pair = (variant, planned[variant.control])
                ours, theirs = (self._mean_scores(one, both) for one in pair)
                found[name] = delong(ours, theirs, self.test.label)
        return found

    def _mean_scores(self, variant: Variant, seeds: set[int]) -> Tensor:
        total = torch.zeros(len(self.test), dtype=torch.float64)
        for seed in sorted(seeds):
            for run in self.members(variant, self.picked(variant) or variant.start, seed):
                total += torch.from_numpy(run.scores().astype(np.float64))
        return total / (len(seeds) * variant.members)

    def _missing(self) -> Iterator[str]:
        for variant in self.variants:
            picked = self.picked(variant)
            if picked is None:
                tried = list(enumerate(self.search(variant).trials))
                unknown = [one for one in tried if self._valid_auc(one[1]) is None]
                runs = [
                    self._run(variant, settings, seed, trial)
                    for trial, settings in unknown or tried  # or all of them diverged
                    for seed in self.tuning_seeds
                ]
            else:
                runs = [run for seed in self.seeds for run in self.members(variant, picked, seed)]
            for run in runs:
                if run.read() is None:
                    failure = self.failures.get(run.key)
                    yield f"{run.name}: {failure.why if failure else 'not run yet'}"
            if picked is None:
                yield f"{variant.name}: its settings are not picked yet"


def _with_seed(settings: RunSettings, seed: int) -> RunSettings:
    training = dataclasses.replace(settings.training, seed=seed)
    return dataclasses.replace(settings, training=training)


def _model_names(run: RunSettings) -> tuple[str, str]:
    """Return the name of the model, and the name with its settings."""
    settings = [f"{name}={value}" for name, value in run.model_settings.items()]
    return run.model, ":".join([run.model, *settings])


def _log_names(run: RunSettings) -> tuple[str, str]:
    """Return the name of the log, and its folder or the name with its settings."""
    log = run.data
    if isinstance(log, PreparedLog):
        return Path(log.folder).name, log.folder
    if isinstance(log, MemoryLog):
        return "your data", log.checksum
    settings = to_mapping(log).items() - to_mapping(SyntheticLog(seed=log.seed)).items()
    name = f"synthetic-{log.seed}"
    return name, ":".join([name, *sorted(f"{key}={value}" for key, value in settings)])


def _clear_name(own: tuple[str, str], names: Sequence[tuple[str, str]]) -> str:
    """Return the short name, or the full one where the short name is ambiguous."""
    meant = {full for short, full in names if short == own[0]}
    return own[0] if len(meant) == 1 else own[1]


@dataclass
class Runner:
    """Makes the runs that are missing, and keeps how those that failed ended."""

    pool: Pool
    folder: Path
    progress: StudyProgress
    deadline: float | None
    failures: dict[str, Failure]
    keep_models: bool
    together: int = 1
    """How many runs may train as one stacked model."""
    made: int = 0
    """Runs finished in this call."""

    def tune(self, cells: "Sequence[Cell]") -> None:
        """Make the trials of all variants; each round of trials depends on the one before."""
        by_seed = [(cell, seed) for seed in cells[0].seeds for cell in cells]
        tried: set[str] = set()
        while not self.pool.stopping.is_set():
            trials = [run for cell, seed in by_seed for run in cell.tuning_runs(seed)]
            if tried.issuperset(run.key for run in trials):
                break
            self.make(trials)
            tried.update(run.key for run in trials)

    def make(self, runs: Sequence[PlannedRun]) -> None:
        """Make runs in parallel; one that several variants share is made once.

        A run whose process died is resumed after the others, when fewer runs share the memory.
        """
        distinct = {run.key: run for run in _stage_makers_first(runs)}
        missing = {
            key: run
            for key, run in distinct.items()
            if run.read() is None or (self.keep_models and not run.model.exists())
        }
        if not distinct or self.pool.stopping.is_set():
            return
        stages = Counter(stage_key(run.settings) for run in distinct.values())
        for _ in range(ATTEMPTS):
            self.progress.plan(len(distinct), len(distinct) - len(missing))
            groups = self._groups(list(missing.values()))
            self.pool.run(
                {key: self._task(group, stages) for key, group in groups.items()},
                partial(self._hear_group, groups),
                self.deadline,
            )
            died = {key for key, failure in self.failures.items() if failure.kind == "died"}
            missing = {key: run for key, run in missing.items() if key in died}
            if not missing or self.pool.stopping.is_set():
                return

    def _groups(self, runs: Sequence[PlannedRun]) -> dict[str, list[PlannedRun]]:
        """Return the runs of each task: those that train together, in the order of the first of them."""
        if self.together == 1:  # seed by seed, whatever the time allows
            return {run.key: [run] for run in runs}
        alike: dict[str, list[PlannedRun]] = {}
        for run in runs:
            alike.setdefault(stack_key(run.settings) or run.key, []).append(run)
        groups = (group for each in alike.values() for group in self._shared_out(each))
        return {group[0].key: group for group in groups}

    def _shared_out(self, runs: list[PlannedRun]) -> Iterator[list[PlannedRun]]:
        """Yield runs in groups of about one size, one for each worker at least."""
        most = min(self.together, -(-len(runs) // max(len(self.pool.workers), 1)))
        for part in np.array_split(np.arange(len(runs)), -(-len(runs) // most)):
            yield [runs[place] for place in part]

    def _task(self, runs: Sequence[PlannedRun], stages: Mapping[str | None, int]) -> dict[str, Any]:
        if len(runs) > 1:
            tasks = [self._task([run], stages) for run in runs]
            return {"together": tasks, "modules": sorted({m for t in tasks for m in t["modules"]})}
        [run] = runs
        folder, stage = self.folder.absolute(), stage_key(run.settings)
        return {
            "folder": str(folder),
            "settings": run.settings.to_mapping(),
            "modules": needed_modules(run.settings.methods),
            "keep_model": self.keep_models,
            "pruning": str(folder / STAGE / stage) if stage and stages[stage] > 1 else None,
        }

    def _hear_group(
        self, groups: Mapping[str, Sequence[PlannedRun]], key: str, answer: Mapping[str, Any]
    ) -> None:
        """Hear an answer to the task of several runs: of one by its number, or of all that have not ended."""
        runs = groups[key]
        if len(runs) == 1:
            self._hear(runs[0], answer)
        elif "of" in answer:
            self._hear(runs[answer["of"]], answer["answer"])
        elif "done" not in answer:
            for run in runs:
                if run.read() is None and ("started" in answer or run.key not in self.failures):
                    self._hear(run, answer)

    def _hear(self, run: PlannedRun, answer: Mapping[str, Any]) -> None:
        match answer:
            case {"started": _}:
                self.failures.pop(run.key, None)
                self.progress.start(run.name)
            case {"done": _}:
                record = run.read()
                assert record is not None, "a worker is done when its result is written"
                self.made += 1
                self.progress.finish(run.name, record)
            case {"diverged": str(why)} | {"failed": str(why)} | {"died": str(why)}:
                [kind] = answer
                self.failures[run.key] = Failure(kind, why)
                self.progress.fail(run.name, why)
            case {"stopped": _} if not self.pool.stopping.is_set():  # by someone else
                self.failures[run.key] = Failure("died", "something asked its process to stop")
            case {"epoch": _}:
                self.progress.epoch(run.name, answer)


def _stage_makers_first(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs by seed, last those that need a first stage which another run of the seed makes."""
    seeds = list(dict.fromkeys(run.settings.training.seed for run in runs))
    made: set[str | None] = set()
    order = []
    for place, run in enumerate(runs):
        stage = stage_key(run.settings)
        waits = stage is not None and stage in made
        order.append((seeds.index(run.settings.training.seed), waits, place))
        made.add(stage)
    return [runs[place] for *_, place in sorted(order)]
