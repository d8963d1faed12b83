"""The machine: what a result was measured on, and what is free: cores and memory."""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rarebit.errors import NotEnoughMemoryError, SettingsError
from rarebit.settings import size

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).resolve().parent
CPU = "cpu"


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


def default_workers(device: "torch.device", threads: int) -> int:
    """Return how many runs to make side by side: one per core that it needs, and on a GPU one.

    Without NVIDIA's Multi-Process Service a GPU works for one process at a time, and four runs side by side are four times slower
    each. Where it runs, a GPU has as many as a CPU.
    """
    default = Path(tempfile.gettempdir()) / "nvidia-mps"
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", default))
    if device.type == "cuda" and not (pipes / "control").exists():
        return 1
    return max(allowed_cores() // threads, 1)


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


def available_memory(
    device: "torch.device | str",
    *,
    proc: Path = Path("/proc"),
    control_groups: Path = Path("/sys/fs/cgroup"),
) -> int | None:
    """Return the bytes that can be allocated on a device now; None where the system does not report it."""
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    if kind != "cpu":
        return None
    system = _number_after("MemAvailable:", proc / "meminfo")
    if system is None:
        return None
    limits = _free_in_control_groups(proc / "self" / "cgroup", control_groups)
    return max(min([system * 1024, *limits, *_free_addresses(proc / "self")]), 0)


def require_memory(
    num_bytes: int, what: str, advice: str, device: "torch.device | str" = CPU
) -> None:
    """Raise `NotEnoughMemoryError` where something takes more bytes than a device has free.

    >>> require_memory(10**18, "a table of 10 M rows", "use fewer")
    Traceback (most recent call last):
    rarebit.errors.NotEnoughMemoryError: a table of 10 M rows takes 1000000000.0 GB on cpu, where ... are free; use fewer
    """
    free = available_memory(device)
    if free is not None and num_bytes > free:
        raise NotEnoughMemoryError(
            f"{what} takes {size(min(num_bytes, sys.maxsize))} on {device}, where {size(free)} are free; {advice}"
        )


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
"""Names of the limit, the usage and the cache in the two versions of control groups."""


def _free_in_control_groups(own: Path, root: Path) -> Iterator[int]:
    """Yield what each control group that this process is in leaves it, from its own to the root."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        (limit_file, used_file, cache), folder = (
            (V1, root / "memory") if controllers else (V2, root)
        )
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):
            place = folder.joinpath(*parts[:length])
            limit, used = _read(place / limit_file), _read(place / used_file)
            if limit and used and limit.strip().isdigit():  # "max": no limit
                # files that were read count as used, but give way to whoever needs the memory
                cached = _number_after(cache, place / "memory.stat") or 0
                yield int(limit) - int(used) + cached


def _free_addresses(process: Path) -> Iterator[int]:
    """Yield what `ulimit -v` leaves a process, where it sets a limit."""
    used = _number_after("VmSize:", process / "status")
    for line in _read(process / "limits").splitlines():
        _, found, values = line.partition("Max address space")
        if found and used is not None and values.split()[0].isdigit():
            yield int(values.split()[0]) - used * 1024


def _number_after(key: str, path: Path) -> int | None:
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == key:
            return int(words[1])
    return None


def _read(path: Path) -> str:
    """Return the text of a file; none of one that is not there."""
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
