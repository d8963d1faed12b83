"""DeLong's interval beside the definition, pair by pair, and its coverage on drawn rows."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from rarebit.errors import DataError, SettingsError
from rarebit.study.statistics import delong
from rarebit.training.metrics import auc

NORMAL_975 = 1.959963984540054


def naive(scores, labels):
    """Return the placements of both classes, one pair at a time."""
    clicks = [s for s, label in zip(scores, labels, strict=True) if label]
    others = [s for s, label in zip(scores, labels, strict=True) if not label]

    def right(click, other):
        return 1.0 if click > other else 0.5 if click == other else 0.0

    v10 = [sum(right(x, y) for y in others) / len(others) for x in clicks]
    v01 = [sum(right(x, y) for x in clicks) / len(clicks) for y in others]
    return v10, v01


def naive_delong(a, b, labels):
    """Return both AUCs and the standard error, from the 2 x 2 covariance of DeLong's equation 6."""
    (a10, a01), (b10, b01) = naive(a, labels), naive(b, labels)
    covariance = np.cov(a10, b10) / len(a10) + np.cov(a01, b01) / len(a01)
    contrast = np.array([1, -1])
    return np.mean(a10), np.mean(b10), math.sqrt(max(contrast @ covariance @ contrast, 0))


@st.composite
def scored_rows(draw):
    """Rows with few distinct scores, so that most are tied, and two of each class at least."""
    n = draw(st.integers(4, 25))
    scores = st.lists(st.integers(0, 6), min_size=n, max_size=n)
    labels = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    hypothesis.assume(2 <= sum(labels) <= n - 2)
    return draw(scores), draw(scores), labels


@hypothesis.given(scored_rows())
def test_it_equals_the_definition_pair_by_pair(rows):
    a, b, labels = rows
    found = delong(torch.tensor(a) / 7, torch.tensor(b) / 7, torch.tensor(labels))
    auc_a, auc_b, error = naive_delong(a, b, labels)
    assert found.auc_a == pytest.approx(auc_a, abs=1e-12)
    assert found.auc_b == pytest.approx(auc_b, abs=1e-12)
    assert found.difference == pytest.approx(auc_a - auc_b, abs=1e-12)
    # squares, because the root of a rounding error of zero is large
    assert found.standard_error**2 == pytest.approx(error**2, abs=1e-12)
    reach = NORMAL_975 * error
    assert found.low == pytest.approx(auc_a - auc_b - reach, abs=1e-7)
    assert found.high == pytest.approx(auc_a - auc_b + reach, abs=1e-7)


def test_four_rows_by_hand():
    labels = torch.tensor([1, 1, 0, 0])
    a = torch.tensor([4.0, 2.0, 3.0, 1.0])  # placements of clicks 1, 1/2, of others 1/2, 1
    b = torch.tensor([1.0, 1.0, 1.0, 1.0])  # all 1/2
    found = delong(a, b, labels)
    assert (found.auc_a, found.auc_b, found.difference) == (0.75, 0.5, 0.25)
    assert found.standard_error == pytest.approx(math.sqrt(1 / 8 / 2 + 1 / 8 / 2), abs=1e-15)
    assert (found.low, found.high) == pytest.approx(
        (0.25 - NORMAL_975 * math.sqrt(1 / 8), 0.25 + NORMAL_975 * math.sqrt(1 / 8))
    )
    assert found.confidence == 0.95


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_aucs_are_those_of_the_metrics_to_the_last_bit(dtype):
    scores = torch.randn(2, 5000).to(dtype)
    labels = (torch.rand(5000) < 0.3).float()
    found = delong(*scores, labels)
    assert (found.auc_a, found.auc_b) == tuple(auc(row, labels) for row in scores)


def test_a_model_does_not_differ_from_itself():
    scores, labels = torch.randn(100), (torch.rand(100) < 0.5).long()
    for same in (scores, 3 * scores):  # only the order counts
        found = delong(scores, same, labels)
        assert (found.difference, found.standard_error, found.low, found.high) == (0, 0, 0, 0)


def test_exchanged_models_have_the_mirrored_interval():
    a, b, labels = torch.randn(200), torch.randn(200), (torch.rand(200) < 0.4).float()
    one, other = delong(a, b, labels), delong(b, a, labels)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-15)
    assert one.standard_error == pytest.approx(other.standard_error, rel=1e-12)


def test_a_higher_confidence_is_a_wider_interval():
    a, b, labels = torch.randn(200), torch.randn(200), (torch.rand(200) < 0.4).float()
    found = delong(a, b, labels, level=0.01)
    assert found.confidence == 0.99
    assert found.high - found.low == pytest.approx(2 * 2.5758293035489 * found.standard_error)


def test_an_interval_has_the_true_difference_as_often_as_it_says():
    generator = torch.Generator().manual_seed(7)
    draws, clicks, others = 2000, 60, 140
    labels = torch.cat([torch.ones(clicks), torch.zeros(others)])
    # normal scores, clicks 1 and 0.6 higher: AUC = Phi(shift / sqrt(2)); half of the noise is common
    normal = torch.distributions.Normal(0.0, 1.0)
    true = normal.cdf(torch.tensor([1.0, 0.6]) / math.sqrt(2))
    common, own_a, own_b = torch.randn(3, draws, clicks + others, generator=generator)
    a = (common + own_a) / math.sqrt(2) + 1.0 * labels
    b = (common + own_b) / math.sqrt(2) + 0.6 * labels
    found = [delong(a[i], b[i], labels) for i in range(draws)]
    inside = sum(x.low <= float(true[0] - true[1]) <= x.high for x in found) / draws
    assert 0.93 < inside < 0.97


def test_a_row_without_a_number_is_refused():
    with pytest.raises(DataError, match="scores must be numbers to be ranked, got nan"):
        delong(torch.tensor([0.1, math.nan, 0.2, 0.3]), torch.zeros(4), torch.tensor([0, 1, 0, 1]))


def test_infinite_scores_are_ranked():
    labels = torch.tensor([0, 1, 0, 1])
    scores = torch.tensor([-math.inf, math.inf, 0.0, math.inf])
    assert delong(scores, torch.zeros(4), labels).auc_a == 1


@pytest.mark.parametrize(
    ("labels", "counts"),
    [
        ([0, 0, 0, 0], "0 and 4"),
        ([1, 1, 1, 1], "4 and 0"),
        ([0, 0, 0, 1], "1 and 3"),
        ([], "0 and 0"),
    ],
)
def test_both_classes_must_be_there(labels, counts):
    scores = torch.zeros(len(labels))
    with pytest.raises(DataError, match=f"two rows with a click and two without, got {counts}"):
        delong(scores, scores, torch.tensor(labels))


@pytest.mark.parametrize("shape", [(3,), (4, 1)])
def test_scores_of_another_shape_are_refused(shape):
    with pytest.raises(DataError, match=r"must have one shape, \(rows,\); got"):
        delong(torch.zeros(4), torch.zeros(shape), torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize("level", [0.0, 1.0, math.nan])
def test_a_level_must_be_a_chance(level):
    with pytest.raises(SettingsError, match="level must be between 0 and 1, got"):
        delong(torch.zeros(4), torch.zeros(4), torch.tensor([0, 1, 0, 1]), level=level)
