"""A process that makes runs of a study: it reads tasks and writes answers, each a line of JSON.

    python -m rarebit.study.worker DEVICE THREADS

    in     {"folder": STUDY, "settings": {...}, "modules": [], "keep_model": false, "pruning": null}
           {"together": [{"folder": STUDY, ...}, ...], "modules": []}            runs of one log as one stacked model
           {"backtest": FOLDER, "name": "grow, seed 0", "policy": "grow", "settings": {...}, "modules": []}
    out    {"epoch": 1, "epochs": 10, "valid_auc": 0.8}      after each epoch
           {"done": true} | {"diverged": "why"} | {"failed": "why"} | {"stopped": true}
           {"of": 0, "answer": {...}}                        of one of several runs, by its number

When its input ends, the study has stopped or was killed: the active run stops after its step and is
checkpointed, as if by Ctrl-C. So no work is lost when a study is killed, and no process stays behind.
"""

import json
import os
import queue
import shutil
import signal
import statistics
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Splits
from rarebit.errors import DataError, NotFiniteError, RarebitError, TrainingInterrupted
from rarebit.machine import available_memory, commit
from rarebit.study.backtest import DATA as PERIODS
from rarebit.study.backtest import PeriodLog, PlannedRun
from rarebit.study.runs import RunFolder, RunRecord, run_key
from rarebit.tables.apply import find_sites, table_bytes
from rarebit.tables.spectrum import default_chunk, information_abundance, triangle_of
from rarebit.tables.table import full_table, methods_of
from rarebit.technique import Rank
from rarebit.training.fit import Course, EpochRecord, Silence, alone
from rarebit.training.memory import estimate_memory
from rarebit.training.metrics import evaluate, evaluate_scores, predict
from rarebit.training.model_file import save_model
from rarebit.training.run import (
    STAGE,
    finish_model,
    model_course,
    num_parameters,
    start_model,
)
from rarebit.training.settings import RunSettings, study_splits
from rarebit.training.together import together

ACTIVATIONS, SHARE = 1 << 16, 0.5
"""Bytes per row of a batch that a small model takes between its layers, and the share of a device's memory that a stack may
take by this estimate."""
Tell: TypeAlias = Callable[[Mapping[str, Any]], None]


class Log(NamedTuple):
    """A log on the device, and how often each id occurs in training."""

    splits: Splits
    counts: Mapping[str, Tensor]


def open_log(settings: RunSettings, device: torch.device) -> Log:
    """Load the log of a run to the device: once for all runs on it."""
    splits = study_splits(settings)
    counts = splits.train.counts()
    splits = Splits(*(part.to(device) for part in splits))
    return Log(splits, {name: count.to(device) for name, count in counts.items()})


def make_run(
    settings: RunSettings, log: Log, folder: RunFolder, *, device: torch.device, **options: Any
) -> RunRecord:
    """Train and evaluate one run and write its record, or resume it; `options` are those of `run_course`."""
    return alone(run_course(settings, log, folder, device=device, **options))


