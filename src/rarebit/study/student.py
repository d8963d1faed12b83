"""Student's t distribution, for intervals over a few seeds.

    P(T > t) = I_x(df / 2, 1 / 2) / 2,    x = df / (df + t^2)

I is the regularised incomplete beta function. It is summed as a continued fraction by Lentz's method,
in the tail or around zero, whichever converges fast; both start from t times the density at t. Small
chances keep their relative precision: nothing is taken as one minus something near one.
"""

import functools
import math

from rarebit.settings import require

__all__ = ["t_cdf", "t_quantile"]

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
