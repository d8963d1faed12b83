"""How a study tells what it is doing."""

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from rarebit.study.runs import RunRecord

__all__ = ["StudyLines", "StudyProgress", "StudySilence"]


class StudyProgress(Protocol):
    """What a study calls as it goes."""

    def plan(self, runs: int, there: int) -> None:
        """Tell how many runs a stage of the study has, and how many of them are there already."""

    def start(self, name: str) -> None:
        """Tell that a run begins."""

    def epoch(self, name: str, values: Mapping[str, Any]) -> None:
        """Tell what an epoch of a run gave: its number, of how many, and the AUC on validation rows."""

    def finish(self, name: str, record: RunRecord) -> None:
        """Tell what a run gave."""

    def fail(self, name: str, why: str) -> None:
        """Tell that a run failed."""

    def say(self, line: str) -> None:
        """Tell something worth knowing."""


class StudySilence:
    """Tells nothing."""

    def plan(self, runs: int, there: int) -> None:
        """Tell nothing."""

    def start(self, name: str) -> None:
        """Tell nothing."""

    def epoch(self, name: str, values: Mapping[str, Any]) -> None:
        """Tell nothing."""

    def finish(self, name: str, record: RunRecord) -> None:
        """Tell nothing."""

    def fail(self, name: str, why: str) -> None:
        """Tell nothing."""

    def say(self, line: str) -> None:
        """Tell nothing."""


class StudyLines(StudySilence):
    """Prints a line a run to standard error."""

    def __init__(self) -> None:
        self.runs, self.done = 0, 0

    def plan(self, runs: int, there: int) -> None:
        """Print how many runs there are to make."""
        self.runs, self.done = runs, there
        self.say(f"{runs} run{'s' if runs != 1 else ''}, {there} of them there already")

    def finish(self, name: str, record: RunRecord) -> None:
        """Print what a run gave."""
        self.done += 1
        self.say(
            f"{self.done} of {self.runs}: {name}: AUC {record.auc:.4f}, on validation rows "
            f"{record.valid_auc:.4f} (epoch {record.best_epoch} of {record.epochs})"
        )

    def fail(self, name: str, why: str) -> None:
        """Print why a run failed."""
        self.done += 1
        self.say(f"{self.done} of {self.runs}: {name} failed: {why}")

    def say(self, line: str) -> None:
        """Print it."""
        sys.stderr.write(f"{line}\n")
