"""The variants of a study: the baseline, every method of the plan, and the controls they must beat.

Any method can be compared with these controls:

    baseline        the model as it is
    narrow          plain tables, narrowed until they have the bytes of the method
    matched-rate    plain tables, tuned on validation, also in the learning rate of the tables and how they start
    tuned           plain tables, tuned on validation: learning rate, weight decay, average of the weights
    wide            plain tables, as wide as all embedding sets of the method together
    ensemble        as many models as the method has embedding sets, each with its own seed, mean score
    a method        such as low-rank: on the same model, sized by the plan's share where it has a size

A method can make controls of its own (`Technique.make_control`), such as the same budget by magnitude for
pruning, or the plain sum for harmless transfer. Each method names the control it is compared with by default.
"""

import math
import warnings
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rarebit.callbacks import TrainingMethod
from rarebit.data.dataset import Dataset
from rarebit.data.order import shuffled_order
from rarebit.data.schema import Schema
from rarebit.errors import SettingsError, StudyError
from rarebit.models._base import RankingModel
from rarebit.settings import require, updated
from rarebit.storage.files import make_folder, read_json, write_json
from rarebit.study.plan import OWN, StudyPlan, StudySettings
from rarebit.study.runs import UNREADABLE, run_key
from rarebit.study.tuning import SWEEP, Axis, axes_of, table_rate
from rarebit.tables.apply import find_sites, find_tables, table_bytes
from rarebit.tables.table import field_of, full_table
from rarebit.technique import (
    BASELINE,
    Expression,
    Rank,
    Technique,
    parse_techniques,
    technique_class,
    technique_names,
    technique_text,
)
from rarebit.training.fit import fit
from rarebit.training.run import finish_model, start_model
from rarebit.training.settings import RunSettings

START_ROWS = 1000
"""Rows of the training data by which the start of tables is measured."""
START = "start"
"""An axis of matched-rate."""


@dataclass(frozen=True)
class Variant:
    """One variant of a study."""

    name: str
    """Its name in tables: the expression of its methods, with their sizes."""
    control: str | None
    """The variant it must beat; None for a variant that is only a control."""
    start: RunSettings
    """Its own settings. The seed is set when they are run."""
    axes: tuple[Axis, ...]
    """What is tuned, from there on."""
    trials: int = 1
    """Settings to try at most."""
    members: int = 1
    """Runs with different seeds whose scores are averaged: more than one is an ensemble."""


def variants_of(
    plan: StudyPlan,
    base: RunSettings,
    schema: Schema,
    rate: Callable[[RunSettings], float] | None = None,
    train: Dataset | None = None,
) -> list[Variant]:
    """Return the variants of a plan on one model and log: the baseline, then controls, then methods.

    `rate` returns how much faster the methods of a run move rows than plain training does. Methods that code trained
    tables by their counts need the training data.
    """
    if plan.settings.control not in (OWN, *CONTROLS, *_controls_of_methods()):
        _parse_control(plan.settings.control)  # reports a mistake before anything is built
    study = _Study(plan.settings, base, schema, rate, train)
    found = {BASELINE: study.baseline}
    for expression in plan.methods:
        run = study.sized(expression)
        if run.methods:
            # building the model reports a method that fits no table here, and not in each of its runs
            method = _Compared(_name(run), run, table_bytes(study.build(run)))
            control = study.control_of(method)
            if control.name == method.name:
                control = study.baseline
            found.setdefault(control.name, control)
            found[method.name] = study.variant(method.name, run, control=control.name)
    if all(variant.control != BASELINE for variant in found.values()) and len(found) > 1:
        found[BASELINE] = replace(study.baseline, trials=1)  # compared with nothing, so not tuned
    # stable: controls and methods keep the order of the plan
    return sorted(found.values(), key=lambda one: (one.name != BASELINE, one.control is not None))


class _Compared(NamedTuple):
    """A method that needs a control: its name, its settings, and the bytes of its tables."""

    name: str
    run: RunSettings
    table_bytes: int

    def split_sets(self, control: str) -> tuple[int, tuple[Technique, ...]]:
        """Return how many embedding sets it has, and its other methods, for a control that needs sets."""
        num_sets = _num_sets(self.run)
        if num_sets is None:
            raise SettingsError(
                f"{self.name} has no embedding sets, which the control {control} needs; use multi-embedding"
            )
        return num_sets, tuple(one for one in self.run.methods if not _makes_sets(one))


