"""What else ran on the machine during a measurement."""

import os
from pathlib import Path

__all__ = ["FOLDER", "OtherLoad"]

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
