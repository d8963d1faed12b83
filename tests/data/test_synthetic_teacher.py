import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data.schema import FIRST_VALUE, PADDING
from rarebit.data.synthetic import (
    CLICK_RATE,
    CROSS,
    MAIN,
    SPREAD,
    DrawnColumn,
    Teacher,
    _deal,
    draw_column,
    draw_effects,
    draw_topics,
    logistic,
    parent_ids,
)

USER, TAGS = DrawnColumn("user", 5000), DrawnColumn("tags", 40, max_length=3)
HOUR, AGE = DrawnColumn("hour", 24, power=1), DrawnColumn("age")
COLUMNS = [USER, TAGS, HOUR, AGE]


def draw_rows(columns, num_rows, seed=0):
    counters = np.arange(num_rows, dtype=np.uint64)
    topics = draw_topics(seed, counters)
    return {column.name: draw_column(column, seed, counters, topics) for column in columns}


def effects_of(columns, **dials):
    defaults = {"seed": 0, "tail_similarity": 0.5, "redundancy": 0.0, "num_patterns": 2}
    return draw_effects(columns, **defaults | dials)


def log_odds(probability):
    return np.log(probability / (1 - probability))


def naive_sums(groups, rows, num_rows):
    """Return each group's sum in each row, by loops."""
    sums = np.zeros((len(groups), num_rows))
    for g, group in enumerate(groups):
        for name, effects in group.items():
            for row in range(num_rows):
                if rows[name].ndim == 1:
                    sums[g, row] += float(effects[0]) * float(rows[name][row])
                    continue
                ids = [i for i in rows[name][:, row] if i != PADDING]
                sums[g, row] += sum(float(effects[i]) for i in ids) / max(len(ids), 1)
    return sums


@pytest.mark.parametrize("num_patterns", [0, 1, 2, 3])
def test_the_chance_is_what_the_docstring_says(num_patterns):
    rows = draw_rows(COLUMNS, 200)
    groups = effects_of(COLUMNS, num_patterns=num_patterns)
    sums = naive_sums(groups, rows, 200)
    z = (sums - sums.mean(axis=1, keepdims=True)) / sums.std(axis=1, keepdims=True)
    score = SPREAD * z[0]
    if num_patterns:
        parts = [MAIN * a + MAIN * b + CROSS * a * b for a, b in zip(z[::2], z[1::2], strict=True)]
        score = SPREAD / math.sqrt(num_patterns) * sum(parts)
    probability = Teacher(groups, rows, noise=0.0).probability(rows)
    bias = log_odds(probability) - score
    assert np.abs(bias - bias.mean()).max() < 1e-4
    assert abs(probability.mean() - CLICK_RATE) < 1e-4


def test_without_patterns_a_value_has_the_same_effect_in_every_row():
    assert abs(interaction(num_patterns=0)).max() < 1e-5


def test_with_a_pattern_the_effect_of_a_value_depends_on_the_others():
    assert abs(interaction(num_patterns=1)).mean() > 0.1


def interaction(num_patterns):
    """Return how much the gap between two hours differs between two users, in log odds."""
    columns = [USER, HOUR]
    groups = effects_of(columns, num_patterns=num_patterns)
    teacher = Teacher(groups, draw_rows(columns, 500), noise=0.0)
    users, hours = np.arange(3, 53), [3, 4]
    odds = {
        (shift, hour): log_odds(
            teacher.probability({"user": users[None] + shift, "hour": np.full((1, 50), hour)})
        )
        for shift in (0, 50)
        for hour in hours
    }
    return odds[0, 3] - odds[0, 4] - odds[50, 3] + odds[50, 4]


@given(st.integers(0, 25), st.integers(2, 11))
def test_every_field_is_dealt_and_no_group_goes_without(num_patterns, num_fields):
    columns = [DrawnColumn(f"field{i}", 10) for i in range(num_fields)]
    groups = [{column.name for column in group} for group in _deal(columns, num_patterns, seed=1)]
    assert len(groups) == max(1, 2 * num_patterns)
    assert set.union(*groups) == {column.name for column in columns}
    assert all(groups)
    for left, right in zip(groups[::2], groups[1::2], strict=False):
        assert not left & right


def test_patterns_differ_by_seed():
    columns = [DrawnColumn(f"field{i}", 10) for i in range(10)]
    assert _deal(columns, 3, seed=0) != _deal(columns, 3, seed=1)


