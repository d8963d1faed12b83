"""Student's t distribution, for intervals over a few seeds.

    P(T > t) = I_x(df / 2, 1 / 2) / 2,    x = df / (df + t^2)

I is the regularised incomplete beta function. It is summed as a continued fraction by Lentz's method,
in the tail or around zero, whichever converges fast; both start from t times the density at t. Small
chances keep their relative precision: nothing is taken as one minus something near one.

The difference of two AUCs on the same rows, with its interval (DeLong et al., 1988).

Seeds tell how much training varies. This tells how much the test rows do: other rows of the same kind
would give another difference. Every row has a placement, the share of the other class that it is on the
right side of, ties counted half:

    V10(i) = share of rows without a click that score below click i;  their mean is the AUC
    V01(j) = share of clicks that score above row j;                  so is theirs
    variance of the difference = var(V10a - V10b) / clicks + var(V01a - V01b) / others

One sort a model gives all placements at once (Sun and Xu, 2014, from midranks; here from the counts below
and above each group of equal scores, which are the same numbers without their rounding).

What the seeds of a study say: does a method help, hurt, or make no difference?

Each seed gives one paired difference, the method's figure minus its control's. Over n seeds,

    interval = mean ± t(1 - level / 2, n - 1) spread / sqrt(n)

Several methods at once would find a winner by luck, so the level is divided as Holm (1979) does: the
smallest p of m methods is held to level / m, the next one to level / (m - 1), and so on; from the first
one that is not told from zero, all keep its level.

    helps           the corrected interval lies above zero, and the mean is at least the minimum effect
    hurts           the mirror image
    no difference   the 90 % interval lies inside the minimum effect on both sides of zero
    too few seeds   anything else, with the number of seeds that would tell

At most 5 % of studies then see help where there is none, be the differences normal, heavy-tailed or of
unequal spread. Strongly lopsided ones, such as a method that fails badly in one seed of ten, are beyond
any t interval over a few seeds; `benchmarks/verdicts.py` shows both.
"""

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rarebit.errors import DataError
from rarebit.settings import require

__all__ = ["Comparison", "PairedAUC", "Verdict", "delong", "judge", "t_cdf", "t_quantile"]

MAX_TERMS = 100_000
"""Of a continued fraction; a million degrees of freedom take a few thousand."""
MAX_STEPS = 300
"""Of the search for a quantile; a handful is the rule."""
MAX_LOG = 709.0
"""The logarithm of the largest float."""


def t_cdf(t: float, df: float) -> float:
    """Return the chance that Student's t with `df` degrees of freedom is at most `t`.

    >>> round(t_cdf(1.0, 1), 12)
    0.75
    """
    _check_df(df)
    require(not math.isnan(t), f"t must be a number, got {t}")
    if t == 0 or math.isinf(t):
        return 0.5 + math.copysign(0.5, t) * (t != 0)
    center, tail = _shares(abs(t), df)
    return tail if t < 0 else 0.5 + center


def t_quantile(p: float, df: float) -> float:
    """Return the t that Student's t with `df` degrees of freedom exceeds with chance 1 - p.

    >>> round(t_quantile(0.975, 4), 4)
    2.7764
    """
    _check_df(df)
    require(0 <= p <= 1, f"p must be between 0 and 1, got {p}")
    if p in (0, 1):
        return math.inf if p == 1 else -math.inf
    point = _upper_point(min(p, 1 - p), df)
    return point if p > 0.5 else -point


def _check_df(df: float) -> None:
    require(1 <= df < math.inf, f"df must be finite and at least 1, got {df}")


@functools.cache  # a study asks for the same few levels and numbers of seeds over and over
def _upper_point(wanted: float, df: float) -> float:
    """Return the t >= 0 that is exceeded with this chance, which is at most one half.

    Newton's method on logarithms of both sides, where either share is concave: one step may go too
    far, all others come nearer from there. A step that leaves what is known is replaced by the middle.
    """
    if wanted == 0.5:
        return 0.0
    by_tail = wanted < 0.25  # the smaller share is the precise one
    goal = math.log(wanted if by_tail else 0.5 - wanted)
    low, high, log_t = -math.inf, math.inf, 0.0
    for _ in range(MAX_STEPS):
        t = math.exp(log_t)
        share = _shares(t, df)[by_tail]
        ahead = math.log(share) - goal if share > 0 else -math.inf
        if (ahead > 0) == by_tail:
            low = log_t
        else:
            high = log_t
        step = share * ahead / _scaled_density(t, df) if share > 0 else math.inf
        new = min(log_t + step if by_tail else log_t - step, MAX_LOG)
        if abs(step) <= 1e-15 * max(1.0, abs(log_t)):
            break
        log_t = new if low < new < high else (low + high) / 2
    return math.exp(log_t)


