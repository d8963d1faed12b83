"""The verdict on paired differences: values by hand, a naive version with scipy, and every odd family."""

import dataclasses
import math
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

import rarebit as rb
from rarebit.errors import DataError, MissingExtraError, SettingsError
from rarebit.study.statistics import judge, scipy_special

EFFECT = 0.0005
DIFFERENCES = st.integers(-3000, 3000).map(lambda millionths: millionths / 1e6)


def families(least=0, most=8):
    """Families of one to five methods, whose numbers of seeds may differ."""
    seeds = st.lists(DIFFERENCES, min_size=least, max_size=most)
    return st.dictionaries(st.sampled_from("abcde"), seeds, min_size=1)


def with_moments(mean, spread, n):
    """Return n differences with exactly this mean and spread."""
    pattern = np.arange(n) - (n - 1) / 2
    return (mean + spread * pattern / pattern.std(ddof=1)).tolist()


def verdicts(found):
    return {name: comparison.verdict for name, comparison in found.items()}


def test_one_method_by_hand():
    found = judge({"a": [0.001, 0.002, 0.003]})["a"]
    assert found.mean == pytest.approx(0.002)
    assert found.spread == pytest.approx(0.001)
    assert (found.n, found.wins, found.confidence) == (3, 3, 0.99)
    # t(0.995, 2) = 9.92484, t(0.95, 2) = 2.91999, both times 0.001 / sqrt(3)
    assert (found.low, found.high) == pytest.approx((-0.003730, 0.007730), abs=1e-6)
    ends = (found.equivalence_low, found.equivalence_high)
    assert ends == pytest.approx((0.000314, 0.003686), abs=1e-6)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-9)  # t = sqrt(12), df = 2
    # t(0.995, 4) / sqrt(5) = 2.059 is above mean / spread = 2, t(0.995, 5) / sqrt(6) = 1.646 is below
    assert (found.verdict, found.seeds_needed) == ("too few seeds", 6)


def test_the_pooled_spread_widens_the_interval_of_a_method_that_seems_to_agree_by_luck():
    quiet, loud = with_moments(0.001, 1e-5, 5), with_moments(0.0, 0.001, 5)
    assert judge({"quiet": quiet})["quiet"].verdict == "helps"
    found = judge({"quiet": quiet, "loud": loud})
    # sqrt((0.00001^2 + 0.001^2) / 2) = 0.000707, times t(0.99, 8) = 2.89646, over sqrt(5)
    assert (found["quiet"].low, found["quiet"].high) == pytest.approx(
        (0.000084, 0.001916), abs=1e-6
    )
    # its own spread is the wider one: t(0.99, 4) = 3.74695
    assert found["loud"].high == pytest.approx(0.001 * 3.74695 / math.sqrt(5), abs=1e-8)
    among = judge({"quiet": quiet} | {f"loud {i}": loud for i in range(7)})
    assert (among["quiet"].verdict, among["quiet"].seeds_needed) == ("too few seeds", 8)
    assert among["quiet"].equivalence_low == found["quiet"].equivalence_low  # its own spread


@pytest.mark.parametrize(
    ("methods", "least"), [(1, 0.99), (2, 0.98), (4, 0.96), (5, 0.95), (9, 0.95)]
)
def test_few_methods_are_judged_more_strictly(methods, least):
    clear = {f"{i}": with_moments(0.01, 0.0001, 5) for i in range(methods)}
    assert min(found.confidence for found in judge(clear).values()) == pytest.approx(least)


@pytest.mark.parametrize(
    ("mean", "spread", "expected"),
    [
        (0.001, 0.0002, "helps"),
        (-0.001, 0.0002, "hurts"),
        (0.0001, 0.0002, "no difference"),
        (-0.0001, 0.0002, "no difference"),
        (0.0004, 0.00001, "no difference"),  # told from zero, but not worth having
        (0.0004, 0.0002, "too few seeds"),  # told from zero, and may be worth having
        (0.001, 0.002, "too few seeds"),
        (0.0, 0.002, "too few seeds"),
    ],
)
def test_the_four_verdicts(mean, spread, expected):
    found = judge({"a": with_moments(mean, spread, 5)})["a"]
    assert found.verdict == expected
    assert (found.seeds_needed is None) == (expected != "too few seeds")


