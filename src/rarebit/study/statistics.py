"""The statistics of a study: the verdict on paired differences, and DeLong's interval for two AUCs.

**Verdict.** Each seed gives one paired difference: the method's figure minus its control's. Over n seeds,

    interval = mean ± max(t(1 - level / 2, n - 1) spread, t(1 - level / 2, m (n - 1)) pooled) / sqrt(n)

`pooled` is the root mean square of the spreads of all m methods. A few seeds of lopsided differences often miss
their long tail; then they seem to agree, and only the other methods show how large the spread is.

Several methods at once would find a winner by luck, so the level is divided as Holm (1979) does: the smallest
p of m methods is compared with level / m, the next one with level / (m - 1), and so on; from the first one
that is not significant on, all keep its level. Few methods pool little, so no level is above 1 % per method of
the study: one method is judged at 1 %, two at 2 %, five or more at Holm's level of 5 %.

    helps           the corrected interval lies above zero, and the mean is at least the minimum effect
    hurts           the mirror image
    no difference   the 90 % interval lies inside the minimum effect on both sides of zero
    too few seeds   anything else, with the number of seeds needed

A study gives no verdict where one side of a comparison was at a disadvantage: it was cut off, tuned up to the edge
of the grid, or started differently (`CellResult.doubt`).

At most 5 % of studies then see help where there is none: where the differences are normal, heavy-tailed, of
unequal spread, or as lopsided as an exponential. `benchmarks/verdicts.py` shows it, and where it does not hold.

**DeLong.** Seeds show how much training varies. DeLong et al. (1988) show how much the test rows do: other
rows of the same kind would give another difference. Every row has a placement, the share of the other class
that it is ranked correctly against, ties counted half:

    V10(i) = share of rows without a click that score below click i;  their mean is the AUC
    V01(j) = share of clicks that score above row j;                  so is theirs
    variance of the difference = var(V10a - V10b) / clicks + var(V01a - V01b) / others

One sort per model gives all placements (Sun and Xu, 2014, from midranks; here from the counts below and above
each group of equal scores, which are the same numbers without their rounding).
"""

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rarebit.errors import DataError, import_extra
from rarebit.settings import require

Doubt = Literal["cut off", "edge of the grid", "unequal start"]
"""Why a comparison is not fair."""
Verdict = Literal["helps", "hurts", "no difference", "too few seeds"] | Doubt

EQUIVALENCE_LEVEL = 0.10
"""A 90 % interval inside two bounds is two one-sided tests at 5 %."""
POOLING_METHODS = 5
"""From this number of methods on, their pooled spread alone keeps the level where differences are lopsided."""
MAX_SEEDS = 1000
"""No study has more; a number beyond it would only look exact."""


