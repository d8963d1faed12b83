"""Runs of the study: each a folder with a checkpoint while it goes on, and a result when it is done."""

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _arms import ARMS
from _language_model import Sizes
from _text import Text, make_text, read_text
from _training import LanguageTraining, Schedule

import rarebit as rb
from rarebit.errors import NotFiniteError
from rarebit.machine import machine
from rarebit.training.checkpoints import CheckpointFolder, stop_requests

__all__ = ["ActiveRun", "Run", "Study", "load_text", "machine_of", "make_runs", "write_json"]

SAVE_SECONDS = 300.0
"""How much training a machine that stops may lose; one that is told to stop loses none."""
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all runs share."""

    source: Path | None
    """The folder of the text; None for the small one."""
    out: Path
    sizes: Sizes
    schedule: Schedule
    device: str
    deadline: float = math.inf
    """When to stop, on the clock `time.monotonic`."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: an arm, its weight, a seed."""

    arm: str
    scale: float
    """How many times the arm's own weight of the transfer loss."""
    seed: int

    def __str__(self) -> str:
        scale = "" if self.scale == 1 else f" x{self.scale:g}"
        return f"{self.arm}{scale}, seed {self.seed}"

    def folder(self, study: Study) -> Path:
        """Return where it is kept: a name that tells, and a hash of all that decides what it gives."""
        decides = {
            "arm": repr(ARMS[self.arm]),
            "scale": self.scale,
            "seed": self.seed,
            "sizes": asdict(study.sizes),
            "schedule": asdict(study.schedule),
            "text": load_text(study.source).described()["sha256"],
        }
        name = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        return study.out / "runs" / f"{self.arm}-x{self.scale:g}-seed{self.seed}-{name}"

    def result(self, study: Study) -> dict[str, Any] | None:
        """Return what it gave, if it is done."""
        file = self.folder(study) / RESULT
        if not file.exists():
            return None
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return found


def make_runs(study: Study, runs: Sequence[Run], together: int) -> None:
    """Make the runs that are not there, so many side by side, until the deadline or a signal."""
    todo = [run for run in runs if run.result(study) is None]
    active: list[ActiveRun] = []
    with stop_requests() as asked, ExitStack() as locks:
        while (todo or active) and time.monotonic() < study.deadline and not asked.requested:
            while todo and len(active) < together:
                active.append(ActiveRun(study, todo.pop(0), locks))
            active = [run for run in active if not run.advance()]
        for run in active:
            run.keep()


class ActiveRun:
    """A run that goes on in this process."""

    def __init__(self, study: Study, run: Run, locks: ExitStack) -> None:
        self.run, self.folder, self.machine = run, run.folder(study), machine_of(study.device)
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints")
        self._unlock = locks.enter_context(ExitStack())
        self._unlock.enter_context(self.checkpoints.locked())
        self.training = _start(study, run)
        found = self.checkpoints.newest()
        if found is not None:
            self.training.load(found.state)
        self.began, self.saved = time.monotonic(), time.monotonic()
        self._say(f"{'goes on' if found else 'starts'} at step {self._place}")

    def advance(self) -> bool:
        """Make a step; return whether the run is over: done, and its result written, or failed."""
        try:
            is_done = self.training.train_step(self._say)
        except NotFiniteError as error:  # the other runs go on
            self._say(str(error))
            self._unlock.close()
            return True
        if is_done:
            self._finish()
            return True
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.keep()
        return False

    def keep(self) -> None:
        """Write a checkpoint."""
        name = f"{self.training.step:09d}"
        if self.training.step and name not in self.checkpoints.names():
            self.checkpoints.write(name, self.training.state())
            self.checkpoints.prune(keep=[name])
        self.saved = time.monotonic()
        self._say(f"is kept at step {self._place}; steps recorded: {self.training.is_recorded}")

    def _finish(self) -> None:
        result = asdict(self.run) | self.training.result()
        facts = {"steps_recorded": self.training.is_recorded, "machine": self.machine}
        write_json(self.folder / RESULT, result | facts)
        self.checkpoints.prune(keep=[])
        self._unlock.close()
        self._say(
            f"test perplexity {result['test']['all']:.2f}; steps recorded: {self.training.is_recorded}"
        )

    @property
    def _place(self) -> str:
        return f"{self.training.step} of {self.training.steps}"

    def _say(self, text: str) -> None:
        print(f"{self.run}: {text}; {time.monotonic() - self.began:.1f} s", flush=True)


@functools.cache
def load_text(source: Path | None) -> Text:
    """Return the text of a folder, or the small one."""
    return make_text() if source is None else read_text(source)


def load_selection(study: Study) -> rb.data.Selection:
    """Return which rare words have frequent relatives; counted once, and kept."""
    text = load_text(study.source)
    checksum = str(text.described()["sha256"])
    folder = study.out / f"selection-{checksum[:12]}"
    if folder.exists():
        return rb.data.load_selection(folder)
    counts = {"embedding": text.counts}
    made = rb.data.select(text.train, counts, rb.data.CoOccurrence(), data_checksum=checksum)
    rb.data.save_selection(made, folder)
    return made


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a file that is whole at any moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    text = json.dumps(_without_nan(values), indent=1, ensure_ascii=False, allow_nan=False)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(file)


@functools.cache
def machine_of(device: str) -> dict[str, Any]:
    """Return what the figures depend on, as it is at the first call."""
    facts: dict[str, Any] = dict(machine())
    if torch.device(device).type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
    return facts


def _start(study: Study, run: Run) -> LanguageTraining:
    arm = ARMS[run.arm]
    return LanguageTraining(
        load_text(study.source),
        arm,
        sizes=study.sizes,
        schedule=study.schedule,
        scale=run.scale,
        selection=load_selection(study) if arm.select else None,
        seed=run.seed,
        device=study.device,
    )


def _without_nan(value: Any) -> Any:
    """Return plain values that every reader of JSON takes."""
    if isinstance(value, Mapping):
        return {str(name): _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
