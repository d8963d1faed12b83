"""The frame of all measurements, with sides whose cost is counted, not timed."""

import json

import pytest

from rarebit.bench import _frame
from rarebit.bench._frame import Timing, measure, result_of, timing_figures
from rarebit.machine import machine


class FakeClock:
    """A clock that only work moves on."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def side(self, name, *costs):
        """Return a side that costs these seconds, call by call, the last one from then on."""
        left = list(costs)

        def work():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work

    def measure(self, sides, **settings):
        return measure(sides, clock=self, **settings)


@pytest.fixture
def clock():
    return FakeClock()


def test_two_sides_take_turns_and_each_is_first_every_other_round(clock):
    sides = {"a": clock.side("a", 1), "b": clock.side("b", 1)}
    clock.measure(sides, budget=0, warm_up=1, min_rounds=3)
    assert "".join(clock.calls) == "abbaabba"


def test_with_three_sides_each_has_each_place(clock):
    sides = {name: clock.side(name, 1) for name in "abc"}
    clock.measure(sides, budget=0, warm_up=0, min_rounds=3)
    assert "".join(clock.calls) == "abcbcacab"


def test_warm_up_is_not_counted(clock):
    sides = {"a": clock.side("a", 100, 100, 1, 2, 3), "b": clock.side("b", 1)}
    timings = clock.measure(sides, budget=0, warm_up=2, min_rounds=3)
    assert timings["a"].seconds == (1, 2, 3)


def test_medians_and_spread_are_those_of_the_sides(clock):
    sides = {"a": clock.side("a", 1, 2, 3, 4, 50), "b": clock.side("b", 2, 2, 20)}
    timings = clock.measure(sides, budget=0, warm_up=0, min_rounds=5)
    assert (timings["a"].median, timings["a"].iqr) == (3, 2)
    assert (timings["b"].median, timings["b"].iqr) == (20, 18)


def test_rounds_are_added_until_the_budget_is_used(clock):
    sides = {"a": clock.side("a", 2), "b": clock.side("b", 1)}
    timings = clock.measure(sides, budget=30, warm_up=2, min_rounds=3)
    assert len(timings["a"].seconds) == 8  # 10 rounds of 3 seconds, two of them warm-up
    assert clock.now == 30


def test_there_are_enough_rounds_whatever_the_budget(clock):
    timings = clock.measure({"a": clock.side("a", 100)}, budget=1, warm_up=1, min_rounds=4)
    assert len(timings["a"].seconds) == 4


def test_figures_are_in_milliseconds():
    timings = {"ours": Timing((1.0, 2.0, 3.0)), "reference": Timing((4.0, 4.0, 4.0))}
    assert timing_figures(timings) == {
        "ours_ms": 2000,
        "ours_iqr_ms": 1000,
        "reference_ms": 4000,
        "reference_iqr_ms": 0,
        "rounds": 3,
    }


def test_a_result_is_one_line_of_json_that_can_be_read_back(monkeypatch):
    said = []

    def run(say):
        say("working")
        return {"ratio": 2 / 3, "ratio_of": "a / b", "ratio_64": None}

    monkeypatch.setattr(_frame.OtherLoad, "share", lambda load: 0.05)
    result = result_of("toy", run, said.append)
    line = json.dumps(result)
    assert "\n" not in line
    assert json.loads(line) == result
    assert (result["bench"], result["ratio"], result["ratio_64"]) == ("toy", 0.6667, None)
    assert {"other_load", "seconds", *machine()} < set(result)
    assert said == ["working"]


@pytest.mark.parametrize(("share", "warnings"), [(None, 0), (0.1, 0), (0.5, 1)])
def test_a_busy_machine_is_reported(share, warnings, monkeypatch):
    monkeypatch.setattr(_frame.OtherLoad, "share", lambda load: share)
    said = []
    result = result_of("toy", lambda say: {"ratio": 1.0, "ratio_of": "a / b"}, said.append)
    assert result["other_load"] == share
    warning = "other processes used 50% of the processors: measure again on a quiet machine"
    assert said == [warning][:warnings]


def test_a_bench_that_does_not_say_its_ratio_is_refused():
    with pytest.raises(AssertionError, match="bench toy must say its ratio, and of what"):
        result_of("toy", lambda say: {"ratio": 1.0}, print)


def test_progress_goes_to_standard_error(capsys):
    _frame.print_to_stderr("a line")
    assert capsys.readouterr() == ("", "a line\n")
