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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from rarebit.callbacks import TrainingData, started
from rarebit.data.dataset import Dataset
from rarebit.data.prepared import PreparedFolder
from rarebit.data.schema import Schema
from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import ModelFileError
from rarebit.models import build_model
from rarebit.models._base import RankingModel
from rarebit.storage import files
from rarebit.storage.files import file_lock, write_json
from rarebit.tables.apply import apply_, end_training_, find_tables, table_bytes, table_parameters
from rarebit.tables.table import Method
from rarebit.technique import SharedStage, Technique, suggestions
from rarebit.training.fit import History, Progress, check_data, fit_started, training_data
from rarebit.training.memory import check_building
from rarebit.training.metrics import Evaluation, evaluate, evaluate_scores
from rarebit.training.model_file import FOLDER, save_model
from rarebit.training.settings import PreparedLog, RunSettings, Training, load_splits

CHECKPOINTS, STAGE = "checkpoints", "pruning"
"""Folders of a run: its checkpoints, and the first stage of a training that has two."""

Say = Callable[[str], object]


class Trained(NamedTuple):
    """A trained model and its history."""

    model: nn.Module
    history: History


def start_model(settings: RunSettings, schema: Schema, *, say: Say = print) -> RankingModel:
    """Return the model of a run before training, with the methods of training applied.

    The seed draws the weights before any method does, so variants of one seed start from the same tables. It is
    set again afterwards, so what training draws does not depend on what methods drew.
    """
    check_building(settings.model, schema, settings.model_settings)
    torch.manual_seed(settings.training.seed)
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

    def start(
        self, methods: Sequence[Technique], *, seed: int | None = None, say: Say | None = None
    ) -> RankingModel:
        """Return the model with these methods on the device, and the training data known to them."""
        training = self.settings.training
        training = training if seed is None else replace(training, seed=seed)
        settings = replace(self.settings, methods=tuple(methods), training=training)
        model = start_model(settings, self.train.schema, say=say or self.say).to(self.device)
        for method in methods:
            method.prepare_(model, self.train)
        return model

    def fit(
        self,
        model: nn.Module,
        methods: Sequence[Technique],
        *,
        training: Training | None = None,
        folder: Path | None = None,
        resume: bool | None = None,
    ) -> Trained:
        """Train a model that has the tables of its methods, with the callbacks of these methods."""
        training = training or self.settings.training
        check_data(model, self.train, self.valid, training)
        with started(list(methods), model, self.data(training)) as callbacks:
            history = fit_started(
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
    settings: RunSettings,
    train: Dataset,
    valid: Dataset | None,
    **options: Any,
) -> Trained:
    """Build and train the model of a run; `options` are those of `TrainingJob`, such as the folder of checkpoints."""
    job = TrainingJob(settings=settings, train=train, valid=valid, **options)
    methods = settings.methods
    for hint in filter(None, (method.hint(methods) for method in methods)):
        job.say(hint)
    for method in methods:
        trained = method.drive(job)
        if trained is not None:
            return trained
    return job.fit(job.start(methods), methods, folder=job.folder)


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
    if isinstance(log, SyntheticLog) or log.checksum:
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