@dataclass
class _Study:
    """A plan on one model and log: builds variants and finds their controls."""

    settings: StudySettings
    base: RunSettings
    schema: Schema
    rate: Callable[[RunSettings], float] | None
    train: Dataset | None = None

    def __post_init__(self) -> None:
        model = self.build(self.base)
        self.shapes = [(t.rows, t.width) for t in find_tables(model) if t.width > 1]
        self.width: int | None = getattr(model, "settings", {}).get("dim")
        self.bytes_by_width: dict[int, int] = {}
        self.baseline = self.variant(BASELINE, self.base)

    def build(self, run: RunSettings) -> RankingModel:
        """Return the model of a run with its methods applied; the caller's random state is kept, and the run warns."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            model = start_model(run, self.schema, say=lambda _: None)
            finish_model(run, model, self.train, say=lambda _: None)
            return model

    def sized(self, expression: Expression) -> RunSettings:
        """Return the run of an expression, its methods sized by the plan's share."""
        return replace(self.base, methods=expression.build(self.shapes, self.settings.share))

    def variant(
        self, name: str, run: RunSettings, *, control: str | None = None, members: int = 1
    ) -> Variant:
        """Return a variant with as many trials as the plan asks for."""
        return Variant(name, control, run, tuple(axes_of(run)), self.settings.trials, members)

    def swept(self, name: str, run: RunSettings, *first: Axis) -> Variant:
        """Return a control that is tuned by definition, on these axes first."""
        trials = self.settings.trials
        trials = max(trials, SWEEP) if self.settings.sweeps else trials
        axes = (*first, *(axis for axis in axes_of(run) if axis not in first))
        return Variant(name, None, run, axes, trials)

    def control_of(self, method: _Compared) -> Variant:
        """Return the control of a method: the plan's, or the one that its last method names."""
        wanted, methods = self.settings.control, method.run.methods
        if wanted == OWN:
            wanted = methods[-1].control
        if wanted in CONTROLS:
            return CONTROLS[wanted](self, method)
        for one in methods:
            made = one.make_control(wanted, methods)
            if made is not None:
                run = replace(method.run, methods=made.techniques)
                return (self.swept if made.tuned else self.variant)(made.name, run)
        require(
            wanted not in _controls_of_methods(),
            f"{method.name} has no method that makes the control {wanted}; name another, such as --control baseline",
        )
        run = self.sized(_parse_control(wanted))
        sets = _num_sets(method.run)
        if sets is not None:  # a control with embedding sets has as many as the method
            own = [{"num_sets": sets} if _makes_sets(one) else {} for one in run.methods]
            run = replace(run, methods=tuple(map(updated, run.methods, own)))
        return self.variant(_name(run), run)


def _narrow(study: _Study, method: _Compared) -> Variant:
    """Plain tables of the method's bytes: does it beat fewer columns?

    They are never smaller than the method's tables. It is the baseline where a column less would be.
    """
    if not isinstance(study.width, int):
        return study.baseline

    def narrowed(width: int) -> RunSettings:
        return replace(study.base, model_settings={**study.base.model_settings, "dim": width})

    def num_bytes(width: int) -> int:  # of the built tables: fields may have their own widths
        if width not in study.bytes_by_width:
            study.bytes_by_width[width] = table_bytes(study.build(narrowed(width)))
        return study.bytes_by_width[width]

    width = 1 + bisect_left(range(1, study.width), method.table_bytes, key=num_bytes)
    if width == study.width:
        return study.baseline
    return study.variant(f"narrow:dim={width}", narrowed(width))


def _matched_rate(study: _Study, method: _Compared) -> Variant:
    """Plain tables at several learning rates: is the method more than a larger learning rate?

    The first rate is the one at which they move as fast as the method's tables. They start as the model's own
    tables do, or as the method's.
    """
    measured = [] if study.rate is None else [study.rate(method.run)]
    training = study.base.training
    # what acts the same way on plain tables stays
    others = tuple(
        one
        for one in method.run.methods
        if isinstance(one, TrainingMethod) or not (one.training_only or one.after_training)
    )
    started = tuple(one.same_start for one in method.run.methods if one.same_start is not None)
    run = replace(
        study.base,
        methods=others,
        training=replace(training, table_lr=math.prod(measured) * training.lr),
    )
    starts = Axis(START, lambda run, _: replace(run, methods=(*others, *started)), choices=2)
    name = ":".join(["matched-rate", *(f"x={factor:g}" for factor in measured)])
    around = [technique_text(one) for one in others if isinstance(one, TrainingMethod)]
    first = [table_rate, *([starts] if started else [])]
    return study.swept("+".join([name, *around]), run, *first)


def _tuned(study: _Study, _: _Compared) -> Variant:
    """Plain tables at the best learning rate, weight decay and average of the weights: would those do?"""
    tuned = study.swept("tuned", study.base)
    return tuned if tuned.trials > study.settings.trials else study.baseline


def _wide(study: _Study, method: _Compared) -> Variant:
    """Plain tables with the width of all embedding sets together: the same weights in one set."""
    num_sets, others = method.split_sets("wide")
    if not isinstance(study.width, int):
        raise SettingsError(
            f"the control of {method.name} is wider tables, and {study.base.model} has no width dim; name "
            "another control, such as --control baseline"
        )
    values = {**study.base.model_settings, "dim": num_sets * study.width}
    run = replace(study.base, model_settings=values, methods=others)
    return study.variant(_name(run, f"wide:dim={values['dim']}"), run)


