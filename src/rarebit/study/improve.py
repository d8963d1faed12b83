"""A better, smaller model within a time, or the proof that there is none (`rarebit improve`, `rb.improve`).

    facts      what the log is like: its tails, its fields, how long training may last
    recipes    which methods are worth trying on such a log: `recipes.toml`, from our own evidence
    plan       methods, numbers of settings and seeds that fit the time; written before the first run
    race       rounds on validation rows: more settings for fewer methods, and as many for plain tables. A run always
               ends by its own patience, so that none is stopped before the point its kind needs
    proof      the winner and the tuned plain tables meet on the test rows once, with paired seeds, both as they
               would be served: coded to the size that was asked for

The answer is "better" only if the interval over seeds, corrected as in studies, and the interval over test rows are both above
zero: seeds alone say nothing about other rows, and on labels without a signal every fit to the rows at hand would win or lose on
all seeds alike. Else it is "smaller", if coding loses next to nothing, or "keep".
"""

import hashlib
import itertools
import math
import os
import shutil
import statistics
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Dataset, Splits
from rarebit.errors import StudyError, StudyInterrupted, TrainingInterrupted
from rarebit.machine import choose_device, default_workers, machine
from rarebit.models._base import OWN_MODELS
from rarebit.settings import require, size, to_mapping
from rarebit.storage.files import file_lock, make_folder, read_json, write_json
from rarebit.study.plan import StudyPlan, StudySettings
from rarebit.study.pool import Pool, StudyLines, StudyProgress, Values
from rarebit.study.results import CellResult, StudyResult, VariantResult, formatted
from rarebit.study.runs import KEY_DIGITS, UNREADABLE, RunFolder, RunRecord, runs_together
from rarebit.study.statistics import PairedAUC, delong, scipy_special
from rarebit.study.study import Cell, Failure, Runner
from rarebit.study.variants import Variant
from rarebit.study.worker import Log, Worker, open_log
from rarebit.tables.apply import apply_, table_bytes
from rarebit.tables.table import Method
from rarebit.technique import (
    BASELINE,
    parse_techniques,
    technique_from_mapping,
    technique_to_mapping,
)
from rarebit.training.checkpoints import describe_data
from rarebit.training.fit import History, fit
from rarebit.training.metrics import Evaluation, evaluate, evaluate_scores, predict
from rarebit.training.model_file import load_model, save_model
from rarebit.training.run import LOCK, RUN_FILE, describe_run, num_parameters, start_model
from rarebit.training.settings import MemoryLog, RunSettings, Training, load_splits

RESULT, PLAN, RUNS = "improvement.json", "plan.json", "study"
CODING = "evidence-coding"
RARE = 30
"""An id that training sees less often is rare, as in `docs/tail.md`."""
EPOCHS = 60
"""Maximum epochs where none are given: patience ends training long before."""
EPOCHS_BEFORE_PATIENCE = 6
"""Epochs that a run takes on top of its patience, to estimate its time."""
LADDER = ((12, 5), (9, 5), (6, 5), (4, 5), (3, 5), (2, 5), (1, 5), (1, 4), (1, 3))
"""Numbers of settings and of seeds, the best first: the first that fits the time is taken."""
REST, LEAST_REST, MOST_REST = 0.1, 60.0, 0.4
"""The end of the time is for coding, measuring and writing: a share of it, at least so many seconds, at most a share."""
SAFETY = 1.4
"""Runs in parallel, and with methods, are slower than the one that was timed."""
PARALLEL = 0.75
"""Share of the time of several workers that runs can use: a search waits for its best settings."""
PROBE_ROWS, PROBE_EPOCHS = 25_000, 2
"""What is timed: of two epochs the faster one, as the first may compile kernels and another program may disturb either."""
ROWS_LEVEL = 0.01
"""The interval over test rows misses the true difference with this chance."""
LOSS = 0.001
"""Coded tables may lose so much AUC and count as the same model in fewer bytes."""

