"""One training run from settings to a folder: data, model, methods, training, test (`rarebit train`).

    start_model     the model before training, with the methods of training applied
    train_model     train it, or let a method drive the training, as pruning does in two stages
    finish_model    the model for inference: merged, and with the methods that come after training
    run             all of it, measured on the test split and written

The folder of a run holds the model (`model.json`, `weights-<hash>.safetensors`), settings and results (`run.json`), and
checkpoints.
"""

import os
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from rarebit.callbacks import TrainingData, started
from rarebit.data.dataset import Dataset, Splits
from rarebit.data.prepared import PreparedFolder
from rarebit.data.schema import Schema
from rarebit.errors import ModelFileError, TrainingError
from rarebit.machine import CPU, available_memory
from rarebit.models import build_model
from rarebit.models._base import RankingModel
from rarebit.settings import from_mapping, require, size
from rarebit.sharding.pieces import save_shards, unshard
from rarebit.sharding.plan import PlanSpec
from rarebit.sharding.processes import (
    TIMEOUT,
    gather_weights,
    join_processes,
    leave_processes,
    processes_of,
    spread_,
)
from rarebit.sharding.sharded import require_torchrec, whole_parameters
from rarebit.storage import files
from rarebit.storage.files import file_lock, write_json
from rarebit.tables.apply import apply_, end_training_, find_tables, table_bytes, table_parameters
from rarebit.tables.collection import drawn_later
from rarebit.tables.table import Method
from rarebit.technique import SharedStage, Technique, suggestions, technique_text
from rarebit.training.checkpoints import BEST
from rarebit.training.fit import (
    Course,
    EpochRecord,
    History,
    Progress,
    alone,
    check_data,
    fit_started,
    training_data,
)
from rarebit.training.memory import check_building
from rarebit.training.metrics import Evaluation, evaluate, evaluate_scores
from rarebit.training.model_file import FOLDER, save_model
from rarebit.training.settings import PreparedLog, RunSettings, Training, load_splits

CHECKPOINTS, STAGE, PIECES = "checkpoints", "pruning", "pieces"
"""Folders of a run: its checkpoints, the first stage of a training that has two, and the pieces of a model that was too
large for one process."""

Say = Callable[[str], object]


class Trained(NamedTuple):
    """A trained model and its history."""

    model: nn.Module
    history: History


