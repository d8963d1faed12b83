"""What a server counts, and what it says about it."""

import math

import pytest

from rarebit.serving.metrics import (
    Histogram,
    ModelMetrics,
    drift,
    histogram_lines,
    prometheus,
    stability_index,
)


def test_names_are_escaped_for_prometheus():
    text = prometheus([("x", "counter", "Some.", [({"field": 'a"b\\c\nd<'}, 1.0)])])
    assert text == '# HELP x Some.\n# TYPE x counter\nx{field="a\\"b\\\\c\\nd<"} 1\n'


def test_a_histogram_is_cumulative():
    found = Histogram((1, 2))
    for value in (0.5, 1, 2, 5):
        found.add(value)
    lines = prometheus([("x", "histogram", "Some.", histogram_lines({}, found))]).splitlines()[2:]
    assert lines == [
        'x_bucket{le="1"} 2',
        'x_bucket{le="2"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 8.5",
        "x_count 4",
    ]


def test_percentiles_are_of_the_latest_requests():
    metrics = ModelMetrics()
    assert metrics.percentile(0.5) is None
    for number in range(2000):
        metrics.count_request(200, number / 1000)
    assert metrics.percentile(0.5) == 1.5
    assert metrics.percentile(0.99) == 1.99


def test_the_stability_index_is_that_of_its_definition():
    tenths = [50, 150, 100, 100, 100, 100, 100, 100, 100, 100]
    wanted = (0.05 - 0.1) * math.log(0.05 / 0.1) + (0.15 - 0.1) * math.log(0.15 / 0.1)
    assert stability_index(tenths) == pytest.approx(wanted)
    assert stability_index([1000] + [0] * 9) > 2


@pytest.mark.parametrize(
    ("tenths", "text"),
    [
        ([10] * 10, "100 scores so far; drift is reported from 500 on."),
        ([100] * 10, "Scores are spread as they were in training."),
        ([50] * 5 + [150] * 5, "Scores are much higher than they were in training: check the inputs."),
        ([140] * 5 + [60] * 5, "Scores are somewhat lower than they were in training: check the inputs."),
        ([300, 0, 0, 0, 200, 200, 0, 0, 0, 300], "Scores are much more uneven than they were in training: check the inputs."),
    ],
)  # fmt: skip
def test_drift_is_said_in_a_sentence(tenths, text):
    assert drift(tenths)["text"] == text
    assert drift(None) is None
