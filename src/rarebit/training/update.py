"""Another day: a trained model learns tomorrow's log, and its tables grow (`rarebit update`).

    vocabulary   new values get ids, old ones keep theirs                                `data/raw/vocabulary.py`
    tables       rows of new ids start as that of unknown values, at the prior, or as you say    `tables/grow.py`
    training     one pass over the day in its order; each row is scored before it is learned
    folder       a run like any other: it exports, compresses, serves, and is updated tomorrow

The run of the day before is only read. Its checkpoints have what training needs and inference does not: the tables of its
methods before they were merged, counts, and the state of the optimizer.
"""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.callbacks import started
from rarebit.data.dataset import Dataset
from rarebit.data.prepare import changes_of, prepare_day
from rarebit.data.prepared import MANIFEST, PreparedFolder, no_progress
from rarebit.data.prepared import Progress as DataProgress
from rarebit.data.schema import FIRST_VALUE, PADDING, UNKNOWN, Schema
from rarebit.errors import DataError, ModelFileError, SettingsError
from rarebit.models._base import RankingModel
from rarebit.settings import require, suggest
from rarebit.storage.files import file_lock, read_json, write_json
from rarebit.tables.apply import find_sites, table_bytes
from rarebit.tables.grow import NewRows, grow_
from rarebit.tables.table import home_of
from rarebit.technique import Technique
from rarebit.training.checkpoints import NONSENSE, trained_state
from rarebit.training.fit import (
    History,
    Progress,
    alone,
    check_data,
    fit_started,
    make_optimizer,
    training_data,
)
from rarebit.training.metrics import Metrics, evaluate_scores, measure, predict
from rarebit.training.model_file import load_model, save_model
from rarebit.training.optimizers import fitting_state
from rarebit.training.run import (
    CHECKPOINTS,
    LOCK,
    RUN_FILE,
    TrainingJob,
    describe_run,
    finish_model,
    make_folder,
    read_run,
    start_model,
    stored_settings,
)
from rarebit.training.settings import PreparedLog, RunSettings
from rarebit.training.step import first_line

if TYPE_CHECKING:
    from rarebit.data.raw.encoder import LogEncoder
    from rarebit.data.raw.vocabulary import DayChanges, Growth

DATA, UPDATE = "data", "update"
"""The folder of the encoded day, and what the run's file calls the update."""

MOST_SCORED = 200_000
"""Rows of the day that are scored before and after it, at most: every row is scored while it is learned."""

Start: TypeAlias = Literal["unknown", "prior", "noise"]
"""How rows of new ids start: as the row of unknown values, at the mean of the table's rows, or at random."""


