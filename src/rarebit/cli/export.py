"""`rarebit export`: a trained model as a file that scores without Rarebit."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.errors import DataError, ModelFileError

if TYPE_CHECKING:
    from rarebit.data.dataset import Dataset
    from rarebit.export.export import Exported

FORMATS = {"onnx": ".onnx", "pt2": ".pt2", "triton": "-triton", "torch": "-torch"}
"""Formats, and how the name of what is written ends if --out is not given."""


def export_command(  # noqa: PLR0917  # typer calls it by name
    run: Annotated[
        Path, Argument(help="Folder of a run, made by rarebit train; with --apply, an ONNX file.")
    ],
    to: Annotated[
        str,
        Option(
            help="onnx (raw values in, scores out), triton (a model of a Triton repository), pt2 (a program of "
            "torch.export, ids in), or torch (plain tables and the vocabulary).",
            autocompletion=opt.complete(lambda: list(FORMATS)),
        ),
    ] = "onnx",
    out: Annotated[
        Path | None, Option(help="The file or folder to write. Default: the name of the run.")
    ] = None,
    ids: Annotated[
        bool, Option("--ids", help="Take ids and numbers as inputs, not raw values.")
    ] = False,
    since: Annotated[
        Path | None,
        Option(
            help="An exported ONNX file, or the run that it was exported from: write a delta, which is what "
            "changed since."
        ),
    ] = None,
    apply: Annotated[
        Path | None,
        Option(help="A delta: apply it to an ONNX file, and write the new one to --out."),
    ] = None,
) -> None:
    """Export a trained model to a file, and check its scores in a fresh process without Rarebit."""
    from rarebit.export.delta import apply_delta, read_delta
    from rarebit.export.export import Format, choose_format, export
    from rarebit.training.model_file import load_model

    if apply is not None:
        made = apply_delta(run, apply, out or apply.with_suffix(FORMATS["onnx"]))
        screen.line(f"{made}: version {read_delta(apply).version}")
        return
    chosen: Format = choose_format(to)

    def write(run: Path, target: Path, since: Path | None = None) -> "Exported":
        rows, facts = rows_and_facts(run)
        return export(
            load_model(run),
            target,
            to=chosen,
            ids=ids or None,
            rows=rows,
            facts=facts,
            since=since,
        )

    target = out or Path(f"{run.resolve().name}{'.delta' if since else FORMATS[chosen]}")
    if since is not None:
        with tempfile.TemporaryDirectory() as folder:
            if since.is_dir():
                since = write(since, Path(folder) / "since.onnx").path
            exported = write(run, target, since)
        delta = read_delta(target)
        screen.line(str(exported))
        screen.line(f"It makes version {delta.version} of version {delta.base_version}.")
        return
    exported = write(run, target)
    screen.line(str(exported))
    if chosen == "onnx" and not ids:
        screen.line(f"Serve it: rarebit serve {target}")


def rows_and_facts(run: Path) -> "tuple[Dataset | None, dict[str, Any]]":
    """Return rows of the log that the model has not learned, where they are at hand, and what is known of the training."""
    from rarebit.training.run import read_facts, read_run
    from rarebit.training.settings import PreparedLog, load_splits

    try:
        settings, facts = read_run(run), read_facts(run)
    except ModelFileError:
        return None, {}  # a model that save_model wrote
    if not isinstance(settings.data, PreparedLog):
        return None, facts
    try:
        return load_splits(settings.data).test, facts
    except DataError as error:
        screen.line(f"The file is checked on generated rows, since the log is not at hand: {error}")
        return None, facts
