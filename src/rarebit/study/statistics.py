"""The statistics of a study: the verdict on paired differences, and DeLong's interval for two AUCs.

**Verdict.** Each seed gives one paired difference: the method's figure minus its control's. Over n seeds,

    interval = mean ± t(1 - level / 2, n - 1) spread / sqrt(n)

Several methods at once would find a winner by luck, so the level is divided as Holm (1979) does: the smallest
p of m methods is compared with level / m, the next one with level / (m - 1), and so on; from the first one
that is not significant on, all keep its level.

    helps           the corrected interval lies above zero, and the mean is at least the minimum effect
    hurts           the mirror image
    no difference   the 90 % interval lies inside the minimum effect on both sides of zero
    too few seeds   anything else, with the number of seeds needed

At most 5 % of studies then see help where there is none, also where the differences are heavy-tailed or of
unequal spread, but not where they are strongly skewed: `benchmarks/verdicts.py` shows both.

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
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rarebit.errors import DataError, MissingExtraError
from rarebit.settings import require

Verdict = Literal["helps", "hurts", "no difference", "too few seeds"]

EQUIVALENCE_LEVEL = 0.10
"""A 90 % interval inside two bounds is two one-sided tests at 5 %."""
MAX_SEEDS = 1000
"""No study has more; a number beyond it would only look exact."""


@functools.cache
def scipy_special() -> Any:
    """Return `scipy.special`: `stdtr` is Student's distribution, `stdtrit` its quantile.

    `scipy.stats.t` calls the same functions, and takes a second to import.
    """
    try:
        return importlib.import_module("scipy.special")
    except ModuleNotFoundError:
        raise MissingExtraError("scipy", "study", "the verdict of a study") from None


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
    """Ends of the interval corrected for the number of methods."""
    confidence: float
    """Confidence level of the interval: 0.95 for one method, more for several."""
    equivalence_low: float
    equivalence_high: float
    """Ends of the 90 % interval."""
    p: float
    """Chance of a mean at least this far from zero without a true difference; not corrected."""
    minimum_effect: float
    """The smallest difference worth having."""
    verdict: Verdict
    seeds_needed: int | None
    """With too few seeds: how many are needed, if means and spreads stay the same and all methods have as many.
    None where that is unknown, or more than 1000."""

    @property
    def summary(self) -> str:
        """The verdict with its figures, such as "helps by 0.0012 (0.0010 to 0.0014)"."""
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
    samples = {name: _sample(name, values) for name, values in differences.items()}
    levels = _holm_levels(samples, level)
    needed = _seeds_to_leave_zero(samples, level)
    return {
        name: _compare(sample, levels[name], needed[name], minimum_effect)
        for name, sample in samples.items()
    }


class _Sample(NamedTuple):
    """The differences of one method in numbers; `scaled` is |mean| / spread."""

    mean: float
    spread: float
    n: int
    wins: int
    scaled: float = 0.0
    p: float = 1.0

    def interval(self, level: float) -> tuple[float, float]:
        """Return the ends of the interval that misses the true mean with this chance."""
        if self.n < 2:
            return -math.inf, math.inf
        half = _half_width(level, self.n) * self.spread
        return self.mean - half, self.mean + half


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
    scaled = abs(mean) / spread if spread > 0 else (math.inf if mean else 0.0)
    p = 2 * float(scipy_special().stdtr(n - 1, -scaled * math.sqrt(n)))
    return _Sample(mean, spread, n, wins, scaled, p)


def _holm_levels(samples: Mapping[str, _Sample], level: float) -> dict[str, float]:
    """Return the level that each method must reach."""
    levels: dict[str, float] = {}
    own, is_significant = level, True
    for rank, name in enumerate(sorted(samples, key=lambda name: (samples[name].p, name))):
        if is_significant:
            own = level / (len(samples) - rank)
            low, high = samples[name].interval(own)
            is_significant = low > 0 or high < 0
        levels[name] = own
    return levels


def _seeds_to_leave_zero(samples: Mapping[str, _Sample], level: float) -> dict[str, int | None]:
    """Return the fewest seeds, the same for all methods, with which each corrected interval excludes zero."""
    needed: dict[str, int | None] = {}
    seeds: int | None = 2
    order = sorted(samples, key=lambda name: (-samples[name].scaled, name))
    for rank, name in enumerate(order):  # by p: a method waits for those before it
        if seeds is not None:
            own = _fewest_seeds(samples[name].scaled, level / (len(samples) - rank))
            seeds = None if own is None else max(seeds, own)
        needed[name] = seeds
    return needed


def _fewest_seeds(distance: float, level: float) -> int | None:
    """Return the fewest seeds whose interval has a half width below a distance, both in spreads."""
    if _half_width(level, MAX_SEEDS) >= distance:
        return None
    return bisect.bisect_left(
        range(MAX_SEEDS), x=True, lo=2, key=lambda n: _half_width(level, n) < distance
    )


@functools.cache  # a study asks for the same few levels and numbers of seeds over and over
def _half_width(level: float, n: int) -> float:
    """Return half the width of an interval over n seeds, in spreads."""
    return -float(scipy_special().stdtrit(n - 1, level / 2)) / math.sqrt(n)


def _compare(
    sample: _Sample, level: float, to_leave_zero: int | None, minimum_effect: float
) -> Comparison:
    low, high = sample.interval(level)
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
        room = minimum_effect - abs(sample.mean)
        needed = to_leave_zero
        if room > 0:
            needed = _fewest_seeds(room / sample.spread, EQUIVALENCE_LEVEL)
        # methods with fewer seeds may hold this one back, so at least one more is needed
        needed = None if needed is None else max(needed, sample.n + 1)
    return Comparison(
        mean=sample.mean,
        spread=sample.spread,
        n=sample.n,
        wins=sample.wins,
        low=low,
        high=high,
        confidence=1 - level,
        equivalence_low=inner_low,
        equivalence_high=inner_high,
        p=sample.p,
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
