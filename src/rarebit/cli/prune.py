"""`rarebit prune`: one model, pruned to several budgets, each trained again and packed."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rarebit.cli.common import (
    DeviceOption,
    SetOption,
    choose_device,
    new_folder,
    override_run,
    told_how_to_go_on,
)
from rarebit.cli.show import BarProgress, console, errors, how_to_call
from rarebit.errors import MissingExtraError, SettingsError
from rarebit.models import model_names
from rarebit.pruning._insight import explain_pruning
from rarebit.pruning._run import PruneResult, PruneSettings, prune_run, read_prune
from rarebit.pruning.pep import PEP
from rarebit.settings import from_mapping, read_toml, require, size
from rarebit.technique import parse_techniques, technique_to_mapping
from rarebit.training.run import RunResult
from rarebit.training.run_settings import RunSettings, load_splits

__all__ = ["prune"]

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}


def prune(  # noqa: PLR0917  # typer calls it by name
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder made by rarebit data prepare; or synthetic, the built-in click log."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(model_names())}; deepfm if not given.")
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(help="Entries to be left over all tables, with commas: 30000,20000,10000."),
    ] = None,
    sparsity: Annotated[
        str | None, typer.Option(help="Or shares of the entries to be zero: 0.9,0.97,0.99.")
    ] = None,
    bytes_: Annotated[
        str | None,
        typer.Option("--bytes", help="Or bytes that the packed tables may have: 2MB,500kB."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods below the pruning, such as mlet:inner_dim=64; or pep, to learn the thresholds."
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="What is left is trained again from ticket, its first values; from random ones; or "
            "trained: not again."
        ),
    ] = None,
    prune_epochs: Annotated[
        int | None, typer.Option(help="Epochs of pruning; as many as of training if not given.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Most passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Initial weights and order of the rows.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help=r"A TOML file: \[model], \[data], \[training], \[\[methods]].", readable=False
        ),
    ] = None,
    set_: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for all of it; a new one below runs/ if not given."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the pruning in this folder.", readable=False),
    ] = None,
    no_plots: Annotated[
        bool, typer.Option("--no-plots", help="Write insight.json only: needs no matplotlib.")
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Cut entries of a model's tables until budgets are met, train what is left again, and pack it."""
    how_far = {
        "budgets": _numbers("--budgets", budgets, int),
        "sparsity": _numbers("--sparsity", sparsity, float),
        "num_bytes": _numbers("--bytes", bytes_, _bytes),
        "start": start,
        "epochs": prune_epochs,
    }
    training = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    if resume is not None:
        given: dict[str, object] = {"--config": config, "--out": out, "--data": data}
        given |= {"--model": model, "--budgets": budgets, "--sparsity": sparsity, "--bytes": bytes_}
        given |= {"--methods": methods, "--start": start, "--set": set_ or None}
        given |= {f"--{name.replace('_', '-')}": value for name, value in training.items()}
        settings, pruning = _to_go_on_with(resume, given, prune_epochs)
    else:
        settings = _settings(
            config,
            model=model,
            data=data,
            training=training,
            assignments=set_ or [],
            methods=methods,
        )
        pruning = from_mapping(
            PruneSettings, {name: value for name, value in how_far.items() if value is not None}
        )
    folder = resume or out or new_folder(f"{settings.model}-pruned")
    result = _prune(settings, pruning, folder, device, resume=resume is not None)
    _show(result, f"{settings.model}, pruned")
    _explain(result, settings, plots=not no_plots)
    smallest = result.folder / str(min(result.pruned))
    saved = f"\nSaved in {result.folder}. To score with the smallest:"
    console.print(saved, soft_wrap=True, markup=False)
    console.print(
        f"  {how_to_call()} predict --model {shlex.quote(str(smallest))}",
        soft_wrap=True,
        markup=False,
    )


def _prune(
    settings: RunSettings, pruning: PruneSettings, folder: Path, device: str, *, resume: bool
) -> PruneResult:
    again = f"{how_to_call()} prune --resume {shlex.quote(str(folder))}"
    with told_how_to_go_on(again), BarProgress() as progress:
        return prune_run(
            settings,
            pruning,
            folder=folder,
            resume=resume,
            device=choose_device(device),
            progress=progress,
            data_progress=progress.rows,
            say=progress.say,
        )


