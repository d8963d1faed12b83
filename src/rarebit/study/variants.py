"""What harmless transfer is held against: the same transfer without its barrier, and its barrier without it.

plain-sum       both gradients added, at the scale that is best on validation
doubled-rows    a transfer gradient of zero: the barrier alone, which makes the rows' gradients larger

The sides of a comparison: every method of a plan, what it is held against, and its trials.

    baseline        the model as it is
    narrow          plain tables, narrower until they have the bytes of the method
    matched-rate    plain tables with other learning rates and starts, the best of them on validation
    tuned           plain tables with other learning rates and weight decays, the best of them on validation
    magnitude       the budget of a method that prunes, met by cutting the smallest trained entries
    wide            plain tables, as wide as all embedding sets of the method together
    ensemble        as many models as the method has embedding sets, each trained by itself, mean score
    plain-sum       the same transfer with both gradients added, the best of several scales on validation
    doubled-rows    the same transfer with a transfer gradient of zero: what its barrier does by itself
    a method        on the same model, sized by the plan's share where it has a size

Narrower tables are the strongest simple control of a method that makes tables smaller: what do its bytes
buy that fewer columns would not? A matched rate is that of a method which moves rows faster: is it more than
a larger learning rate? Tuning is that of a method which holds rows back: would another weight decay do? Cutting at once is that of pruning in training: does it find better entries? Wide tables and
ensembles are those of several embedding sets, which have the weights of the first and average like the second.
The plain sum is that of harmless transfer: does it gain by its barrier, or would a weight on the transfer do?
"""

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from rarebit.callbacks import TrainingMethod
from rarebit.data.schema import Schema
from rarebit.errors import SettingsError
from rarebit.models._base import RankingModel
from rarebit.settings import require
from rarebit.study.plan import OWN, StudyPlan
from rarebit.tables.find import find_tables, table_bytes
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
from rarebit.training.run import finish_model, start_model
from rarebit.training.settings import RunSettings

__all__ = [
    "BASELINE",
    "Side",
    "sides_of",
]

Rate: TypeAlias = Callable[[RunSettings], float]
"""How many times as fast a run's methods move rows as plain training does."""

NARROW, MATCHED_RATE, TUNED = "narrow", "matched-rate", "tuned"
WIDE, ENSEMBLE = "wide", "ensemble"
CONTROLS = (NARROW, MATCHED_RATE, TUNED, WIDE, ENSEMBLE)
"""Controls that any method may be compared with; methods make others themselves."""

RATE_FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""What the tables' learning rate is multiplied by, beside the measured factor; validation picks."""
TUNED_LR, TUNED_DECAY = (1.0, 2.0, 0.5), (1.0, 10.0, 0.1)
"""What the learning rate and the weight decay of a tuned baseline are multiplied by; validation picks."""
FIRST_DECAYS = (0.0, 1e-5, 1e-4)
"""What is tried where there is no weight decay to multiply."""
LR_FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25, 8.0, 0.125)
"""What the learning rate is multiplied by in trials: a knob that every side has."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str
    """What it is called in tables: the expression of its methods, with their sizes."""
    control: str | None
    """The side it is held against; None for one that others are held against."""
    trials: tuple[RunSettings, ...]
    """What is tried, the side's own settings first. Their seed is set when they are run."""
    members: int = 1
    """Runs with seeds of their own whose scores are averaged: more than one is an ensemble."""

    @property
    def is_method(self) -> bool:
        """Whether it is compared; else it is there as the control of others."""
        return self.control is not None


def sides_of(
    plan: StudyPlan, base: RunSettings, schema: Schema, rate: Rate | None = None
) -> list[Side]:
    """Return the sides of a plan on one model and log, the baseline first.

    `rate` tells how much faster a run's methods move rows than plain training does.

    >>> from rarebit import Field
    >>> schema = Schema((Field(name="user", rows=900), Field(name="item", rows=700)))
    >>> plan = StudyPlan.from_mapping({"methods": "low-rank", "model": {"name": "fm", "dim": 8}})
    >>> [(side.name, side.control) for side in sides_of(plan, plan.runs[0], schema)]
    [('baseline', None), ('narrow:dim=4', None), ('low-rank:rank=3', 'narrow:dim=4')]
    """
    return _Sides(plan, base, schema, rate).all()