def _ensemble(study: _Study, method: _Compared) -> Variant:
    """As many models as there are embedding sets, averaged: are the sets more than an ensemble?"""
    num_sets, others = method.split_sets("ensemble")
    run = replace(study.base, methods=others)
    return study.variant(_name(run, f"ensemble:x={num_sets}"), run, members=num_sets)


CONTROLS: dict[str, Callable[[_Study, _Compared], Variant]] = {
    "narrow": _narrow,
    "matched-rate": _matched_rate,
    "tuned": _tuned,
    "wide": _wide,
    "ensemble": _ensemble,
}
"""Controls for any method; methods make others themselves."""


def _controls_of_methods() -> list[str]:
    """Return the controls that the methods on offer make."""
    return [made for name in technique_names() for made in technique_class(name).controls]


def _parse_control(text: str) -> Expression:
    known = ", ".join([*CONTROLS, *_controls_of_methods()])
    expected = f"control must be own, {known}, baseline or a method"
    try:
        found = parse_techniques(text)
    except SettingsError as error:
        raise SettingsError(f"{expected}: {error}") from None
    require(len(found) == 1, f"{expected}, one for all, got {text!r}")
    return found[0]


def _name(run: RunSettings, *first: str) -> str:
    return "+".join([*first, *map(technique_text, run.methods)]) or BASELINE


def _makes_sets(method: Technique) -> bool:
    return method.composition_rank is Rank.SETS


def _num_sets(run: RunSettings) -> int | None:
    return next((method.num_sets for method in run.methods if _makes_sets(method)), None)


class MeasuredRates:
    """How much faster runs move rows: measured once, and stored in a file.

    The figure is part of the settings of runs, so a study that resumes must have the same.
    """

    def __init__(self, path: Path, train: Dataset) -> None:
        self.path, self.train = path, train

    def __call__(self, run: RunSettings) -> float:
        """Return the factor of a run's methods, to two digits. SGD needs no measurement."""
        if run.training.optimizer == "sgd":
            return math.prod(method.rate_under_sgd for method in run.methods)
        try:
            stored = read_json(self.path) if self.path.exists() else {}
            known = {str(key): float(value) for key, value in stored.items()}
        except (OSError, *UNREADABLE) as error:
            raise StudyError(f"{str(self.path)!r} cannot be read: {error}; remove it") from None
        key = run_key(run)
        if key not in known:
            known[key] = float(f"{rate_multiplier(run, self.train):.2g}")
            make_folder(self.path.parent)
            write_json(self.path, known, error=StudyError)
        return known[key]


def rate_multiplier(run: RunSettings, train: Dataset, *, steps: int = 100) -> float:
    """Return how much farther the median row moves with a run's methods than without them.

    Both models make the same steps from the same seed; only rows that were looked up count.
    """
    num_rows = min(steps * run.training.batch_size, len(train))
    batch = train[shuffled_order(len(train), seed=run.training.seed, epoch=1)[:num_rows]]
    first = Dataset(train.schema, batch.ids, batch.numeric, batch.label)
    with torch.random.fork_rng(devices=[]):
        theirs, ours = (_distances(one, first) for one in (replace(run, methods=()), run))
    return float(ours.median() / theirs.median())


def _distances(run: RunSettings, train: Dataset) -> Tensor:
    """Return how far one epoch moves each row that it looks up, over all tables wider than 1."""
    model = start_model(run, train.schema, say=lambda _: None)

    def tables() -> dict[str, Tensor]:
        sites = [site for site in find_sites(model) if site.info.width > 1]
        return {site.info.name: full_table(site.table).clone() for site in sites}

    before = tables()
    fit(model, train, settings=replace(run.training, epochs=1), progress=False)
    moved = []
    for name, table in tables().items():
        ids = train.ids[:, train.schema.slots[field_of(name)]].long().unique()
        moved.append((table - before[name])[ids].norm(dim=1))
    return torch.cat(moved)


def start_size(run: RunSettings, train: Dataset) -> float | None:
    """Return the root mean square of the numbers that the first rows look up before the first step.

    What is pruned starts as all entries do; padding, which is zero, does not count.
    """
    kept = tuple(method for method in run.methods if method.composition_rank is not Rank.MASKS)
    run = replace(run, methods=kept)
    first = train[torch.arange(min(START_ROWS, len(train)))]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        model = start_model(run, train.schema, say=lambda _: None)
    sites, slots = [one for one in find_sites(model) if one.info.width > 1], train.schema.slots
    rows = [
        full_table(site.table)[first.ids[:, slots[field]].long()]
        for site in sites
        if (field := field_of(site.info.name))
        in slots  # your own model may name its tables differently
    ]
    entries = torch.cat([row.flatten().double() for row in rows]) if rows else torch.zeros(0)
    entries = entries[entries != 0]
    return float(f"{float(entries.square().mean().sqrt()):.3g}") if len(entries) else None
