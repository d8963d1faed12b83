"""The machine: what a result was measured on, and how many of its cores are free."""

import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from rarebit.errors import SettingsError

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).resolve().parent


def machine() -> dict[str, int | str | None]:
    """Return what the figures depend on: processors, threads, versions, device and commit."""
    import torch

    return {
        "device": "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def choose_device(device: "torch.device | str") -> "torch.device":
    """Return a device; "auto" is a GPU if there is one."""
    import torch

    found = torch.cuda.is_available()
    chosen = torch.device("cuda" if found else "cpu") if device == "auto" else torch.device(device)
    if chosen.type == "cuda" and not found:
        raise SettingsError(f"device {device} was asked for, but torch sees no GPU here")
    return chosen


class OtherLoad:
    """The share of all processors that other processes used since this was created.

    0.5 on two cores: other processes kept one of them busy.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._read()

    def share(self) -> float | None:
        """Return the share, or None if the system does not report it."""
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
        # user nice system idle iowait irq softirq steal; user includes guests already
        ticks = [int(field) for field in line.split()[1:9]]
        per_second = os.sysconf("SC_CLK_TCK")
        idle, total = sum(ticks[3:5]), sum(ticks)
        return (total - idle) / per_second, total / per_second, sum(os.times()[:4])


def allowed_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may use: those it is bound to, or its container's quota if that is less."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((cgroup / file).read_text("ascii") for file in files).split()
        except (OSError, ValueError):
            continue
        if quota.isdigit():  # otherwise "max" or -1: no quota
            cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def free_cores(load: OtherLoad) -> int:
    """Return how many of the allowed cores other processes left free since `load` was created; at least 1."""
    busy = (load.share() or 0.0) * (os.cpu_count() or 1)
    return max(min(allowed_cores(), round((os.cpu_count() or 1) - busy)), 1)


def commit(folder: Path = FOLDER) -> str | None:
    """Return the commit this file is of, with "-dirty" where files differ from it.

    A copy that git does not know tells its commit by the variable RAREBIT_COMMIT. None where the package
    is installed, or there is no git.
    """
    told = os.environ.get("RAREBIT_COMMIT")
    # An environment may lie inside a repository of someone else, whose commit says nothing of us.
    if told or _git(folder, "rev-parse", "--show-prefix") != "src/rarebit/":
        return told
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
