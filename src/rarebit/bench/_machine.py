"""What a measurement ran on, and what else ran meanwhile."""

import os
import platform
import subprocess
from pathlib import Path

import torch

__all__ = ["FOLDER", "OtherLoad", "machine"]

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


def machine() -> dict[str, int | str | None]:
    """Return what the figures depend on: processors, threads, versions, device and commit."""
    return {
        "device": "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _commit(folder: Path = FOLDER) -> str | None:
    """Return the commit this file is of, with "-dirty" where files differ from it.

    None where the package is installed, or there is no git.
    """
    # An environment may lie inside a repository of someone else, whose commit says nothing of us.
    if _git(folder, "rev-parse", "--show-prefix") != "src/rarebit/bench/":
        return None
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603  # fixed commands
            ["git", *arguments],  # noqa: S607  # git is found on the path
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