class _Sides:
    """Collects the sides: a control that is not there yet is added once."""

    def __init__(
        self, plan: StudyPlan, base: RunSettings, schema: Schema, rate: Rate | None
    ) -> None:
        if plan.settings.control not in (OWN, *CONTROLS, *_made_controls()):
            _read_control(plan.settings.control)  # to tell a mistake before anything is built
        self.plan, self.base, self.schema, self.rate = plan, base, schema, rate
        model = self._start(base)
        self.plain, self.width = find_tables(model), model.settings.get("dim")
        self.found: dict[str, Side] = {}
        self.bytes: dict[int, int] = {}
        """Of narrower tables, by width."""

    def all(self) -> list[Side]:
        self._add(BASELINE, self.base)
        for expression in self.plan.methods:
            name, settings = self._method_side(expression)
            if name != BASELINE:
                # a method that fits no table is told here, and not by each of its runs
                kept = table_bytes(self._start(settings))
                self._add(name, settings, control=self._control(name, settings, kept))
        # stable: the baseline, then controls, then methods, each in the order of the plan
        return sorted(self.found.values(), key=lambda side: (side.name != BASELINE, side.is_method))

    def _method_side(self, expression: Expression) -> tuple[str, RunSettings]:
        shapes = [(table.rows, table.width) for table in self.plain if table.width > 1]
        methods = expression.build(shapes, self.plan.settings.share)
        settings = dataclasses.replace(self.base, methods=methods)
        return _name(settings), settings

    def _control(self, name: str, settings: RunSettings, kept: int) -> str:
        """Return the name of a side's control, which is added where it is not there yet."""
        wanted = self.plan.settings.control
        if wanted == OWN:
            wanted = settings.methods[-1].control
        if wanted == NARROW:
            return self._narrow(kept)
        if wanted == MATCHED_RATE:
            return self._matched_rate(settings)
        if wanted == TUNED:
            return self._tuned()
        if wanted == ENSEMBLE:
            return self._ensemble(name, settings)
        if wanted == WIDE:
            return self._once(name, *self._wide(name, settings))
        made = [one.make_control(wanted, settings.methods) for one in settings.methods]
        control = next((one for one in made if one is not None), None)
        if control is not None:
            trials = tuple(dataclasses.replace(settings, methods=t) for t in control.trials)
            if len(trials) > 1:
                return self._add_swept(control.name, trials)
            return self._once(name, control.name, trials[0])
        require(
            wanted not in _made_controls(),
            f"{name} has no method that makes the control {wanted}; name another, such as --control baseline",
        )
        its_settings = _as_many_sets(self._method_side(_read_control(wanted))[1], settings)
        return self._once(name, _name(its_settings), its_settings)

    def _once(self, name: str, control: str, settings: RunSettings) -> str:
        """Add a control that has the settings of one run; nothing is its own control."""
        if control == name:
            return BASELINE
        self._add(control, settings)
        return control

    def _narrow(self, kept: int) -> str:
        """Add plain tables of the bytes that a method keeps; the baseline where there is no width."""
        if not isinstance(self.width, int):
            return BASELINE
        # at least as many: a control is never smaller than what is held against it
        widths = range(1, self.width)
        place = bisect_left(widths, kept, key=self._narrow_bytes)
        if place == len(widths):
            return BASELINE
        name = f"{NARROW}:dim={widths[place]}"
        self._add(name, self._narrowed(widths[place]))
        return name

    def _matched_rate(self, settings: RunSettings) -> str:
        """Add plain tables with other learning rates, that at which they move as the method's among them.

        They start as the model's own do, or as the method's: whichever is better on validation.
        """
        measured = [] if self.rate is None else [self.rate(settings)]
        training = self.base.training
        others = [m for m in settings.methods if _stays_beside_plain_tables(m)]
        starts = [m.same_start for m in settings.methods if m.same_start is not None]
        trials = tuple(
            dataclasses.replace(
                self.base,
                methods=methods,
                training=dataclasses.replace(training, table_lr=factor * training.lr),
            )
            for methods in dict.fromkeys([tuple(others), (*others, *starts)])
            for factor in dict.fromkeys([*measured, *RATE_FACTORS])
        )
        name = ":".join([MATCHED_RATE, *(f"x={factor:g}" for factor in measured)])
        name = "+".join(
            [name, *(technique_text(m) for m in others if isinstance(m, TrainingMethod))]
        )
        return self._add_swept(name, trials)

    def _tuned(self) -> str:
        """Add plain tables at several learning rates and weight decays; untuned they are the baseline."""
        training = self.base.training
        decays = [factor * training.weight_decay for factor in TUNED_DECAY]
        trials = tuple(
            dataclasses.replace(
                self.base,
                training=dataclasses.replace(training, lr=lr * training.lr, weight_decay=decay),
            )
            for decay in (decays if training.weight_decay else FIRST_DECAYS)
            for lr in TUNED_LR
        )
        return self._add_swept(TUNED, trials) if self.plan.settings.sweeps else BASELINE

    def _add_swept(self, name: str, trials: tuple[RunSettings, ...]) -> str:
        """Add a control with a dial of its own, once."""
        chosen = trials if self.plan.settings.sweeps else trials[:1]
        self.found.setdefault(name, Side(name, None, chosen))
        return name

    def _wide(self, name: str, settings: RunSettings) -> tuple[str, RunSettings]:
        """Return plain tables with a column for each of all embedding sets together."""
        num_sets = _num_sets(name, settings, WIDE)
        if not isinstance(self.width, int):
            raise SettingsError(
                f"{name} is held against wider tables, and {self.base.model} has no width dim; name "
                "another control, such as --control baseline"
            )
        values = {**self.base.model_settings, "dim": num_sets * self.width}
        others = tuple(m for m in settings.methods if m.composition_rank is not Rank.SETS)
        found = dataclasses.replace(self.base, model_settings=values, methods=others)
        parts = [f"{WIDE}:dim={values['dim']}", *(technique_text(method) for method in others)]
        return "+".join(parts), found

    def _ensemble(self, name: str, settings: RunSettings) -> str:
        """Add as many models as there are embedding sets, each with its own seed."""
        num_sets = _num_sets(name, settings, ENSEMBLE)
        others = tuple(m for m in settings.methods if m.composition_rank is not Rank.SETS)
        found = dataclasses.replace(self.base, methods=others)
        full = "+".join(
            [f"{ENSEMBLE}:x={num_sets}", *(technique_text(method) for method in others)]
        )
        self._add(full, found, members=num_sets)
        return full

    def _narrowed(self, width: int) -> RunSettings:
        values = {**self.base.model_settings, "dim": width}
        return dataclasses.replace(self.base, model_settings=values)

    def _narrow_bytes(self, width: int) -> int:
        """Return what narrower tables store, by building them: fields may have widths of their own."""
        if width not in self.bytes:
            self.bytes[width] = table_bytes(self._start(self._narrowed(width)))
        return self.bytes[width]

    def _add(
        self, name: str, settings: RunSettings, *, control: str | None = None, members: int = 1
    ) -> None:
        if name in self.found and control is None:  # it is there already, perhaps as a method
            return
        wanted = self.plan.settings.trials
        trials = tuple(itertools.islice(_trials(settings), wanted))
        require(
            len(trials) == wanted,
            f"study: {name} has {len(trials)} settings to try, and trials={wanted} asks for more",
        )
        self.found[name] = Side(name, control, trials, members)

    def _start(self, settings: RunSettings) -> RankingModel:
        with torch.random.fork_rng(devices=[]):
            model = start_model(settings, self.schema, say=_say_nothing)
            finish_model(settings, model, say=_say_nothing)
            return model