@functools.cache
def scipy_special() -> Any:
    """Return `scipy.special`: `stdtr` is Student's distribution, `stdtrit` its quantile.

    `scipy.stats.t` calls the same functions, and takes a second to import.
    """
    return import_extra("scipy.special", "study", "the verdict of a study")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The paired differences of one method to its control, and the verdict."""

    mean: float
    """Mean difference, method minus control; NaN without a seed."""
    spread: float
    """Standard deviation of the differences; NaN with fewer than two seeds."""
    n: int
    """Seeds."""
    wins: int
    """Seeds in which the method is better than its control."""
    low: float
    high: float
    """Ends of the interval corrected for the number of methods, over the wider of its own and the pooled spread."""
    confidence: float
    """Confidence level of the interval: 0.99 for one method, 0.98 for two, 0.95 or more from five on."""
    equivalence_low: float
    equivalence_high: float
    """Ends of the 90 % interval, over its own spread."""
    p: float
    """Chance of a mean at least this far from zero without a true difference, by either spread; not corrected."""
    minimum_effect: float
    """The smallest difference worth having."""
    verdict: Verdict
    seeds_needed: int | None
    """With too few seeds: how many are needed, if means and spreads stay the same and all methods have as many.
    None where that is unknown, or more than 1000."""
    why: str = ""
    """Why there is no verdict: what was not fair, and what to do."""

    @property
    def summary(self) -> str:
        """The verdict with its figures, such as "helps by 0.0012 (0.0006 to 0.0018)"."""
        if self.why:
            return f"no verdict, {self.verdict}: {self.why}"
        least = format(Decimal(f"{self.minimum_effect:.3g}"), "f")
        decimals = max(4, len(least.partition(".")[2]))
        ends = (self.low, self.high) if self.mean > 0 else (self.high, self.low)
        size, near, far = (f"{abs(x):.{decimals}f}" for x in (self.mean, *ends))
        match self.verdict:
            case "helps" | "hurts":
                return f"{self.verdict} by {size} ({near} to {far})"
            case "no difference":
                return f"no difference of {least} or more"
        if self.n < 2:
            return "too few seeds: at least 2 are needed"
        if self.seeds_needed is None:
            return f"too few seeds: more than {MAX_SEEDS} are needed"
        return f"too few seeds: about {self.seeds_needed} are needed"


def judge(
    differences: Mapping[str, Sequence[float]],
    *,
    minimum_effect: float = 0.0005,
    level: float = 0.05,
) -> dict[str, Comparison]:
    """Return the verdict on every method, given its differences to its control, one per seed.

    All methods of a study belong in one call: the correction counts them, also those without a seed.

    >>> found = judge({"mlet": [0.0012, 0.0013, 0.0011], "hashing": [-0.0002, 0.0011, 0.0001]})
    >>> {name: comparison.verdict for name, comparison in found.items()}
    {'mlet': 'helps', 'hashing': 'too few seeds'}
    """
    require(
        0 < minimum_effect < math.inf, f"minimum_effect must be above zero, got {minimum_effect}"
    )
    require(0 < level < 1, f"level must be between 0 and 1, got {level}")
    family = _Family({name: _sample(name, values) for name, values in differences.items()}, level)
    return {name: _compare(name, family, minimum_effect) for name in differences}


def paired_interval(differences: Sequence[float], *, level: float = 0.05) -> tuple[float, float]:
    """Return the ends of Student's interval of the mean of paired differences; for a verdict, use `judge`.

    >>> low, high = paired_interval([0.0012, 0.0013, 0.0011])
    >>> round(low, 5), round(high, 5)
    (0.00095, 0.00145)
    """
    return _sample("differences", differences).interval(level)


class _Sample(NamedTuple):
    """The differences of one method in numbers."""

    mean: float
    spread: float
    n: int
    wins: int

    def interval(self, level: float, pooled: "_Pooled | None" = None) -> tuple[float, float]:
        """Return the ends of the interval that misses the true mean with this chance."""
        if self.n < 2:
            return -math.inf, math.inf
        widths = [spread * _quantile(level, freedom) for spread, freedom in self._spreads(pooled)]
        half = max(widths) / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    def p(self, pooled: "_Pooled") -> float:
        """Return the chance of a mean at least this far from zero without a true difference."""
        if self.n < 2 or not self.mean:
            return 1.0
        error = abs(self.mean) * math.sqrt(self.n)
        return max(
            2 * float(scipy_special().stdtr(freedom, -error / spread)) if spread else 0.0
            for spread, freedom in self._spreads(pooled)
        )

    def _spreads(self, pooled: "_Pooled | None") -> list["_Pooled"]:
        own = _Pooled(self.spread, self.n - 1)
        return [own] if pooled is None else [own, pooled]


class _Pooled(NamedTuple):
    """A spread, of one method or of all together, and its degrees of freedom."""

    spread: float
    freedom: int


def _sample(name: str, differences: Sequence[float]) -> _Sample:
    values = [float(value) for value in differences]
    if not all(map(math.isfinite, values)):
        raise DataError(
            f"differences must be finite numbers, got {values} for {name!r}; "
            "leave out the seeds whose training failed"
        )
    n, wins = len(values), sum(value > 0 for value in values)
    if n < 2:
        return _Sample(values[0] if values else math.nan, math.nan, n, wins)
    # rounding must not move the mean of equal values off them: their spread is zero
    mean = min(max(math.fsum(values) / n, min(values)), max(values))
    spread = math.hypot(*(value - mean for value in values)) / math.sqrt(n - 1)
    return _Sample(mean, spread, n, wins)


class _Family:
    """The methods of a study, which are judged together."""

    def __init__(self, samples: Mapping[str, _Sample], level: float) -> None:
        self.samples, self.level = samples, level
        several = [sample for sample in samples.values() if sample.n >= 2]
        freedom = sum(sample.n - 1 for sample in several)
        squares = math.hypot(*(sample.spread * math.sqrt(sample.n - 1) for sample in several))
        self.pooled = _Pooled(squares / math.sqrt(max(freedom, 1)), freedom)
        self.levels = self._holm_levels()
        self.enlarged: dict[int, _Family] = {}
        """The same means and spreads with other numbers of seeds."""

    def _holm_levels(self) -> dict[str, float]:
        """Return the level that each method must reach."""
        levels: dict[str, float] = {}
        most = self.level * min(len(self.samples) / POOLING_METHODS, 1.0)
        own, is_significant = most, True
        p = {name: sample.p(self.pooled) for name, sample in self.samples.items()}
        for rank, name in enumerate(sorted(p, key=lambda name: (p[name], name))):
            if is_significant:
                own = min(self.level / (len(p) - rank), most)
                low, high = self.samples[name].interval(own, self.pooled)
                is_significant = low > 0 or high < 0
            levels[name] = own
        return levels

    def interval(self, name: str) -> tuple[float, float]:
        """Return the ends of the corrected interval of a method."""
        return self.samples[name].interval(self.levels[name], self.pooled)

    def seeds_to_leave_zero(self, name: str) -> int | None:
        """Return the fewest seeds, the same for all methods, with which the corrected interval excludes zero."""

        def excludes_zero(n: int) -> bool:
            if n not in self.enlarged:
                at = {one: x._replace(n=n) if x.n > 1 else x for one, x in self.samples.items()}
                self.enlarged[n] = _Family(at, self.level)
            low, high = self.enlarged[n].interval(name)
            return low > 0 or high < 0

        return _fewest_seeds(excludes_zero)


def _fewest_seeds(are_enough: Callable[[int], bool]) -> int | None:
    """Return the fewest seeds that are enough, where more always are."""
    if not are_enough(MAX_SEEDS):
        return None
    return bisect.bisect_left(range(MAX_SEEDS), x=True, lo=2, key=are_enough)


@functools.cache  # a study asks for the same few levels and numbers of seeds over and over
def _quantile(level: float, freedom: int) -> float:
    """Return how many standard errors an interval has on each side."""
    return -float(scipy_special().stdtrit(freedom, level / 2))


def _compare(name: str, family: _Family, minimum_effect: float) -> Comparison:
    sample = family.samples[name]
    low, high = family.interval(name)
    inner_low, inner_high = sample.interval(EQUIVALENCE_LEVEL)
    verdict: Verdict = "too few seeds"
    if low > 0 and sample.mean >= minimum_effect:
        verdict = "helps"
    elif high < 0 and sample.mean <= -minimum_effect:
        verdict = "hurts"
    elif -minimum_effect < inner_low and inner_high < minimum_effect:
        verdict = "no difference"
    needed = None
    if verdict == "too few seeds" and sample.n >= 2:

        def is_inside(n: int) -> bool:
            inner = sample._replace(n=n).interval(EQUIVALENCE_LEVEL)
            return -minimum_effect < inner[0] and inner[1] < minimum_effect

        if abs(sample.mean) < minimum_effect:
            needed = _fewest_seeds(is_inside)
        else:
            needed = family.seeds_to_leave_zero(name)
        # methods with fewer seeds may hold this one back, so at least one more is needed
        needed = None if needed is None else max(needed, sample.n + 1)
    return Comparison(
        mean=sample.mean,
        spread=sample.spread,
        n=sample.n,
        wins=sample.wins,
        low=low,
        high=high,
        confidence=1 - family.levels[name],
        equivalence_low=inner_low,
        equivalence_high=inner_high,
        p=sample.p(family.pooled),
        minimum_effect=minimum_effect,
        verdict=verdict,
        seeds_needed=needed if needed is None or needed <= MAX_SEEDS else None,
    )


@dataclass(frozen=True, kw_only=True)
class PairedAUC:
    """Two AUCs of the same rows, and their difference with its confidence interval."""

    auc_a: float
    auc_b: float
    difference: float
    """The first AUC minus the second."""
    standard_error: float
    """Of the difference, over other rows of the same kind."""
    low: float
    high: float
    """Ends of the interval."""
    confidence: float
    """Confidence level of the interval."""


def delong(scores_a: Tensor, scores_b: Tensor, labels: Tensor, *, level: float = 0.05) -> PairedAUC:
    """Return the AUCs of two models on the same rows, and their difference with its interval.

    All are (N,), on one device; a label above one half is a click.

    >>> labels = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> good = torch.tensor([0.1, 0.2, 0.6, 0.5, 0.8, 0.9])
    >>> found = delong(good, torch.zeros(6), labels)
    >>> round(found.auc_a, 3), found.auc_b, round(found.low, 3), round(found.high, 3)
    (0.889, 0.5, 0.081, 0.697)
    """
    require(0 < level < 1, f"level must be between 0 and 1, got {level}")
    shapes = [tuple(x.shape) for x in (scores_a, scores_b, labels)]
    if labels.dim() != 1 or len(set(shapes)) > 1:
        raise DataError(f"both scores and the labels must have one shape, (rows,); got {shapes}")
    if bool(scores_a.isnan().any() | scores_b.isnan().any()):
        raise DataError(
            "scores must be numbers to be ranked, got nan; look at the model's training"
        )
    clicked = labels > 0.5
    num_clicks = int(clicked.sum())
    if min(num_clicks, len(labels) - num_clicks) < 2:
        raise DataError(
            "an interval of the AUC needs at least two rows with a click and two without, "
            f"got {num_clicks} and {len(labels) - num_clicks}; give it more rows"
        )
    auc_a, *placements_a = _placements(scores_a, clicked)
    auc_b, *placements_b = _placements(scores_b, clicked)
    both = zip(placements_a, placements_b, strict=True)
    error = math.sqrt(sum(float((ours - theirs).var()) / len(ours) for ours, theirs in both))
    difference = auc_a - auc_b
    half = NormalDist().inv_cdf(1 - level / 2) * error
    return PairedAUC(
        auc_a=auc_a,
        auc_b=auc_b,
        difference=difference,
        standard_error=error,
        low=difference - half,
        high=difference + half,
        confidence=1 - level,
    )


def _placements(scores: Tensor, clicked: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return the AUC, and in float64 the placements of the rows with a click and of the others."""
    ordered, order = scores.sort()
    is_last = torch.ones_like(clicked)  # of its group of equal scores
    is_last[:-1] = ordered[1:] != ordered[:-1]
    last = is_last.nonzero().flatten()
    start = last.new_zeros(1)
    clicks = clicked[order].long().cumsum(0)[last].diff(prepend=start)
    others = (last + 1).diff(prepend=start) - clicks
    # twice the counts, so that half a tie is a whole number: below for clicks, above for others
    below = 2 * (others.cumsum(0) - others) + others
    above = 2 * (clicks.sum() - clicks.cumsum(0)) + clicks
    group = torch.empty_like(order)
    group[order] = is_last.long().cumsum(0) - is_last.long()
    num_clicks, num_others = int(clicks.sum()), int(others.sum())
    return (
        int((clicks * below).sum()) / (2 * num_clicks * num_others),
        below[group[clicked]].double() / (2 * num_others),
        above[group[~clicked]].double() / (2 * num_clicks),
    )