@pytest.mark.parametrize("similarity", [0.0, 0.6, 1.0])
def test_tail_similarity_is_the_correlation_with_the_parent(similarity):
    groups = effects_of([USER, HOUR], tail_similarity=similarity, num_patterns=1)
    effects = next(group["user"] for group in groups if "user" in group)
    parents = parent_ids(USER, seed=0)
    rare = np.arange(FIRST_VALUE + USER.num_frequent, FIRST_VALUE + USER.num_values)
    correlation = np.corrcoef(effects[rare], effects[parents[rare]])[0, 1]
    assert abs(correlation - similarity) < 0.05
    assert abs(effects[rare].std() - 1) < 0.1  # as strong as those of frequent values


def test_tail_similarity_leaves_frequent_values_alone():
    alike, apart = (effects_of([USER], tail_similarity=s, num_patterns=0)[0] for s in (0.6, 0.0))
    stop = FIRST_VALUE + USER.num_frequent
    assert np.array_equal(alike["user"][:stop], apart["user"][:stop])
    assert not np.array_equal(alike["user"][stop:], apart["user"][stop:])


@pytest.mark.parametrize("redundancy", [0.0, 0.3, 1.0])
def test_redundancy_is_the_share_of_values_without_effect(redundancy):
    group = effects_of([USER], redundancy=redundancy, num_patterns=0)[0]
    silent = (group["user"][FIRST_VALUE:] == 0).mean()
    assert abs(silent - redundancy) <= 5 * np.sqrt(redundancy * (1 - redundancy) / 5000)


def test_a_redundant_value_has_no_effect_in_any_group():
    groups = effects_of([USER, HOUR], redundancy=0.5, num_patterns=4)
    silent = [group["user"] == 0 for group in groups if "user" in group]
    assert len(silent) == 4
    assert all(np.array_equal(silent[0], other) for other in silent)


def test_redundancy_leaves_the_other_values_alone():
    some, none = (effects_of([USER], redundancy=r, num_patterns=0)[0]["user"] for r in (0.5, 0.0))
    assert np.array_equal(some[some != 0], none[some != 0])


def test_padding_has_no_effect():
    for group in effects_of(COLUMNS):
        assert all(effects[PADDING] == 0 for name, effects in group.items() if name != "age")


def test_an_empty_list_counts_as_no_effect():
    groups = effects_of([TAGS], num_patterns=0)
    teacher = Teacher(groups, draw_rows([TAGS], 500), noise=0.0)
    best = int(np.argmax(groups[0]["tags"]))
    lists = np.array([[0, best, best], [0, 0, best], [0, 0, 0]])
    empty, one, two_equal = teacher.probability({"tags": lists})
    assert one == two_equal > empty


@pytest.mark.parametrize("noise", [0.0, 0.25, 1.0])
def test_noise_mixes_the_chance_with_the_click_rate(noise):
    rows, groups = draw_rows(COLUMNS, 300), effects_of(COLUMNS)
    clean = Teacher(groups, rows, noise=0.0).probability(rows)
    noisy = Teacher(groups, rows, noise=noise).probability(rows)
    assert np.allclose(noisy, (1 - noise) * clean + noise * CLICK_RATE, atol=1e-12)


def test_a_log_without_any_effect_has_one_chance():
    rows, groups = draw_rows([USER, HOUR], 300), effects_of([USER, HOUR], redundancy=1.0)
    probability = Teacher(groups, rows, noise=0.0).probability(rows)
    assert np.allclose(probability, CLICK_RATE, atol=1e-5)


@pytest.mark.parametrize("num_patterns", [0, 3, 9])
@pytest.mark.parametrize("redundancy", [0.0, 0.8])
@pytest.mark.parametrize("seed", [1, 2])
def test_click_rate_and_signal_hardly_depend_on_the_dials(seed, redundancy, num_patterns):
    groups = effects_of(COLUMNS, seed=seed, redundancy=redundancy, num_patterns=num_patterns)
    rows = draw_rows(COLUMNS, 8000, seed)
    teacher = Teacher(groups, draw_rows(COLUMNS, 4000, seed), noise=0.0)
    probability = teacher.probability(rows)
    assert abs(probability.mean() - CLICK_RATE) < 0.02
    assert 1.2 < log_odds(probability).std() < 2.0


def test_logistic_is_close_to_the_logistic_function():
    scores = np.linspace(-10, 10, 401)
    exact = 1 / (1 + np.exp(-scores))
    assert np.abs(logistic(scores) / exact - 1).max() < 1e-4
    assert (np.diff(logistic(scores)) > 0).all()


def test_logistic_stays_between_zero_and_one():
    low, high = logistic(np.array([-1e9, 1e9]))
    assert 0 < low < 1e-12
    assert high <= 1
