"""What the command line shows of a study: its progress and its tables.

`rarebit compare`: methods with paired seeds, each against its control.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from rarebit.cli.common import (
    DeviceOption,
    SetOption,
    choose_device,
    override,
    parse_assignment,
    stop,
)
from rarebit.cli.show import console, errors, how_to_call
from rarebit.errors import SettingsError, StudyInterrupted
from rarebit.models import model_names
from rarebit.settings import read_toml
from rarebit.study.plan import StudyPlan, section_tables
from rarebit.study.pool import StudyLines
from rarebit.study.results import (
    CellResult,
    StudyResult,
    TextTable,
    comparison_table,
    decile_table,
    read_result,
    side_table,
    verdict_lines,
)
from rarebit.study.runs import RunRecord
from rarebit.study.study import study

__all__ = ["BarStudy", "compare", "run_study", "show_study"]

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


def compare(  # noqa: PLR0917  # typer calls it by name
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods with commas between them, combined by +, with settings after colons: "
            "baseline,low-rank,hashing:buckets=1000+low-rank. See rarebit methods."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Of {', '.join(model_names())}; several with commas. deepfm if not given."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder made by rarebit data prepare; or synthetic, the built-in log. May be repeated."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help=r"A TOML file: methods, seeds, ..., \[\[model]], \[\[data]], \[training]. "
            "Options win over it.",
            readable=False,
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each side; 5 if not given.")] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Settings tried for each side on validation rows; 1 if not given: no tuning."
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help="Of the tables' bytes that smaller tables may keep; 0.5 if not given."),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(
            help="What all methods are held against, such as baseline; else each one's own."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Most passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    set_: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the study; studies/MODEL-DATA if not given."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(help="Go on with the runs in the folder; --no-resume refuses a used one."),
    ] = True,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so long; the same command goes on.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Runs side by side; one a core if not given, one on a GPU.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of each run on a CPU.")] = 1,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Keep the model of every run in its folder.")
    ] = False,
    show: Annotated[
        Path | None,
        typer.Option(
            help="Run nothing: show the result in this folder or JSON file; with --control, held against "
            "that side of it.",
            readable=False,
        ),
    ] = None,
    deciles: Annotated[
        bool,
        typer.Option(
            "--deciles", help="Show differences by tenths of the test rows, too, rarest first."
        ),
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Compare methods with paired seeds, each against its control, and say which of them help.

    What is finished is kept: the same command goes on where it was stopped.
    """
    if show is not None:
        found = read_result(show)
        show_study(found if control is None else found.against(control), deciles=deciles)
        return
    if methods is None and plan is None:
        raise SettingsError("say what to compare: --methods baseline,low-rank or --plan study.toml")
    values = read_toml(plan) if plan is not None else {}
    given = {
        "methods": methods,
        "seeds": seeds,
        "trials": trials,
        "share": share,
        "control": control,
    }
    values |= {name: value for name, value in given.items() if value is not None}
    if model is not None:
        values["model"] = [{"name": name.strip()} for name in model.split(",")]
    if data is not None:
        values["data"] = data
    for name, value in {"epochs": epochs, "batch_size": batch_size, "lr": lr}.items():
        override(values, "training", name, value)
    for assignment in set_ or []:
        _set(values, *parse_assignment(assignment))
    wanted = StudyPlan.from_mapping(values)
    folder = out or _folder(wanted)
    if not resume and any((folder / "runs").glob("*")):
        raise SettingsError(
            f"{str(folder)!r} holds runs already; go on with them, or choose another"
        )
    result = run_study(
        folder,
        wanted,
        minutes=minutes,
        workers=workers,
        threads=threads,
        device=choose_device(device),
        keep_models=keep_models,
        deciles=deciles,
    )
    place = shlex.quote(str(folder))
    if not result.is_complete:
        console.print("Some runs are missing: the same command makes them.")
    console.print(f"\nKept in {folder}. To see it again:", soft_wrap=True, markup=False)
    console.print(f"  {how_to_call()} compare --show {place}", soft_wrap=True, markup=False)


def run_study(
    folder: Path, plan: StudyPlan, *, deciles: bool = False, **options: Any
) -> StudyResult:
    """Run a study with bars, show it, and say how to go on with one that was stopped."""
    try:
        with BarStudy() as progress:
            result = study(folder, plan, progress=progress, **options)
    except StudyInterrupted as stopped:
        show_study(read_result(folder), deciles=deciles)
        stop(f"{stopped}; the same command goes on", code=130)
    except KeyboardInterrupt:
        stop("stopped at once; the same command goes on from the last checkpoints", code=130)
    show_study(result, deciles=deciles)
    return result


def _set(values: dict[str, Any], section: str, name: str, value: object) -> None:
    """Put one value into a section of the plan: into each of its tables, where it has several."""
    if section in ("model", "data"):
        tables = section_tables(section, values.get(section, {}))
        values[section] = [{**table, name: value} for table in tables]
    else:
        override(values, section, name, value)


def _folder(plan: StudyPlan) -> Path:
    """Return studies/MODEL-DATA: the same command finds its runs again."""
    runs = plan.runs[:1] if len({run.model for run in plan.runs}) == 1 else ()
    model = runs[0].model if runs else "models"
    logs = {Path(getattr(run.data, "folder", "synthetic")).name for run in plan.runs}
    return Path("studies") / f"{model}-{logs.pop() if len(logs) == 1 else 'logs'}"
