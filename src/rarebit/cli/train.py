"""`rarebit train`: one model, trained and kept in a folder."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from rarebit.cli.common import (
    DeviceOption,
    SetOption,
    choose_device,
    new_folder,
    override,
    override_run,
    told_how_to_go_on,
)
from rarebit.cli.show import BarProgress, console, errors, how_to_call, show_run
from rarebit.errors import SettingsError
from rarebit.models import model_names
from rarebit.settings import read_toml
from rarebit.technique import parse_techniques, technique_to_mapping
from rarebit.training.run import RunResult, read_run, run
from rarebit.training.run_settings import PreparedLog, RunSettings

__all__ = ["train"]


def train(  # noqa: PLR0917  # typer calls it by name
    model: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(model_names())}; deepfm if not given.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder made by rarebit data prepare; or synthetic, the built-in click log."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods joined by +, with settings after colons, as low-rank:rank=4. See rarebit methods."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help=r"A TOML file: \[model], \[data], \[training], \[\[methods]].", readable=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run; a new one below runs/ if not given.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the run in this folder, from its newest checkpoint.", readable=False
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of the generated click log.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Most passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    tables: Annotated[
        str | None,
        typer.Option(help="dense: every row in every step; rowwise: the rows a step looked up."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Initial weights and order of the rows.")] = None,
    set_: SetOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Train a ranking model and keep it in a folder. Options win over the settings file."""
    values = _first_settings(config, resume, out, methods)
    training = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "tables": tables,
        "seed": seed,
    }
    override_run(values, model=model, data=data, training=training, assignments=set_)
    override(values, "data", "rows", rows)
    if methods is not None:
        values["methods"] = _read_methods(methods)
    settings = RunSettings.from_mapping(values)
    folder = resume or out or new_folder(settings.model)
    result = _train(settings, folder, device, resume=resume is not None)
    place = shlex.quote(str(result.folder))
    console.print(f"\nSaved in {result.folder}. To score with it:", soft_wrap=True, markup=False)
    console.print(f"  {how_to_call()} predict --model {place}", soft_wrap=True, markup=False)


def _first_settings(
    config: Path | None, resume: Path | None, out: Path | None, methods: str | None
) -> dict[str, Any]:
    """Return the settings that options change: of a file, of the run to go on with, or none."""
    if resume is None:
        return read_toml(config) if config is not None else {}
    for name, given in {"--config": config, "--out": out, "--methods": methods}.items():
        if given is not None:
            raise SettingsError(f"{name} has no place beside --resume: the run has its own")
    return read_run(resume).to_mapping()


def _read_methods(text: str) -> list[dict[str, Any]]:
    """Return the methods of one run, as a settings file holds them."""
    found = parse_techniques(text)
    if len(found) != 1:
        raise SettingsError(
            f"--methods is one combination for a run, got {len(found)}: {text!r}; join methods by +, or "
            "compare them: rarebit compare"
        )
    for part in found[0].parts:
        if not part.is_sized:
            raise SettingsError(
                f"a run needs the size of {part.name}, got {part.text!r}; give it after a colon: see rarebit "
                "methods"
            )
    return [technique_to_mapping(part.build()) for part in found[0].parts]


def _train(settings: RunSettings, folder: Path, device: str, *, resume: bool = False) -> RunResult:
    again = f"{how_to_call()} train --resume {shlex.quote(str(folder))}"
    with told_how_to_go_on(again), BarProgress() as progress:
        result = run(
            settings,
            folder=folder,
            resume=resume,
            device=choose_device(device),
            progress=progress,
            data_progress=progress.rows,
            say=errors.print,
        )
    log = settings.data
    name = log.folder if isinstance(log, PreparedLog) else "the built-in click log"
    show_run(result, f"{settings.model} on the test split of {name}", settings.methods)
    return result
