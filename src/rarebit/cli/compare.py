"""`rarebit compare`: compare methods with paired seeds, each against its control."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.cli.report import write_page
from rarebit.errors import SettingsError, StudyError, StudyInterrupted
from rarebit.settings import read_toml
from rarebit.text import TextTable

if TYPE_CHECKING:
    from rarebit.study.plan import StudyPlan
    from rarebit.study.results import StudyResult

MOST_MISSING = 5
"""Lines on runs that are missing."""


def compare(  # noqa: PLR0917  # typer calls it by name
    methods: Annotated[
        str | None,
        Option(
            help="Methods separated by commas, combined by +, with settings after colons: "
            "baseline,low-rank,hashing:buckets=1000+low-rank. See rarebit methods.",
            autocompletion=opt.complete_methods,
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            help=f"Models, separated by commas: {', '.join(opt.MODELS)}. Default: deepfm.",
            autocompletion=opt.complete(lambda: opt.MODELS, marks=","),
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        Option(help="A folder made by rarebit data prepare, or synthetic. May be repeated."),
    ] = None,
    plan: Annotated[
        Path | None,
        Option(
            help=r"A TOML file: methods, seeds, ..., \[\[model]], \[\[data]], \[training]. "
            "Options override it.",
            readable=False,
        ),
    ] = None,
    seeds: Annotated[int | None, Option(help="Runs of each variant. Default: 5.")] = None,
    trials: Annotated[
        int | None, Option(help="Settings tried for each variant on validation. Default: 1.")
    ] = None,
    share: Annotated[
        float | None, Option(help="Share of the bytes that smaller tables keep. Default: 0.5.")
    ] = None,
    control: Annotated[
        str | None, Option(help="One control for all methods. Default: each method's own.")
    ] = None,
    epochs: opt.Epochs = None,
    batch_size: opt.BatchSize = None,
    lr: opt.Lr = None,
    set_: opt.Set = None,
    out: Annotated[
        Path | None, Option(help="Folder of the study. Default: studies/MODEL-DATA.")
    ] = None,
    resume: Annotated[
        bool, Option(help="Resume the runs in the folder; --no-resume refuses a folder with runs.")
    ] = True,
    minutes: Annotated[
        float | None, Option(help="Stop after so many minutes; the same command resumes.")
    ] = None,
    workers: Annotated[
        int | None,
        Option(help="Parallel runs. Default: one per core; on a GPU one, unless NVIDIA MPS runs."),
    ] = None,
    threads: Annotated[int, Option(help="CPU threads per run.")] = 1,
    together: opt.Together = "auto",
    keep_models: Annotated[
        bool, Option("--keep-models", help="Keep the model of every run in its folder.")
    ] = False,
    show: Annotated[
        Path | None,
        Option(
            help="Run nothing: show a result (folder or JSON file), compared with --control if given.",
            readable=False,
        ),
    ] = None,
    deciles: Annotated[
        bool, Option("--deciles", help="Also show differences by tenths of the test rows.")
    ] = False,
    plot: Annotated[
        Path | None,
        Option(help="Also draw AUC by the size of the tables to this PNG file.", readable=False),
    ] = None,
    runs: Annotated[
        Path | None,
        Option(help="Also write all runs to this Parquet file, a row per run.", readable=False),
    ] = None,
    device: opt.Device = "auto",
) -> None:
    """Compare methods with paired seeds, and report which of them beat their control.

    Finished runs are kept: the same command resumes a study that was stopped.
    """
    from rarebit.study.plan import StudyPlan, section_tables
    from rarebit.study.results import read_result

    if show is not None:
        found = read_result(show)
        found = found if control is None else found.against(control)
        show_study(found, deciles=deciles, plot=plot)
        _write_runs(found, runs)
        return
    if methods is None and plan is None:
        raise SettingsError(
            "nothing to compare; give --methods baseline,low-rank or --plan study.toml"
        )
    values = read_toml(plan) if plan is not None else {}
    models = None if model is None else [{"name": name.strip()} for name in model.split(",")]
    values |= opt.given(methods=methods, model=models, data=data, seeds=seeds)
    values |= opt.given(trials=trials, share=share, control=control)
    for name, value in {"epochs": epochs, "batch_size": batch_size, "lr": lr}.items():
        opt.override(values, "training", name, value)
    for assignment in set_ or []:
        section, key, setting = opt.parse_assignment(assignment)
        if section in ("model", "data"):  # of each model or log
            tables = section_tables(section, values.get(section, {}))
            values[section] = [{**table, key: setting} for table in tables]
        else:
            opt.override(values, section, key, setting)
    wanted = StudyPlan.from_mapping(values)
    folder = out or _folder(wanted)
    if not resume and any((folder / "runs").glob("*")):
        raise SettingsError(
            f"{str(folder)!r} holds runs already; resume them, or choose another folder"
        )
    run_study(
        folder,
        wanted,
        minutes=minutes,
        workers=workers,
        threads=threads,
        together=opt.choose_together(together),
        device=opt.choose_device(device),
        keep_models=keep_models,
        deciles=deciles,
        plot=plot,
    )
    _write_runs(read_result(folder), runs)
    screen.line(f"\nSaved in {folder}. To show it again:")
    screen.command("compare", "--show", str(folder))


def _write_runs(result: "StudyResult", path: Path | None) -> None:
    from rarebit.study.results import write_runs

    if path is not None:
        screen.line(f"All runs: {write_runs(result, path)}")


def run_study(
    folder: Path,
    plan: "StudyPlan",
    *,
    deciles: bool = False,
    plot: Path | None = None,
    **options: Any,
) -> None:
    """Run a study with progress bars, and show its result; if runs are missing, end with how to resume it."""
    from rarebit.study.results import read_result
    from rarebit.study.study import study

    words = [word for word in sys.argv[1:] if word != "--no-resume"]
    resume = f"to resume: {screen.command_text(*words)}"
    try:
        with screen.StudyBars() as progress:
            result = study(folder, plan, progress=progress, **options)
    except StudyInterrupted as stopped:
        show_study(read_result(folder), deciles=deciles, plot=plot)
        write_page(folder)
        opt.stop(f"{stopped}; {resume}", code=130)
    except KeyboardInterrupt:
        opt.stop(f"stopped; checkpoints are kept; {resume}", code=130)
    show_study(result, deciles=deciles, plot=plot)
    write_page(folder)
    if not result.is_complete:
        missing = [line for cell in result.cells for line in cell.missing]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        opt.stop(f"the study is incomplete: {missing[0]}{more}; {resume}", code=1)


def show_study(result: "StudyResult", *, deciles: bool = False, plot: Path | None = None) -> None:
    """Print the tables and verdicts of a study; differences by frequency deciles and a plot only on request."""
    from rarebit.study.results import comparison_table, decile_table, variant_table, verdict_lines

    for cell in result.cells:
        names = screen.short_names(variant.name for variant in cell.variants)
        _show(variant_table(cell), names)
        if cell.methods:
            _show(comparison_table(cell, result.minimum_effect), names)
        if cell.methods and deciles:
            _show(decile_table(cell), names)
        screen.legend(names)
        if cell.methods:
            for line in verdict_lines(cell, result.minimum_effect):
                screen.console.print(line)
        for line in cell.missing[:MOST_MISSING]:
            screen.line(f"missing: {line}")
        if len(cell.missing) > MOST_MISSING:
            screen.console.print(f"and {len(cell.missing) - MOST_MISSING} more")
    if plot is not None:
        from rarebit.diagnosis.plots import draw_study
        from rarebit.storage.files import write_files

        [path] = write_files(plot.parent, {plot.name: draw_study(result)}, error=StudyError)
        screen.line(f"AUC by the size of the tables: {path}")


def _show(table: TextTable, names: Mapping[str, str]) -> None:
    rows = [
        [
            screen.verdict(cell) if name == "verdict" else names.get(cell, cell)
            for name, cell in zip(table.header, row, strict=True)
        ]
        for row in table.rows
    ]
    left = ["control", "verdict"]
    screen.table(table.header, rows, title=table.title, left=left, parts=True)


def _folder(plan: "StudyPlan") -> Path:
    """Return studies/MODEL-DATA: the same command finds its runs again."""
    models = {run.model for run in plan.runs}
    logs = {Path(getattr(run.data, "folder", "synthetic")).name for run in plan.runs}
    model = models.pop() if len(models) == 1 else "models"
    return Path("studies") / f"{model}-{logs.pop() if len(logs) == 1 else 'logs'}"