def test_the_level_is_divided_as_holm_does():
    strong, middle, weak = (with_moments(0.001, spread, 5) for spread in (1e-4, 2e-4, 6e-4))
    found = judge({"weak": weak, "strong": strong, "middle": middle})
    confidence = {name: comparison.confidence for name, comparison in found.items()}
    assert confidence == pytest.approx({"strong": 1 - 0.05 / 3, "middle": 0.975, "weak": 0.97})
    assert list(found) == ["weak", "strong", "middle"]
    # p = 0.0203 is told from zero beside two strong methods, and not beside two weak ones
    assert found["weak"].p == pytest.approx(0.0203, abs=1e-4)
    assert found["weak"].verdict == "helps"
    beside = judge({"a": weak, "b": weak, "c": weak})
    assert set(verdicts(beside).values()) == {"too few seeds"}


def test_after_the_first_that_is_not_told_from_zero_all_keep_its_level():
    family = {
        "first": with_moments(0.003, 1e-4, 5),
        "second": with_moments(0.001, 0.0008, 5),  # p = 0.049, held to 0.05 / 3
        "third": with_moments(0.001, 0.002, 5),
        "fourth": [],
    }
    found = judge(family)
    assert found["first"].confidence == pytest.approx(1 - 0.05 / 4)
    for name in ("second", "third", "fourth"):
        assert found[name].confidence == pytest.approx(1 - 0.05 / 3)


def naive(family, effect, level):
    """The rule once more, from scipy's t test and interval, and from all residuals of the family."""
    residuals = np.concatenate([np.array(values) - np.mean(values) for values in family.values()])
    freedom = len(residuals) - len(family)
    pooled = np.sqrt((residuals**2).sum() / freedom)
    tests, p = {}, {}
    for name, values in family.items():
        tests[name] = stats.ttest_1samp(values, 0)
        error = pooled / np.sqrt(len(values))
        p[name] = max(tests[name].pvalue, 2 * stats.t.sf(abs(np.mean(values)) / error, freedom))
    order = sorted(tests, key=lambda name: (p[name], name))
    found, own, failed = {}, None, False
    for rank, name in enumerate(order):
        if not failed:
            own = min(level / (len(order) - rank), level * len(order) / 5)
            failed = p[name] > own
        mean, n = np.mean(family[name]), len(family[name])
        ends = tests[name].confidence_interval(1 - own)
        other = stats.t.interval(1 - own, freedom, mean, pooled / np.sqrt(n))
        low, high = min(ends.low, other[0]), max(ends.high, other[1])
        inner = tests[name].confidence_interval(0.9)
        verdict = "too few seeds"
        if low > 0 and mean >= effect:
            verdict = "helps"
        if high < 0 and mean <= -effect:
            verdict = "hurts"
        if inner.low > -effect and inner.high < effect:
            verdict = "no difference"
        numbers = (mean, np.std(family[name], ddof=1), low, high, *inner, 1 - own)
        found[name] = (verdict, p[name], numbers)
    return found


@hypothesis.given(
    family=families(least=2),
    effect=st.sampled_from([0.0001, EFFECT, 0.002]),
    level=st.sampled_from([0.01, 0.05, 0.2]),
)
def test_the_rule_equals_a_naive_version(family, effect, level):
    hypothesis.assume(all(len(set(values)) > 1 for values in family.values()))
    found = judge(family, minimum_effect=effect, level=level)
    for name, (verdict, p, numbers) in naive(family, effect, level).items():
        ours = found[name]
        assert ours.verdict == verdict
        assert ours.p == pytest.approx(p, rel=1e-8)
        assert (
            ours.mean,
            ours.spread,
            ours.low,
            ours.high,
            ours.equivalence_low,
            ours.equivalence_high,
            ours.confidence,
        ) == pytest.approx(numbers, rel=1e-9, abs=1e-14)
        assert ours.n == len(family[name])
        assert ours.wins == sum(value > 0 for value in family[name])


