"""What the seeds of a study say: does a method help, hurt, or make no difference?

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
from typing import Literal, NamedTuple

from rarebit.errors import DataError
from rarebit.settings import require
from rarebit.study.student import t_cdf, t_quantile

__all__ = ["Comparison", "Verdict", "judge"]

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
