"""`rarebit diagnose`: find what is wasted in the tables of a run, or of a file of weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.cli.report import write_page
from rarebit.errors import DataError, ModelFileError, SettingsError

if TYPE_CHECKING:
    from rarebit.data.dataset import Splits
    from rarebit.diagnosis.report import Diagnosis

DESCRIPTION = "model.json"
"""The file next to the weights in the folder of a model."""
MOST_FINDINGS = 8


def diagnose_command(
    target: Annotated[
        Path,
        Argument(
            help="Folder of a run, made by rarebit train, or a .safetensors file.", readable=False
        ),
    ],
    data: Annotated[
        Path | None,
        Option(
            help="A prepared folder, for training counts. Default: that of the run.", readable=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Write diagnosis.json and the plots to this folder.", readable=False),
    ] = None,
    json_: opt.Json = False,
    no_plots: opt.NoPlots = False,
) -> None:
    """Find what is wasted in tables, and what to try: collapsed spectra, dead and rare rows."""
    found = _diagnose(target, data)
    files = [] if out is None else found.save(out, plots=not no_plots)
    if json_:
        print(json.dumps(found.to_mapping()))
        return
    show_diagnosis(found, title=f"Tables of {target}")
    if target.is_file() and target.with_name(DESCRIPTION).exists():
        screen.console.print("To see each field:")
        screen.command("diagnose", str(target.parent))
    if files:
        screen.line(f"\nWritten to {out}: {', '.join(file.name for file in files)}")
        assert out is not None, "files are written to it"
        write_page(out)
    else:
        screen.console.print("\nTo keep the numbers and plots: --out FOLDER")


def show_diagnosis(found: "Diagnosis", *, title: str, to: Console = screen.console) -> None:
    """Print the figures of all tables, what they mean, and what to try."""
    to.print(Text(title, style="bold"), soft_wrap=True)
    for section in found.sections(wide=to.width >= screen.WIDE):
        if isinstance(section, str):
            to.print(Text(section))
            continue
        if section.title:
            to.print(Text(f"\n{section.title}", style="bold"))
        numbers = [name for name in section.header[1:] if name != "methods"]
        screen.table(
            section.header, section.rows, note=section.note, left=["methods"], fixed=numbers, to=to
        )
    if found.findings:
        to.print(Text("\nWhat is wasted, and what to try", style="bold"))
    for number, finding in enumerate(found.findings[:MOST_FINDINGS], start=1):
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(f"{number}.", Text(str(finding)))
        to.print(line)
    more = len(found.findings) - MOST_FINDINGS
    if more > 0:
        to.print(f"And {more} more, in diagnosis.json (--out FOLDER) and in --json.")
    if found.notes:
        to.print()
    for note in found.notes:
        to.print(Text(note))


def _diagnose(target: Path, data: Path | None) -> "Diagnosis":
    from rarebit.diagnosis.diagnose import diagnose, diagnose_file
    from rarebit.training.model_file import load_model
    from rarebit.training.run import read_reports

    if not target.is_dir():
        if data is not None and target.exists():
            raise SettingsError(
                f"--data needs the folder of a run; {str(target)!r} is a file of weights, which does not "
                "say which of them belong to which field"
            )
        return diagnose_file(target)
    found = diagnose(load_model(target), _training_data(target, data))
    try:
        return replace(found, reports=read_reports(target))
    except ModelFileError:  # a model saved by hand; `_training_data` has reported what is missing
        return found


def _training_data(run: Path, data: Path | None) -> "Splits | None":
    """Return the training data of a model; None, with the reason on standard error, if it is gone."""
    from rarebit.data.dataset import Dataset
    from rarebit.training.run import read_run
    from rarebit.training.settings import load_splits

    if data is not None:
        return Dataset.open(str(data)).splits
    try:
        settings = read_run(run)
        with screen.RunBars() as progress:
            return load_splits(settings.data, progress=progress.rows)
    except (DataError, ModelFileError) as error:
        screen.line(f"without training counts: {error}", to=screen.errors)
        return None
