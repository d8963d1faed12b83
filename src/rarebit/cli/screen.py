"""What the command line prints: tables, figures, progress bars, commands to copy.

Names come from data, files and users. Nothing in them is markup here, and no control character in them reaches the
terminal.
"""

import re
import shlex
import shutil
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
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

from rarebit.study.pool import StudyLines, Summary

if TYPE_CHECKING:
    from rarebit.training.fit import EpochRecord
    from rarebit.training.metrics import Evaluation

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Escape sequences begin with one of these; the last ones turn the direction of writing."""
BREAKS = re.compile(r"(?<=[ ])|(?<=[+:,_./=])(?=[A-Za-z])")
"""Where a text may be folded: after a space, and between the parts of a name."""


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
LONGEST_NAME = 21
"""Letters of a method's name in a narrow terminal."""


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    note: str = "",
    left: Sequence[str] = (),
    fixed: Sequence[str] = (),
    parts: bool = False,
    to: Console = console,
) -> None:
    """Print a table: the first column aligned left, the others right; nothing in it is markup.

    Where the terminal is too narrow, cells are folded between words and parts of names. Where that does not fit either,
    each row is a paragraph.

    note     printed below the table
    left     further columns that are aligned left
    fixed    columns that are never folded
    parts    where the terminal is too narrow, print columns that fit, and the others below with the first column
             again, so that every row is one line
    """
    gap = 2 if to.width >= WIDE else 1
    lines = [[_one_line(cell) for cell in row] for row in (header, *rows)]
    for places in _parts_of(lines, to.width - 1, gap) if parts else ():
        names, *others = ([cells[place] for place in places] for cells in lines)
        table([name.plain for name in names], others, title=title, left=left, fixed=fixed, to=to)
        title = ""
    if parts:
        return
    widths = _widths(list(zip(*lines, strict=True)), fixed, to.width - gap * len(header) - 1)
    if title and not widths:
        to.print(_one_line(title))
    if widths:
        shown = Table(
            title=_one_line(title) if title else None,
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, gap - 1, 0, 0),
            pad_edge=False,
        )
        for place, (name, width) in enumerate(zip(header, widths, strict=True)):
            right = place > 0 and name not in left
            shown.add_column(
                _fold(lines[0][place], width), justify="right" if right else "left", width=width
            )
        for cells in lines[1:]:
            shown.add_row(*map(_fold, cells, widths))
        to.print(shown)
    else:
        for cells in lines[1:]:
            pairs = [f"{what} {cell}" for what, cell in zip(header[1:], cells[1:], strict=True)]
            to.print(cells[0], Padding(Text(", ".join(pairs)), (0, 0, 0, 2)), sep="\n")
    if note:
        to.print(Text(note, style="dim"))


def _parts_of(lines: Sequence[Sequence[Text]], room: int, gap: int) -> list[list[int]]:
    """Return which columns go side by side, each part with the first one; the last part gets what is left."""
    widths = [max(cell.cell_len for cell in cells) + gap for cells in zip(*lines, strict=True)]
    found = [[0]]
    for place in range(1, len(widths)):
        if len(found[-1]) > 1 and sum(widths[n] for n in (*found[-1], place)) > room:
            found.append([0])
        found[-1].append(place)
    return found


def short_names(names: Iterable[str], to: Console = console) -> dict[str, str]:
    """Return the names of methods as a narrow terminal shows them: without settings, and shorter where that is too long.

    >>> short_names(["mlet:inner_dim=32:init=keep+shrinkage+forgetting", "tail"], Console(width=80))
    {'mlet:inner_dim=32:init=keep+shrinkage+forgetting': 'mlet+shrink+forget', 'tail': 'tail'}
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        short = name
        if to.width < WIDE and cell_len(name) > LONGEST_NAME:
            words = [part.partition(":")[0] for part in name.split("+")]
            short = "+".join(words)
            if cell_len(short) > LONGEST_NAME:
                short = "+".join(_initials(word) for word in words)
            short = short if cell_len(short) <= LONGEST_NAME else short[: LONGEST_NAME - 1] + "~"
        same = sum(one == short or one.startswith(f"{short} ") for one in found.values())
        found[name] = f"{short} {same + 1}" if same and short != name else short
    return found


def _initials(word: str) -> str:
    first, *more = word.split("-")
    return first[0] + "".join(one[:1] for one in more) if more and first else word[:6]


def legend(names: Mapping[str, str]) -> None:
    """Print what short names stand for."""
    rows = [(short, name) for name, short in names.items() if short != name]
    width = max((cell_len(short) for short, _ in rows), default=0)
    for short, name in rows:
        line(f"{short.ljust(width)}  = {name}")


MEANINGS = {"helps": "green", "hurts": "red", "no difference": "dim"}
"""Colours of verdicts; one that is open is yellow."""


def verdict(words: str) -> Text:
    """Return a verdict in its colour."""
    return Text(words, style=MEANINGS.get(words, "yellow"))


def _widths(columns: Sequence[Sequence[Text]], fixed: Sequence[str], room: int) -> list[int]:
    """Return the widths of columns for the fewest lines per row; none if words would have to break."""
    wholes = [max(cell.cell_len for cell in cells) for cells in columns]
    most_parts = max(len(_parts(cell)) for cells in columns for cell in cells)
    for most in range(1, most_parts + 1):
        widths = []
        for cells, whole in zip(columns, wholes, strict=True):
            least = max(cell_len(part.rstrip()) for cell in cells for part in _parts(cell))
            long = {cell.plain: cell for cell in cells if cell.cell_len > least}.values()

            def fits(width: int, long: Iterable[Text] = long, most: int = most) -> bool:
                return all(_fold(cell, width).plain.count("\n") < most for cell in long)

            tried = range(whole if cells[0].plain in fixed else least, whole)
            widths.append(tried.start + bisect_left(tried, True, key=fits))
        if sum(widths) <= room:
            missing = sorted((whole - widths[place], place) for place, whole in enumerate(wholes))
            for more, place in missing:  # what is left, to the columns that need least
                widths[place] += more if sum(widths) + more <= room else 0
            return widths
    return []


def _parts(text: Text) -> list[str]:
    return BREAKS.split(text.plain)


def _fold(text: Text, width: int) -> Text:
    """Return a text of at most this width, with line breaks between words and parts of names."""
    if text.cell_len <= width:
        return text
    lines = [""]
    for part in _parts(text):
        if lines[-1] and cell_len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return Text("\n".join(map(str.rstrip, lines)), style=text.style)


def _one_line(text: str | Text) -> Text:
    """Return a text without line breaks and control characters, so that its width is known."""
    return text if isinstance(text, Text) else Text(CONTROL.sub("", text.replace("\n", " ")))


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
    if evaluation.grouped_auc is not None:
        figures["grouped AUC"] = auc_text(evaluation.grouped_auc)
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

    def finish(self, name: str, record: Summary) -> None:
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
