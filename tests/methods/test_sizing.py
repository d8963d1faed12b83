"""Methods sized by a share of the weights, against counts of models that were really built."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.technique import parse_techniques

SHAPES = st.lists(st.tuples(st.integers(1, 30), st.integers(2, 9)), min_size=1, max_size=4)
SHARES = st.floats(0.02, 1.0)


def kept(shapes: list[tuple[int, int]], *methods: rb.Method) -> float:
    """Return the share of the weights that a model with these methods stores."""
    model = nn.ModuleList([nn.Embedding(*shape) for shape in shapes])
    plain = sum(parameter.numel() for parameter in model.parameters())
    for method in methods:
        rb.apply_(model, method, verbose=False)
    return sum(parameter.numel() for parameter in model.parameters()) / plain


def every_setting(method: type[rb.Method], shapes: list[tuple[int, int]]) -> list[rb.Method]:
    """Return the method with every setting that suits one of the tables at least."""
    if method is rb.Hashing:
        return [rb.Hashing(buckets=m) for m in range(1, max(rows for rows, _ in shapes) + 1)]
    return [rb.LowRank(rank=r) for r in range(1, max(min(shape) for shape in shapes) + 1)]


@pytest.mark.filterwarnings("ignore:.* makes all rows")
@pytest.mark.parametrize("method", [rb.Hashing, rb.LowRank])
@settings(max_examples=60)
@given(shapes=SHAPES, share=SHARES)
def test_no_other_size_is_closer_below_the_share(method, shapes, share):
    fitting = [k for m in every_setting(method, shapes) if (k := kept(shapes, m)) <= share]
    if fitting:
        assert kept(shapes, method.for_share(shapes, share)) == max(fitting)
    else:
        with pytest.raises(SettingsError, match="cannot keep a share of"):
            method.for_share(shapes, share)


def test_sizes_worked_by_hand():
    # 8000 + 400 weights: half are 4200, and 475 x 8 + 50 x 8 = 4200
    assert rb.Hashing.for_share([(1000, 8), (50, 8)], 0.5) == rb.Hashing(buckets=475)
    # 8000 + 40 weights; rank 3: 1008 x 3 + 13 x 3 = 3063; rank 4 already 4084 > 4020
    assert rb.LowRank.for_share([(1000, 8), (5, 8)], 0.5) == rb.LowRank(rank=3)
    # the short table is left alone from rank 6 on: 1008 x 6 + 40 = 6088
    assert rb.LowRank.for_share([(1000, 8), (5, 8)], 6088 / 8040) == rb.LowRank(rank=6)
    assert rb.LowRank.for_share([(1000, 8), (5, 8)], 6087 / 8040) == rb.LowRank(rank=5)


def test_a_share_that_is_met_exactly_is_met():
    # 0.29 x 100 is 28.999999999999996 in floats
    assert rb.Hashing.for_share([(100, 1)], 0.29) == rb.Hashing(buckets=29)


def test_a_larger_rank_may_keep_less():
    # rank 3: 28 x 3 + 10 x 11 x 3 = 414; rank 4 leaves the short ones alone: 28 x 4 + 240 = 352
    shapes = [(20, 8)] + [(3, 8)] * 10
    assert kept(shapes, rb.LowRank(rank=3)) == 414 / 400
    assert kept(shapes, rb.LowRank(rank=4)) == 352 / 400
    assert rb.LowRank.for_share(shapes, 0.9) == rb.LowRank(rank=4)
    # rank 3: 84 x 3 + 10 x 67 x 3 = 2262; rank 4: 84 x 4 + 1920 = 2256; both are below 2272
    assert rb.LowRank.for_share([(20, 64)] + [(3, 64)] * 10, 0.71) == rb.LowRank(rank=3)


def test_a_long_table_is_sized_at_once():
    assert rb.Hashing.for_share([(10**12, 64)], 0.001) == rb.Hashing(buckets=10**9)


@pytest.mark.parametrize(
    ("method", "shapes", "least"),
    [(rb.Hashing, [(10, 4), (10, 4)], "0.1"), (rb.LowRank, [(10, 4)], "0.35")],
)
def test_the_error_says_the_least_that_can_be_kept(method, shapes, least):
    with pytest.raises(SettingsError, match=f"share of 0.01 .* keep is {least}; ask for that or"):
        method.for_share(shapes, 0.01)
    assert method.for_share(shapes, float(least))


@pytest.mark.parametrize("method", [rb.Hashing, rb.LowRank])
@pytest.mark.parametrize(
    ("shapes", "share", "message"),
    [
        ([], 0.5, "depends on the shapes of tables, got none"),
        ([(3, 4), (0, 4)], 0.5, "at least one row and one column, got"),
        ([(3, 4)], 0.0, "share must be above 0 and at most 1, got share=0.0"),
        ([(3, 4)], 1.5, "got share=1.5"),
        ([(3, 4)], float("nan"), "got share=nan"),
    ],
)
def test_what_cannot_be_sized_is_refused(method, shapes, share, message):
    with pytest.raises(SettingsError, match=message):
        method.for_share(shapes, share)


def test_a_method_without_a_size_comes_with_its_defaults(toy_methods):
    assert toy_methods["toy-words"].for_share([(9, 4)], 0.1) == toy_methods["toy-words"]()


def test_a_method_that_does_not_know_its_size_asks_for_it(toy_methods):
    with pytest.raises(SettingsError, match="method toy-factor: ToyFactor needs factor"):
        toy_methods["toy-factor"].for_share([(9, 4)], 0.1)


@settings(max_examples=60)
@given(shapes=SHAPES, share=SHARES)
def test_a_combination_keeps_at_most_the_share(shapes, share):
    [expression] = parse_techniques("hashing+low-rank")
    try:
        methods = expression.build(shapes, share)
    except SettingsError:
        assume(False)
    # the second may be left with no table that it suits, which apply_ tells
    suited = [m for m in methods if any(m.unsuited(*shape) is None for shape in shapes)]
    assert len(suited) == 2
    assert kept(shapes, *methods) <= share * (1 + 1e-12)


def test_parts_share_what_is_kept_evenly():
    shapes = [(1000, 16)]
    [expression] = parse_techniques("hashing+low-rank")
    hashing, low_rank = expression.build(shapes, 0.25)
    assert hashing == rb.Hashing(buckets=500)
    assert low_rank == rb.LowRank.for_share([(500, 16)], 0.5)
    assert kept(shapes, hashing, low_rank) == (500 + 16) * 7 / 16000


@pytest.mark.parametrize("given_part", ["hashing:buckets=40+low-rank", "hashing+low-rank:rank=2"])
def test_a_part_that_is_given_is_not_sized(given_part):
    [expression] = parse_techniques(given_part)
    hashing, low_rank = expression.build([(100, 8), (60, 8)], 0.5)
    expected = {
        "hashing:buckets=40+low-rank": (
            rb.Hashing(buckets=40),
            rb.LowRank.for_share([(40, 8), (40, 8)], 0.5),
        ),
        "hashing+low-rank:rank=2": (
            rb.Hashing.for_share([(100, 8), (60, 8)], 0.5),
            rb.LowRank(rank=2),
        ),
    }
    assert (hashing, low_rank) == expected[given_part]


def test_the_share_is_checked_before_it_is_divided():
    for text, share in itertools.product(
        ["low-rank", "hashing+low-rank", "baseline"], [-0.5, 0.0, 2]
    ):
        [expression] = parse_techniques(text)
        with pytest.raises(SettingsError, match="share must be above 0 and at most 1"):
            expression.build([(100, 8)], share)