def start_model(
    settings: RunSettings, schema: Schema, *, say: Say = print, in_pieces: bool = False
) -> RankingModel:
    """Return the model of a run before training, with the methods of training applied.

    The seed draws the weights before any method does, so variants of one seed start from the same tables. It is
    set again afterwards, so what training draws does not depend on what methods drew. `in_pieces` leaves plain tables on the
    meta device, for `spread_` to draw the pieces of each process; tables with methods start from whole ones.
    """
    plain = all(
        not isinstance(method, Method) or method.after_training for method in settings.methods
    )
    in_pieces = in_pieces and plain
    if not in_pieces:
        check_building(settings.model, schema, settings.model_settings)
    torch.manual_seed(settings.training.seed)
    with drawn_later() if in_pieces else nullcontext():
        model = build_model(settings.model, schema, settings.model_settings)
    for method in settings.methods:
        if isinstance(method, Method) and not method.after_training:
            say(str(apply_(model, method, verbose=False)))
    torch.manual_seed(settings.training.seed)
    return model


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What a run trains: the parts that a method which drives the training puts together."""

    settings: RunSettings
    train: Dataset
    valid: Dataset | None
    folder: Path | None = None
    """The folder of the checkpoints."""
    resume: bool = False
    device: torch.device | str = "cpu"
    progress: Progress | bool = True
    say: Say = print
    shared: SharedStage | None = None
    """A first stage that this run shares with others."""
    plan: PlanSpec | None = None
    """How to spread the tables over the processes of torchrun; None: one process trains them."""

    def start(
        self, methods: Sequence[Technique], *, seed: int | None = None, say: Say | None = None
    ) -> RankingModel:
        """Return the model with these methods on the device, and the training data known to them."""
        training = self.settings.training
        training = training if seed is None else replace(training, seed=seed)
        settings = replace(self.settings, methods=tuple(methods), training=training)
        in_pieces = self.plan is not None
        model = start_model(settings, self.train.schema, say=say or self.say, in_pieces=in_pieces)
        for method in methods:
            method.prepare_(model, self.train)
        if self.plan is not None:
            whole_rows = training.optimizer == "adagrad" and training.tables == "rowwise"
            spread_(
                model,
                self.plan,
                whole_rows=whole_rows,
                batch_size=training.batch_size,
                say=say or self.say,
            )
            processes_of(model).reseed(training.seed, 0)
        return model.to(self.device)

    def fit(self, model: nn.Module, methods: Sequence[Technique], **options: Any) -> Trained:
        """Train a model that has the tables of its methods, with the callbacks of these methods."""
        return alone(self.course(model, methods, **options))

    def course(
        self,
        model: nn.Module,
        methods: Sequence[Technique],
        *,
        training: Training | None = None,
        folder: Path | None = None,
        resume: bool | None = None,
    ) -> Course[Trained]:
        """Train as `fit` does, possibly together with others."""
        training = training or self.settings.training
        check_data(model, self.train, self.valid, training)
        with started(list(methods), model, self.data(training)) as callbacks:
            history = yield from fit_started(
                model,
                self.train,
                self.valid,
                callbacks,
                settings=training,
                folder=folder,
                resume=self.resume if resume is None else resume,
                progress=self.progress,
            )
        return Trained(model, history)

    def data(self, training: Training) -> TrainingData:
        """Return what callbacks may know, with the folder of a prepared log."""
        data, log = training_data(training, self.train, self.valid), self.settings.data
        if isinstance(log, PreparedLog) and log.checksum:
            return replace(data, folder=Path(log.folder), checksum=log.checksum)
        return data


def train_model(
    settings: RunSettings, train: Dataset, valid: Dataset | None, **options: Any
) -> Trained:
    """Build and train the model of a run; `options` are those of `TrainingJob`, such as the folder of checkpoints."""
    return alone(model_course(settings, train, valid, **options))


def model_course(
    settings: RunSettings, train: Dataset, valid: Dataset | None, **options: Any
) -> Course[Trained]:
    """Build and train as `train_model` does, possibly together with others."""
    job = TrainingJob(settings=settings, train=train, valid=valid, **options)
    methods = settings.methods
    for hint in filter(None, (method.hint(methods) for method in methods)):
        job.say(hint)
    for method in methods:
        if job.plan is not None and type(method).drive is not Technique.drive:
            raise TrainingError(
                f"{technique_text(method)} drives training in stages of its own, which one process does: leave the engine "
                "out"
            )
        trained = method.drive(job)
        if trained is not None:
            return trained
    return (yield from job.course(job.start(methods), methods, folder=job.folder))


def finish_model(
    settings: RunSettings, model: nn.Module, train: Dataset | None = None, *, say: Say = print
) -> bool:
    """Make a trained model ready for inference; return whether its scores changed.

    What only training needs is merged; then come the methods for trained tables, which may look at the training data.
    """
    end_training_(model)
    last = [m for m in settings.methods if isinstance(m, Method) and m.after_training]
    for method in last:
        known = method if train is None else method.fitted(model, train)
        say(str(apply_(model, known, verbose=False)))
    return bool(last)


def num_parameters(model: nn.Module) -> int:
    """Return how many weights a model has, including those its tables store as integers."""
    tables = sum(info.num_parameters for info in find_tables(model))
    trained = sum(parameter.numel() for parameter in table_parameters(model).values())
    return sum(parameter.numel() for parameter in model.parameters()) - trained + tables


RUN_FILE, LOCK = "run.json", "lock"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run."""

    model: nn.Module
    history: History
    test: Evaluation
    num_parameters: int
    """Weights of the whole model."""
    table_bytes: int
    """Bytes of its tables."""
    folder: Path | None
    """Where it was written."""
    hints: tuple[str, ...] = ()
    """What methods suggest for a run without any."""


def run(
    settings: RunSettings,
    *,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    device: torch.device | str = "cpu",
    progress: Progress | bool = True,
    data_progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = print,
    shared: SharedStage | None = None,
) -> RunResult:
    """Generate or open the data, build and train the model, measure it on the test split, and write it.

    With a folder, training writes checkpoints there, and `resume` resumes from the newest. `shared` is a first stage of
    training that this run shares with others.

    >>> small = RunSettings.from_mapping({
    ...     "model": {"name": "fm", "dim": 2}, "data": {"rows": 2000}, "training": {"epochs": 1}})
    >>> run(small, progress=False, say=lambda line: None).test.overall.rows
    200
    """
    # before anything is written: a prepared log may not be usable
    settings = with_checksum(settings)
    prepared = load_splits(settings.data) if isinstance(settings.data, PreparedLog) else None
    with _opened(settings, folder, resume=resume) as out:
        splits = prepared or load_splits(settings.data, progress=data_progress)
        one_pass = settings.training.one_pass
        splits = splits.in_one_pass() if one_pass else splits
        model, history = train_model(
            settings,
            splits.train,
            splits.valid if len(splits.valid) and not one_pass else None,
            folder=None if out is None else out / CHECKPOINTS,
            resume=resume,
            device=device,
            progress=progress,
            say=say,
            shared=shared,
        )
        return _finished(settings, model, history, splits, out, say=say)