def _stays_beside_plain_tables(method: Technique) -> bool:
    """Return whether a method does the same for tables without the others, before training or in it."""
    return isinstance(method, TrainingMethod) or not (method.training_only or method.after_training)


def _made_controls() -> list[str]:
    """Return the controls that methods on offer make."""
    return [made for name in technique_names() for made in technique_class(name).controls]


def _num_sets(name: str, settings: RunSettings, control: str) -> int:
    found = [method.num_sets for method in settings.methods if method.composition_rank is Rank.SETS]
    require(
        bool(found),
        f"{name} has no embedding sets, which {control} is a control for; use multi-embedding",
    )
    return found[0]


def _as_many_sets(control: RunSettings, held_against_it: RunSettings) -> RunSettings:
    """Return a control with as many embedding sets as what is held against it, where both have some."""
    sets = [m.num_sets for m in held_against_it.methods if m.composition_rank is Rank.SETS]
    methods = tuple(
        dataclasses.replace(method, num_sets=sets[0])  # type: ignore[type-var]  # methods are dataclasses
        if sets and method.composition_rank is Rank.SETS
        else method
        for method in control.methods
    )
    return dataclasses.replace(control, methods=methods)


def _name(settings: RunSettings) -> str:
    return "+".join(technique_text(method) for method in settings.methods) or BASELINE


def _read_control(text: str) -> Expression:
    known = ", ".join([*CONTROLS, *_made_controls()])
    expected = f"control must be own, {known}, baseline or a method"
    try:
        found = parse_techniques(text)
    except SettingsError as error:
        raise SettingsError(f"{expected}: {error}") from None
    require(len(found) == 1, f"{expected}, one for all, got {text!r}")
    return found[0]


def _trials(settings: RunSettings) -> Iterator[RunSettings]:
    """Yield settings to try: those given, then the values of all knobs, nearest to them first."""
    knobs = [
        [(number, name, value) for value in (getattr(method, name), *_others(method, name, values))]
        for number, method in enumerate(settings.methods)
        for name, values in method.knobs.items()
    ]
    choices = itertools.product(*(range(len(knob)) for knob in knobs), range(len(LR_FACTORS)))
    for places in sorted(choices, key=sum):
        chosen = [knob[place] for knob, place in zip(knobs, places, strict=False)]
        methods = _with_values(settings.methods, chosen)
        lr = settings.training.lr * LR_FACTORS[places[-1]]
        training = dataclasses.replace(settings.training, lr=lr)
        yield dataclasses.replace(settings, methods=methods, training=training)


def _others(method: Technique, name: str, values: Sequence[object]) -> list[object]:
    return [value for value in values if value != getattr(method, name)]


def _with_values(
    methods: Sequence[Technique], chosen: Sequence[tuple[int, str, object]]
) -> tuple[Technique, ...]:
    values: list[dict[str, Any]] = [{} for _ in methods]
    for number, name, value in chosen:
        values[number][name] = value
    return tuple(
        dataclasses.replace(method, **changed)  # type: ignore[type-var]  # methods are dataclasses
        for method, changed in zip(methods, values, strict=True)
    )


def _say_nothing(line: str) -> None:
    del line
