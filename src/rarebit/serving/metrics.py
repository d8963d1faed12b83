"""What a server counts: for Prometheus (`GET /metrics`) and for the status page (`GET /status.json`)."""

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

LATENCIES = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LATEST = 1000
"""Requests that the percentiles of the status page are of."""
SECONDS = 10
"""Seconds that rows per second are of."""
ENOUGH_ROWS = 500
"""Fewer scores say nothing about drift."""


class Histogram:
    """Counts of values by upper bound.

    >>> found = Histogram((1, 2))
    >>> for value in (1, 1.5, 9): found.add(value)
    >>> found.counts, found.total
    ([1, 1, 1], 11.5)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class VersionMetrics:
    """What was counted since a version was loaded: its vocabulary decides what is unknown."""

    def __init__(self, fields: Sequence[str], *, has_deciles: bool) -> None:
        self.fields, self.rows = fields, 0
        self.unknown = [0] * len(fields)
        self.tenths = [0] * 10 if has_deciles else None

    def add(self, stats: Mapping[str, Any]) -> None:
        """Count a batch."""
        self.rows += stats["rows"]
        if "unknown" in stats:
            self.unknown = [a + b for a, b in zip(self.unknown, stats["unknown"], strict=True)]
        if self.tenths is not None and "tenths" in stats:
            self.tenths = [a + b for a, b in zip(self.tenths, stats["tenths"], strict=True)]


class ModelMetrics:
    """What was counted for a model since the start of the server."""

    def __init__(self) -> None:
        self.codes: Counter[int] = Counter()
        self.rows = self.restarts = self.swaps = 0
        self.latency, self.batches = Histogram(LATENCIES), Histogram(BATCHES)
        self.latest: deque[float] = deque(maxlen=LATEST)
        self._by_second: deque[tuple[int, int]] = deque(maxlen=SECONDS + 1)

    def count_request(self, code: int, seconds: float) -> None:
        """Count an answered request."""
        self.codes[code] += 1
        self.latency.add(seconds)
        self.latest.append(seconds)

    def count_batch(self, rows: int) -> None:
        """Count the rows of a batch."""
        self.rows += rows
        self.batches.add(rows)
        second = int(time.monotonic())
        if self._by_second and self._by_second[-1][0] == second:
            rows += self._by_second.pop()[1]
        self._by_second.append((second, rows))

    def rows_per_second(self) -> float:
        """Return the rows of the last full seconds, per second."""
        now = int(time.monotonic())
        return (
            sum(rows for second, rows in self._by_second if now - SECONDS <= second < now) / SECONDS
        )

    def percentile(self, share: float) -> float | None:
        """Return a percentile of the latest latencies in seconds."""
        ordered = sorted(self.latest)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def stability_index(tenths: Sequence[int]) -> float:
    """Return the population stability index of scores, counted by tenths of the scores at training.

    >>> stability_index([100] * 10)
    0.0
    """
    total = sum(tenths)
    shares = [max(count, 0.5) / total for count in tenths]  # an empty tenth has no logarithm
    return math.fsum((share - 0.1) * math.log(share / 0.1) for share in shares)


def drift(tenths: Sequence[int] | None) -> dict[str, Any] | None:
    """Return how served scores are spread over the tenths of the scores at training, and a sentence."""
    if tenths is None:
        return None
    total = sum(tenths)
    if total < ENOUGH_ROWS:
        text = f"{total:,} scores so far; drift is reported from {ENOUGH_ROWS:,} on."
        return {"tenths": list(tenths), "index": None, "text": text}
    index = stability_index(tenths)
    if index < 0.1:
        text = "Scores are spread as they were in training."
    else:
        upper = sum(tenths[5:]) / total
        where = "higher" if upper > 0.55 else "lower" if upper < 0.45 else "more uneven"
        size = "much " if index >= 0.25 else "somewhat "
        text = f"Scores are {size}{where} than they were in training: check the inputs."
    return {"tenths": list(tenths), "index": round(index, 4), "text": text}


def prometheus(
    lines: Iterable[tuple[str, str, str, Iterable[tuple[dict[str, str], float]]]],
) -> str:
    """Return metrics as Prometheus reads them: name, kind, help, and values by labels."""
    out = []
    for name, kind, text, values in lines:
        values = list(values)  # noqa: PLW2901  # it may be a generator
        if not values:
            continue
        out += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for labels, value in values:
            suffix = labels.get("", "")
            shown = ",".join(f'{key}="{_escaped(found)}"' for key, found in labels.items() if key)
            out.append(
                f"{name}{suffix}{{{shown}}} {value:.10g}"
                if shown
                else f"{name}{suffix} {value:.10g}"
            )
    return "\n".join(out) + "\n"


def histogram_lines(
    labels: dict[str, str], found: Histogram
) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the lines of a histogram; the label "" is the suffix of the name."""
    total = 0
    for bound, count in zip((*found.bounds, math.inf), found.counts, strict=True):
        total += count
        shown = "+Inf" if bound == math.inf else f"{bound:g}"
        yield {"": "_bucket", **labels, "le": shown}, total
    yield {"": "_sum", **labels}, found.total
    yield {"": "_count", **labels}, total


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