def run_course(
    settings: RunSettings,
    log: Log,
    folder: RunFolder,
    *,
    device: torch.device,
    keep_model: bool = False,
    pruning: Path | None = None,
    tell: Tell | None = None,
) -> Course[RunRecord]:
    """Make a run as `make_run` does, possibly together with others.

    `pruning` is the folder of a first stage that it shares with other runs.
    """
    train, valid, test = log.splits
    one_pass = settings.training.one_pass
    methods = settings.methods
    sharing = [method for method in methods if method.shared_stage(methods) is not None]
    model, history = yield from model_course(
        settings,
        train,
        None if one_pass else valid,
        folder=folder.checkpoints,
        resume=True,
        device=device,
        progress=_Epochs(settings.training.epochs, tell) if tell else False,
        say=lambda _: None,
        shared=sharing[0].share(pruning) if sharing and pruning is not None else None,
    )
    best = history.best_epoch
    assert best is not None, "a study trains with validation rows"
    kept = history.epochs[best - 1].valid
    changed = finish_model(settings, model, train, say=lambda _: None)
    if history.scores is not None:
        kept = evaluate_scores(history.scores[: len(valid)], valid).overall
        scores = history.scores[len(valid) :]
    else:
        kept = evaluate(model, valid).overall if changed else kept
        scores = predict(model, test)
    measured = evaluate_scores(scores, test, counts=log.counts)
    if measured.auc is None or kept is None or kept.auc is None:
        raise DataError("AUC needs rows of both classes in the validation and the test split")
    record = RunRecord(
        key=folder.key,
        seed=settings.training.seed,
        valid_auc=kept.auc,
        parameters=num_parameters(model),
        table_bytes=table_bytes(model),
        best_epoch=best,
        epochs=len(history.epochs),
        microseconds_a_row=1e6 / history.samples_per_second,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=str(torch.__version__),
        commit=commit(),
        valid_aucs=tuple(shortened(one.valid.auc) for one in history.epochs if one.valid),
        still_rising=history.still_rising,
        reports=shortened(history.reports),
        **abundances(model),
        **RunRecord.test_figures(measured),
    )
    if keep_model:
        save_model(model, folder.model)
    folder.write(settings, record, scores)
    for done in (folder.checkpoints, folder.path / STAGE):
        shutil.rmtree(done, ignore_errors=True)
    return record


def abundances(model: nn.Module) -> dict[str, Any]:
    """Return mean information abundances of the tables wider than 1, by their names in a run's record.

    One is of each embedding set by itself, the other of whole tables, all sets side by side.
    """
    each, whole = [], []
    for site in find_sites(model):
        if site.info.width > 1:
            sets = [m.num_sets for m in methods_of(site.table) if m.composition_rank is Rank.SETS]
            weight = full_table(site.table)
            width = weight.shape[1]
            # its columns have the singular values of the table's
            triangle = triangle_of(weight.split(default_chunk(weight.device, width)), width)
            each += [information_abundance(one) for one in triangle.chunk(max([1, *sets]), dim=1)]
            whole.append(information_abundance(triangle))
    if not whole:
        return {}
    return {"abundance": statistics.fmean(each), "whole_abundance": statistics.fmean(whole)}


def shortened(report: Any) -> Any:
    """Return a report with five digits per number: a study stores hundreds of reports."""
    if isinstance(report, Mapping):
        return {key: shortened(value) for key, value in report.items()}
    return float(f"{report:.5g}") if isinstance(report, float) else report


class _Epochs(Silence):
    """Reports each epoch to the study."""

    def __init__(self, epochs: int, tell: Tell) -> None:
        self.epochs, self.tell = epochs, tell

    def finish_epoch(self, record: EpochRecord) -> None:
        valid = None if record.valid is None else record.valid.auc
        self.tell({"epoch": record.epoch, "epochs": self.epochs, "valid_auc": valid})


class _Tasks:
    """Lines of standard input. When it ends, the active run is asked to stop, and no other starts."""

    def __init__(self, lines: TextIO) -> None:
        self.queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.running = self.ended = False
        self.changing = threading.Lock()
        """Held while one of the two changes: a run either sees the end, or is stopped by it."""
        self.reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self.reader.start()

    def __iter__(self) -> Iterator[str]:
        while (line := self.queue.get()) is not None:
            with self.changing:
                if self.ended:
                    return
                self.running = True
            yield line
            with self.changing:
                self.running = False

    def _read(self, lines: TextIO) -> None:
        for line in lines:
            self.queue.put(line)
        with self.changing:
            self.ended = True
            if self.running:
                os.kill(os.getpid(), signal.SIGTERM)
        self.queue.put(None)


