"""From the settings of a run to its trained model, in one stage or in two.

    start_model     the model as training finds it, with the methods of training applied
    train_model     train it; with `Pruned`, first find which entries survive, then train those again
    finish_model    what is served: folded, and with the methods that come after training

Pruning keeps what it needs to go on in a folder beside that of the checkpoints. Methods that only take part in
training (`TrainingMethod`) do so in the last stage, so the first is that of the same run without them.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from rarebit.callbacks import TrainingMethod
from rarebit.data.dataset import Dataset
from rarebit.data.schema import Schema
from rarebit.methods._counts import counted_in, set_counts_
from rarebit.methods.shrinkage import Shrinkage
from rarebit.models import build_model
from rarebit.models._base import RankingModel
from rarebit.pruning._budget import threshold_parameters
from rarebit.pruning._prune import CHECKPOINTS, Trained, masked_model, prune
from rarebit.pruning._ticket import DESCRIPTION, Ticket, keep_largest, load_ticket, save_ticket
from rarebit.pruning.masked import Masked
from rarebit.pruning.pep import PEP
from rarebit.pruning.pruned import Pruned
from rarebit.settings import require
from rarebit.storage.disk import file_lock
from rarebit.tables.apply import apply_, end_training_
from rarebit.tables.find import find_sites, find_tables, table_parameters
from rarebit.tables.table import AnyTable, full_table, method_name
from rarebit.training.callbacks import (
    fit_with_methods,
    measured,
    taking_part,
    training_data,
)
from rarebit.training.progress import Progress
from rarebit.training.run_settings import RunSettings
from rarebit.training.settings import Training

__all__ = [
    "PRUNING",
    "SharedPruning",
    "count_rows_",
    "finish_model",
    "num_parameters",
    "pruning_of",
    "start_model",
    "train_model",
]

PRUNING = "pruning"
"""The folder of the first stage, beside that of the checkpoints."""
LOCK, TICKET = "lock", "ticket"
"""In the folder of a first stage that several runs have together."""
OTHER_DRAW = 1_000_003
"""Added to the seed where tables are to start from other values than before."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class SharedPruning:
    """A first stage of pruning that several runs have together."""

    folder: Path
    """Where it is kept."""
    budgets: tuple[int, ...]
    """How many entries the runs keep."""
    as_ticket: bool = False
    """Whether all that is kept of it is which entries survive, for runs that differ in their second stage
    alone. Those may run side by side: one makes it, and the others wait."""


def start_model(settings: RunSettings, schema: Schema, *, say: Say = print) -> RankingModel:
    """Return the model of a run as training finds it, with the methods of training applied.

    The seed draws the weights before any method does, so that methods of one seed start from the same
    tables; and it is set again, so that what training draws does not depend on what they drew.

    >>> from rarebit import Field
    >>> schema = Schema((Field(name="user", rows=9), Field(name="item", rows=7)))
    >>> type(start_model(RunSettings(model="fm"), schema)).__name__
    'FM'
    """
    torch.manual_seed(settings.training.seed)
    model = build_model(settings.model, schema, settings.model_settings)
    for method in settings.methods:
        if not (method.after_training or isinstance(method, TrainingMethod)):
            say(str(apply_(model, method, verbose=False)))
    torch.manual_seed(settings.training.seed)
    return model


def count_rows_(model: nn.Module, train: Dataset) -> None:
    """Tell tables that ask for it how often training will see their rows, in place.

    >>> from rarebit import Shrinkage
    >>> data = Dataset.from_columns({"user": [0, 1, 1, 1]}, label=[0, 1, 0, 1])
    >>> model = nn.ModuleDict({"user": nn.Embedding(2, 8)})
    >>> changes = apply_(model, Shrinkage(), verbose=False)
    >>> count_rows_(model, data)
    >>> model["user"].evidence.counts
    tensor([1, 3])
    """
    if any(counted_in(site.table) for site in find_sites(model)):
        set_counts_(model, train.counts())


