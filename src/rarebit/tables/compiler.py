"""Small C++ sources behind C functions, compiled on first use and loaded without torch's headers.

A library lies in the user's cache folder under a name that changes with source, compiler and processor. It is tried
out before it gets that name. Where there is no compiler, or anything else goes wrong, there is no library, and plain
torch has to do the same. `RAREBIT_COMPILE=0` in the environment switches all of it off.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from rarebit.errors import DataError

# Not -ffast-math: sums keep their order and NaN stays NaN. Square roots need no errno, and without
# contraction the bits do not depend on whether the processor can multiply and add in one.
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fopenmp-simd"),
    *("-shared", "-fPIC"),
)
CHOICES = (("-march=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())
"""Further flags, best first: the first that the compiler takes and that give right results."""
COMPILERS = ("c++", "g++", "clang++")
MOST_SECONDS = 120.0
"""A compiler that takes longer hangs."""

Kernel = TypeVar("Kernel")


def load_compiled(
    source: Path, wrap: Callable[[ctypes.CDLL], Kernel | None], environment: Mapping[str, str]
) -> Kernel | None:
    """Return what `wrap` makes of the library of a source, from the cache or the compiler of an environment.

    `wrap` tries the library out and returns None, or raises, where it is not right. None without one.
    """
    if is_switched_off(environment):
        return None
    for command in _compilers(environment):
        kernel = _Compiler(source, wrap, command, environment).load()
        if kernel is not None:
            return kernel
    return None


def is_switched_off(environment: Mapping[str, str]) -> bool:
    """Return whether an environment switches compiling off."""
    return environment.get("RAREBIT_COMPILE") == "0"


def is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether C can read a tensor by its address: of this type, contiguous, and on the CPU."""
    # A subclass may keep its numbers elsewhere, as distributed tensors do.
    return (
        type(tensor) in {Tensor, nn.Parameter}
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and tensor.is_contiguous()
    )


def _compilers(environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the commands of the compilers there are, the user's choice first."""
    seen = set()
    for command in (environment.get("CXX", ""), *COMPILERS):
        try:
            name, *arguments = shlex.split(command)
        except ValueError:  # nothing, or a quote left open
            continue
        found = shutil.which(name, path=environment.get("PATH", ""))
        # One program often has several names: what it cannot do under one, it cannot under another.
        if found is not None and (program := (os.path.realpath(found), *arguments)) not in seen:
            seen.add(program)
            yield [found, *arguments]


class _Compiler(Generic[Kernel]):
    """One compiler and what it is to make."""

    def __init__(
        self,
        source: Path,
        wrap: Callable[[ctypes.CDLL], Kernel | None],
        command: list[str],
        environment: Mapping[str, str],
    ) -> None:
        self.source, self.wrap = source, wrap
        self.command, self.environment = command, environment

    def load(self) -> Kernel | None:
        """Return the kernel out of the cache, or compiled."""
        try:
            text = self.source.read_bytes()
            version = self._run([*self.command, "--version"])
        except (OSError, subprocess.SubprocessError):
            return None
        what = (text, FLAGS, CHOICES, self.command, version, _processor())
        name = f"{self.source.stem}-{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.so"
        cache = _cache_folder(self.environment)
        if cache is not None and (kernel := self._open(cache / name)) is not None:
            return kernel
        # Without a folder of ours, or where nothing in it may be run, a private one does for this process.
        return self._build(cache, name) or self._build(None, name)

    def _build(self, folder: Path | None, name: str) -> Kernel | None:
        """Compile into a folder, or one that is gone afterwards, and load the result."""
        try:
            if folder is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # On some network disks a library in use cannot be removed.
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as workplace:
                for number, choice in enumerate(CHOICES):
                    built = Path(workplace) / f"{number}.so"
                    flags = [*FLAGS, *choice, str(self.source), "-o", str(built)]
                    try:
                        self._run([*self.command, *flags])
                    except (OSError, subprocess.SubprocessError):
                        continue
                    if (kernel := self._open(built)) is not None:
                        if folder is not None:
                            # Only what works gets the name, whole: other processes may look for it now.
                            built.replace(folder / name)
                        return kernel
        except OSError:
            pass
        return None

    def _run(self, command: list[str]) -> bytes:
        done = subprocess.run(  # noqa: S603  # the user's own compiler, on our source
            command,
            env=dict(self.environment),
            capture_output=True,
            check=True,
            timeout=MOST_SECONDS,
        )
        return done.stdout

    def _open(self, library: Path) -> Kernel | None:
        if not library.is_file():
            return None
        try:
            return self.wrap(ctypes.CDLL(str(library)))
        except (OSError, AttributeError, DataError, MemoryError):  # no library, not ours, or wrong
            return None


def _cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for libraries that outlive the process, or None where the user has none."""
    caches = environment.get("XDG_CACHE_HOME", "")
    if Path(caches).is_absolute():
        return Path(caches) / "rarebit"
    home = environment.get("HOME", "")
    return Path(home) / ".cache" / "rarebit" if Path(home).is_absolute() else None


def _processor() -> str:
    """Return what a library made for this very processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = []
    kinds = ("vendor", "cpu family", "model", "stepping", "flags", "features", "cpu part", "isa")
    found = [line for line in lines if line.lower().startswith(kinds)]
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *found])