@hypothesis.given(family=families())
def test_exactly_one_verdict_holds(family):
    for found in judge(family).values():
        helps = found.low > 0 and found.mean >= EFFECT
        hurts = found.high < 0 and found.mean <= -EFFECT
        same = found.equivalence_low > -EFFECT and found.equivalence_high < EFFECT
        assert helps + hurts + same <= 1
        names = {"helps": helps, "hurts": hurts, "no difference": same}
        assert [name for name, holds in names.items() if holds] == [
            name for name in names if name == found.verdict
        ]
        assert (found.verdict == "too few seeds") == (not (helps or hurts or same))


@hypothesis.given(family=families())
def test_the_mirror_image_has_the_mirrored_verdict(family):
    mirrored = judge({name: [-x for x in values] for name, values in family.items()})
    swap = {"helps": "hurts", "hurts": "helps"}
    for name, found in judge(family).items():
        assert mirrored[name].verdict == swap.get(found.verdict, found.verdict)
        assert (mirrored[name].low, mirrored[name].high) == (-found.high, -found.low)
        assert mirrored[name].seeds_needed == found.seeds_needed


@hypothesis.given(family=families())
def test_the_order_of_the_methods_and_the_unit_do_not_matter(family):
    found = judge(family)
    backwards = judge(dict(reversed(family.items())))
    assert {name: repr(backwards[name]) for name in found} == {
        name: repr(comparison) for name, comparison in found.items()
    }
    large = {name: [1024 * value for value in values] for name, values in family.items()}
    assert verdicts(judge(large, minimum_effect=1024 * EFFECT)) == verdicts(found)


@hypothesis.given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from([-2e-3, -6e-4, -3e-4, 0.0, 4e-4, 5.1e-4, 1e-3]), st.floats(1e-4, 4e-3)
        ),
        min_size=1,
        max_size=5,
    ),
    n=st.integers(2, 6),
)
def test_the_number_of_seeds_needed_is_the_smallest_that_tells(shapes, n):
    def with_seeds(number):
        return judge(
            {f"{i}": with_moments(mean, spread, number) for i, (mean, spread) in enumerate(shapes)}
        )

    for name, found in with_seeds(n).items():
        if found.verdict == "too few seeds":
            if found.seeds_needed is None:
                assert with_seeds(1000)[name].verdict == "too few seeds"
                continue
            assert n < found.seeds_needed <= 1000
            assert with_seeds(found.seeds_needed)[name].verdict != "too few seeds"
            assert with_seeds(found.seeds_needed - 1)[name].verdict == "too few seeds"


def test_a_method_waits_for_those_that_are_clearer():
    five, nine = (
        judge({name: with_moments(0.001, 0.001, 4) for name in names})
        for names in ("abcde", "abcdefghi")
    )
    assert {found.seeds_needed for found in nine.values()} == {nine["a"].seeds_needed}
    assert nine["a"].seeds_needed > five["a"].seeds_needed


def test_with_unequal_numbers_of_seeds_one_more_is_the_least_that_is_asked_for():
    # "ahead" has p = 0.02; that is enough after the others, which have too few seeds to go first
    ahead = {"ahead": with_moments(0.001, 0.000943, 8)}
    behind, later = ({f"{i}": with_moments(0.01, 0.0005, n) for i in range(4)} for n in (2, 8))
    assert judge(ahead | later)["ahead"].verdict == "helps"
    found = judge(ahead | behind)
    assert (found["ahead"].verdict, found["ahead"].seeds_needed) == ("too few seeds", 9)
    assert (found["0"].verdict, found["0"].seeds_needed) == ("too few seeds", 3)


