"""From the settings of a run to its trained model.

start_model     the model before training, with the methods of training applied
train_model     train it, or let a method drive the training, as pruning does in two stages
finish_model    the model for inference: merged, and with the methods that come after training
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from rarebit.callbacks import TrainingData, started
from rarebit.data.dataset import Dataset
from rarebit.data.schema import Schema
from rarebit.models import build_model
from rarebit.models._base import RankingModel
from rarebit.tables.apply import apply_, end_training_
from rarebit.tables.find import find_tables, table_parameters
from rarebit.tables.table import Method
from rarebit.technique import SharedStage, Technique
from rarebit.training.fit import fit_started, training_data
from rarebit.training.loop import History
from rarebit.training.progress import Progress
from rarebit.training.run_settings import PreparedLog, RunSettings
from rarebit.training.settings import Training

__all__ = [
    "CHECKPOINTS",
    "STAGE",
    "Trained",
    "TrainingJob",
    "finish_model",
    "num_parameters",
    "start_model",
    "train_model",
]

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

    >>> from rarebit.data import Field
    >>> schema = Schema((Field(name="user", rows=9), Field(name="item", rows=7)))
    >>> type(start_model(RunSettings(model="fm"), schema)).__name__
    'FM'
    """
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
    *,
    folder: Path | None = None,
    resume: bool = False,
    device: torch.device | str = "cpu",
    progress: Progress | bool = True,
    say: Say = print,
    shared: SharedStage | None = None,
) -> Trained:
    """Build and train the model of a run; the folder is that of its checkpoints.

    >>> from rarebit.data.synthetic import SyntheticLog, generate
    >>> settings = RunSettings.from_mapping({"model": {"name": "fm", "dim": 2}, "training": {"epochs": 1}})
    >>> splits = generate(SyntheticLog(rows=2000))
    >>> train_model(settings, splits.train, splits.valid, progress=False).history.best_epoch
    1
    """
    job = TrainingJob(
        settings=settings,
        train=train,
        valid=valid,
        folder=folder,
        resume=resume,
        device=device,
        progress=progress,
        say=say,
        shared=shared,
    )
    methods = settings.methods
    for method in methods:
        hint = method.hint(methods)
        if hint:
            job.say(hint)
    for method in methods:
        trained = method.drive(job)
        if trained is not None:
            return trained
    return job.fit(job.start(methods), methods, folder=job.folder)


def finish_model(settings: RunSettings, model: nn.Module, *, say: Say = print) -> bool:
    """Make a trained model ready for inference; return whether its scores changed.

    What only training needs is merged; then come the methods for trained tables.
    """
    end_training_(model)
    last = [m for m in settings.methods if isinstance(m, Method) and m.after_training]
    for method in last:
        say(str(apply_(model, method, verbose=False)))
    return bool(last)


def num_parameters(model: nn.Module) -> int:
    """Return how many weights a model has, including those its tables store as integers.

    >>> num_parameters(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1)))
    45
    """
    tables = sum(info.num_parameters for info in find_tables(model))
    trained = sum(parameter.numel() for parameter in table_parameters(model).values())
    return sum(parameter.numel() for parameter in model.parameters()) - trained + tables