class Learner:
    """A model that learns day after day: its tables as they are trained, and its optimizer."""

    def __init__(self, settings: RunSettings, model: RankingModel, optimizer: Optimizer) -> None:
        self.settings, self.model, self.optimizer = settings, model, optimizer

    @classmethod
    def start(
        cls, settings: RunSettings, first: Dataset, *, device: torch.device | str = "cpu"
    ) -> "Learner":
        """Return the learner of a log that begins with these rows, before training."""
        refuse_stages(settings.methods)
        job = TrainingJob(
            settings=settings, train=first, valid=None, device=device, say=lambda _: None
        )
        model = job.start(settings.methods)
        return cls(settings, model, make_optimizer(model, settings.training))

    @classmethod
    def open(cls, folder: Path, schema: Schema, *, device: torch.device | str = "cpu") -> "Learner":
        """Return the learner of a finished run, from its last checkpoint."""
        settings = read_run(folder)
        refuse_stages(settings.methods)
        found = trained_state(folder / CHECKPOINTS)
        if found is None:
            raise ModelFileError(
                f"{str(folder)!r} has no checkpoint to go on from: its folder {CHECKPOINTS!r} is missing; train it again"
            )
        weights, state = found
        model = start_model(settings, schema, say=lambda _: None)
        try:
            model.load_state_dict(weights)
            optimizer = make_optimizer(model.to(device), settings.training)
            fitting = fitting_state(optimizer, state["optimizer"], state.get("stateless"))
            optimizer.load_state_dict(fitting)
        except NONSENSE as error:
            raise ModelFileError(
                f"the checkpoint in {str(folder)!r} is not that of its run: {first_line(error)}; train it again"
            ) from None
        for module in model.modules():
            keep_counting: Callable[[], None] | None = getattr(module, "keep_counting_", None)
            if keep_counting is not None:  # the counts of a table
                keep_counting()
        return cls(settings, model, optimizer)

    def grow(
        self,
        schema: Schema,
        changes: "DayChanges",
        *,
        start: Start = "unknown",
        rows: Mapping[str, NewRows] | None = None,
        counts: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Give tables the rows of a day's schema; `rows` are those of new ids where they are known, by field."""
        starts: dict[str, NewRows] = {
            name: start if start != "unknown" else _as_unknown(len(day.new))
            for name, day in changes.columns.items()
        }
        grow_(
            self.model,
            {field.name: field.rows for field in schema.table_fields},
            start=starts | dict(rows or {}),
            reset=changes.reset,
            counts=counts,
            optimizer=self.optimizer,
            verbose=False,
        )
        self.model.schema = schema

    def learn(
        self,
        data: Dataset,
        *,
        folder: Path | None = None,
        resume: bool = False,
        progress: Progress | bool = True,
    ) -> History:
        """Train in one pass over a day; the history has the score of each row before it was learned."""
        training = replace(self.settings.training, one_pass=True)
        check_data(self.model, data, None, training)
        with started(
            list(self.settings.methods), self.model, training_data(training, data, None)
        ) as callbacks:
            course = fit_started(
                self.model,
                data,
                None,
                callbacks,
                settings=training,
                optimizer=self.optimizer,
                folder=folder,
                resume=resume,
                progress=progress,
            )
            return alone(course)


def refuse_stages(methods: Sequence[Technique]) -> None:
    """Raise for a method that cannot learn day after day."""
    for method in methods:
        if type(method).drive is not Technique.drive:
            raise SettingsError(
                f"{method} trains in stages of its own and cannot learn another day; train anew on all rows"
            )


def _as_unknown(new: int) -> NewRows:
    return lambda rows: rows[UNKNOWN].expand(new, -1)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How well some rows of the day are ranked: by the model of the day before, while learning, and afterwards."""

    before: Metrics
    """By the model of the day before; new ids have the rows that they start with."""
    learning: Metrics
    """Each row just before it was learned."""
    after: Metrics
    """By the new model, on rows that it has learned."""


@dataclass(frozen=True, kw_only=True)
class FieldDay:
    """What a day did to one field."""

    name: str
    rows: int
    """Rows of its table now."""
    new: int
    """Values that got an id."""
    reset: int
    """Of these, ids that once were another value's."""
    dropped: int
    """Values that lost their id."""
    waiting: int
    """Values of the day without an id."""
    unknown_share: float
    """Share of the day's values that are unknown."""
    moved: float
    """How far the rows of old ids in the day moved, as a share of their length."""


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """A run that went on for another day."""

    model: nn.Module
    folder: Path
    rows: int
    """Rows of the day."""
    new_rows: int
    """Rows with an id that was new on this day."""
    all: Stages
    new: Stages | None
    """Rows with a new id; None where there are none."""
    known: Stages | None
    """The other rows."""
    fields: tuple[FieldDay, ...]
    table_bytes: int
    samples_per_second: float

    def figures(self) -> dict[str, Any]:
        """Return everything but the model as plain values."""
        values = asdict(replace(self, model=nn.Identity()))
        return {k: v for k, v in values.items() if k not in ("model", "folder")}


def update(
    parent: str | os.PathLike[str],
    log: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    growth: "Growth | None" = None,
    start: Start = "unknown",
    like: Mapping[str, str] | None = None,
    passes: int = 1,
    bad_rows: Literal["stop", "aside"] = "stop",
    resume: bool = False,
    device: torch.device | str = "cpu",
    progress: Progress | bool = True,
    data_progress: DataProgress = no_progress,
) -> UpdateResult:
    r"""Let a trained run learn another day of its log, in a new folder, and return what happened.

    start    how the rows of new ids start: as the row of unknown values, at the "prior", which is the mean of the table's
             rows, or at "noise"
    like     for a field, another one that groups its ids: a new item starts at the mean of the known items that had the
             same category on this day, `like={"item": "category"}`
    passes   over the day; scores and figures "while learning" are of the first

    Tables that keep counts, such as those of shrinkage, give a new id the prior that they learned, whatever it starts with.

    >>> import tempfile
    >>> import rarebit as rb
    >>> monday, tuesday = (f"user,click\n{names}\n" for names in ("ann,0\nbob,1\n" * 20, "bob,1\neve,0\n" * 9))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     folder = Path(place)
    ...     _ = (folder / "mon.csv").write_text(monday), (folder / "tue.csv").write_text(tuesday)
    ...     _ = rb.prepare(folder / "mon.csv", folder / "data", label="click")
    ...     settings = {"model": {"name": "fm", "dim": 4}, "data": {"folder": str(folder / "data")}}
    ...     _ = rb.run(rb.RunSettings.from_mapping(settings), folder=folder / "mon", progress=False)
    ...     day = update(folder / "mon", folder / "tue.csv", folder / "tue", progress=False)
    >>> day.new_rows, day.fields[0].new
    (9, 1)
    """
    from rarebit.data import Growth
    from rarebit.data.raw.encoder import encoder_of

    parent, folder, like = Path(parent), Path(out), dict(like or {})
    require(
        start in ("unknown", "prior", "noise"),
        f"start must be unknown, prior or noise, got {start!r}",
    )
    require(passes >= 1, f"passes must be at least 1, got passes={passes}")
    encoder = encoder_of(load_model(parent))
    for name, by in like.items():
        check_like(encoder.fields, name, by)
    for file in _listed(log):
        if not Path(file).exists():
            raise DataError(f"{str(file)!r} does not exist; check the name and the folder")
    learner = Learner.open(parent, encoder.fields, device=device)
    make_folder(folder)
    with file_lock(folder / LOCK):
        if (folder / RUN_FILE).exists() and not resume:
            raise ModelFileError(
                f"{str(folder)!r} holds a run already; resume it (rarebit update --resume "
                f"{shlex.quote(str(folder))}), or choose another folder"
            )
        asked = {
            "parent": str(parent.absolute()),
            "log": [str(Path(one).absolute()) for one in _listed(log)],
            "growth": asdict(growth or Growth()),
            "start": start,
            "like": like,
            "passes": passes,
            "bad_rows": bad_rows,
        }
        values = {"settings": stored_settings(learner.settings), UPDATE: asked}
        write_json(folder / RUN_FILE, values, error=ModelFileError)
        if not (folder / DATA / MANIFEST).exists():
            prepare_day(
                log,
                folder / DATA,
                like=encoder,
                growth=growth or Growth(),
                bad_rows=bad_rows,
                progress=data_progress,
            )
        data = Dataset.open(folder / DATA)
        changes = changes_of(folder / DATA)
        counts = counts_before(encoder, data.schema)
        known_rows = {name: like_group(data, changes, name, by) for name, by in like.items()}
        old = {name: numbers[: encoder.fields[name].rows] for name, numbers in counts.items()}
        learner.grow(data.schema, changes, start=start, rows=known_rows, counts=old)
        watch = DayWatch(learner.model, data, changes)
        folders = [folder / f"pass-{number}" for number in range(1, passes)]
        history, *_ = [
            learner.learn(data, folder=one, resume=resume, progress=progress)
            for one in (*folders, folder / CHECKPOINTS)
        ]
        assert history.scores is not None
        learning = history.scores.cpu()
        all_rows, new, known = watch.stages(learning)
        fields = tuple(watch.fields())
        checksum = PreparedFolder(folder / DATA).checksum
        log_of_day = PreparedLog(folder=str(folder / DATA), checksum=checksum)
        settings = replace(learner.settings, data=log_of_day)
        data.known_counts = {name: counts[name] + seen for name, seen in data.counts().items()}
        finish_model(settings, learner.model, data, say=lambda _: None)
        result = UpdateResult(
            model=learner.model,
            folder=folder,
            rows=len(data),
            new_rows=int(new_rows_of(data, changes).sum()),
            all=all_rows,
            new=new,
            known=known,
            fields=fields,
            table_bytes=table_bytes(learner.model),
            samples_per_second=history.samples_per_second,
        )
        save_model(learner.model, folder)
        test = evaluate_scores(learning, data, counts=counts)
        described = {**asked, "vocabulary": encoder.checksum, "result": result.figures()}
        values = describe_run(settings, history, test, learner.model) | {UPDATE: described}
        write_json(folder / RUN_FILE, values, error=ModelFileError)
        return result


def read_update(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments of the update that a folder holds, to resume it."""
    read_run(folder)  # raises where it holds no run
    values = read_json(Path(folder) / RUN_FILE).get(UPDATE)
    if values is None:
        raise ModelFileError(
            f"{str(folder)!r} holds a run of rarebit train, no update; resume it with rarebit train --resume"
        )
    from rarebit.data import Growth

    names = ("parent", "log", "start", "like", "passes", "bad_rows")
    return {**{name: values[name] for name in names}, "growth": Growth(**values["growth"])}


def _listed(
    log: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> Sequence[str | os.PathLike[str]]:
    return [log] if isinstance(log, str | os.PathLike) else log


def counts_before(encoder: "LogEncoder", schema: Schema) -> dict[str, Tensor]:
    """Return how often each id of a day was seen before it, by field: not at all, if it is new."""
    counts = {}
    for field in schema.table_fields:
        column, seen = encoder.schema[field.name], encoder.seen
        numbers = torch.zeros(field.rows, dtype=torch.int64)
        if seen is not None and column.vocabulary_name in seen.counts:
            known = np.rint(seen.counts[column.vocabulary_name]).astype(np.int64)
            numbers[FIRST_VALUE : FIRST_VALUE + len(known)] = torch.from_numpy(known)
        counts[field.name] = numbers
    return counts


def new_rows_of(data: Dataset, changes: "DayChanges") -> Tensor:
    """Return which rows of a day have an id that is new on it."""
    found = torch.zeros(len(data), dtype=torch.bool)
    for name, day in changes.columns.items():
        is_new = torch.zeros(day.rows, dtype=torch.bool)
        is_new[torch.from_numpy(day.new)] = True
        found |= is_new[data.ids[:, data.schema.slots[name]].long()].any(1)
    return found


def check_like(schema: Schema, name: str, by: str) -> None:
    """Raise unless both are fields with one id per row."""
    for wanted in (name, by):
        if wanted not in schema.slots or schema[wanted].max_length != 1:
            hint = suggest(wanted, list(schema.slots))
            raise DataError(f"like: {wanted!r} is no field with one id per row{hint}")


def like_group(data: Dataset, changes: "DayChanges", name: str, by: str) -> NewRows:
    """Return how new ids of a field start: at the mean row of the known ids that had their group on this day.

    An id whose group had no known id starts as unknown values do.
    """
    check_like(data.schema, name, by)
    require(name in changes.columns, f"like: {name!r} is hashed or binned, so it gets no new ids")
    ids, groups = (data.ids[:, data.schema.slots[one].start].long() for one in (name, by))
    day, num_groups = changes.columns[name], data.schema[by].rows
    place = torch.full((day.rows,), -1)
    place[torch.from_numpy(day.new)] = torch.arange(len(day.new))
    is_new = place[ids] >= 0

    def start(rows: Tensor) -> Tensor:
        known, home = ids[~is_new].to(rows.device), rows.device
        sums = rows.new_zeros(num_groups, rows.shape[1])
        sums.index_add_(0, groups[~is_new].to(home), rows[known])
        sizes = groups[~is_new].bincount(minlength=num_groups).to(home)
        means = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], rows[UNKNOWN])
        found, own = rows.new_zeros(len(day.new), rows.shape[1]), place[ids[is_new]].to(home)
        found.index_add_(0, own, means[groups[is_new].to(home)])
        return found / own.bincount(minlength=len(day.new)).clamp(min=1)[:, None]

    return start


class DayWatch:
    """What the report of a day compares: scores and rows from before it with those after it."""

    def __init__(self, model: nn.Module, data: Dataset, changes: "DayChanges") -> None:
        self.model, self.data, self.changes = model, data, changes
        self.every = slice(None, None, -(-len(data) // MOST_SCORED))
        """The rows that are scored before and after the day."""
        parts = (data.ids, data.numeric, data.label)
        self.sample = Dataset(data.schema, *(part[self.every] for part in parts))
        self.before = predict(model, self.sample).cpu()
        self.rows = self._old_rows()

    def stages(self, learning: Tensor) -> tuple[Stages, Stages | None, Stages | None]:
        """Return the figures of all rows, of those with a new id, and of the others; `learning` are scores while learning."""
        scores = (self.before, learning[self.every], predict(self.model, self.sample).cpu())
        is_new = new_rows_of(self.sample, self.changes)

        def of(rows: Tensor) -> Stages:
            before, while_learning, after = (
                measure(one[rows], self.sample.label[rows]) for one in scores
            )
            return Stages(before=before, learning=while_learning, after=after)

        groups = [of(rows) if bool(rows.any()) else None for rows in (is_new, ~is_new)]
        return of(torch.ones_like(is_new)), groups[0], groups[1]

    def fields(self) -> Iterator[FieldDay]:
        """Yield what the day did to each field."""
        for field in self.data.schema.table_fields:
            ids = self.data.ids[:, self.data.schema.slots[field.name]]
            day = self.changes.columns.get(field.name)
            yield FieldDay(
                name=field.name,
                rows=field.rows,
                new=0 if day is None else len(day.new),
                reset=0 if day is None else len(day.reset),
                dropped=0 if day is None else len(day.dropped),
                waiting=0 if day is None else day.waiting,
                unknown_share=int((ids == UNKNOWN).sum()) / max(int((ids != PADDING).sum()), 1),
                moved=self._moved(field.name),
            )

    @torch.no_grad()
    def _old_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the old ids of the day and a copy of their rows, by the name of the table."""
        found, slots = {}, self.data.schema.slots
        for site in find_sites(self.model):
            name = site.info.field
            if name in slots:
                ids = self.data.ids[:, slots[name]].long().unique()
                if name in self.changes.columns:
                    new = torch.from_numpy(self.changes.columns[name].new)
                    ids = ids[~torch.isin(ids, new)]
                ids = ids[ids >= FIRST_VALUE].to(home_of(site.table))
                found[site.info.name] = ids, site.table(ids).clone()
        return found

    @torch.no_grad()
    def _moved(self, field: str) -> float:
        """Return how far the rows of a field moved, as a share of their length."""
        moved = length = 0.0
        for site in find_sites(self.model):
            if site.info.field == field and site.info.name in self.rows:
                ids, rows = self.rows[site.info.name]
                moved += float((site.table(ids) - rows).square().sum())
                length += float(rows.square().sum())
        return float((moved / length) ** 0.5) if length else 0.0
