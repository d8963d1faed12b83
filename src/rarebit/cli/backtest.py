"""`rarebit backtest`: policies for ids that keep arriving, period after period."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.cli.compare import MOST_MISSING
from rarebit.errors import MissingExtraError, SettingsError, StudyError, StudyInterrupted
from rarebit.settings import from_mapping, suggest

if TYPE_CHECKING:
    from rarebit.data.raw.periods import By
    from rarebit.study.backtest import BacktestResult

EXAMPLES = """[bold]Examples[/bold]

rarebit backtest clicks.parquet --label click --time timestamp --by week

rarebit backtest clicks.csv --label click --time timestamp --by 20 --policies grow,grow:start=noise,retrain:every=4

rarebit backtest clicks.parquet --schema clicks.toml --time timestamp --policies grow,grow:like=item/category,hashing
"""
PERIODS = ("day", "week", "month")
SECTIONS = ("model", "training", "growth")


def backtest_command(  # noqa: PLR0917  # typer calls it by name
    log: Annotated[
        Path,
        Argument(
            help="The log: .csv .tsv .txt .ndjson (.gz .bz2 .xz .zst), or .parquet.", readable=False
        ),
    ],
    label: Annotated[str | None, Option(help="The label column: 1 for a click, else 0.")] = None,
    time: Annotated[str | None, Option(help="The time column.")] = None,
    schema: Annotated[
        Path | None, Option(help="A schema file, as rarebit data schema writes it.", readable=False)
    ] = None,
    by: Annotated[
        str, Option(help="Periods: day, week, month, or a number of parts with equally many rows.")
    ] = "day",
    warm_up: Annotated[
        int, Option("--warm-up", help="Periods that start the vocabulary; they are not scored.")
    ] = 1,
    policies: Annotated[
        str,
        Option(
            help="Policies separated by commas: grow, grow:start=prior, grow:start=noise, "
            "grow:like=item/category, restart, fixed, hashing, retrain, retrain:every=4, frozen."
        ),
    ] = "grow,grow:start=noise,fixed,hashing",
    methods: Annotated[
        str,
        Option(
            help="Training methods; each policy is run with each of them. See rarebit methods.",
            autocompletion=opt.complete_methods,
        ),
    ] = "baseline",
    control: Annotated[
        str | None,
        Option(help="The policy to compare with. Default: grow:start=noise, else the first."),
    ] = None,
    seeds: Annotated[int, Option(help="Runs of each policy.")] = 5,
    model: opt.Model = None,
    epochs: Annotated[
        int | None, Option(help="Epochs of retrain; all other policies train in one pass.")
    ] = None,
    batch_size: opt.BatchSize = None,
    lr: opt.Lr = None,
    set_: opt.Set = None,
    out: Annotated[
        Path | None, Option(help="Folder of the backtest. Default: backtests/LOG.")
    ] = None,
    workers: Annotated[
        int | None,
        Option(help="Parallel runs. Default: one per core; on a GPU one, unless NVIDIA MPS runs."),
    ] = None,
    threads: Annotated[int, Option(help="CPU threads per run.")] = 1,
    no_plots: opt.NoPlots = False,
    device: opt.Device = "auto",
) -> None:
    """Train period after period, score each before training on it, and compare policies for new ids.

    Finished runs are kept: the same command resumes a backtest that was stopped.
    """
    from rarebit.data.log_schema import LogSchema
    from rarebit.data.raw.vocabulary import Growth
    from rarebit.study.backtest import backtest

    if schema is not None:
        opt.refuse_with("--schema", {"--label": label})
    values: dict[str, Any] = {}
    opt.override_run(
        values,
        model=model,
        data=None,
        training={"epochs": epochs, "batch_size": batch_size, "lr": lr},
        assignments=set_,
    )
    for section in values:
        if section not in SECTIONS:
            raise SettingsError(f"unknown section {section!r}{suggest(section, SECTIONS)}")
    folder = out or Path("backtests") / log.name.split(".")[0]
    resume = f"to resume: {screen.command_text(*sys.argv[1:])}"
    try:
        with screen.RunBars() as reading, screen.StudyBars() as progress:
            result = backtest(
                log,
                folder,
                label=label,
                time=time,
                by=_by(by),
                warm_up=warm_up,
                schema=None if schema is None else LogSchema.read(schema),
                growth=from_mapping(Growth, values.get("growth", {}), where="growth"),
                policies=policies,
                methods=methods,
                model=values.get("model", "deepfm"),
                training=values.get("training"),
                seeds=seeds,
                control=control,
                workers=workers,
                threads=threads,
                device=opt.choose_device(device),
                progress=progress,
                data_progress=reading.data_stage,
            )
    except StudyInterrupted as stopped:
        opt.stop(f"{stopped}; {resume}", code=130)
    except KeyboardInterrupt:
        opt.stop(f"stopped; finished runs are kept; {resume}", code=130)
    show_backtest(result)
    if result.missing:
        more = f" and {len(result.missing) - 1} more" if len(result.missing) > 1 else ""
        opt.stop(f"the backtest is incomplete: {result.missing[0]}{more}; {resume}", code=1)
    if not no_plots:
        _draw(result, folder)
    screen.line(f"\nSaved in {folder}.")


def _by(text: str) -> "By":
    if text.isdecimal() and int(text) >= 2:
        return int(text)
    if text not in PERIODS:
        raise SettingsError(
            f"--by must be day, week, month or a number of parts of at least 2, got {text!r}"
        )
    return cast("By", text)


def show_backtest(result: "BacktestResult") -> None:
    """Print the tables of a backtest."""
    from rarebit.study.backtest import difference_table, figure_table

    tables = [figure_table(result)]
    tables += [difference_table(result)] if len(result.policies) > 1 else []
    names = screen.short_names(policy.name for policy in result.policies)
    for table in tables:
        left = [name for name in table.header if name.endswith("verdict")]
        rows = [
            [
                screen.verdict(cell) if name in left else names.get(cell, cell)
                for name, cell in zip(table.header, row, strict=True)
            ]
            for row in table.rows
        ]
        screen.table(table.header, rows, title=table.title, left=left, parts=True)
        if table.note:
            screen.console.print(table.note, style="dim")
    screen.legend(names)
    for line in result.missing[:MOST_MISSING]:
        screen.line(f"missing: {line}")


def _draw(result: "BacktestResult", folder: Path) -> None:
    from rarebit.diagnosis.plots import draw_backtest
    from rarebit.storage.files import write_files

    try:
        made = write_files(folder, draw_backtest(result), error=StudyError)
        screen.line(f"AUC over time: {', '.join(map(str, made))}")
    except MissingExtraError as missing:
        screen.line(f"no plots: {missing}", to=screen.errors)