def _shares(t: float, df: float) -> tuple[float, float]:
    """Return P(0 < T < t) and P(T > t) for t > 0."""
    a, density = df / 2, _scaled_density(t, df)
    length = math.hypot(1.0, t / math.sqrt(df))
    x, rest = 1 / length / length, (t / math.sqrt(df) / length) ** 2  # rest = 1 - x
    if x < (a + 1) / (a + 2.5):
        tail = density / 2 / _beta_fraction(a, 0.5, x, rest)
        return 0.5 - tail, tail
    center = density / 2 / _beta_fraction(0.5, a, rest, x)
    return center, 0.5 - center


def _scaled_density(t: float, df: float) -> float:
    """Return t times the density at t: t / sqrt(pi df) Γ(a + 1/2) / Γ(a) (1 + t²/df)^(-a - 1/2)."""
    a, ratio = df / 2, t / math.sqrt(df)
    length = math.hypot(1.0, ratio)
    # the square is lost beyond 1, where a huge t would overflow; log1p is needed below
    log_square = math.log1p(ratio * ratio) if ratio < 1 else 2 * math.log(length)
    return _gamma_ratio(a) / math.sqrt(math.pi) * (ratio / length) * math.exp(-a * log_square)


@functools.cache
def _gamma_ratio(a: float) -> float:
    """Return Γ(a + 1/2) / Γ(a): above 20 by Stirling's series, as the gammas themselves grow too large."""
    if a < 20:
        return math.gamma(a + 0.5) / math.gamma(a)
    square = a * a
    series = -1 / 8 + (1 / 192 - (1 / 640 - 17 / 14336 / square) / square) / square
    return math.sqrt(a) * math.exp(series / a)


def _beta_fraction(a: float, b: float, x: float, y: float) -> float:
    """Return f of I_x(a, b) = x^a y^b / B(a, b) / f, with y = 1 - x.

    f = b0 + a1 / (b1 + a2 / (b2 + ...)), where (DiDonato and Morris, 1992)
    am = (a + m - 1)(a + b + m - 1) m (b - m) x² / (a + 2m - 1)²,
    bm = m + m (b - m) x / (a + 2m - 1) + (a + m)(a y - b x + 1 + m (1 + y)) / (a + 2m + 1).
    """
    fraction = ahead = a * (a * y - b * x + 1) / (a + 1)
    behind = 0.0
    for m in range(1, MAX_TERMS):
        odd = a + 2 * m - 1
        cross = m * (b - m) * x / odd
        above = (a + m - 1) * (a + b + m - 1) * cross * x / odd
        below = m + cross + (a + m) * (a * y - b * x + 1 + m * (1 + y)) / (odd + 2)
        behind = 1 / (below + above * behind)
        ahead = below + above / ahead
        fraction *= ahead * behind
        if abs(ahead * behind - 1) < 1e-15:
            break
    return fraction


@dataclass(frozen=True, kw_only=True)
class PairedAUC:
    """Two AUCs of the same rows and how sure their difference is."""

    auc_a: float
    """Of the first scores."""
    auc_b: float
    """Of the second scores."""
    difference: float
    """First minus second."""
    standard_error: float
    """Of the difference, over other rows of the same kind."""
    low: float
    """Lower end of the interval of the difference."""
    high: float
    """Upper end of it."""
    confidence: float
    """How often such an interval has the true difference."""


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
    _check(scores_a, scores_b, labels)
    clicked = labels > 0.5
    a, b = _placements(scores_a, clicked), _placements(scores_b, clicked)
    variance = sum(
        float((ours - theirs).var()) / len(ours)
        for ours, theirs in ((a.clicks, b.clicks), (a.others, b.others))
    )
    error = math.sqrt(variance)
    difference = a.auc - b.auc
    reach = NormalDist().inv_cdf(1 - level / 2) * error
    return PairedAUC(
        auc_a=a.auc,
        auc_b=b.auc,
        difference=difference,
        standard_error=error,
        low=difference - reach,
        high=difference + reach,
        confidence=1 - level,
    )