@pytest.mark.parametrize("values", [[], [0.01]])
def test_without_two_seeds_nothing_is_said(values):
    found = judge({"few": values, "many": with_moments(0.001, 0.0001, 5)})
    few = found["few"]
    assert (few.verdict, few.seeds_needed, few.n) == ("too few seeds", None, len(values))
    assert (few.low, few.high, few.p) == (-math.inf, math.inf, 1)
    assert (few.equivalence_low, few.equivalence_high) == (-math.inf, math.inf)
    assert math.isnan(few.spread)
    assert few.mean == 0.01 if values else math.isnan(few.mean)
    assert few.summary == "too few seeds: at least 2 are needed"
    # a method that has not run yet is one of the family all the same
    assert found["many"].confidence == pytest.approx(0.98)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "no difference"),
        (0.0004, "no difference"),
        (-0.0004, "no difference"),
        (EFFECT, "helps"),
        (-EFFECT, "hurts"),
        (0.1, "helps"),
    ],
)
@pytest.mark.parametrize("n", [2, 3, 7])
def test_equal_differences_are_their_own_interval(value, expected, n):
    found = judge({"a": [value] * n})["a"]
    assert (found.mean, found.low, found.high, found.spread) == (value, value, value, 0)
    assert found.p == (0 if value else 1)
    assert found.verdict == expected


def test_a_mean_near_the_minimum_effect_would_take_too_many_seeds():
    found = judge({"a": with_moments(0.000499, 0.001, 5)})["a"]
    assert (found.verdict, found.seeds_needed) == ("too few seeds", None)


def test_no_method_gives_no_verdict():
    assert judge({}) == {}


@pytest.mark.parametrize(
    ("family", "summary"),
    [
        ({"a": [0.0012, 0.0013, 0.0011]}, "helps by 0.0012 (0.0006 to 0.0018)"),
        ({"a": [-0.0012, -0.0013, -0.0011]}, "hurts by 0.0012 (0.0006 to 0.0018)"),
        ({"a": [0.0001, 0.0001, 0.0002]}, "no difference of 0.0005 or more"),
        ({"a": [0.001, 0.002, 0.003]}, "too few seeds: about 6 are needed"),
        ({"a": with_moments(0.000499, 0.01, 5)}, "too few seeds: more than 1000 are needed"),
    ],
)
def test_a_verdict_with_its_figures(family, summary):
    assert judge(family)["a"].summary == summary


def test_summaries_have_the_digits_of_the_minimum_effect():
    small = judge({"a": [0.000012, 0.000013, 0.000011]}, minimum_effect=0.000002)["a"]
    assert small.summary == "helps by 0.000012 (0.000006 to 0.000018)"
    none = judge({"a": [0.0, 0.0]}, minimum_effect=0.00005)["a"]
    assert none.summary == "no difference of 0.00005 or more"
    coarse = judge({"a": [0.0212, 0.0213, 0.0211]}, minimum_effect=0.01)["a"]
    assert coarse.summary == "helps by 0.0212 (0.0206 to 0.0218)"
    assert judge({"a": [0.0, 0.0]}, minimum_effect=2.0)["a"].summary == "no difference of 2 or more"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_difference_that_is_no_number_is_refused(bad):
    with pytest.raises(DataError, match=r"finite numbers, got \[0\.1, .*\] for 'mlet'; leave out"):
        judge({"mlet": [0.1, bad]})


@pytest.mark.parametrize("effect", [0.0, -0.0005, math.nan, math.inf])
def test_a_minimum_effect_must_be_above_zero(effect):
    with pytest.raises(SettingsError, match="minimum_effect must be above zero, got"):
        judge({"a": [0.1, 0.2]}, minimum_effect=effect)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.05, math.nan])
def test_a_level_must_be_a_chance(level):
    with pytest.raises(SettingsError, match="level must be between 0 and 1, got"):
        judge({"a": [0.1, 0.2]}, level=level)


def test_a_comparison_cannot_be_changed():
    found = judge({"a": [0.1, 0.2]})["a"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.verdict = "helps"


def test_without_scipy_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "scipy", None)
    scipy_special.cache_clear()
    with pytest.raises(
        MissingExtraError, match=r"verdict of a study needs .*'scipy'.*rarebit\[study\]"
    ):
        judge({"a": [0.1, 0.2]})
    small = {"data": {"rows": 500}, "training": {"epochs": 1}, "seeds": 1, "device": "cpu"}
    with pytest.raises(MissingExtraError, match=r"rarebit\[study\]"):
        rb.study(tmp_path / "study", methods="baseline", progress=False, **small)
    assert not (tmp_path / "study").exists()  # reported before any run
