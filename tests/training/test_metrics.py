import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
from capabilities import needs_cuda
from hypothesis import given
from hypothesis import strategies as st

from rarebit.training.metrics import Metrics, auc, average_precision, logloss, measure

# Few distinct scores, so that most rows are tied with others.
tied_rows = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=40)
distinct_rows = st.lists(
    st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=1, max_size=40
)
rows = tied_rows | distinct_rows


def tensors(rows):
    scores, labels = zip(*rows, strict=True)
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(labels, dtype=torch.float32)


def naive_auc(rows):
    """The share of (clicked, other) pairs in the right order, a tie half, one pair at a time."""
    clicked = [score for score, label in rows if label]
    others = [score for score, label in rows if not label]
    if not clicked or not others:
        return None
    halves = sum(2 * (c > o) + (c == o) for c in clicked for o in others)
    return float(Fraction(halves, 2 * len(clicked) * len(others)))


def naive_average_precision(rows):
    """The sum over thresholds of precision times the gain in recall."""
    positives = sum(label for _, label in rows)
    if not positives:
        return None
    total, before = 0.0, 0
    for threshold in sorted({score for score, _ in rows}, reverse=True):
        selected = [label for score, label in rows if score >= threshold]
        total += sum(selected) / len(selected) * (sum(selected) - before) / positives
        before = sum(selected)
    return total


@given(rows)
def test_auc_counts_pairs_exactly(rows):
    assert auc(*tensors(rows)) == naive_auc(rows)


@given(rows)
def test_average_precision_equals_a_loop_over_thresholds(rows):
    got, want = average_precision(*tensors(rows)), naive_average_precision(rows)
    assert got == pytest.approx(want, abs=1e-12) if want is not None else got is None


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(0, 1)), min_size=1, max_size=20))
def test_logloss_equals_the_formula(rows):
    total = 0.0
    for logit, label in rows:
        chance = 1 / (1 + math.exp(-logit))
        total -= label * math.log(chance) + (1 - label) * math.log(1 / (1 + math.exp(logit)))
    logits, labels = (
        torch.tensor(values, dtype=torch.float64) for values in zip(*rows, strict=True)
    )
    assert logloss(logits, labels) == pytest.approx(total / len(rows), rel=1e-9, abs=1e-9)


def test_logloss_of_extreme_logits_is_finite_and_exact():
    assert logloss(torch.tensor([1000.0, -1000.0]), torch.tensor([0.0, 1.0])) == 1000.0
    assert logloss(torch.tensor([1000.0, -1000.0]), torch.tensor([1.0, 0.0])) == 0.0


def test_values_worked_by_hand():
    scores, labels = torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    # Pairs: 2 > 3 no, 2 = 2 half, 1 > 3 no, 1 > 2 no.
    assert auc(scores, labels) == 0.125
    # At 2: precision 1/3 for half of the clicks; at 1: precision 2/4 for the other half.
    assert average_precision(scores, labels) == pytest.approx((1 / 3 + 2 / 4) / 2, abs=1e-15)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_one_class_has_no_auc(value):
    scores, labels = torch.tensor([0.5, 1.5]), torch.full((2,), value)
    assert auc(scores, labels) is None
    assert average_precision(scores, labels) == (1.0 if value else None)


@given(tied_rows)
def test_ranking_metrics_see_the_order_only(rows):
    scores, labels = tensors(rows)
    for metric in (auc, average_precision):
        want = metric(scores, labels)
        assert metric(scores**3 * 7 - 2, labels) == want
        assert metric(scores.int(), labels) == want


@given(rows, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(rows, random):
    want = [metric(*tensors(rows)) for metric in (auc, average_precision)]
    random.shuffle(rows)
    assert [metric(*tensors(rows)) for metric in (auc, average_precision)] == want


def test_minus_zero_ties_with_zero():
    assert auc(torch.tensor([0.0, -0.0]), torch.tensor([1.0, 0.0])) == 0.5


def test_a_million_rows_do_not_overflow():
    scores, labels = torch.randn(1_000_000).mul_(1000).round_(), torch.rand(1_000_000) < 0.5
    doubled_ranks = (2 * scipy.stats.rankdata(scores.numpy())).astype(np.int64)
    positives = int(labels.sum())
    pairs = int(doubled_ranks[labels.numpy()].sum()) - positives * (positives + 1)
    want = pairs / (2 * positives * (len(labels) - positives))
    assert auc(scores, labels.float()) == want
    assert auc(labels.float() + 1e-3 * torch.rand(1_000_000), labels.float()) == 1.0


@needs_cuda
def test_the_gpu_gives_the_same_metrics():
    scores, labels = torch.randn(10_000).mul_(100).round_(), (torch.rand(10_000) < 0.3).float()
    on_gpu, on_cpu = measure(scores.cuda(), labels.cuda()), measure(scores, labels)
    assert (on_gpu.rows, on_gpu.positives, on_gpu.auc) == (10_000, on_cpu.positives, on_cpu.auc)
    assert on_gpu.pr_auc == pytest.approx(on_cpu.pr_auc, rel=1e-12)
    assert on_gpu.logloss == pytest.approx(on_cpu.logloss, rel=1e-12)


def test_measure_gives_all_of_them():
    logits, labels = torch.randn(50), (torch.rand(50) < 0.3).float()
    assert measure(logits, labels) == Metrics(
        rows=50,
        positives=int(labels.sum()),
        auc=auc(logits, labels),
        logloss=logloss(logits, labels),
        pr_auc=average_precision(logits, labels),
    )


def test_metrics_say_when_they_are_undefined():
    both = Metrics(rows=1234, positives=5, auc=0.75, logloss=0.5, pr_auc=0.25)
    assert str(both) == "AUC 0.75000, logloss 0.50000, PR-AUC 0.25000, 1,234 rows"
    none = measure(torch.zeros(2), torch.zeros(2))
    assert str(none) == (
        "AUC undefined (one class), logloss 0.69315, PR-AUC undefined (one class), 2 rows"
    )


def test_metrics_with_more_clicks_than_rows_are_refused():
    for positives in (-7, 4):
        with pytest.raises(ValueError, match=r"positives must lie between 0 and 3 rows, got"):
            Metrics(rows=3, positives=positives, auc=0.5, logloss=0.1, pr_auc=0.5)
