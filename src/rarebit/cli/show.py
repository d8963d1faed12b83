"""What the command line shows: tables, progress bars, errors."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from rarebit.settings import size
from rarebit.technique import Technique
from rarebit.training.metrics import Evaluation, Metrics
from rarebit.training.progress import EpochRecord
from rarebit.training.run import RunResult
from rarebit.training.score import Scored

__all__ = [
    "BarProgress",
    "console",
    "epoch_hint",
    "errors",
    "how_to_call",
    "show_evaluation",
    "show_run",
    "show_scored",
]

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


class BarProgress:
    """A progress bar for generating data and for every epoch, with the validation metric beside it.

    Where standard error is no terminal, a line an epoch instead.
    """

    def __init__(self) -> None:
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=errors,
            disable=not errors.is_terminal,
        )
        self.task = self.bars.add_task("", total=None, visible=False, note="")

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

    def rows(self, done: int, total: int) -> None:
        """Show how many rows of the log are generated."""
        self.stage("click log", done, total)

    def stage(self, name: str, done: int, total: int) -> None:
        """Show how much of some work is done."""
        if self.bars.tasks[self.task].description != name:
            self.task = self.bars.add_task(name, total=total, note="")
        self.bars.update(self.task, completed=done, total=total)

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self.bars.console.print(line)

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:
        """Show a new bar for an epoch."""
        self.task = self.bars.add_task(f"epoch {epoch}/{epochs}", total=rows, note="")

    def advance(self, rows: int) -> None:
        """Move the bar on."""
        self.bars.advance(self.task, rows)

    def finish_epoch(self, record: EpochRecord) -> None:
        """Write the epoch's result beside its bar."""
        note = f"loss {record.train_loss:.4f}"
        if record.valid is not None:
            note += f", valid AUC {_number(record.valid.auc)}"
        self.bars.update(self.task, note=note)
        if not errors.is_terminal:
            errors.print(f"epoch {record.epoch}: {note}")


def how_to_call() -> str:
    """Return what to type for `rarebit`: a path where it is not on the search path."""
    script = Path(sys.executable).with_name("rarebit")
    if shutil.which("rarebit") or not script.exists():
        return "rarebit"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def show_run(result: RunResult, title: str, methods: Sequence[Technique] = ()) -> None:
    """Print the table at the end of a run with these methods, and what its best epoch suggests."""
    table = _table(title)
    _add_metrics(table, result.test)
    table.add_row("parameters", f"{result.num_parameters:,}")
    table.add_row("bytes of tables", size(result.table_bytes))
    table.add_row("training speed", f"{result.history.samples_per_second:,.0f} samples/s")
    console.print(table)
    best, epochs = result.history.best_epoch, len(result.history.epochs)
    console.print(f"Weights of epoch {best} of {epochs}, the best on the validation split.")
    forgets = any(method.needs_epochs for method in methods)
    hint = epoch_hint(best, epochs, forgets=forgets)
    if hint:
        console.print(hint)


def epoch_hint(best: int | None, epochs: int, *, forgets: bool = False) -> str:
    """Return what the best epoch suggests; nothing where it suggests nothing.

    >>> epoch_hint(3, 3)
    'The last epoch was the best: more of them may be better (--epochs).'
    """
    if epochs > 1 and best == epochs:
        return "The last epoch was the best: more of them may be better (--epochs)."
    if epochs > 1 and best == 1 and not forgets:
        return (
            "The first epoch was the best: later ones may overfit rare rows; --methods shrinkage+forgetting "
            "is against that."
        )
    return ""


def show_evaluation(evaluation: Evaluation, title: str) -> None:
    """Print the metrics of a model on some data."""
    table = _table(title)
    _add_metrics(table, evaluation)
    console.print(table)


def show_scored(scored: Scored, title: str) -> None:
    """Print what scoring a raw log gave: rows, values the model does not know, metrics."""
    table = _table(title)
    table.add_row("rows scored", f"{scored.rows:,}")
    if scored.bad_rows:
        table.add_row("rows set aside", f"{scored.bad_rows:,}")
    for name, count in scored.unknown.items():
        if count:
            table.add_row(Text(f"unknown values of {name}"), f"{count:,}")
    if not any(scored.unknown.values()):
        table.add_row("unknown values", "0")
    if scored.metrics is not None:
        table.add_row("AUC", _auc(scored.metrics))
        table.add_row("logloss", f"{scored.metrics.logloss:.4f}")
    console.print(table)


def _table(title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    return table


def _add_metrics(table: Table, test: Evaluation) -> None:
    table.add_row("AUC", _auc(test.overall))
    if test.ceiling is not None:
        table.add_row("  best any model could reach", _auc(test.ceiling))
    if test.rarest is not None:
        table.add_row("AUC on the rarest fifth", _auc(test.rarest))
    if test.rarest_ceiling is not None:
        table.add_row("  best any model could reach there", _auc(test.rarest_ceiling))
    table.add_row("logloss", f"{test.logloss:.4f}")
    table.add_row("PR-AUC", _number(test.pr_auc))


def _auc(metrics: Metrics) -> str:
    return _number(metrics.auc)


def _number(value: float | None) -> str:
    return "undefined: all labels are of one class" if value is None else f"{value:.4f}"