Outcome = Literal["better", "smaller", "keep", "stopped"]
Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a log is like, as far as recipes ask."""

    rows: int
    """Training rows."""
    fields: int
    """Fields with a table."""
    ids: int
    """Rows of all tables."""
    tail: float
    """Share of the lookups of a field that are of ids seen less than 30 times: that of the field with most."""
    tail_field: str
    rare_rows: float
    """Share of the rows of all tables whose ids training saw less than 30 times: about their share of the memory."""
    largest: tuple[tuple[str, float], ...]
    """The fields with most of the memory, and their shares of it."""
    epochs: int
    """Epochs that training may last."""
    one_pass: int
    """Whether training goes once over the log in its order: 0 or 1."""

    @classmethod
    def of(cls, train: Dataset, training: Training) -> "Facts":
        """Look at the training rows."""
        counts = train.counts()
        totals = {name: max(int(n.sum()), 1) for name, n in counts.items()}
        tails = {name: int(n[n < RARE].sum()) / totals[name] for name, n in counts.items()}
        rows = {name: len(n) for name, n in counts.items()}
        all_rows = max(sum(rows.values()), 1)
        longest = max(tails, key=tails.__getitem__, default="")
        largest = sorted(rows, key=lambda name: -rows[name])[:3]
        return cls(
            rows=len(train),
            fields=len(rows),
            ids=sum(rows.values()),
            tail=tails.get(longest, 0.0),
            tail_field=longest,
            rare_rows=sum(int((n < RARE).sum()) for n in counts.values()) / all_rows,
            largest=tuple((name, rows[name] / all_rows) for name in largest),
            epochs=1 if training.one_pass else training.epochs,
            one_pass=int(training.one_pass),
        )

    def lines(self) -> list[list[str]]:
        """Return the facts for people: name, value, meaning."""
        largest = ", ".join(f"{name} {share:.0%}" for name, share in self.largest)
        return [
            ["training rows", f"{self.rows:,}", ""],
            ["fields with a table", f"{self.fields}", f"{self.ids:,} ids"],
            [
                "tail",
                f"{self.tail:.1%}",
                f"of the lookups of {self.tail_field!r} are of ids seen less than {RARE} times",
            ],
            [
                "rare rows",
                f"{self.rare_rows:.1%}",
                f"of all rows of tables belong to ids seen less than {RARE} times",
            ],
            ["memory", largest, "fields with the most rows"],
            [
                "epochs",
                "one pass" if self.one_pass else f"at most {self.epochs}",
                "patience ends training earlier",
            ],
        ]


@dataclass(frozen=True)
class Recipe:
    """Methods, and the facts of a log that make them worth trying."""

    methods: str
    needs: Mapping[str, Sequence[float]]
    why: str
    evidence: str

    def lacks(self, facts: Facts) -> str:
        """Return which fact of a log speaks against it; nothing where none does."""
        for name, (low, high) in self.needs.items():
            value = getattr(facts, name)
            if not low <= value <= high:
                return f"{name.replace('_', ' ')} is {value:.3g}, and it needs {low:g} to {high:g}"
        return ""


def recipes() -> list[Recipe]:
    """Return all recipes, the most promising first."""
    stored = tomllib.loads((files("rarebit.study") / "recipes.toml").read_text("utf-8"))
    return [Recipe(**values) for values in stored["recipe"]]


class Round(NamedTuple):
    """A round of the race."""

    methods: int
    """Methods that take part; plain tables always do."""
    trials: int
    """Settings that each may have tried by the end of it."""


def rounds_of(methods: int, trials: int) -> list[Round]:
    """Return the rounds of a race: each halves the methods and gives those that are left more settings.

    In the first one all have one setting, which also tells how long runs take.

    >>> rounds_of(3, 9)
    [Round(methods=3, trials=1), Round(methods=2, trials=3), Round(methods=1, trials=9)]
    """
    num = max(math.ceil(math.log2(max(methods, 1))) + 1, 1 + (trials > 1))
    found, left = [], methods
    for place in range(num):
        share = place / (num - 1) if num > 1 else 1.0
        found.append(Round(left, max(round(trials**share), 1)))
        left = math.ceil(left / 2)
    return found


def runs_of(methods: int, trials: int, seeds: int) -> int:
    """Return how many runs a race and its proof take at most."""
    rounds = rounds_of(methods, trials)
    tried = sum(
        (one.methods - after.methods) * one.trials
        for one, after in zip(rounds, [*rounds[1:], Round(0, 0)], strict=True)
    )
    sides = 2 if methods else 1
    return tried + trials + sides * (seeds - 1)


def replanned(
    plan: Mapping[str, Any], done: int, fits: Callable[[int, int], bool]
) -> dict[str, Any]:
    """Return settings, seeds and rounds of a plan of which `done` rounds are over: as many as fit.

    `fits(runs, seeds)` tells whether there is time. What was tried stays; a race that has had its last round with several
    settings has no more of them.
    """
    methods, rounds = len(plan["methods"]) - 1, plan["rounds"][:done]
    tried = rounds[-1]["trials"]
    fewer = [(tried, seeds) for trials, seeds in LADDER if trials == 1]
    is_over = 1 < done == len(plan["rounds"])
    choices = fewer if is_over else [*(one for one in LADDER if one[0] > tried), *fewer]
    trials, seeds = next(
        (one for one in choices if fits(runs_of(methods, *one), one[1])), choices[-1]
    )
    left = [] if is_over else rounds_of(methods, trials)[done:]
    left = [one._replace(trials=max(one.trials, tried)) for one in left]
    return {
        "trials": trials,
        "seeds": seeds,
        "runs": runs_of(methods, trials, seeds),
        "rounds": [*rounds, *(one._asdict() for one in left)],
    }


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """The result: what to do, and the model."""

    outcome: Outcome
    """"better", "smaller" (the same, in fewer bytes), "keep" (what you have), or "stopped" before there was a proof."""
    verdict: str
    """The answer in a sentence."""
    model: nn.Module | None
    """The model to use; None for "keep" and "stopped"."""
    folder: Path
    """Where all is stored: the model, `improvement.json`, the runs."""
    result: StudyResult
    """The comparison on the test rows."""
    caveats: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.verdict, *self.caveats])


def improve(
    build: Callable[[], nn.Module] | None = None,
    train: Dataset | None = None,
    valid: Dataset | None = None,
    test: Dataset | None = None,
    *,
    folder: str | os.PathLike[str],
    data: Any = None,
    model: Any = "deepfm",
    training: Training | Mapping[str, Any] | None = None,
    size: str | float | None = "1/16",
    minutes: float = 60.0,
    trials: int | None = None,
    seeds: int | None = None,
    workers: int | None = None,
    together: int | Literal["auto"] = "auto",
    device: torch.device | str = "auto",
    progress: StudyProgress | bool = True,
    say: Say = print,
) -> Improvement:
    """Look for methods that make a model rank better on a log, prove it on rows nobody chose by, and code its tables.

    Give a function that builds your model, which takes a batch, and three data sets; or `data`, a prepared folder, and the
    name of a `model` of ours, or its settings. All runs fit into so many `minutes`; what is finished stays in the `folder`,
    and the same call resumes. `trials` and `seeds` replace what would fit the time; `workers` and `together` are those of a study. `size` is that of the tables, as in
    `compress_`; None leaves them as they are.

    >>> import tempfile
    >>> found = improve(
    ...     data={"rows": 2500, "seed": 1}, model={"name": "fm", "dim": 4}, training={"epochs": 1, "batch_size": 256},
    ...     folder=tempfile.mkdtemp(), trials=1, seeds=2, workers=1, device="cpu", progress=False, say=lambda line: None)
    >>> found.outcome in ("better", "smaller", "keep")
    True
    """
    require(minutes > 0, f"minutes must be above 0, got minutes={minutes}")
    start = time.monotonic()
    scipy_special()  # reports a missing package before any run
    device = choose_device(device)
    if isinstance(progress, bool):
        progress = StudyLines() if progress else StudyProgress()
    if size is not None:
        technique_from_mapping({"method": CODING, "size": size})  # reports a mistake before any run
    values = to_mapping(training) if isinstance(training, Training) else dict(training or {})
    values = {"epochs": EPOCHS, "patience": "auto"} | values
    with _own(build, (train, valid, test), data, model) as sections:
        base = RunSettings.from_mapping({**sections, "training": values})
        where = Path(folder)
        try:
            make_folder(where / RUNS / "runs")
        except OSError as error:
            raise StudyError(
                f"cannot write to the folder {str(where)!r}: {error.strerror}"
            ) from None
        with file_lock(where / LOCK):
            asked = {"settings": base.to_mapping(), "size": size, "trials": trials, "seeds": seeds}
            job = _Job(
                base=base, folder=where, size=size, minutes=minutes, start=start, device=device, progress=progress, say=say,
                workers=workers or default_workers(device, 1), together=runs_together(together, device),
                is_own=build is not None,
            )  # fmt: skip
            return job.run(asked, trials, seeds)


@contextmanager
def _own(
    build: Callable[[], nn.Module] | None,
    parts: Sequence[Dataset | None],
    data: Any,
    model: Any,
) -> Iterator[dict[str, Any]]:
    """Yield the sections of a run, and hold a model and data of the user's own while they are in use."""
    given = [part for part in parts if part is not None]
    if build is None:
        require(data is not None and not given, "give data=, or build, train, valid and test")
        model = {"name": model} if isinstance(model, str) else dict(model)
        if isinstance(data, str | os.PathLike):
            data = {"source": "synthetic"} if data == "synthetic" else {"folder": os.fspath(data)}
        yield {"model": model, "data": data}
        return
    require(
        len(given) == 3 and data is None,
        "a model of your own needs its data sets: improve(build, train, valid, test)",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = build()
    described = [describe_data(part) for part in given]
    weights = [
        [name, list(p.shape), float(p.detach().double().sum())]
        for name, p in first.named_parameters()
    ]
    checksum = hashlib.sha256(repr([described, weights]).encode()).hexdigest()
    name = type(first).__name__
    OWN_MODELS[name], MemoryLog.held[checksum] = build, Splits(*given)
    try:
        yield {"model": {"name": name}, "data": {"source": "memory", "checksum": checksum}}
    finally:
        del OWN_MODELS[name], MemoryLog.held[checksum]


class _HerePool(Pool):
    """Makes runs in this process, one after the other: a model of the user's own cannot be sent to others."""

    def __init__(self, device: torch.device, threads: int) -> None:
        super().__init__(0, str(device), threads)
        self.device = device

    def run(
        self,
        tasks: Mapping[str, Values],
        hear: Callable[[str, Values], None],
        deadline: float | None,
    ) -> None:
        for key, task in tasks.items():
            if deadline is not None and time.monotonic() >= deadline:
                self.stop()
            if self.stopping.is_set():
                return

            def tell(answer: Values, key: str = key) -> None:
                hear(key, answer)
                if "epoch" in answer and deadline is not None and time.monotonic() >= deadline:
                    raise _Over

            hear(key, {"started": True})
            try:
                Worker(self.device, tell).work({**task, "modules": []})
            except _Over:
                self.stop()
            except (KeyboardInterrupt, TrainingInterrupted):
                self.interrupted = True
                self.stop()


class _Over(BaseException):
    """The time is over: between two epochs of a run in this process."""


@dataclass
class _Job:
    """One call of `improve`."""

    base: RunSettings
    folder: Path
    size: str | float | None
    minutes: float
    start: float
    device: torch.device
    progress: StudyProgress
    say: Say
    workers: int
    together: int
    is_own: bool
    failures: dict[str, Failure] = field(default_factory=dict)
    race: list[dict[str, Any]] = field(default_factory=list)

    def rest(self, plan: Mapping[str, Any], seeds: int) -> float:
        """Return the seconds at the end that coding, measuring and writing take."""
        seconds = 60 * self.minutes
        coding = SAFETY * plan["seconds_to_code"] * (2 * seeds + 1)
        return float(max(REST * seconds, min(max(LEAST_REST, coding), MOST_REST * seconds)))

    def deadline(self, plan: Mapping[str, Any]) -> float:
        """Return when the last run must be over."""
        return self.start + 60 * self.minutes - self.rest(plan, plan["seeds"])

    def fits(self, plan: Mapping[str, Any], runs: int, seeds: int, per_run: float) -> bool:
        """Return whether there is time for so many runs, and for a proof with so many seeds."""
        left = self.start + 60 * self.minutes - time.monotonic()
        return runs * per_run / self.power + self.rest(plan, seeds) <= left

    @property
    def power(self) -> float:
        """How many runs are made in the time of one."""
        return 1.0 if self.is_own or self.workers == 1 else PARALLEL * self.workers

    def run(self, asked: Mapping[str, Any], trials: int | None, seeds: int | None) -> Improvement:
        """Plan, race, prove, and write what came of it."""
        known_result = self._finished(asked)
        if known_result is not None:
            return known_result
        splits = load_splits(self.base.data)
        splits = splits.in_one_pass() if self.base.training.one_pass else splits
        facts = Facts.of(splits.train, self.base.training)
        known = recipes()
        lacks = {one.methods: one.lacks(facts) for one in known}
        tried = [one.methods for one in known if not lacks[one.methods]]
        asking = [
            part.technique.patience for text in tried for part in parse_techniques(text)[0].parts
        ]
        # all sides have one patience in all rounds, so that plain tables are trained once
        training = self.base.training.with_patience(max(asking, default=0))
        self.base = replace(self.base, training=training)
        plan = self._plan(asked, tried, trials, seeds, splits)
        self._announce(facts, plan, lacks)
        pool = _HerePool(self.device, 1) if self.is_own else Pool(self.workers, str(self.device), 1)
        with pool:
            runner = Runner(
                pool,
                self.folder / RUNS,
                self.progress,
                self.deadline(plan),
                self.failures,
                keep_models=True,
                together=self.together,
            )
            cell, winner = self._race(runner, plan)
            if cell is not None:
                last = self._cell([winner] if winner else [], plan["trials"], plan["seeds"])
                runner.make([run for seed in last.seeds for run in last.compared_runs(seed)])
            is_over = pool.stopping.is_set()
        proof = None if cell is None else self._prove(last, winner)
        found = self._conclude(proof, facts, plan, lacks, known, is_over=is_over)
        if pool.interrupted:
            raise StudyInterrupted(
                f"stopped; what is proven so far is in {str(self.folder)!r}: {found.verdict}"
            )
        return found

    def _finished(self, asked: Mapping[str, Any]) -> Improvement | None:
        """Return the result that an earlier call finished; None where there is more to do."""
        path = self.folder / RESULT
        if not path.exists():
            return None
        try:
            stored = read_json(path)
            found, study = stored["improvement"], StudyResult.from_mapping(stored["study"])
            if not found["finished"] or read_json(self.folder / PLAN)["asked"] != asked:
                return None  # the plan says why not
        except (OSError, AssertionError, *UNREADABLE) as error:
            raise StudyError(f"{str(path)!r} cannot be read: {error}; remove it") from None
        build = OWN_MODELS.get(self.base.model)
        model = None
        if found["outcome"] in ("better", "smaller"):
            model = load_model(self.folder, into=None if build is None else build())
        return Improvement(
            outcome=found["outcome"], verdict=found["verdict"], caveats=tuple(found["caveats"]),
            model=model, folder=self.folder, result=study,
        )  # fmt: skip

    def _plan(
        self,
        asked: Mapping[str, Any],
        tried: Sequence[str],
        trials: int | None,
        seeds: int | None,
        splits: Splits,
    ) -> dict[str, Any]:
        """Return the plan in the folder, or make one that fits the time."""
        path = self.folder / PLAN
        try:
            stored = read_json(path)
        except FileNotFoundError:
            stored = {}
        except (OSError, *UNREADABLE) as error:
            raise StudyError(f"{str(path)!r} cannot be read: {error}; remove it") from None
        if stored:
            if stored["asked"] != asked:
                raise StudyError(
                    f"{str(self.folder)!r} holds an improvement of other settings; choose another folder, or repeat its "
                    "command"
                )
            return stored
        measured = self._measure(splits)
        per_run = measured["seconds_per_run"]
        asked_for = [(trials or t, seeds or s) for t, s in LADDER]
        steps = [
            (t, s)
            for t, s in asked_for
            if self.fits(measured, runs_of(len(tried), t, s), s, per_run)
        ]
        chosen = steps[0] if steps else asked_for[-1]
        plan = {
            "methods": [BASELINE, *tried],
            "trials": chosen[0],
            "seeds": chosen[1],
            "first_seed": 0,
            "rounds": [one._asdict() for one in rounds_of(len(tried), chosen[0])],
            "runs": runs_of(len(tried), *chosen),
            **measured,
            "size": self.size,
            "minutes": self.minutes,
            "asked": asked,
        }
        write_json(path, plan, error=StudyError)
        return plan

    def _measure(self, splits: Splits) -> dict[str, float]:
        """Return how long a run takes, from the speed of plain training on a few rows, and to code and measure its model."""
        rows = min(len(splits.train), PROBE_ROWS)
        first = splits.train[torch.arange(rows)]
        part = Dataset(splits.train.schema, first.ids, first.numeric, first.label)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(devices=[]):
                model = start_model(self.base, part.schema, say=lambda _: None).to(self.device)
                probe = self.base.training
                probe = probe if probe.one_pass else replace(probe, epochs=PROBE_EPOCHS)
                history = fit(model, part, settings=probe, progress=False)
                speed = max(epoch.samples_per_second for epoch in history.epochs)
                begin = time.monotonic()
                predict(model, part.to(self.device))
                predicting = (time.monotonic() - begin) / rows
                begin = time.monotonic()
                if self.size is not None:
                    code_(model, self.size, splits.train)
                coding = time.monotonic() - begin
        finally:
            torch.set_num_threads(threads)
        patience = self.base.training.patience
        epochs = EPOCHS_BEFORE_PATIENCE + (patience if isinstance(patience, int) else 0)
        epochs = 1 if self.base.training.one_pass else min(epochs, self.base.training.epochs)
        training = len(splits.train) / speed + len(splits.valid) * predicting
        found = {
            "seconds_per_run": SAFETY * (epochs * training + len(splits.test) * predicting),
            "seconds_to_code": coding + 2 * (len(splits.valid) + len(splits.test)) * predicting,
        }
        return {name: float(f"{seconds:.2g}") for name, seconds in found.items()}

    def _announce(self, facts: Facts, plan: Mapping[str, Any], lacks: Mapping[str, str]) -> None:
        """Say what the log is like and what will be tried, before the first run."""
        self.say(f"{facts.rows:,} training rows, {facts.fields} fields, {facts.ids:,} ids.")
        if facts.tail:
            self.say(
                f"{facts.tail:.0%} of the lookups of {facts.tail_field!r} are of ids seen less than {RARE} times."
            )
        for methods, why in lacks.items():
            self.say(f"{methods}: {f'left out, {why}' if why else 'worth trying'}.")
        minutes = plan["runs"] * plan["seconds_per_run"] / 60 / self.power
        ends = time.strftime("%H:%M", time.localtime(time.time() + 60 * min(minutes, self.minutes)))
        self.say(
            f"Plan: {plan['trials']} setting{'s' * (plan['trials'] > 1)} each, then {plan['seeds']} paired seeds from "
            f"{plan['first_seed']}; about {plan['runs']} runs, {minutes:.1f} minutes, until {ends} or earlier."
        )
        if not self.fits(plan, plan["runs"], plan["seeds"], plan["seconds_per_run"]):
            self.say("That is more than there is time for; the same command resumes.")

    def _replan(self, plan: dict[str, Any], runner: Runner, done: int) -> None:
        """Plan as many settings and seeds as fit, once `done` rounds show how long runs take: time alone decides, no result."""
        if not runner.made or plan["asked"]["trials"] or plan["asked"]["seeds"]:
            return
        per_run = (time.monotonic() - self.start) * self.power / runner.made
        finished = len([*(self.folder / RUNS / "runs").glob("*/result.json")])
        changed = replanned(
            plan, done, lambda runs, seeds: self.fits(plan, runs - finished, seeds, per_run)
        )
        if changed.items() <= plan.items():
            return
        plan |= changed
        write_json(self.folder / PLAN, plan, error=StudyError)
        runner.deadline = self.deadline(plan)
        self.say(
            f"Runs take {per_run:.0f} s, so the plan is now {plan['trials']} setting{'s' * (plan['trials'] > 1)} each and "
            f"{plan['seeds']} paired seeds."
        )

    def _cell(self, methods: Sequence[str], trials: int, seeds: int) -> Cell:
        plan = StudyPlan(
            methods=parse_techniques(",".join([BASELINE, *methods])),
            runs=(self.base,),
            settings=StudySettings(seeds=seeds, trials=trials, sweeps=False, control=BASELINE),
        )
        return Cell(plan, self.base, self.folder / RUNS, self.failures)

    def _race(self, runner: Runner, plan: dict[str, Any]) -> tuple[Cell | None, str | None]:
        """Return the cell of the last round, None where the time was over, and the method that won."""
        left = [one for one in plan["methods"] if one != BASELINE]
        winner = None
        for number in itertools.count(1):
            one = plan["rounds"][number - 1]
            cell = self._cell(left, one["trials"], 1)
            names = dict(
                zip(left, [v.name for v in cell.variants if v.name != BASELINE], strict=True)
            )
            runner.tune([cell])
            runner.make([run for seed in cell.tuning_seeds for run in cell.compared_runs(seed)])
            scores = {variant.name: _valid_auc(cell, variant) for variant in cell.variants}
            plain = scores[BASELINE]
            order = sorted(left, key=lambda text: -(scores[names[text]] or -math.inf))
            self._replan(plan, runner, number)
            is_last = number == len(plan["rounds"])
            kept = order[: plan["rounds"][number]["methods"]] if not is_last else order[:1]
            complete = plain is not None and all(scores[names[text]] is not None for text in left)
            if is_last and left:
                best = scores[names[order[0]]]
                winner = (
                    order[0] if best is not None and plain is not None and best > plain else None
                )
            for text in [BASELINE, *left]:
                fate = "goes on" if text in (BASELINE, *kept) else "dropped"
                if is_last:
                    fate = (
                        "meets the test rows"
                        if text in (BASELINE, winner)
                        else "not better than plain tables"
                    )
                self.race.append(
                    {"round": number, "methods": text, "trials": one["trials"], "seeds": 1,
                     "valid_auc": scores[names.get(text, BASELINE)], "fate": fate if complete else "stopped"}
                )  # fmt: skip
            shown = [
                f"{text} {formatted(scores[names.get(text, BASELINE)], '.4f')}"
                for text in [*order, BASELINE]
            ]
            self.say(
                f"Round {number} of {len(plan['rounds'])}, validation AUC: {', '.join(shown)}."
            )
            if not complete:
                return None, None
            if is_last:
                return cell, winner
            left = kept
        raise AssertionError("the last round ends the race")

    def _prove(self, cell: Cell, winner: str | None) -> "_Proof":
        """Code the models of both sides, and compare them on the test rows."""
        log = open_log(cell.base, self.device)
        result = cell.result()
        plain = replace(
            result.variant(BASELINE), name="tuned" if cell.settings.trials > 1 else BASELINE
        )
        sides = [
            _Side(self, cell, log, next(v for v in cell.variants if v.name == BASELINE), plain)
        ]
        if winner is not None:
            [variant] = [v for v in cell.variants if v.name != BASELINE]
            sides.append(
                _Side(self, cell, log, variant, replace(result.variant(variant.name), control=None))
            )
        return _Proof(self, cell, sides)

    def _conclude(
        self,
        proof: "_Proof | None",
        facts: Facts,
        plan: Mapping[str, Any],
        lacks: Mapping[str, str],
        known: Sequence[Recipe],
        *,
        is_over: bool,
    ) -> Improvement:
        """Write the result, with the model if there is one to use."""
        outcome: Outcome = "stopped"
        verdict = "Keep what you have: the time was over before anything was proven."
        caveats: list[str] = []
        model: nn.Module | None = None
        cells: tuple[CellResult, ...] = ()
        figures: dict[str, str] = {}
        if proof is not None:
            outcome, verdict, caveats = proof.outcome, proof.verdict, proof.caveats
            cells, figures = (proof.result,), proof.figures
        if is_over and proof is not None:
            caveats = [
                *caveats,
                "The time was over before all runs were finished; the same command resumes.",
            ]
        elif is_over:
            caveats = ["The same command resumes."]
        if proof is not None and outcome in ("better", "smaller"):
            model = proof.save()
        study = StudyResult(
            plan={
                "minimum_effect": StudySettings().minimum_effect,
                "seeds": plan["seeds"],
                "first_seed": 0,
            },
            cells=cells,
        )
        took = {"minutes": round((time.monotonic() - self.start) / 60, 2)}
        log = self.base.data
        stored = {
            "machine": machine() | took,
            "improvement": {
                "model": self.base.model,
                "log": Path(getattr(log, "folder", "")).name
                or ("your data" if self.is_own else "synthetic"),
                "finished": not is_over,
                "outcome": outcome,
                "verdict": verdict,
                "caveats": caveats,
                "figures": figures,
                "facts": facts.lines(),
                "recipes": [
                    {
                        "methods": one.methods,
                        "tried": not lacks[one.methods],
                        "why": f"{one.why}. {lacks[one.methods] or one.evidence}.",
                    }
                    for one in known
                ],
                "race": self.race,
                "plan": {name: value for name, value in plan.items() if name != "asked"},
                "command": self._command(),
            },
            "study": study.to_mapping(),
        }
        write_json(self.folder / RESULT, stored, error=StudyError)
        if not is_over:  # a later call would need them
            for run in (self.folder / RUNS / "runs").glob("*/model"):
                shutil.rmtree(run, ignore_errors=True)
        return Improvement(
            outcome=outcome, verdict=verdict, model=model, folder=self.folder, result=study, caveats=tuple(caveats)
        )  # fmt: skip

    def _command(self) -> str:
        if self.is_own:
            return f"rb.improve(build, train, valid, test, size={self.size!r}, minutes={self.minutes:g}, folder=...)"
        data = getattr(self.base.data, "folder", "synthetic")
        words = [
            "rarebit improve",
            "--data",
            Path(data).name if Path(data).is_absolute() else data,
            "--model",
            self.base.model,
        ]
        for section, values in (
            ("model", self.base.model_settings),
            ("training", to_mapping(self.base.training)),
        ):
            plain = to_mapping(Training(epochs=EPOCHS)) if section == "training" else {}
            words += [
                f"--set {section}.{k}={v}"
                for k, v in values.items()
                if v != plain.get(k) and k not in ("patience", "seed")
            ]
        return " ".join([*words, f"--size {self.size or 'none'} --minutes {self.minutes:g}"])


def _valid_auc(cell: Cell, variant: Variant) -> float | None:
    """Return the validation AUC of the picked settings over the tuning seeds; None while a run is missing."""
    picked = cell.picked(variant)
    if picked is None:
        return None
    records = [
        run.read() for seed in cell.tuning_seeds for run in cell.members(variant, picked, seed)
    ]
    aucs = [one.valid_auc for one in records if one is not None]
    return statistics.fmean(aucs) if len(aucs) == len(records) else None


def code_(model: nn.Module, size: str | float, train: Dataset) -> None:
    """Code all tables of a trained model, first-order weights, too."""
    coding = technique_from_mapping({"method": CODING, "size": size})
    assert isinstance(coding, Method)
    with warnings.catch_warnings(action="ignore"):  # of tables with little left
        apply_(model, coding.fitted(model, train), min_width=1, verbose=False)


def lost_by_coding(
    cell: CellResult, plain: VariantResult, whole: VariantResult, coded: VariantResult
) -> list[str]:
    """Return how far a method is ahead before its tables are coded, where coding loses more than next to nothing of it."""
    ahead, left = (
        cell.mean_difference(replace(one, control=plain.name), "auc") for one in (whole, coded)
    )
    if ahead is None or left is None or ahead <= 0 or ahead - left <= LOSS:
        return []
    figure = f"{ahead:+.4f}, the mean of the seeds without a verdict"
    return [
        f"With whole tables {whole.name} differs from plain ones by {figure}: try a larger size."
    ]


class _Side:
    """A side of the proof: its runs, and the same models with coded tables."""

    def __init__(
        self, job: _Job, cell: Cell, log: Log, variant: Variant, result: VariantResult
    ) -> None:
        self.job, self.cell, self.log, self.result = job, cell, log, result
        self.settings = cell.picked(variant) or variant.start
        self.folders = {run.seed: RunFolder(cell.folder, run.key) for run in result.runs}
        self.scores: dict[str, dict[int, Tensor]] = {result.name: {}}
        self.evaluations: dict[int, Evaluation] = {}
        for seed, folder in self.folders.items():
            self.scores[result.name][seed] = torch.from_numpy(folder.scores().astype("float64"))
        self.coded = result if job.size is None else self._coded()

    def model(self, seed: int) -> nn.Module:
        """Return the model of a seed, coded if a size was asked for."""
        build = OWN_MODELS.get(self.job.base.model)
        folder = self.folders[seed].model
        model = load_model(folder, device=self.job.device, into=None if build is None else build())
        if self.job.size is not None:
            code_(model, self.job.size, self.log.splits.train)
        return model

    def _coded(self) -> VariantResult:
        coding = technique_from_mapping({"method": CODING, "size": self.job.size})
        text = f"{CODING}:size={self.job.size}"
        name = text if self.result.name in (BASELINE, "tuned") else f"{self.result.name}+{text}"
        self.scores[name], records = {}, []
        for record in self.result.runs:
            model = self.model(record.seed)
            scores = predict(model, self.log.splits.test)
            self.scores[name][record.seed] = scores.double().cpu()
            self.evaluations[record.seed] = measured = evaluate_scores(
                scores, self.log.splits.test, counts=self.log.counts
            )
            valid = evaluate(model, self.log.splits.valid).overall
            key = hashlib.sha256(f"{record.key} {text}".encode()).hexdigest()[:KEY_DIGITS]
            records.append(
                replace(
                    record,
                    key=key,
                    valid_auc=valid.auc or 0.0,
                    parameters=num_parameters(model),
                    table_bytes=table_bytes(model),
                    abundance=None,
                    whole_abundance=None,
                    reports={},
                    valid_aucs=(),
                    **RunRecord.test_figures(measured),
                )
            )
        settings = {
            **self.result.settings,
            "methods": [*self.result.settings["methods"], technique_to_mapping(coding)],
        }
        return replace(
            self.result, name=name, runs=tuple(records), settings=settings, trials=(), start=None
        )

    def averaged(self, name: str, seeds: Sequence[int]) -> Tensor:
        """Return the scores of the test rows, averaged over seeds."""
        return torch.stack([self.scores[name][seed] for seed in seeds]).mean(dim=0)


class _Proof:
    """The comparison on the test rows, and what it says."""

    def __init__(self, job: _Job, cell: Cell, sides: Sequence[_Side]) -> None:
        self.job, self.cell, self.plain = job, cell, sides[0]
        self.winner = sides[1] if len(sides) > 1 else None
        control = self.plain.result.name
        variants, rows = [self.plain.result], {}
        for side in sides:
            if side.coded is not side.result:
                if side is not self.plain:
                    variants.append(side.result)
                variants.append(replace(side.coded, control=control))
            elif side is not self.plain:
                variants.append(replace(side.result, control=control))
        labels = self.plain.log.splits.test.label.cpu()
        for side in sides:
            seeds = sorted(side.folders.keys() & self.plain.folders.keys())
            if seeds and any(one.name == side.coded.name and one.control for one in variants):
                ours, theirs = (
                    side.averaged(side.coded.name, seeds),
                    self.plain.averaged(control, seeds),
                )
                rows[side.coded.name] = delong(ours, theirs, labels, level=ROWS_LEVEL)
        self.labels = labels
        self.result = replace(
            cell.result(), variants=tuple(variants), rows=rows, missing=tuple(cell.result().missing)
        )
        self.least = StudySettings().minimum_effect
        self._decide()

    def _decide(self) -> None:
        """Choose the outcome, and say it in a sentence."""
        self.outcome: Outcome = "keep"
        self.chosen: _Side | None = None
        self.caveats: list[str] = []
        self.figures: dict[str, str] = {}
        # not by `compare`, which gives no verdict where a search ended at its edge: both sides had the same chance
        found = self.result.judged(self.least)
        control = f"plain tables ({self._tuned()})"
        before = self.plain.result.runs[0].table_bytes if self.plain.result.runs else 0
        if self.winner is not None and self.winner.coded.runs:
            name = self.winner.coded.name
            ours, rows = found[name], self.result.rows.get(name)
            if (
                ours.verdict == "helps"
                and rows is not None
                and rows.low > 0
                and self._above_chance(self.winner)
            ):
                self.outcome, self.chosen = "better", self.winner
                smaller = (
                    f", in {self._bytes(self.winner)} instead of {size(before)}"
                    if self.job.size
                    else ""
                )
                self.verdict = (
                    f"{self.winner.result.name} ranks better by {ours.mean:.4f} ({ours.low:.4f} to {ours.high:.4f}) than "
                    f"{control}{smaller}."
                )
                self.caveats += self._doubts()
                self._tell(self.winner)
                return
            self.caveats.append(
                f"{name} was not proven better: {self._why_not(ours.summary, rows)}."
            )
            self.caveats += lost_by_coding(
                self.result, self.plain.result, self.winner.result, self.winner.coded
            )
        self.verdict = (
            f"Keep what you have: nothing that was tried is proven to rank better than {control}."
        )
        if (
            self.job.size is not None
            and len(self.plain.coded.runs) > 1
            and self._above_chance(self.plain)
        ):
            ours = found[self.plain.coded.name]
            if ours.equivalence_low > -LOSS:
                self.outcome, self.chosen = "smaller", self.plain
                self.verdict = (
                    f"Keep what you have, in fewer bytes: {self._bytes(self.plain)} instead of {size(before)}, AUC "
                    f"{ours.mean:+.4f} ({ours.equivalence_low:+.4f} to {ours.equivalence_high:+.4f}); nothing that was tried is proven to rank "
                    f"better than {control}."
                )
                self._tell(self.plain)
            else:
                self.caveats.append(
                    f"Tables of size {self.job.size} would change the AUC by {ours.mean:+.4f}; try a larger size."
                )

    def _tuned(self) -> str:
        trials = self.cell.settings.trials
        return f"tuned on {trials} settings" if trials > 1 else "at the given settings"

    def _bytes(self, side: _Side) -> str:
        return size(side.coded.runs[0].table_bytes)

    def _why_not(self, words: str, rows: PairedAUC | None) -> str:
        over = f"over test rows {rows.low:+.4f} to {rows.high:+.4f}" if rows else "no pair of runs"
        return f"over seeds: {words}; {over}"

    def _above_chance(self, side: _Side) -> bool:
        """Return whether the side ranks at all: better than scores that are all the same."""
        seeds = sorted(side.folders)
        scores = side.averaged(side.coded.name, seeds)
        return delong(scores, torch.zeros_like(scores), self.labels, level=ROWS_LEVEL).low > 0

    def _doubts(self) -> list[str]:
        """Return what the race leaves open: sides whose best setting was the last one tried, or that were cut off."""
        lines = []
        for one in (self.plain.result, self.winner.result if self.winner else None):
            if one is not None and one.edge:
                lines.append(
                    f"{one.name} is best at the last {' and '.join(one.edge)} tried: with more time it may be better."
                )
            if one is not None and one.cut_off > len(one.runs) / 2:
                lines.append(f"{one.name} still rose when training ended: allow more epochs.")
        return lines

    def _tell(self, side: _Side) -> None:
        plain, ours = self.plain.result, side.coded
        mean = [statistics.fmean(one.figures("auc").values()) for one in (plain, ours)]
        self.figures = {
            "test AUC": f"{mean[1]:.4f}",
            "of plain tables": f"{mean[0]:.4f}",
            "bytes of tables": size(ours.runs[0].table_bytes),
            "before": size(plain.runs[0].table_bytes),
            "paired seeds": str(len(ours.runs)),
        }

    def save(self) -> nn.Module:
        """Write the model of the seed that is best on validation rows as a run of its own, and return it."""
        side = self.chosen
        assert side is not None
        best = max(side.coded.runs, key=lambda run: run.valid_auc)
        model = side.model(best.seed)
        settings = replace(side.settings, training=replace(side.settings.training, seed=best.seed))
        if self.job.size is not None:
            coding = technique_from_mapping({"method": CODING, "size": self.job.size})
            settings = replace(settings, methods=(*settings.methods, coding))
        measured = side.evaluations.get(best.seed)
        if measured is None:
            measured = evaluate(model, side.log.splits.test, counts=side.log.counts)
        history = History(epochs=[], best_epoch=best.best_epoch)
        folder = self.job.folder
        for old in folder.glob("weights-*.safetensors"):
            old.unlink()
        save_model(model.cpu(), folder)
        write_json(
            folder / RUN_FILE, describe_run(settings, history, measured, model), error=StudyError
        )
        return model