def run_spread(
    settings: RunSettings,
    *,
    folder: str | os.PathLike[str],
    resume: bool = False,
    device: str = "cpu",
    plan: PlanSpec = "auto",
    timeout: timedelta = TIMEOUT,
    progress: Progress | bool = True,
    say: Callable[[str], None] = print,
) -> RunResult | None:
    """Run as `run` does, in the processes of `torchrun`, with the tables spread over them by TorchRec.

    Every process calls it with the same arguments. The first writes the folder, reports, and at the end has the plain model,
    as after `run`; the others return None. Where the plain model does not fit the memory of the first one, its pieces are
    written, and all return None. A process that fails ends all of them, at the latest after `timeout`.
    """
    join_processes(device, timeout)
    require_torchrec()
    is_first = dist.get_rank() == 0
    say, progress = (say, progress) if is_first else (_nothing, False)
    settings = with_checksum(settings)
    splits = load_splits(settings.data)
    require(
        not settings.training.one_pass,
        "training in one pass scores the rows in their order, which one process does: leave the engine out",
    )
    with _opened(settings, folder, resume=resume) if is_first else nullcontext(Path(folder)) as out:
        assert out is not None
        dist.barrier()  # the folder is there, or refused
        model, history = train_model(
            settings,
            splits.train,
            splits.valid if len(splits.valid) else None,
            folder=out / CHECKPOINTS,
            resume=resume,
            device=device,
            progress=progress,
            say=say,
            plan=plan,
        )
        whole = sum(p.numel() * p.itemsize for p in whole_parameters(model).values())
        free = available_memory(CPU)
        # building the plain model takes its tables twice
        if processes_of(model).largest(int(is_first and free is not None and 3 * whole > free)):
            test = evaluate(model, splits.test, counts=splits.train.counts())
            save_shards(model, out / PIECES)
            if is_first:
                described = describe_run(settings, history, test, model)
                write_json(out / RUN_FILE, described, error=ModelFileError)
            say(
                f"test: {test}\nthe whole model, {size(whole)}, does not fit the memory of this machine; its pieces are in "
                f"{str(out / PIECES)!r}. On a larger one: rarebit reshard {shlex.quote(str(out))}"
            )
            leave_processes()
            return None
        weights = gather_weights(model)
        leave_processes()
        if not is_first:
            return None
        return _from_weights(settings, weights, history, splits, out, say=say)


def reshard(folder: str | os.PathLike[str], *, say: Say = print) -> RunResult:
    """Join the pieces that several processes wrote of a run into its plain model, and finish the run in this process.

    A run that ended leaves its pieces where the model did not fit its first process. Of one that was interrupted, the weights
    are those of the best epoch so far.
    """
    out, settings = Path(folder), read_run(folder)
    best = sorted((out / CHECKPOINTS).glob(f"{BEST}*"))
    found = out / PIECES if (out / PIECES).exists() else next(iter(best[::-1]), out / PIECES)
    weights = unshard(found)
    with _reading(folder) as values:
        stored = dict(values.get("history", {}))
        records = [from_mapping(EpochRecord, record) for record in stored.pop("epochs", [])]
        history = History(epochs=records, reports=dict(values.get("reports", {})), **stored)
    say(f"read from {str(found)!r}")
    with file_lock(out / LOCK):
        splits = load_splits(settings.data)
        return _from_weights(settings, weights, history, splits, out, say=say)


def _from_weights(
    settings: RunSettings,
    weights: Mapping[str, Tensor],
    history: History,
    splits: Splits,
    out: Path,
    *,
    say: Say,
) -> RunResult:
    """Finish a run of several processes in one, from the weights of its plain model."""
    model = start_model(settings, splits.train.schema, say=_nothing)
    for method in settings.methods:
        method.prepare_(model, splits.train)
    model.load_state_dict(weights)
    return _finished(settings, model, history, splits, out, say=say)


def _nothing(line: str) -> None:
    """Say nothing."""