def pruning_of(settings: RunSettings) -> Pruned | None:
    """Return how a run prunes, or None for a run of one stage.

    >>> pruning_of(RunSettings(methods=(Pruned(keep=9),))).keep
    9
    """
    return next((method for method in settings.methods if isinstance(method, Pruned)), None)


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
    shared: SharedPruning | None = None,
) -> Trained:
    """Build and train the model of a run; the folder is that of its checkpoints.

    Runs that differ in their budget alone may share the first stage of pruning: it is made once.

    >>> from rarebit.data.synthetic import SyntheticLog, generate
    >>> settings = RunSettings.from_mapping({"model": {"name": "fm", "dim": 2}, "training": {"epochs": 1}})
    >>> splits = generate(SyntheticLog(rows=2000))
    >>> trained = train_model(settings, splits.train, splits.valid, progress=False)
    >>> trained.history.best_epoch
    1
    """
    pruned = pruning_of(settings)
    if pruned is not None:
        _refuse_no_last_stage(settings, pruned)
        _warn_of_prior(settings, say)
        stages = _Stages(settings, pruned, train, valid, device, progress, say, shared)
        return stages.run(folder, resume=resume)
    model = start_model(settings, train.schema, say=say).to(device)
    count_rows_(model, train)
    return fit_with_methods(
        model, settings, train, valid, folder=folder, resume=resume, progress=progress
    )


def finish_model(settings: RunSettings, model: nn.Module, *, say: Say = print) -> bool:
    """Make a trained model what is served; return whether its scores are others than in training.

    What only training needs is folded; then come the methods that are made for trained tables.
    """
    end_training_(model)
    last = [method for method in settings.methods if method.after_training]
    for method in last:
        say(str(apply_(model, method, verbose=False)))
    return bool(last)


def num_parameters(model: nn.Module) -> int:
    """Return how many weights a model has, those that its tables keep as integers included.

    >>> num_parameters(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1)))
    45
    """
    tables = sum(info.num_parameters for info in find_tables(model))
    trained = sum(parameter.numel() for parameter in table_parameters(model).values())
    return sum(parameter.numel() for parameter in model.parameters()) - trained + tables


