"""Student's t beside scipy's, and beside closed forms where scipy's is not precise."""

import math
import statistics

import hypothesis
import pytest
from hypothesis import strategies as st
from scipy import stats

from rarebit.errors import SettingsError
from rarebit.study.statistics import t_cdf, t_quantile

DEGREES = [1, 1.5, 2, 3, 4, 7, 9, 38, 39, 40, 41, 99, 1000, 12345.6, 1e5, 1e6]
POINTS = [0, 1e-3, 0.1, 0.5, 1, 1.5, 1.73, 1.74, 2, 3, 5, 10, 20, 37, 1e3, 1e6]
CHANCES = [1e-100, 1e-20, 1e-9, 1e-4, 0.0025, 0.01, 0.025, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4]


@pytest.mark.parametrize("df", DEGREES)
def test_the_chance_is_that_of_scipy(df):
    for t in [*POINTS, *(-t for t in POINTS)]:
        assert t_cdf(t, df) == pytest.approx(stats.t.cdf(t, df), rel=0, abs=1e-12)


@pytest.mark.parametrize("df", DEGREES)
def test_small_chances_keep_their_precision(df):
    for t in POINTS[-8:]:
        expected = stats.t.sf(t, df)
        if expected > 1e-290:
            assert t_cdf(-t, df) == pytest.approx(expected, rel=1e-11, abs=0)


@pytest.mark.parametrize("df", DEGREES)
def test_the_quantile_is_that_of_scipy(df):
    for p in [*CHANCES, *(1 - p for p in CHANCES[3:])]:
        assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-10, abs=0)


@pytest.mark.parametrize("p", [1e-300, 1e-9, 0.2, 0.25, 0.4, 0.5 - 1e-12, 0.5, 0.5 + 1e-9, 0.999])
def test_the_quantile_of_one_two_and_four_degrees_is_the_closed_form(p):
    center = p - 0.5
    tail = min(p, 1 - p)
    # the cotangent is precise in the tail, the tangent around zero
    near, far = math.tan(math.pi * center), math.copysign(1 / math.tan(math.pi * tail), center)
    assert t_quantile(p, 1) == pytest.approx(near if tail > 0.1 else far, rel=1e-12, abs=0)
    chance = 4 * p * (1 - p)
    assert t_quantile(p, 2) == pytest.approx(2 * center * math.sqrt(2 / chance), rel=1e-12, abs=0)
    if p > 1e-6 and tail < 0.49:  # the form loses digits at either end
        cosine = math.cos(math.acos(math.sqrt(chance)) / 3) / math.sqrt(chance)
        fourth = math.copysign(2 * math.sqrt(cosine - 1), center)
        assert t_quantile(p, 4) == pytest.approx(fourth, rel=1e-11, abs=0)


def test_many_degrees_are_the_normal_distribution():
    normal = statistics.NormalDist()
    assert t_cdf(1.3, 1e12) == pytest.approx(normal.cdf(1.3), abs=1e-11)
    assert t_quantile(0.975, 1e12) == pytest.approx(normal.inv_cdf(0.975), abs=1e-10)


@hypothesis.given(
    p=st.floats(1e-250, 1 - 1e-9), df=st.integers(1, 1_000_000) | st.floats(1, 50, exclude_min=True)
)
def test_the_quantile_undoes_the_chance(p, df):
    # of p near one half the tail has 16 digits, so that is what can be asked for
    assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, rel=1e-11, abs=0)


@hypothesis.given(t=st.floats(-1e100, 1e100), df=st.floats(1, 1e6))
def test_the_distribution_is_the_same_on_both_sides(t, df):
    assert t_cdf(t, df) + t_cdf(-t, df) == pytest.approx(1, abs=1e-15)


def test_the_ends():
    assert (t_cdf(-math.inf, 3), t_cdf(0.0, 3), t_cdf(math.inf, 3)) == (0, 0.5, 1)
    assert (t_quantile(0, 3), t_quantile(0.5, 3), t_quantile(1, 3)) == (-math.inf, 0, math.inf)


def test_values_too_large_for_their_square():
    assert t_cdf(-1e200, 1) == pytest.approx(1e-200 / math.pi, rel=1e-12)
    assert t_quantile(1e-200, 1) == pytest.approx(-1e200 / math.pi, rel=1e-12)


@pytest.mark.parametrize("df", [0, 0.5, -1, math.inf, math.nan])
def test_degrees_of_freedom_out_of_range_are_refused(df):
    with pytest.raises(SettingsError, match="df must be finite and at least 1, got"):
        t_cdf(1.0, df)
    with pytest.raises(SettingsError, match="df must be finite and at least 1, got"):
        t_quantile(0.9, df)


def test_what_is_no_chance_or_no_number_is_refused():
    with pytest.raises(SettingsError, match=r"p must be between 0 and 1, got 1\.1"):
        t_quantile(1.1, 3)
    with pytest.raises(SettingsError, match="p must be between 0 and 1, got nan"):
        t_quantile(math.nan, 3)
    with pytest.raises(SettingsError, match="t must be a number, got nan"):
        t_cdf(math.nan, 3)
