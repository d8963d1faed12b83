"""The two stages of a run that prunes: find which entries survive, then train those again."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from rarebit.callbacks import TrainingMethod
from rarebit.pruning._budget import threshold_parameters
from rarebit.pruning._prune import masked_model, prune
from rarebit.pruning._ticket import DESCRIPTION, Ticket, keep_largest, load_ticket, save_ticket
from rarebit.pruning.masked import Masked
from rarebit.pruning.pep import PEP
from rarebit.pruning.pruned import Pruned, SharedPruning
from rarebit.settings import require
from rarebit.storage.disk import file_lock
from rarebit.tables.apply import apply_, end_training_
from rarebit.tables.find import find_sites
from rarebit.tables.table import AnyTable, Method, full_table
from rarebit.technique import Technique, technique_name, technique_text
from rarebit.training.fit import measured
from rarebit.training.stages import CHECKPOINTS, STAGE, Trained, TrainingJob

__all__ = ["PruningDriver"]

LOCK, TICKET = "lock", "ticket"
"""In the folder of a first stage that several runs share."""
OTHER_DRAW = 1_000_003
"""Added to the seed where tables start from other values than before."""


@dataclass(frozen=True)
class PruningDriver:
    """Trains a run in two stages."""

    pruned: Pruned
    job: TrainingJob

    def run(self) -> Trained:
        """Find which entries survive, then train them again; the job's folder is that of the second stage."""
        job, shared = self.job, self.job.shared
        late = [m for m in job.settings.methods if isinstance(m, TrainingMethod)]
        require(
            not late or self.pruned.start != "trained",
            f"{', '.join(map(technique_name, late))} acts when pruned tables are trained again, and "
            "start='trained' leaves that out; use start='ticket'",
        )
        if isinstance(shared, SharedPruning) and shared.as_ticket:
            return self._retrained(self._shared_ticket(shared.folder))
        folder = None if job.folder is None else job.folder.parent / STAGE
        if shared is not None:
            folder = shared.folder
        trained, ticket = self._first_stage(folder, resume=job.resume or shared is not None)
        if self.pruned.start == "trained":
            self._cut(trained.model, ticket)
            history = trained.history
            history = measured(trained.model, history, job.valid, epoch=len(history.epochs))
            return Trained(trained.model, history)
        return self._retrained(ticket)

    def _first_stage(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        stage = self._by_magnitude if self.pruned.by == "magnitude" else self._by_threshold
        return stage(folder, resume=resume)

    def _shared_ticket(self, folder: Path) -> Ticket:
        """Return which entries survive, as the first of several runs found out."""
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / LOCK, wait=True):
            if (folder / TICKET / DESCRIPTION).exists():
                return load_ticket(folder / TICKET)
            _, ticket = self._first_stage(folder / STAGE, resume=True)
            save_ticket(ticket, folder / TICKET)
            shutil.rmtree(folder / STAGE, ignore_errors=True)
        return ticket

    def _by_threshold(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        """Train while a threshold cuts entries, until the budget is met."""
        job, methods = self.job, self._without(Pruned, TrainingMethod)
        acting = [technique_text(m) for m in methods if m.callback() is not None]
        require(
            not acting,
            f"{', '.join(acting)} acts around training, and pruning by a threshold has no room for that; use "
            "pruned with by='magnitude', or other settings",
        )
        model = job.start(methods)
        training = job.settings.training
        training = replace(training, epochs=self.pruned.epochs or training.epochs)
        if not threshold_parameters(model):
            # row-wise weight decay leaves rows alone that are never seen
            training = replace(training, tables="rowwise")
        shared = job.shared
        pruning = prune(
            model,
            job.train,
            budgets=shared.budgets if isinstance(shared, SharedPruning) else [self.pruned.keep],
            settings=training,
            folder=folder,
            resume=resume,
            progress=job.progress,
        )
        [ticket] = [t for t in pruning.tickets if t.facts["budget"] == self.pruned.keep]
        return Trained(model, pruning.history), ticket

    def _by_magnitude(self, folder: Path | None, *, resume: bool) -> tuple[Trained, Ticket]:
        """Train to the best epoch, and cut all but the largest entries."""
        methods = self._without(Pruned, TrainingMethod)
        model = self.job.start(methods)
        start = {name: full_table(table).cpu().clone() for name, table in _wide(model).items()}
        training = self.job.settings.training
        trained = self.job.fit(
            model,
            methods,
            training=replace(training, epochs=self.pruned.epochs or training.epochs),
            folder=None if folder is None else folder / CHECKPOINTS,
            resume=resume,
        )
        return trained, keep_largest(_wide(model), self.pruned.keep).with_start(start)

    def _retrained(self, ticket: Ticket) -> Trained:
        """Train what survived, from where it started or from other values."""
        job, methods = self.job, self._without(Pruned, PEP)
        job.say(f"retraining the {ticket.num_kept:,} entries that are left")
        if self.pruned.start == "random":
            seed = job.settings.training.seed + OTHER_DRAW
            drawn = _wide(job.start(methods, seed=seed, say=_silent))
            ticket = ticket.with_start({name: full_table(drawn[name]) for name in ticket.kept})

        def build() -> nn.Module:
            model = job.start(methods, say=_silent)
            end_training_(model)
            return model

        # methods that change tables were merged; those that act around training do so now
        acting = [m for m in methods if isinstance(m, TrainingMethod)]
        trained = job.fit(masked_model(build, ticket), acting, folder=job.folder)
        self._cut(trained.model, ticket)
        return trained

    def _cut(self, model: nn.Module, ticket: Ticket) -> None:
        """Merge what was trained, and let its tables be what is left of them."""
        end_training_(model)
        last = any(method.after_training for method in self.job.settings.methods)
        # what comes after training rounds a plain table; anything else is packed
        left: Method = Masked(ticket.with_start(None)) if last else self.pruned
        apply_(model, left, where=lambda info: info.name in ticket.kept, verbose=False)
        if last:
            end_training_(model)

    def _without(self, *kinds: type[Technique]) -> list[Technique]:
        return [m for m in self.job.settings.methods if not isinstance(m, kinds)]


def _wide(model: nn.Module) -> Mapping[str, AnyTable]:
    """Return the tables wider than first-order weights."""
    return {site.info.name: site.table for site in find_sites(model) if site.info.width > 1}


def _silent(line: str) -> None:
    del line
