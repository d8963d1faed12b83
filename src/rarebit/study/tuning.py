"""Tuning: how a variant of a study finds its settings, each with the same number of trials.

The dials of a variant are the axes of a grid: the learning rate, the knobs of its methods, the weight decay, the
average of the weights, in one pass that of the tables as well, and for some controls others. The search starts at the given settings, tries their
neighbours along each axis, and goes on from the best of all on validation rows, until the best has no untried
neighbour or the trials are used up. So it follows an axis as far as that helps, and a best setting at the end of
what was tried, on an axis that goes on, says that more trials would find a better one: the edge of the grid.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from rarebit.errors import SettingsError
from rarebit.settings import updated
from rarebit.training.settings import RunSettings

LR_STEP, DECAY_STEP = 2.0, 10.0
"""Factors from one learning rate, and one weight decay, to the next."""
SWEEP = 12
"""Settings tried for a control that is tuned by definition, unless all variants try more."""
FIRST_DECAY = 1e-5
"""The smallest weight decay tried where there is none to multiply."""
AVERAGES = (None, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Averages of the weights, in epochs."""
AVERAGES_IN_ONE_PASS = (None, 0.01, 0.03, 0.1, 0.3)
"""The same in one pass, where a long average lags behind all that training sees for the first time."""

Point: TypeAlias = tuple[int, ...]
"""Steps along each axis from the given settings."""
Score: TypeAlias = Callable[[RunSettings], float | None]
"""The validation AUC of settings: None while it is unknown, -inf for settings that diverge."""


@dataclass(frozen=True)
class Axis:
    """One dial: settings so many steps from the given ones."""

    name: str
    move: Callable[[RunSettings, int], RunSettings | None]
    """Return settings moved by so many steps; None beyond the end of the axis."""
    choices: int = 0
    """The number of values that have no order; 0 for an axis with steps up and down."""


class Search(NamedTuple):
    """What a search has found so far."""

    trials: tuple[RunSettings, ...]
    """The settings tried, and those to try next."""
    best: int | None
    """Which of them is the best; None while one that is to be tried has no score."""
    edge: tuple[str, ...]
    """Axes on which the best is the last value tried and the axis goes on."""


def search(start: RunSettings, axes: Sequence[Axis], trials: int, score: Score) -> Search:
    """Return which settings to try next, or the best of all.

    The search depends on the scores alone: called again with more of them, it goes on where it was.

    >>> def score(run):  # the best learning rate is 0.008
    ...     return -abs(math.log(run.training.lr / 0.008))
    >>> found = search(RunSettings(), [learning_rate], 6, score)
    >>> [run.training.lr for run in found.trials], found.best, found.edge
    ([0.001, 0.002, 0.0005, 0.004, 0.008, 0.016], 4, ())
    """
    origin: Point = (0,) * len(axes)
    known: dict[Point, RunSettings] = {origin: start}
    tried: dict[Point, float] = {}
    new = [origin]
    while True:
        scores = {point: score(known[point]) for point in new}
        if None in scores.values():
            points = [*tried, *new]
            return Search(tuple(known[point] for point in points), None, ())
        tried |= {point: value for point, value in scores.items() if value is not None}
        best = max(tried, key=lambda point: tried[point])
        if tried[best] == -math.inf:  # all diverge: go on from the lowest rate, the first axis
            best = min(tried)
        near = {point: run for point, run in _neighbours(best, start, axes) if point not in tried}
        # first what lies beyond all that was tried: an axis is followed as long as that helps
        beyond = [point for point in near if _is_beyond(point, best, tried, axes)]
        left = trials - len(tried)
        if left <= 0 and trials >= SWEEP:
            new = beyond[: max(left + trials, 0)]
        else:
            new = (beyond or [*near])[: max(left, 0)]
        if not new:
            moved = [axes[_moved(point, best)].name for point in beyond]
            edge = tuple(dict.fromkeys(moved)) if trials > 1 else ()
            runs = tuple(known[point] for point in tried)
            return Search(runs, [*tried].index(best) if tried[best] > -math.inf else None, edge)
        known |= {point: near[point] for point in new}


def _neighbours(
    best: Point, start: RunSettings, axes: Sequence[Axis]
) -> list[tuple[Point, RunSettings]]:
    """Return the points one step away along one axis, and their settings."""
    found = []
    for number, axis in enumerate(axes):
        here = best[number]
        places = range(axis.choices) if axis.choices else (here + 1, here - 1)
        for place in places:
            point = (*best[:number], place, *best[number + 1 :])
            run = _settings(point, start, axes)
            if place != here and run is not None:
                found.append((point, run))
    return found