@contextmanager
def _opened(
    settings: RunSettings, folder: str | os.PathLike[str] | None, *, resume: bool
) -> Iterator[Path | None]:
    """Give the folder of a run to the only process that writes it, with its settings inside."""
    out = None if folder is None else make_folder(Path(folder))
    # before run.json is written: it may be that of a run in another process
    with nullcontext() if out is None else file_lock(out / LOCK):
        if out is not None and not resume:
            if (out / CHECKPOINTS).exists() or (out / STAGE).exists():
                raise ModelFileError(
                    f"{str(out)!r} holds a run already; resume it "
                    f"(rarebit train --resume {shlex.quote(str(out))}), or choose another folder"
                )
            if (out / FOLDER.description).exists():  # such as a compressed run
                raise ModelFileError(f"{str(out)!r} holds a model already; choose another folder")
            values = {"settings": stored_settings(settings)}
            write_json(out / RUN_FILE, values, error=ModelFileError)
        yield out


def _finished(
    settings: RunSettings,
    model: nn.Module,
    history: History,
    splits: Splits,
    out: Path | None,
    *,
    say: Say,
) -> RunResult:
    """Return the result of a trained model, ready for inference, measured on the test split, and written."""
    finish_model(settings, model, splits.train, say=say)
    counts = splits.train.counts()
    result = RunResult(
        model=model,
        history=history,
        test=evaluate(model, splits.test, counts=counts)
        if history.scores is None
        else evaluate_scores(history.scores, splits.train, counts=counts),
        num_parameters=num_parameters(model),
        table_bytes=table_bytes(model),
        folder=out,
        hints=() if settings.methods else tuple(suggestions(counts)),
    )
    if out is not None:
        save_model(model, out)
        write_json(
            out / RUN_FILE,
            describe_run(settings, history, result.test, model),
            error=ModelFileError,
        )
    return result


def describe_run(
    settings: RunSettings, history: History, test: Evaluation, model: nn.Module
) -> dict[str, Any]:
    """Return what the file of a finished run says."""
    from rarebit import __version__

    values = asdict(replace(history, scores=None))
    values.pop("scores")  # one per row
    return {
        "settings": stored_settings(settings),
        "test": asdict(test),
        "reports": values.pop("reports"),
        "history": values,
        "num_parameters": num_parameters(model),
        "table_bytes": table_bytes(model),
        "tables": [
            {"name": info.name, "rows": info.rows, "num_bytes": info.num_bytes}
            for info in find_tables(model)
        ],
        "versions": {
            "rarebit": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def read_run(folder: str | os.PathLike[str]) -> RunSettings:
    """Return the settings of the run that wrote a folder."""
    with _reading(folder) as values:
        return RunSettings.from_mapping(values["settings"])


def read_reports(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the reports of the callbacks of a run, by name; none from an older run."""
    with _reading(folder) as values:
        return dict(values.get("reports", {}))


def read_facts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a finished run is known by: model, methods, log, test AUC and the versions it was made with."""
    settings = read_run(folder)
    with _reading(folder) as values:
        log = settings.data
        return {
            "model": settings.model,
            "methods": [str(method) for method in settings.methods],
            "log": getattr(log, "checksum", None) or str(log),
            "best_epoch": values.get("history", {}).get("best_epoch"),
            "test_auc": values.get("test", {}).get("overall", {}).get("auc"),
            "versions": values.get("versions"),
        }


@contextmanager
def _reading(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the content of the run's file; what is wrong with it becomes a `ModelFileError`."""
    path = Path(folder) / RUN_FILE
    try:
        yield files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelFileError(
            f"{str(folder)!r} holds no run: {RUN_FILE} is missing; train one with rarebit train"
        ) from None
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ModelFileError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{str(path)!r} is damaged: {error}") from None


def with_checksum(settings: RunSettings) -> RunSettings:
    """Return the settings with the checksum of the prepared log."""
    log = settings.data
    if not isinstance(log, PreparedLog) or log.checksum:
        return settings
    found = replace(log, checksum=PreparedFolder(log.folder).checksum)
    return replace(settings, data=found)


def stored_settings(settings: RunSettings) -> dict[str, Any]:
    """Return the settings for a file, with absolute paths."""
    values = settings.to_mapping()
    if isinstance(settings.data, PreparedLog):
        values["data"]["folder"] = str(Path(settings.data.folder).absolute())
    return values


def make_folder(folder: Path) -> Path:
    """Make the folder before training, and raise where it is not writable."""
    try:
        files.make_folder(folder)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ModelFileError(
            f"cannot write to the folder {str(folder)!r}: {error.strerror}; choose another one"
        ) from None
    return folder
