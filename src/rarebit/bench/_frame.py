"""What else ran on the machine during a measurement.

The frame of all measurements: sides that take turns in one process, medians, and the machine.

    A B   B A   A B   ...      one measured unit of each side a round, the first one changing

A shared machine slows down and recovers from one second to the next. Sides that take turns meet
the same seconds, so the ratio of their medians holds where either time alone does not.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rarebit.machine import machine

__all__ = [
    "FOLDER",
    "BenchResult",
    "OtherLoad",
    "Say",
    "Timing",
    "measure",
    "print_to_stderr",
    "result_of",
    "timing_figures",
]

FOLDER = Path(__file__).resolve().parent


class OtherLoad:
    """The share of all processors that other processes took since this was made.

    0.5 on two cores: one of them was busy with something else.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._read()

    def share(self) -> float | None:
        """Return the share, or None where the system does not say."""
        now = self._read()
        if self._start is None or now is None or now[1] <= self._start[1]:
            return None
        busy, total, own = (new - old for new, old in zip(now, self._start, strict=True))
        return min(max((busy - own) / total, 0.0), 1.0)

    def _read(self) -> tuple[float, float, float] | None:
        """Return seconds of busy processors, of all processors, and of this process."""
        try:
            line = self._stat.read_text("ascii").split("\n", 1)[0]
        except OSError:
            return None
        # user nice system idle iowait irq softirq steal; guests are counted in user already
        ticks = [int(field) for field in line.split()[1:9]]
        per_second = os.sysconf("SC_CLK_TCK")
        idle, total = sum(ticks[3:5]), sum(ticks)
        return (total - idle) / per_second, total / per_second, sum(os.times()[:4])


BenchResult: TypeAlias = dict[str, float | str | None]
"""The figures of a bench by name: flat, and ready for JSON."""
Say: TypeAlias = Callable[[str], object]
Clock: TypeAlias = Callable[[], float]
TOO_MUCH_LOAD = 0.1
"""Two threads on two cores wait for each other, so little of other work slows them down a lot."""


def print_to_stderr(line: str) -> None:
    """Print a line of progress; standard output is for the result."""
    sys.stderr.write(line + "\n")


@dataclass(frozen=True)
class Timing:
    """How long one side took, in seconds, round by round.

    >>> Timing((3.0, 1.0, 2.0)).median
    2.0
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle time."""
        return statistics.median(self.seconds)

    @property
    def iqr(self) -> float:
        """The spread: how far the middle half of the times lies apart."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low


def measure(
    sides: Mapping[str, Callable[[], object]],
    *,
    budget: float,
    warm_up: int = 2,
    min_rounds: int = 5,
    clock: Clock = time.perf_counter,
) -> dict[str, Timing]:
    """Time the sides in turn until `budget` seconds are used; warm-up rounds are not counted.

    A call of a side is one measured unit. There are `min_rounds` rounds, whatever they take.

    >>> timings = measure({"a": list, "b": dict}, budget=0.0)
    >>> len(timings["a"].seconds)
    5
    """
    assert min_rounds >= 2, "quartiles need two times"
    names, start = list(sides), clock()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    turn = 0
    while turn < warm_up + min_rounds or clock() - start < budget:
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before = clock()
            sides[name]()
            seconds[name].append(clock() - before)
        turn += 1
    return {name: Timing(tuple(times[warm_up:])) for name, times in seconds.items()}


def timing_figures(timings: Mapping[str, Timing], suffix: str = "") -> BenchResult:
    """Return the median and the spread of each side in milliseconds, and the number of rounds.

    >>> timing_figures({"ours": Timing((0.5, 1.5))}, "_64")
    {'ours_ms_64': 1000.0, 'ours_iqr_ms_64': 500.0, 'rounds_64': 2}
    """
    figures: BenchResult = {}
    for name, timing in timings.items():
        figures[f"{name}_ms{suffix}"] = 1000 * timing.median
        figures[f"{name}_iqr_ms{suffix}"] = 1000 * timing.iqr
    figures[f"rounds{suffix}"] = min(len(timing.seconds) for timing in timings.values())
    return figures


def result_of(name: str, run: Callable[[Say], BenchResult], say: Say) -> BenchResult:
    """Run a bench and put what it ran on beside its figures."""
    load, start = OtherLoad(), time.perf_counter()
    figures = run(say)
    assert {"ratio", "ratio_of"} <= set(figures), f"bench {name} must say its ratio, and of what"
    seconds, other = time.perf_counter() - start, load.share()
    if other is not None and other > TOO_MUCH_LOAD:
        say(f"other processes took {other:.0%} of the processors: measure again on a quiet machine")
    result: BenchResult = {"bench": name, **figures}
    result |= {"other_load": other, "seconds": seconds, **machine()}
    return {key: _rounded(value) for key, value in result.items()}


def _rounded(value: float | str | None) -> float | str | None:
    """Return a float with four digits: the rest is noise."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
