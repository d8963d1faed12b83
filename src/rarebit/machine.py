"""What a result was measured on: processors, versions, commit."""

import os
import platform
import subprocess
from pathlib import Path

import torch

from rarebit.errors import SettingsError

FOLDER = Path(__file__).resolve().parent


def machine() -> dict[str, int | str | None]:
    """Return what the figures depend on: processors, threads, versions, device and commit."""
    return {
        "device": "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def choose_device(device: torch.device | str) -> torch.device:
    """Return a device; "auto" is a GPU if there is one."""
    found = torch.cuda.is_available()
    chosen = torch.device("cuda" if found else "cpu") if device == "auto" else torch.device(device)
    if chosen.type == "cuda" and not found:
        raise SettingsError(f"device {device} was asked for, but torch sees no GPU here")
    return chosen


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