def _check(scores_a: Tensor, scores_b: Tensor, labels: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (scores_a, scores_b, labels)]
    if labels.dim() != 1 or len(set(shapes)) > 1:
        raise DataError(f"both scores and the labels must have one shape, (rows,); got {shapes}")
    if bool(scores_a.isnan().any() | scores_b.isnan().any()):
        raise DataError(
            "scores must be numbers to be ranked, got nan; look at the model's training"
        )
    clicks = int((labels > 0.5).sum())
    if min(clicks, len(labels) - clicks) < 2:
        raise DataError(
            "an interval of the AUC needs at least two rows with a click and two without, "
            f"got {clicks} and {len(labels) - clicks}; give it more rows"
        )


class _Placements(NamedTuple):
    """The AUC, and in float64 the placements of the rows with a click and of the others."""

    auc: float
    clicks: Tensor
    others: Tensor


def _placements(scores: Tensor, clicked: Tensor) -> _Placements:
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
    return _Placements(
        auc=int((clicks * below).sum()) / (2 * num_clicks * num_others),
        clicks=below[group[clicked]].double() / (2 * num_others),
        others=above[group[~clicked]].double() / (2 * num_clicks),
    )


Verdict = Literal["helps", "hurts", "no difference", "too few seeds"]

EQUIVALENCE_LEVEL = 0.10
"""A 90 % interval inside two bounds is two one-sided tests at 5 %."""
MAX_SEEDS = 1000
"""No study has more; a number beyond it would only look exact."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The paired differences of one method to its control, and what they say."""

    mean: float
    """Of the differences, method minus control; not a number without a seed."""
    spread: float
    """Standard deviation of the differences; not a number with fewer than two seeds."""
    n: int
    """Seeds."""
    wins: int
    """Seeds in which the method is better than its control."""
    low: float
    """Lower end of the interval corrected for the number of methods."""
    high: float
    """Upper end of it."""
    confidence: float
    """How often such an interval has the true difference: 0.95 for one method, more for several."""
    equivalence_low: float
    """Lower end of the 90 % interval."""
    equivalence_high: float
    """Upper end of it."""
    p: float
    """Chance of a mean at least this far from zero without a true difference; not corrected."""
    minimum_effect: float
    """The smallest difference worth having."""
    verdict: Verdict
    """What follows from the above."""
    seeds_needed: int | None
    """With too few seeds: how many would tell, if means and spreads stay as they are and all methods
    have as many. None if that cannot be said, or is more than 1000."""

    @property
    def words(self) -> str:
        """The verdict as a phrase, with the figures that carry it.

        >>> judge({"mlet": [0.0012, 0.0013, 0.0011]})["mlet"].words
        'helps by 0.0012 (0.0010 to 0.0014)'
        """
        least = format(Decimal(f"{self.minimum_effect:.3g}"), "f")
        decimals = max(4, len(least.partition(".")[2]))
        size, *ends = (f"{abs(x):.{decimals}f}" for x in (self.mean, *self._ends_by_size))
        match self.verdict:
            case "helps" | "hurts":
                return f"{self.verdict} by {size} ({ends[0]} to {ends[1]})"
            case "no difference":
                return f"no difference of {least} or more"
        if self.n < 2:
            return "too few seeds: at least 2 are needed"
        if self.seeds_needed is None:
            return f"too few seeds: {MAX_SEEDS} would not tell"
        return f"too few seeds: about {self.seeds_needed} would tell"

    @property
    def _ends_by_size(self) -> tuple[float, float]:
        return (self.low, self.high) if self.mean > 0 else (self.high, self.low)


