"""`rarebit improve`: a better, smaller model within a time, with the proof on a page."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.cli.report import write_page
from rarebit.errors import DataError, ExportError, MissingExtraError, StudyInterrupted
from rarebit.settings import read_toml

EXAMPLES = """[bold]Examples[/bold]

rarebit improve --data data/clicks --model dcn_v2 --size 1/16 --minutes 60 --out improved

rarebit improve --data data/clicks --size none --minutes 30
"""
EXPORTED = "model.onnx"


def improve(  # noqa: PLR0917  # typer calls it by name
    data: opt.Data = None,
    model: opt.Model = None,
    size: Annotated[
        str,
        Option(help="Bytes of all tables together: 1/16 or 0.05 of the plain ones, 2MB, or none."),
    ] = "1/16",
    minutes: Annotated[float, Option(help="The time for everything.")] = 60.0,
    config: opt.Config = None,
    set_: opt.Set = None,
    out: Annotated[
        Path | None, Option(help="Folder of the result. Default: improved/MODEL-DATA.")
    ] = None,
    trials: Annotated[
        int | None, Option(help="Settings tried for each side. Default: what fits the time.")
    ] = None,
    seeds: Annotated[
        int | None, Option(help="Paired seeds on the test rows. Default: what fits the time.")
    ] = None,
    workers: Annotated[
        int | None, Option(help="Parallel runs. Default: one per core, one on a GPU.")
    ] = None,
    together: opt.Together = "auto",
    device: opt.Device = "auto",
) -> None:
    """Look for methods that rank better on a log, prove it on unused test rows, and store the tables smaller.

    "Keep what you have" is an answer. What is finished is kept: the same command resumes.
    """
    from rarebit.settings import require
    from rarebit.study.improve import improve as run_improve

    values = read_toml(config) if config is not None else {}
    opt.override_run(values, model=model, data=data, training={}, assignments=set_)
    require("data" in values, "improve what? Give --data data/clicks, or --data synthetic")
    require(
        "methods" not in values, "improve chooses the methods; take [[methods]] out of the file"
    )
    sections = {name: values.get(name, {}) for name in ("model", "data", "training")}
    sections["model"].setdefault("name", "deepfm")
    log = Path(str(sections["data"].get("folder", "synthetic"))).name
    folder = out or Path("improved") / f"{sections['model']['name']}-{log}"
    resume = f"to go on: {screen.command_text(*sys.argv[1:])}"
    try:
        with screen.StudyBars() as progress:
            found = run_improve(
                **sections,
                folder=folder,
                size=None if size == "none" else opt.size_or_share(size),
                minutes=minutes,
                trials=trials,
                seeds=seeds,
                workers=workers,
                together=opt.choose_together(together),
                device=opt.choose_device(device),
                progress=progress,
                say=progress.say,
            )
    except StudyInterrupted as stopped:
        write_page(folder)
        opt.stop(f"{stopped} {resume}", code=130)
    except KeyboardInterrupt:
        opt.stop(f"stopped; finished runs are kept; {resume}", code=130)
    screen.console.print(f"\n{found.verdict}", style="bold")
    for line in found.caveats:
        screen.console.print(line)
    if found.model is not None:
        _export(folder)
        screen.line(f"\nSaved in {folder}. To score data with it:")
        screen.command("predict", "--model", str(folder))
    write_page(folder)
    if found.outcome == "stopped":
        opt.stop(f"give it more --minutes; {resume}", code=1)


def _export(folder: Path) -> None:
    """Write the model for serving, where the packages for it are there."""
    from rarebit.cli.export import rows_and_facts
    from rarebit.export.export import export
    from rarebit.training.model_file import load_model
    from rarebit.training.run import read_run
    from rarebit.training.settings import PreparedLog

    try:
        rows, facts = rows_and_facts(folder)
        ids = None if isinstance(read_run(folder).data, PreparedLog) else True
        made = export(load_model(folder), folder / EXPORTED, ids=ids, rows=rows, facts=facts)
        screen.line(f"Exported: {made.path}")
    except (MissingExtraError, ExportError, DataError) as problem:
        screen.line(f"not exported: {problem}", to=screen.errors)
