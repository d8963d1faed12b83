"""How all benches measure: variants that take turns in one process, medians, and the machine's load.

    A B   B A   A B   ...      one measured unit of each variant per round, in changing order

A shared machine slows down and recovers from one second to the next. Variants that take turns meet
the same seconds, so the ratio of their medians is reliable where either time alone is not.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rarebit.machine import OtherLoad, machine

FOLDER = Path(__file__).resolve().parent
TOO_MUCH_LOAD = 0.1
"""Two threads on two cores wait for each other, so a little other work slows them down a lot."""
BenchResult: TypeAlias = dict[str, float | str | None]
"""The figures of a bench by name: flat, and ready for JSON."""
Say: TypeAlias = Callable[[str], object]
Variants: TypeAlias = Mapping[str, Callable[[], object]]
"""By name, a function whose call is one measured unit."""


def print_to_stderr(line: str) -> None:
    """Print a line of progress; standard output is for the result."""
    sys.stderr.write(line + "\n")


@dataclass(frozen=True)
class Timing:
    """The seconds of one variant, round by round. `a / b` is the ratio of the medians."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle time."""
        return statistics.median(self.seconds)

    @property
    def iqr(self) -> float:
        """The interquartile range."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    def __truediv__(self, other: "Timing") -> float:
        return self.median / other.median


def measure(
    variants: Variants,
    *,
    budget: float,
    warm_up: int = 2,
    min_rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the variants in turn until `budget` seconds are used; warm-up rounds do not count.

    There are at least `min_rounds` rounds, however long they take.
    """
    assert min_rounds >= 2, "quartiles need two times"
    names, start = list(variants), clock()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    turn = 0
    while turn < warm_up + min_rounds or clock() - start < budget:
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before = clock()
            variants[name]()
            seconds[name].append(clock() - before)
        turn += 1
    return {name: Timing(tuple(times[warm_up:])) for name, times in seconds.items()}


def compare(
    variants: Variants, *, budget: float, load: str = "", suffix: str = "", warm_up: int = 2
) -> tuple[dict[str, Timing], BenchResult]:
    """Time the variants in turn; return their times, and their figures for the result.

    load      if given, the load of other processes is a figure `other_load_<load>`
    suffix    ends the name of each other figure
    """
    other = OtherLoad()
    times = measure(variants, budget=budget, warm_up=warm_up)
    figures: BenchResult = {f"other_load_{load}": other.share()} if load else {}
    return times, figures | timing_figures(times, suffix)


def ratios(
    variants: Variants,
    first: str,
    second: str,
    ratio_of: str,
    *,
    budget: float,
    load: str = "",
    **others: tuple[str, str],
) -> BenchResult:
    """Time the variants in turn; return the ratio of two of them, further ratios by name, and all figures."""
    times, figures = compare(variants, budget=budget, load=load)
    more = {f"ratio_{name}": times[one] / times[other] for name, (one, other) in others.items()}
    return {"ratio": times[first] / times[second], "ratio_of": ratio_of, **more, **figures}


def timing_figures(timings: Mapping[str, Timing], suffix: str = "") -> BenchResult:
    """Return median and interquartile range of each variant in milliseconds, and the number of rounds."""
    figures: BenchResult = {}
    for name, timing in timings.items():
        figures[f"{name}_ms{suffix}"] = 1000 * timing.median
        figures[f"{name}_iqr_ms{suffix}"] = 1000 * timing.iqr
    figures[f"rounds{suffix}"] = min(len(timing.seconds) for timing in timings.values())
    return figures


def run_python(code: str, *arguments: object) -> str:
    """Run code in a fresh process, with this rarebit, and return what it printed."""
    paths = [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(  # noqa: S603  # code of the benches
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def result_of(name: str, run: Callable[[Say], BenchResult], say: Say) -> BenchResult:
    """Run a bench; return its figures, rounded to four digits, with the machine and its load."""
    load, start = OtherLoad(), time.perf_counter()
    figures = run(say)
    assert {"ratio", "ratio_of"} <= set(figures), f"bench {name} must say its ratio, and of what"
    seconds, other = time.perf_counter() - start, load.share()
    if other is not None and other > TOO_MUCH_LOAD:
        say(f"other processes used {other:.0%} of the processors: measure again on a quiet machine")
    result: BenchResult = {"bench": name, **figures}
    result |= {"other_load": other, "seconds": seconds, **machine()}
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in result.items()
    }