class Worker:
    """Makes runs one after the other; a log is loaded once for consecutive runs on it."""

    def __init__(self, device: torch.device, tell: Tell) -> None:
        self.device, self.tell = device, tell
        self.log_settings: object = None
        self.log: Log | None = None
        self.periods: PeriodLog | None = None

    def work(self, task: Mapping[str, Any]) -> None:
        """Make a run, or several together, and tell how it ended; a run that fails does not stop the next one."""
        try:
            for module in task.get("modules", ()):  # methods without an entry point
                import_module(module)
            self.make(task)
        except Exception as error:  # whatever a run does, the study continues
            self.tell(_how_it_ended(error))
            if isinstance(error, TrainingInterrupted):
                raise
        else:
            self.tell({"done": True})

    def make(self, task: Mapping[str, Any]) -> None:
        """Make the run of a task, or its runs."""
        if "backtest" in task:
            self._make_policy(task)
        elif "together" in task:
            self._make_together(task["together"])
        else:
            alone(self._course(task, self.tell))

    def _log_of(self, settings: RunSettings) -> Log:
        if self.log is None or self.log_settings != settings.data:
            self.log = None  # frees its memory first
            self.log, self.log_settings = open_log(settings, self.device), settings.data
        return self.log

    def _course(self, task: Mapping[str, Any], tell: Tell) -> Course[RunRecord]:
        settings = RunSettings.from_mapping(task["settings"])
        return run_course(
            settings,
            self._log_of(settings),
            RunFolder(Path(task["folder"]), run_key(settings)),
            device=self.device,
            keep_model=task["keep_model"],
            pruning=None if task.get("pruning") is None else Path(task["pruning"]),
            tell=tell,
        )

    def _make_together(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Make runs of one log as one stack, and tell of each by its number."""

        def tell(number: int, answer: Mapping[str, Any]) -> None:
            self.tell({"of": number, "answer": answer})

        waiting, stopped = dict(enumerate(tasks)), list[TrainingInterrupted]()
        while waiting and not stopped:
            most = self._most_together(waiting)
            numbers = list(waiting)[:most]
            courses = [self._course(waiting.pop(n), partial(tell, n)) for n in numbers]
            for ended in together(courses, lambda line: sys.stderr.write(f"{line}\n")):
                error = ended.error
                if isinstance(error, TrainingInterrupted):
                    stopped.append(error)
                answer = {"done": True} if error is None else _how_it_ended(error)
                tell(numbers[ended.number], answer)
        if stopped:
            raise stopped[0]

    def _most_together(self, waiting: Mapping[int, Mapping[str, Any]]) -> int:
        """Return how many of these runs fit the memory of the device, as far as that is known."""
        free = available_memory(self.device)
        if free is None:
            return len(waiting)
        settings = RunSettings.from_mapping(next(iter(waiting.values()))["settings"])
        train, valid, _ = self._log_of(settings).splits
        model = start_model(settings, train.schema, say=lambda _: None)
        needed = estimate_memory(model, train, valid, settings=settings.training)
        each = needed.total - needed.data + ACTIVATIONS * settings.training.batch_size
        return max(1, min(len(waiting), int(SHARE * free) // each))

    def _make_policy(self, task: Mapping[str, Any]) -> None:
        folder = Path(task["backtest"])
        self.periods = self.periods or PeriodLog(folder / PERIODS)
        run = PlannedRun.of_task(task)
        run.make(folder, self.periods, device=self.device, tell=self.tell)


def _how_it_ended(error: Exception) -> dict[str, Any]:
    """Return the last answer of a run that ended by an error."""
    if isinstance(error, TrainingInterrupted):
        return {"stopped": True}
    if isinstance(error, NotFiniteError):
        return {"diverged": str(error)}
    if isinstance(error, RarebitError | torch.OutOfMemoryError):
        return {"failed": str(error)}
    traceback.print_exception(error)
    return {"failed": f"{type(error).__name__}: {error}"}


def main(device: str, threads: str, *, kind: type[Worker] = Worker) -> None:
    """Work until there are no more tasks."""
    torch.set_num_threads(int(threads))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a model prints is no answer

    def tell(answer: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the study is gone; the end of the input says so, too
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

    worker = kind(torch.device(device), tell)
    try:
        for line in _Tasks(sys.stdin):
            worker.work(json.loads(line))
    except TrainingInterrupted:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
