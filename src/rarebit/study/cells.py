"""A model on a log: its sides, the runs they need, and what those that are there say."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rarebit.data.dataset import Splits
from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import DataError
from rarebit.settings import to_mapping
from rarebit.study.matched_rate import KnownRates
from rarebit.study.plan import StudyPlan
from rarebit.study.results import Ceiling, CellResult, SideResult, Trial, pick
from rarebit.study.runs import RunFolder, RunRecord, identify, run_key, together
from rarebit.study.statistics import PairedAUC, delong
from rarebit.study.variants import Side, sides_of
from rarebit.technique import technique_text
from rarebit.training.metrics import evaluate_scores
from rarebit.training.settings import PreparedLog, RunSettings, load_splits

__all__ = ["Cell", "PlannedRun"]

RATES = "rates.json"
"""The file of measured rates in the folder of a study."""
MEMBER_SEEDS = 1_000_000
"""How far apart the seeds of an ensemble's models are; the first has the seed of the ensemble."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of a side with a seed, finished or not."""

    name: str
    settings: RunSettings
    folder: RunFolder

    @property
    def record(self) -> RunRecord | None:
        """What it gave; None where it is not finished."""
        return self.folder.read()


class Cell:
    """A model on a log. `failures` says why runs failed, by their key, and grows as they do."""

    def __init__(
        self, plan: StudyPlan, base: RunSettings, folder: Path, failures: Mapping[str, str]
    ) -> None:
        self.settings, self.folder, self.failures = plan.settings, folder, failures
        self.is_alone = len(plan.runs) == 1
        self.model_name = _told_apart(base, plan.runs, _model_name)
        self.log_name = _told_apart(base, plan.runs, _log_name)
        self.base = identify(base)
        splits = load_splits(self.base.data)
        if not len(splits.valid):
            raise DataError(
                f"a study picks on validation rows, and {self.log_name} has none; prepare it anew"
            )
        self.test, self.counts = splits.test, splits.train.counts()
        self.ceiling = _ceiling(splits)
        rates = KnownRates(folder / RATES, splits.train)
        self.sides = sides_of(plan, self.base, splits.train.schema, rates)

    @property
    def name(self) -> str:
        """The model and the log, in words."""
        return f"{self.model_name} on {self.log_name}"

    @property
    def seeds(self) -> range:
        """The seeds of every side."""
        first = self.settings.first_seed
        return range(first, first + self.settings.seeds)

    def tuning_runs(self, seed: int) -> Iterator[PlannedRun]:
        """Yield the runs by which settings are picked; none where nothing is tuned."""
        if seed not in self._tuning_seeds:
            return
        tuned = [side for side in self.sides if len(side.trials) > 1]
        for trial in range(max((len(side.trials) for side in tuned), default=0)):
            for side in tuned:
                if trial < len(side.trials):
                    yield self._run(side, trial, seed)

    def compared_runs(self, seed: int) -> Iterator[PlannedRun]:
        """Yield the runs of the picked settings, as far as they are known."""
        for side in self.sides:
            trial = self.picked(side)
            if trial is not None:
                yield from self._members(side, trial, seed)

    def picked(self, side: Side) -> int | None:
        """Return the trial that is best on validation rows; None while one of them is missing.

        A trial that fails is out: its learning rate may be too high.
        """
        if len(side.trials) == 1:
            return 0
        tried = {
            trial: [run.record for run in runs]
            for trial, runs in enumerate(self._tried(side))
            if not any(run.folder.key in self.failures for run in runs)
        }
        if not tried or any(record is None for runs in tried.values() for record in runs):
            return None
        best = pick([[record for record in runs if record] for runs in tried.values()])
        return None if best is None else list(tried)[best]

    def result(self) -> CellResult:
        """Return what the finished runs say."""
        sides = [self._side_result(side) for side in self.sides]
        return CellResult(
            model=self.model_name,
            data=self.log_name,
            checksum=self.base.data.checksum if isinstance(self.base.data, PreparedLog) else None,
            sides=tuple(sides),
            ceiling=self.ceiling,
            rows=self._other_rows(sides),
            missing=tuple(self._missing()),
        )

    @property
    def _tuning_seeds(self) -> range:
        return self.seeds[: self.settings.tuning_seeds]

    def _run(self, side: Side, trial: int, seed: int) -> PlannedRun:
        settings = side.trials[trial]
        training = dataclasses.replace(settings.training, seed=seed)
        settings = dataclasses.replace(settings, training=training)
        name = f"{side.name}, seed {seed}"
        if not self.is_alone:
            name = f"{self.name}: {name}"
        if len(side.trials) > 1:
            name += f", trial {trial + 1}"
        return PlannedRun(name, settings, RunFolder(self.folder, run_key(settings)))

    def _members(self, side: Side, trial: int, seed: int) -> list[PlannedRun]:
        """Return the runs of a side with a seed: one, or those of an ensemble, each with its own seed."""
        return [
            self._run(side, trial, seed + number * MEMBER_SEEDS) for number in range(side.members)
        ]

    def _record(self, side: Side, trial: int, seed: int) -> RunRecord | None:
        """Return what a side gave with a seed; an ensemble is measured by the mean of its scores."""
        members = self._members(side, trial, seed)
        records = [run.record for run in members]
        found = [record for record in records if record is not None]
        if len(found) < len(members):
            return None
        if len(found) == 1:
            return found[0]
        mean = torch.from_numpy(np.mean([run.folder.scores() for run in members], axis=0))
        return together(found, seed, evaluate_scores(mean, self.test, counts=self.counts))

    def _tried(self, side: Side) -> list[list[PlannedRun]]:
        return [
            [self._run(side, trial, seed) for seed in self._tuning_seeds]
            for trial in range(len(side.trials))
        ]

    def _side_result(self, side: Side) -> SideResult:
        trial = self.picked(side)
        found = [] if trial is None else [self._record(side, trial, seed) for seed in self.seeds]
        settings = side.trials[trial or 0].to_mapping()
        del settings["data"], settings["training"]["seed"]  # the same for all sides; one a run
        return SideResult(
            name=side.name,
            control=side.control,
            settings=settings,
            trials=tuple(self._trials(side)) if trial is not None else (),
            runs=tuple(record for record in found if record is not None),
        )

    def _trials(self, side: Side) -> Iterator[Trial]:
        """Yield what was tried, with the AUC that it was picked by."""
        if len(side.trials) == 1:
            return
        for settings, runs in zip(side.trials, self._tried(side), strict=True):
            records = [record for run in runs if (record := run.record)]
            training = settings.training
            yield Trial(
                settings={
                    "lr": training.lr,
                    "table_lr": training.table_lr,
                    "methods": "+".join(technique_text(method) for method in settings.methods),
                },
                valid_auc=statistics.fmean(r.valid_auc for r in records) if records else None,
            )

    def _other_rows(self, sides: Sequence[SideResult]) -> dict[str, PairedAUC]:
        """Return how the scores of each method, averaged over seeds, differ from its control's."""
        by_name = {side.name: side for side in sides}
        planned = {side.name: side for side in self.sides}
        found = {}
        for side in sides:
            control = by_name.get(side.control or "")
            seeds = set() if control is None else _seeds(side) & _seeds(control)
            if control is not None and seeds:
                both = (planned[each.name] for each in (side, control))
                ours, theirs = (self._mean_scores(each, seeds) for each in both)
                found[side.name] = delong(ours, theirs, self.test.label)
        return found

    def _mean_scores(self, side: Side, seeds: set[int]) -> Tensor:
        total = torch.zeros(len(self.test), dtype=torch.float64)
        for seed in sorted(seeds):
            for run in self._members(side, self.picked(side) or 0, seed):
                total += torch.from_numpy(run.folder.scores().astype(np.float64))
        return total / (len(seeds) * side.members)

    def _missing(self) -> Iterator[str]:
        for side in self.sides:
            trial = self.picked(side)
            if trial is None:
                runs = [run for tried in self._tried(side) for run in tried]
                yield from self._unfinished(runs)
                yield f"{side.name}: its settings are not picked yet"
            else:
                for seed in self.seeds:
                    yield from self._unfinished(self._members(side, trial, seed))

    def _unfinished(self, runs: Sequence[PlannedRun]) -> Iterator[str]:
        for run in runs:
            if run.record is None:
                why = self.failures.get(run.folder.key)
                yield f"{run.name}: {why or 'not run yet'}"


