"""`rarebit report`: a page from stored results, to look at and to send."""

import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rarebit.cli import screen
from rarebit.errors import ReportError


def report_command(
    target: Annotated[
        Path,
        Argument(
            help="Folder of a run, study, diagnosis, pruning, frontier, backtest, improvement or text recipe; or a JSON file of "
            "one.",
            readable=False,
        ),
    ],
    out: Annotated[
        Path | None,
        Option(help="The page. Default: report.html in the folder; NAME.html for NAME.json."),
    ] = None,
    open_: Annotated[bool, Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write one self-contained page of stored results: verdict, charts, tables, settings."""
    from rarebit.report.report import report

    file = report(target, out)
    screen.line(f"Page: {file}")
    if open_ and not webbrowser.open(file.absolute().as_uri()):
        screen.line("no browser was found; open the file yourself", to=screen.errors)


def write_page(folder: Path) -> None:
    """Write the page of a folder that a command has filled, and say where it is."""
    from rarebit.report.report import report

    try:
        screen.line(f"Page: {report(folder)}")
    except ReportError as error:  # the results are there; the page can be made later
        screen.line(f"no page: {error}", to=screen.errors)