def judge(
    differences: Mapping[str, Sequence[float]],
    *,
    minimum_effect: float = 0.0005,
    level: float = 0.05,
) -> dict[str, Comparison]:
    """Return the verdict on every method, given its differences to its control, one a seed.

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
    """What counts of some differences; `scaled` is the mean in spreads, without its sign."""

    mean: float
    spread: float
    n: int
    wins: int
    scaled: float
    p: float

    def interval(self, level: float) -> tuple[float, float]:
        """Return the ends of the interval that misses the true mean with this chance."""
        if self.n < 2:
            return -math.inf, math.inf
        half = _reach(level, self.n) * self.spread
        return self.mean - half, self.mean + half


def _sample(name: str, differences: Sequence[float]) -> _Sample:
    values = [float(value) for value in differences]
    if not all(map(math.isfinite, values)):
        raise DataError(
            f"differences must be finite numbers, got {values} for {name!r}; "
            "leave out the seeds whose training failed"
        )
    n, wins = len(values), sum(value > 0 for value in values)
    if n == 0:
        return _Sample(math.nan, math.nan, n, wins, 0.0, 1.0)
    # rounding must not move the mean of equal values off them: their spread is zero
    mean = min(max(math.fsum(values) / n, min(values)), max(values))
    if n == 1:
        return _Sample(mean, math.nan, n, wins, 0.0, 1.0)
    spread = math.hypot(*(value - mean for value in values)) / math.sqrt(n - 1)
    scaled = abs(mean) / spread if spread > 0 else (math.inf if mean else 0.0)
    p = 2 * t_cdf(-scaled * math.sqrt(n), n - 1)
    return _Sample(mean, spread, n, wins, scaled, p)


def _holm_levels(samples: Mapping[str, _Sample], level: float) -> dict[str, float]:
    """Return the level that each method is held to."""
    levels: dict[str, float] = {}
    own, told_apart = level, True
    for rank, name in enumerate(sorted(samples, key=lambda name: (samples[name].p, name))):
        if told_apart:
            own = level / (len(samples) - rank)
            low, high = samples[name].interval(own)
            told_apart = low > 0 or high < 0
        levels[name] = own
    return levels


def _seeds_to_leave_zero(samples: Mapping[str, _Sample], level: float) -> dict[str, int | None]:
    """Return the fewest seeds of all methods with which each corrected interval leaves zero out.

    With as many seeds for all, the order of p is that of the means in spreads, and a method waits for
    those before it.
    """
    needed: dict[str, int | None] = {}
    seeds: int | None = 2
    order = sorted(samples, key=lambda name: (-samples[name].scaled, name))
    for rank, name in enumerate(order):
        if seeds is not None:
            own = _fewest_seeds(samples[name].scaled, level / (len(samples) - rank))
            seeds = None if own is None else max(seeds, own)
        needed[name] = seeds
    return needed


def _fewest_seeds(distance: float, level: float) -> int | None:
    """Return the fewest seeds whose interval reaches less far than a distance given in spreads."""
    if _reach(level, MAX_SEEDS) >= distance:
        return None
    return bisect.bisect_left(
        range(MAX_SEEDS), x=True, lo=2, key=lambda n: _reach(level, n) < distance
    )


@functools.cache
def _reach(level: float, n: int) -> float:
    """Return how far an interval over n seeds goes to either side of the mean, in spreads."""
    return -t_quantile(level / 2, n - 1) / math.sqrt(n)


def _compare(
    sample: _Sample, level: float, needed: int | None, minimum_effect: float
) -> Comparison:
    low, high = sample.interval(level)
    ends = sample.interval(EQUIVALENCE_LEVEL)
    verdict: Verdict
    if low > 0 and sample.mean >= minimum_effect:
        verdict = "helps"
    elif high < 0 and sample.mean <= -minimum_effect:
        verdict = "hurts"
    elif -minimum_effect < ends[0] and ends[1] < minimum_effect:
        verdict = "no difference"
    else:
        verdict = "too few seeds"
    undecided = verdict == "too few seeds" and sample.n >= 2
    return Comparison(
        mean=sample.mean,
        spread=sample.spread,
        n=sample.n,
        wins=sample.wins,
        low=low,
        high=high,
        confidence=1 - level,
        equivalence_low=ends[0],
        equivalence_high=ends[1],
        p=sample.p,
        minimum_effect=minimum_effect,
        verdict=verdict,
        seeds_needed=_seeds_needed(sample, needed, minimum_effect) if undecided else None,
    )


def _seeds_needed(sample: _Sample, to_leave_zero: int | None, minimum_effect: float) -> int | None:
    """Return how many seeds would tell a difference of this size, or that there is none."""
    room = minimum_effect - abs(sample.mean)
    needed = _fewest_seeds(room / sample.spread, EQUIVALENCE_LEVEL) if room > 0 else to_leave_zero
    # methods with fewer seeds may be what holds this one back; one more is still the least
    more = MAX_SEEDS + 1 if needed is None else max(needed, sample.n + 1)
    return more if more <= MAX_SEEDS else None
