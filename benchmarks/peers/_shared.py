"""What the scripts of all libraries share: the job, the clock and the result.

A script is called with the folder of a job and its own options as JSON. The folder holds

    job.json        fields and their rows, dim, hidden, lr, batch_size, epochs
    train.npz       ids (n, F) int32 and label (n,) float32, as Rarebit encoded them
    held_out.npz    the same, of other rows

and gets back `scores_1.npy`, `scores_2.npy`, ... (the scores of the held-out rows after each epoch)
and `result.json`. This file needs numpy only: it is imported in each library's environment.
"""

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every library is to train, and on what."""

    folder: Path
    options: Mapping[str, Any]
    """Options of this library alone."""
    fields: Mapping[str, int]
    """The rows of each field's table, by name."""
    dim: int
    hidden: list[int]
    lr: float
    batch_size: int
    epochs: int

    def rows(self, part: str) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids and labels of "train" or "held_out"."""
        with np.load(self.folder / f"{part}.npz") as arrays:
            return arrays["ids"], arrays["label"]

    def columns(self, part: str) -> tuple[dict[str, NDArray[np.int32]], NDArray[np.float32]]:
        """Return the ids one array a field, and the labels."""
        ids, label = self.rows(part)
        named = zip(self.fields, ids.T, strict=True)
        return {name: np.ascontiguousarray(column) for name, column in named}, label


def read_job() -> Job:
    """Return the job that the command line names."""
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    return Job(folder=folder, options=options, **json.loads((folder / "job.json").read_text()))


class Recorder:
    """Times the epochs. What comes between the end of one and the start of the next is left out."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.folder, self.clock = folder, clock
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.began = 0.0

    def start(self) -> None:
        """Take note that an epoch begins."""
        if not self.seconds:
            forget_peak_memory()
        self.began = self.clock()

    def finish(self, loss: float, scores: Callable[[], NDArray[np.floating[Any]]]) -> None:
        """Stop the clock of an epoch; keep its mean training loss and the scores after it."""
        self.seconds.append(self.clock() - self.began)
        self.losses.append(float(loss))
        np.save(self.folder / f"scores_{len(self.seconds)}.npy", scores().reshape(-1))

    def write(self, settings: Mapping[str, Any], *packages: str) -> None:
        """Write what was measured, with what, and the versions of the packages."""
        import torch

        result = {
            "epoch_seconds": self.seconds,
            "train_loss": self.losses,
            "peak_memory_mb": peak_memory_mb(),
            "threads": torch.get_num_threads(),
            "settings": dict(settings),
            "versions": {name: version(name) for name in packages},
        }
        (self.folder / "result.json").write_text(json.dumps(result))


def forget_peak_memory() -> None:
    """Let the peak begin again: what preparing the files took is not training."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(status: Path = Path("/proc/self/status")) -> int | None:
    """Return the most memory this process held, or None where the system does not say.

    Not from `getrusage`: a new process starts with its parent's peak there.
    """
    if not status.exists():
        return None
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), flags=re.MULTILINE)
    return None if peak is None else int(peak[1]) // 1024
