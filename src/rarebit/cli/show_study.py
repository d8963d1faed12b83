"""What the command line shows of a study: its progress and its tables."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from rarebit.cli.show import console, errors
from rarebit.study.progress import StudyLines
from rarebit.study.results import CellResult, StudyResult
from rarebit.study.runs import RunRecord
from rarebit.study.tables import (
    TextTable,
    comparison_table,
    decile_table,
    side_table,
    verdict_lines,
)

__all__ = ["BarStudy", "show_study"]

LONG_NAME = 13
MOST_LINES = 5
"""Lines on runs that are missing."""


class BarStudy(StudyLines):
    """A bar for the whole study and one for each run under way, with its validation AUC.

    Where standard error is no terminal, a line a run instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=errors,
            disable=not errors.is_terminal,
        )
        self.all: TaskID | None = None
        self.under_way: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bars.stop()

    def plan(self, runs: int, there: int) -> None:
        """Show a bar for the runs of a stage."""
        super().plan(runs, there)
        if self.all is not None:
            self.bars.remove_task(self.all)
        self.all = self.bars.add_task("runs", total=runs, completed=there, note="")

    def start(self, name: str) -> None:
        """Show a bar for a run."""
        self.under_way[name] = self.bars.add_task(name, total=None, note="")

    def epoch(self, name: str, values: Mapping[str, Any]) -> None:
        """Move the bar of a run on by an epoch."""
        auc = values["valid_auc"]
        self.bars.update(
            self.under_way[name],
            completed=values["epoch"],
            total=values["epochs"],
            note="" if auc is None else f"valid AUC {auc:.4f}",
        )

    def finish(self, name: str, record: RunRecord) -> None:
        """Print what a run gave, and take its bar away."""
        super().finish(name, record)
        self._end(name)

    def fail(self, name: str, why: str) -> None:
        """Print why a run failed, and take its bar away."""
        super().fail(name, why)
        self._end(name)

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self.bars.console.print(line, markup=False, soft_wrap=True)

    def _end(self, name: str) -> None:
        self.bars.remove_task(self.under_way.pop(name))
        if self.all is not None:
            self.bars.update(self.all, completed=self.done)


def show_study(result: StudyResult, *, deciles: bool = False) -> None:
    """Print all tables of a study; by frequency deciles only where asked for."""
    for cell in result.cells:
        _show(side_table(cell))
        if cell.methods:
            _show(comparison_table(cell, result.minimum_effect))
            for line in verdict_lines(cell, result.minimum_effect):
                console.print(line, markup=False, soft_wrap=True)
        if cell.methods and deciles:
            _show(decile_table(cell))
        _show_missing(cell)


def _show(table: TextTable) -> None:
    shown = Table(
        title=Text(table.title),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0),
        pad_edge=False,
    )
    for number, name in enumerate(table.header):
        shown.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    names = [row[0] for row in table.rows]
    # names are folded last: numbers with their spread can be read in two lines
    shown.columns[0].min_width = min(max(map(len, names), default=1), LONG_NAME)
    shown.columns[-1].justify = "left"
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)


def _show_missing(cell: CellResult) -> None:
    for line in cell.missing[:MOST_LINES]:
        console.print(f"missing: {line}", markup=False, soft_wrap=True)
    if len(cell.missing) > MOST_LINES:
        console.print(f"and {len(cell.missing) - MOST_LINES} more")