@dataclass(frozen=True)
class _Stages:
    """The two stages of a run that prunes; `shared` is a first stage that several runs have together."""

    settings: RunSettings
    pruned: Pruned
    train: Dataset
    valid: Dataset | None
    device: torch.device | str
    progress: Progress | bool
    say: Say
    shared: "SharedPruning | None"

    def run(self, folder: Path | None, *, resume: bool) -> Trained:
        """Find which entries survive, then train those again; the folder is that of the second stage."""
        first = None if folder is None else folder.parent / PRUNING
        if self.shared is not None:
            first = self.shared.folder
        if self.shared is not None and self.shared.as_ticket:
            return self._trained_again(
                self._shared_ticket(self.shared.folder), folder, resume=resume
            )
        trained, ticket = self._first_stage(first, resume=resume or self.shared is not None)
        if self.pruned.start == "trained":
            self._cut(trained.model, ticket)
            return measured(trained, self.valid, epoch=len(trained.history.epochs))
        return self._trained_again(ticket, folder, resume=resume)

    def _trained_again(self, ticket: Ticket, folder: Path | None, *, resume: bool) -> Trained:
        self.say(f"training the {ticket.num_kept:,} entries that are left again")
        trained = self._retrain(ticket, folder, resume=resume)
        self._cut(trained.model, ticket)
        return trained

    def _first_stage(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        stage = self._by_magnitude if self.pruned.by == "magnitude" else self._by_threshold
        return stage(folder, resume=resume)

    def _shared_ticket(self, folder: Path) -> Ticket:
        """Return which entries survive, as the first of several runs has found out."""
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / LOCK, wait=True):
            if (folder / TICKET / DESCRIPTION).exists():
                return load_ticket(folder / TICKET)
            _, ticket = self._first_stage(folder / PRUNING, resume=True)
            save_ticket(ticket, folder / TICKET)
            shutil.rmtree(folder / PRUNING, ignore_errors=True)
        return ticket

    def _by_threshold(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        """Train while a threshold cuts entries, until the budget is met."""
        model, training = self._start(), self._first_training
        self._refuse_taking_part(model)
        if not threshold_parameters(model):
            # by rows, weight decay leaves a row alone that is never seen
            training = replace(training, tables="rowwise")
        pruning = prune(
            model,
            self.train,
            budgets=[self.pruned.keep] if self.shared is None else self.shared.budgets,
            settings=training,
            folder=folder,
            resume=resume,
            progress=self.progress,
        )
        [ticket] = [t for t in pruning.tickets if t.facts["budget"] == self.pruned.keep]
        return Trained(model, pruning.history), ticket

    def _refuse_taking_part(self, model: nn.Module) -> None:
        """Raise where a table is to be learned in a way that a rising threshold leaves no room for."""
        settings = _without_pruning(self.settings)
        data = training_data(settings, self.train, self.valid)
        with taking_part(settings.methods, model, data) as part:
            require(
                not part.attached,
                f"{', '.join(part.settings.values())} takes part in training, which pruning by a threshold has "
                "no room for; use pruned with by='magnitude', or other settings",
            )

    def _by_magnitude(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        """Train to the best epoch, and cut all but the largest entries."""
        model = self._start()
        start = {name: full_table(table).cpu().clone() for name, table in _wide(model).items()}
        trained = fit_with_methods(
            model,
            replace(_without_pruning(self.settings), training=self._first_training),
            self.train,
            self.valid,
            folder=None if folder is None else folder / CHECKPOINTS,
            resume=resume,
            progress=self.progress,
        )
        return trained, keep_largest(_wide(model), self.pruned.keep).with_start(start)

    def _retrain(self, ticket: Ticket, folder: Path | None, *, resume: bool) -> Trained:
        """Train what has survived, from where it started or from other values."""
        if self.pruned.start == "random":
            other = replace(
                self.settings,
                training=replace(
                    self.settings.training, seed=self.settings.training.seed + OTHER_DRAW
                ),
            )
            drawn = _wide(
                start_model(_without_thresholds(other), self.train.schema, say=_say_nothing)
            )
            ticket = ticket.with_start({name: full_table(drawn[name]) for name in ticket.kept})
        # what changes tables was folded; what takes part in training does so now
        methods = tuple(m for m in self.settings.methods if isinstance(m, TrainingMethod))
        return fit_with_methods(
            masked_model(self._start_plain, ticket),
            replace(self.settings, methods=methods),
            self.train,
            self.valid,
            folder=folder,
            resume=resume,
            progress=self.progress,
        )

    def _cut(self, model: nn.Module, ticket: Ticket) -> None:
        """Fold what was trained, and let its tables be what is left of them."""
        end_training_(model)
        last = any(method.after_training for method in self.settings.methods)
        # what comes after training rounds a plain table; anything else is packed
        left = Masked(ticket.with_start(None)) if last else self.pruned
        apply_(model, left, where=lambda info: info.name in ticket.kept, verbose=False)
        if last:
            end_training_(model)

    @property
    def _first_training(self) -> Training:
        training = self.settings.training
        return replace(training, epochs=self.pruned.epochs or training.epochs)

    def _start(self) -> RankingModel:
        """Return the model that is pruned: with all methods but the pruning itself."""
        settings = _without_pruning(self.settings)
        model = start_model(settings, self.train.schema, say=self.say).to(self.device)
        count_rows_(model, self.train)
        return model

    def _start_plain(self) -> RankingModel:
        """Return the model that is trained again: the same, with what only training needs folded."""
        settings = _without_thresholds(self.settings)
        model = start_model(settings, self.train.schema, say=_say_nothing).to(self.device)
        count_rows_(model, self.train)
        end_training_(model)
        return model


def _refuse_no_last_stage(settings: RunSettings, pruned: Pruned) -> None:
    late = [method_name(m) for m in settings.methods if isinstance(m, TrainingMethod)]
    require(
        not late or pruned.start != "trained",
        f"{', '.join(late)} takes part when pruned tables are trained again, and start='trained' leaves that "
        "out; use start='ticket'",
    )


def _warn_of_prior(settings: RunSettings, say: Say) -> None:
    if any(isinstance(m, Shrinkage) and m.prior != "zero" for m in settings.methods):
        say(
            "rows of rare ids are mostly the prior of shrinkage, which pruning may keep in all of them and little "
            "else; shrinkage:prior=zero leaves the entries to rows"
        )


def _without_pruning(settings: RunSettings) -> RunSettings:
    methods = tuple(m for m in settings.methods if not isinstance(m, Pruned | TrainingMethod))
    return replace(settings, methods=methods)


def _without_thresholds(settings: RunSettings) -> RunSettings:
    methods = tuple(m for m in settings.methods if not isinstance(m, Pruned | PEP))
    return replace(settings, methods=methods)


def _wide(model: nn.Module) -> dict[str, AnyTable]:
    """Return the tables that a method is applied to: those wider than first-order weights."""
    return {site.info.name: site.table for site in find_sites(model) if site.info.width > 1}


def _say_nothing(line: str) -> None:
    del line
