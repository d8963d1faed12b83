"""`rarebit diagnose`: what is wrong with the tables of a run, or of a bare file of weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rarebit.cli.show import BarProgress, console, errors, how_to_call
from rarebit.data.dataset import Dataset, Splits
from rarebit.diagnosis.diagnose import diagnose, diagnose_file
from rarebit.diagnosis.report import TRAINED_AS_PRODUCTS, Diagnosis
from rarebit.diagnosis.text import explanation, reweighting_cells, table_cells
from rarebit.diagnosis.transfer import LEDGER_TITLE, barrier_cells, ledger_cells, ledger_notes
from rarebit.errors import DataError, ModelFileError, SettingsError
from rarebit.training.model_file import load_model
from rarebit.training.run import read_reports, read_run
from rarebit.training.run_settings import load_splits

__all__ = ["diagnose_command", "show_diagnosis"]

DESCRIPTION = "model.json"
"""What lies beside the weights in the folder of a model."""
WIDE = 110
"""From this width of the terminal on, all figures are shown."""
MOST_FINDINGS = 8


def diagnose_command(  # typer calls it by name
    target: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, as rarebit train leaves it, or a .safetensors file.",
            readable=False,
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder made by rarebit data prepare, for the training counts; that of the run "
            "if not given.",
            readable=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write diagnosis.json and the plots to this folder.", readable=False),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print nothing but the diagnosis as one JSON object.")
    ] = False,
    no_plots: Annotated[
        bool, typer.Option("--no-plots", help="Write diagnosis.json only: needs no matplotlib.")
    ] = False,
) -> None:
    """Say what is wasted in the tables of a run or file, and what to try: spectra, dead and rare rows."""
    found = _diagnose(target, data)
    files = [] if out is None else found.save(out, plots=not no_plots)
    if json_:
        print(json.dumps(found.to_mapping()))
        return
    show_diagnosis(found, title=f"Tables of {target}")
    if target.is_file() and target.with_name(DESCRIPTION).exists():
        where = f"To see each field by itself: {how_to_call()} diagnose {target.parent}"
        console.print(where, markup=False, soft_wrap=True)
    if files:
        names = ", ".join(file.name for file in files)
        console.print(f"\nWritten to {out}: {names}", markup=False, soft_wrap=True)
    else:
        console.print("\nTo keep the numbers and plots: --out FOLDER")


def show_diagnosis(found: Diagnosis, *, title: str, to: Console = console) -> None:
    """Print the figures of all tables, what they mean, and what to try."""
    to.print(Text(title, style="bold"), soft_wrap=True)
    if found.wide_tables:
        headers, lines = table_cells(found.wide_tables, wide=to.width >= WIDE)
        to.print(_figures(headers, lines))
        to.print(Text(explanation(headers), style="dim"))
    headers, lines = reweighting_cells(found.tables)
    if lines:
        to.print(Text(f"\n{TRAINED_AS_PRODUCTS}", style="bold"))
        to.print(_figures(headers, lines))
        to.print(Text(explanation(headers), style="dim"))
    if found.transfer is not None:
        _show_ledger(found.transfer, to)
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


def _show_ledger(ledger: Mapping[str, Any], to: Console) -> None:
    to.print(Text(f"\n{LEDGER_TITLE}", style="bold"))
    for headers, lines in (ledger_cells(ledger), barrier_cells(ledger)):
        if lines:
            to.print(_figures(headers, lines))
            to.print(Text(explanation(headers), style="dim"))
    for note in ledger_notes(ledger):
        to.print(Text(note))


def _diagnose(target: Path, data: Path | None) -> Diagnosis:
    if target.is_dir():
        model = load_model(target)
        return replace(diagnose(model, _training_data(target, data)), reports=_reports(target))
    if data is not None and target.exists():
        raise SettingsError(
            f"--data goes with the folder of a run, and {str(target)!r} is a file of weights, which "
            "does not say which of them belong to which field"
        )
    return diagnose_file(target)


def _reports(run: Path) -> dict[str, Any]:
    """Return what methods tell of a run; none of a model that was saved by hand."""
    try:
        return read_reports(run)
    except ModelFileError:  # what is wrong with it is told where its data is looked for
        return {}


def _training_data(run: Path, data: Path | None) -> Splits | None:
    """Return what a model was trained on; None, and a line that says why, where that is gone."""
    if data is not None:
        return Dataset.open(str(data)).splits
    try:
        settings = read_run(run)
        with BarProgress() as progress:
            return load_splits(settings.data, progress=progress.rows)
    except (DataError, ModelFileError) as error:
        errors.print(f"without training counts: {error}", markup=False, soft_wrap=True)
        return None


def _figures(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, header in enumerate(headers):
        name = place == 0
        table.add_column(
            header,
            justify="left" if name or header == "methods" else "right",
            no_wrap=not name and header != "methods",
            overflow="fold",
            min_width=8 if name else None,
        )
    for line in lines:
        table.add_row(*map(Text, line))
    return table