def _show(result: PruneResult, title: str) -> None:
    """Print a line for each budget beside the unpruned model."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in (
        "entries left",
        "of all",
        "tables",
        "test AUC",
        "against unpruned",
        "rarest fifth",
    ):
        table.add_column(name, justify="right")
    whole = result.unpruned
    for kept, found in [(result.entries, whole), *result.pruned.items()]:
        table.add_row(
            f"{kept:,}",
            f"{kept / result.entries:.1%}",
            size(found.table_bytes),
            _auc(found.test.auc),
            "" if found is whole else _difference(found, whole),
            _auc(found.test.rarest.auc if found.test.rarest else None),
        )
    console.print(table)
    console.print(
        "One seed says little. With more, and against cutting the smallest entries at once:\n  "
        f"{how_to_call()} compare --methods baseline,pruned:keep={min(result.pruned)}",
        soft_wrap=True,
        markup=False,
    )


def _explain(result: PruneResult, settings: RunSettings, *, plots: bool) -> None:
    train = load_splits(settings.data).train
    try:
        files = explain_pruning(result, train, plots=plots)
    except MissingExtraError as missing:
        errors.print(f"no plots: {missing}", markup=False, soft_wrap=True)
        files = explain_pruning(result, train, plots=False)
    console.print(
        f"Which rows kept how much: {', '.join(path.name for path in files)} in {files[0].parent}",
        soft_wrap=True,
        markup=False,
    )


def _numbers(option: str, text: str | None, read: Any) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(read(part.strip().replace("_", "")) for part in text.split(","))
    except ValueError:
        raise SettingsError(
            f"{option} takes numbers with commas between them, got {text!r}"
        ) from None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+)\s*([kMG]?B?)", text, flags=re.IGNORECASE)
    unit = found[2].upper() if found else ""
    if found is None or unit not in UNITS:
        raise ValueError(text)
    return int(float(found[1]) * UNITS[unit])


def _methods(text: str) -> list[dict[str, Any]]:
    found = parse_techniques(text)
    require(len(found) == 1, f"--methods takes one combination of methods here, got {text!r}")
    unsized = [part.name for part in found[0].parts if not part.is_sized]
    require(not unsized, f"{', '.join(unsized)} needs its size here, got {text!r}")
    return [technique_to_mapping(part.build()) for part in found[0].parts]


def _settings(
    config: Path | None,
    *,
    model: str | None,
    data: str | None,
    training: Mapping[str, object],
    assignments: Sequence[str],
    methods: str | None,
) -> RunSettings:
    """Return the run that is pruned: a file's settings, over which options win."""
    values: dict[str, Any] = read_toml(config) if config is not None else {}
    override_run(values, model=model, data=data, training=training, assignments=assignments)
    if methods is not None:
        values["methods"] = _methods(methods)
    return RunSettings.from_mapping(values)


def _to_go_on_with(
    folder: Path, given: Mapping[str, object], prune_epochs: int | None
) -> tuple[RunSettings, PruneSettings]:
    """Return what a pruning was asked for; learned thresholds may be given more epochs than they had."""
    beside = [name for name, value in given.items() if value is not None]
    require(
        not beside,
        f"{', '.join(beside)} has no place beside --resume: the pruning in the folder has its own",
    )
    settings, pruning = read_prune(folder)
    if prune_epochs is None:
        return settings, pruning
    require(
        any(isinstance(method, PEP) for method in settings.methods),
        "--prune-epochs has no place beside --resume: a schedule is to end where it was going to; only "
        "learned thresholds may be given more epochs",
    )
    return settings, replace(pruning, epochs=prune_epochs)


def _auc(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _difference(found: RunResult, whole: RunResult) -> str:
    if found.test.auc is None or whole.test.auc is None:
        return "-"
    return f"{found.test.auc - whole.test.auc:+.4f}"