def _settings(point: Point, start: RunSettings, axes: Sequence[Axis]) -> RunSettings | None:
    run: RunSettings | None = start
    try:
        for axis, steps in zip(axes, point, strict=True):
            run = axis.move(run, steps) if run is not None and steps else run
    except SettingsError:  # beyond what a method accepts
        return None
    return run


def _moved(point: Point, other: Point) -> int:
    """Return the axis along which two neighbours differ."""
    return next(
        axis for axis, pair in enumerate(zip(point, other, strict=True)) if len({*pair}) > 1
    )


def _is_beyond(point: Point, best: Point, tried: dict[Point, float], axes: Sequence[Axis]) -> bool:
    """Return whether no settings tried have as much, or as little, of what a neighbour changes, or its choice."""
    number = _moved(point, best)
    places = [one[number] for one in tried]
    if axes[number].choices:
        return point[number] not in places
    return not min(places) <= point[number] <= max(places)


def _move_lr(run: RunSettings, steps: int) -> RunSettings:
    training, factor = run.training, LR_STEP**steps
    table_lr = None if training.table_lr is None else training.table_lr * factor
    return replace(run, training=replace(training, lr=training.lr * factor, table_lr=table_lr))


def _move_decay(run: RunSettings, steps: int) -> RunSettings | None:
    decay = run.training.weight_decay
    if not decay and steps < 0:
        return None
    new = decay * DECAY_STEP**steps if decay else FIRST_DECAY * DECAY_STEP ** (steps - 1)
    return replace(run, training=replace(run.training, weight_decay=float(f"{new:.12g}")))


def _move_average(run: RunSettings, steps: int) -> RunSettings | None:
    own = run.training.ema_epochs
    averages = AVERAGES_IN_ONE_PASS if run.training.one_pass else AVERAGES
    ladder = sorted({*averages, own}, key=lambda epochs: epochs or 0.0)
    place = ladder.index(own) + steps
    if run.training.ema_decay is not None or not 0 <= place < len(ladder):
        return None
    return replace(run, training=replace(run.training, ema_epochs=ladder[place]))


def _move_table_rate(run: RunSettings, steps: int) -> RunSettings:
    training = run.training
    table_lr = (training.lr if training.table_lr is None else training.table_lr) * LR_STEP**steps
    return replace(run, training=replace(training, table_lr=table_lr))


learning_rate = Axis("learning rate", _move_lr)
table_rate = Axis("learning rate of the tables", _move_table_rate)
TRAINING = (Axis("weight decay", _move_decay), Axis("averaging", _move_average))
"""What every variant can tune beside its learning rate and the knobs of its methods."""


def axes_of(run: RunSettings) -> list[Axis]:
    """Return the axes of a run: the learning rate, the knobs of its methods, weight decay and averaging.

    A knob of zero is off, and stays so. In one pass a row has to learn from the first lookups of its id, so there the learning rate of the
    tables is an axis of its own.
    """
    knobs = [
        _knob(number, name, own, values)
        for number, method in enumerate(run.methods)
        for name, values in method.knobs.items()
        if (own := getattr(method, name)) != 0
    ]
    rates = [learning_rate, table_rate] if run.training.one_pass else [learning_rate]
    return [*rates, *knobs, *TRAINING]


def _knob(number: int, name: str, own: Any, values: Sequence[Any]) -> Axis:
    """Return the axis of a knob of a run's method; numbers go on beyond the values by their last factor."""

    def change(run: RunSettings, value: Any) -> RunSettings:
        methods = list(run.methods)
        methods[number] = updated(methods[number], {name: value})
        return replace(run, methods=tuple(methods))

    if any(isinstance(value, bool | str) for value in (own, *values)):
        several = [own, *(value for value in values if value != own)]
        return Axis(name, lambda run, place: change(run, several[place]), choices=len(several))
    ladder = sorted({own, *values})

    def move(run: RunSettings, steps: int) -> RunSettings | None:
        value = _rung(ladder, ladder.index(own) + steps)
        return None if value is None else change(run, value)

    return Axis(name, move)


def _rung(ladder: Sequence[Any], place: int) -> Any:
    """Return the value at a place of a ladder of numbers, which goes on by the factor of its last two."""
    if 0 <= place < len(ladder):
        return ladder[place]
    if len(ladder) == 1:
        return None
    last, before = (ladder[0], ladder[1]) if place < 0 else (ladder[-1], ladder[-2])
    if min(last, before) <= 0:  # zero is an end
        return None
    value = last * (last / before) ** (-place if place < 0 else place - len(ladder) + 1)
    return max(round(value), 1) if isinstance(last, int) else float(f"{value:.3g}")