def _told_apart(
    base: RunSettings, runs: Sequence[RunSettings], name: Callable[[RunSettings, bool], str]
) -> str:
    """Return a short name, or the long one where the short one stands for something else, too."""
    short = name(base, False)
    meant = {name(run, True) for run in runs if name(run, False) == short}
    return short if len(meant) == 1 else name(base, True)


def _model_name(run: RunSettings, in_full: bool) -> str:
    settings = run.model_settings.items() if in_full else ()
    return ":".join([run.model, *(f"{name}={value}" for name, value in settings)])


def _log_name(run: RunSettings, in_full: bool) -> str:
    log = run.data
    if isinstance(log, PreparedLog):
        return log.folder if in_full else Path(log.folder).name
    settings = to_mapping(log).items() - to_mapping(SyntheticLog(seed=log.seed)).items()
    told = sorted(f"{name}={value}" for name, value in settings) if in_full else ()
    return ":".join([f"synthetic-{log.seed}", *told])


def _ceiling(splits: Splits) -> Ceiling | None:
    """Return the AUC of the true chances, where they are known."""
    test = splits.test
    if test.probability is None:
        return None
    truth = torch.logit(test.probability.double(), eps=1e-12)
    best = evaluate_scores(truth, test, counts=splits.train.counts())
    return Ceiling(auc=best.auc, rarest_auc=best.rarest.auc if best.rarest else None)


def _seeds(side: SideResult) -> set[int]:
    return {run.seed for run in side.runs}
