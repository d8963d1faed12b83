"""What the command line prints: tables, figures, progress bars, commands to copy.

Names come from data, files and users. Nothing in them is markup here, and no control character in them reaches the
terminal.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rarebit.study.pool import StudyLines

if TYPE_CHECKING:
    from rarebit.study.runs import RunRecord
    from rarebit.training.fit import EpochRecord
    from rarebit.training.metrics import Evaluation

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Escape sequences begin with one of these; the last ones turn the direction of writing."""


class _Screen(Console):
    """A console that prints text as it is, without control characters."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # halves of a surrogate pair stand for bytes of a file name that are no UTF-8
            text = CONTROL.sub("", segment.text).encode(errors="replace").decode()
            yield segment if segment.control else Segment(text, segment.style)


console, errors = _Screen(), _Screen(stderr=True)
WIDE = 110
"""From this width of the terminal on, nothing is shortened."""


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    note: str = "",
    left: Sequence[str] = (),
    fixed: Sequence[str] = (),
    names: int = 8,
    to: Console = console,
) -> None:
    """Print a table: the first column aligned left, the others right; nothing in it is markup.

    note     printed below the table
    left     further columns that are aligned left
    fixed    columns that are never wrapped
    names    least width of the first column, which is wrapped last
    """
    lines = [[_one_line(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    shown = Table(
        title=_one_line(title) if title else None,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0) if to.width >= WIDE else (0, 0),
        pad_edge=False,
    )
    for place, name in enumerate(header):
        shown.add_column(
            _one_line(name),
            justify="right" if place and name not in left else "left",
            overflow="fold",
            no_wrap=name in fixed,
        )
    longest = max((cells[0].cell_len for cells in lines), default=1)
    shown.columns[0].min_width = min(longest, names)
    for cells in lines:
        shown.add_row(*cells)
    to.print(shown)
    if note:
        to.print(Text(note, style="dim"))


def _one_line(text: str) -> Text:
    return Text(text.replace("\n", " "))


def figures(title: str, values: Mapping[str, str]) -> None:
    """Print names and their values, one per line, in a box."""
    shown = Table(title=_one_line(title), title_justify="left", show_header=False)
    shown.add_column()
    shown.add_column(justify="right")
    for name, value in values.items():
        shown.add_row(_one_line(name), _one_line(value))
    console.print(shown)


def line(text: str, *, to: Console = console) -> None:
    """Print a line as it is, without markup and without wrapping."""
    to.print(text, markup=False, soft_wrap=True)


def command(*words: str) -> None:
    """Print a `rarebit` command to copy."""
    line(f"  {command_text(*words)}")


def command_text(*words: str) -> str:
    """Return a `rarebit` command that a shell runs as it is."""
    return f"{how_to_call()} {shlex.join(words)}"


def how_to_call() -> str:
    """Return what to type for `rarebit`: its path if it is not on the search path."""
    script = Path(sys.executable).with_name("rarebit")
    if shutil.which("rarebit") or not script.exists():
        return "rarebit"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def evaluation_figures(evaluation: "Evaluation") -> dict[str, str]:
    """Return the metrics of a model by the names that people see."""
    figures = {"AUC": auc_text(evaluation.auc)}
    if evaluation.ceiling is not None:
        figures["  best any model could reach"] = auc_text(evaluation.ceiling.auc)
    if evaluation.rarest is not None:
        figures["AUC on the rarest fifth"] = auc_text(evaluation.rarest.auc)
    if evaluation.rarest_ceiling is not None:
        figures["  best any model could reach there"] = auc_text(evaluation.rarest_ceiling.auc)
    return figures | {"logloss": f"{evaluation.logloss:.4f}", "PR-AUC": auc_text(evaluation.pr_auc)}


def auc_text(auc: float | None) -> str:
    """Return an AUC with four digits."""
    return "undefined: all labels are of one class" if auc is None else f"{auc:.4f}"


class _Bars:
    """Progress bars on standard error; none if it is no terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=errors,
            disable=not errors.is_terminal,
        )

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        line(text, to=self.bars.console)


class RunBars(_Bars):
    """One bar, for the data and then for the active epoch, and a line per finished epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.bar = self.bars.add_task("", total=None, visible=False, note="")
        self.bars.live.transient = True  # what is finished stays as a line

    def rows(self, done: int, total: int) -> None:
        """Show how many rows of the built-in log are generated."""
        self.stage("click log", done, total)

    def stage(self, name: str, done: int, total: int) -> None:
        """Show how much of some work is done."""
        if self.bars.tasks[0].description != name:
            self.bars.reset(self.bar, description=name, total=total, visible=True)
        self.bars.update(self.bar, completed=done, total=total)

    def data_stage(self, name: str, done: int, total: int) -> None:
        """Show how far preparing data is: reading in megabytes, the rest in rows."""
        if name == "reading":
            self.stage("reading, MB", done // 1_000_000, max(total // 1_000_000, 1))
        else:
            self.stage(f"{name}, rows", done, total)

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:
        self.bars.reset(self.bar, description=f"epoch {epoch}/{epochs}", total=rows, visible=True)

    def advance(self, rows: int) -> None:
        self.bars.advance(self.bar, rows)

    def finish_epoch(self, record: "EpochRecord") -> None:
        note = f"loss {record.train_loss:.4f}"
        if record.valid is not None:
            note += f", valid AUC {auc_text(record.valid.auc)}"
        self.say(f"epoch {record.epoch}: {note}")


class StudyBars(_Bars, StudyLines):
    """A bar for the whole study and one per active run, with its validation AUC, as far as the terminal is high."""

    def __init__(self) -> None:
        super().__init__()
        self.all: TaskID | None = None
        self.under_way: dict[str, TaskID] = {}

    def plan(self, runs: int, there: int) -> None:
        super().plan(runs, there)
        if self.all is not None:
            self.bars.remove_task(self.all)
        self.all = self.bars.add_task("runs", total=runs, completed=there, note="")

    def start(self, name: str) -> None:
        self.under_way[name] = self.bars.add_task(name, total=None, note="")
        self._fit()

    def epoch(self, name: str, values: Mapping[str, Any]) -> None:
        auc = values["valid_auc"]
        self.bars.update(
            self.under_way[name],
            completed=values["epoch"],
            total=values["epochs"],
            note="" if auc is None else f"valid AUC {auc:.4f}",
        )

    def finish(self, name: str, record: "RunRecord") -> None:
        super().finish(name, record)
        self._end(name)

    def fail(self, name: str, why: str) -> None:
        super().fail(name, why)
        self._end(name)

    def _end(self, name: str) -> None:
        self.bars.remove_task(self.under_way.pop(name))
        if self.all is not None:
            self.bars.update(self.all, completed=self.done)
        self._fit()

    def _fit(self) -> None:
        """Show as many runs as the terminal has lines: what is higher than the terminal stops moving."""
        for place, bar in enumerate(self.under_way.values()):
            self.bars.update(bar, visible=place < errors.height - 2)
