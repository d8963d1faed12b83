"""`rarebit prune`: prune one model to several budgets, retrain each, and pack it."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.errors import MissingExtraError, SettingsError
from rarebit.settings import from_mapping, read_toml, require, size
from rarebit.technique import BASELINE, technique_name, technique_text

if TYPE_CHECKING:
    from rarebit.pruning import PruneResult
    from rarebit.training.settings import RunSettings

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}


def prune(  # noqa: PLR0917  # typer calls it by name
    data: opt.Data = None,
    model: opt.Model = None,
    budgets: Annotated[
        str | None, Option(help="Entries to keep in all tables together: 30000,20000,10000.")
    ] = None,
    sparsity: Annotated[
        str | None, Option(help="Or the share of zero entries: 0.9,0.97,0.99.")
    ] = None,
    bytes_: Annotated[
        str | None, Option("--bytes", help="Or the bytes of the packed tables: 2MB,500kB.")
    ] = None,
    methods: Annotated[
        str | None,
        Option(
            help="Methods applied first, such as mlet:inner_dim=64; pep learns thresholds.",
            autocompletion=opt.complete_methods,
        ),
    ] = None,
    start: Annotated[
        str | None,
        Option(
            help="Retrain from initial values (ticket), random ones (random), or not (trained)."
        ),
    ] = None,
    prune_epochs: Annotated[
        int | None, Option(help="Epochs of pruning. Default: the maximum epochs of training.")
    ] = None,
    prune_tables: Annotated[
        str | None,
        Option(help="Optimizer during pruning: dense or rowwise. Default: rowwise on a schedule."),
    ] = None,
    epochs: opt.Epochs = None,
    batch_size: opt.BatchSize = None,
    lr: opt.Lr = None,
    seed: opt.Seed = None,
    config: opt.Config = None,
    set_: opt.Set = None,
    out: opt.Out = None,
    resume: opt.Resume = None,
    no_plots: opt.NoPlots = False,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Prune the tables of a model to one or several budgets, retrain what is left, and pack it."""
    from rarebit.pruning import PruneSettings, prune_run, read_prune
    from rarebit.training.settings import RunSettings

    training = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    if resume is not None:
        given: dict[str, object] = {"--config": config, "--out": out, "--data": data}
        given |= {"--model": model, "--budgets": budgets, "--sparsity": sparsity, "--bytes": bytes_}
        given |= {"--methods": methods, "--start": start, "--set": set_ or None}
        given["--prune-tables"] = prune_tables
        given |= {f"--{name.replace('_', '-')}": value for name, value in training.items()}
        opt.refuse_with("--resume", given, ": the pruning in the folder has its own")
        settings, pruning = read_prune(resume)
        if prune_epochs is not None:
            require(
                any(technique_name(method) == "pep" for method in settings.methods),
                "--prune-epochs cannot be combined with --resume: a schedule has a fixed end; only learned "
                "thresholds may be given more epochs",
            )
            pruning = replace(pruning, epochs=prune_epochs)
    else:
        values = read_toml(config) if config is not None else {}
        opt.override_run(values, model=model, data=data, training=training, assignments=set_)
        if methods is not None:
            values["methods"] = opt.read_methods(methods)
        settings = RunSettings.from_mapping(values)
        how_far = opt.given(
            budgets=_numbers("--budgets", budgets, int),
            sparsity=_numbers("--sparsity", sparsity, float),
            num_bytes=_numbers("--bytes", bytes_, _bytes),
            start=start,
            epochs=prune_epochs,
            tables=prune_tables,
        )
        pruning = from_mapping(PruneSettings, how_far)
    folder = resume or out or opt.new_folder(f"{settings.model}-pruned")
    again = opt.choose_threads(threads) + ([] if device == "auto" else ["--device", device])
    again += ["--no-plots"] if no_plots else []
    with opt.resumable("prune", "--resume", str(folder), *again), screen.RunBars() as progress:
        result = prune_run(
            settings,
            pruning,
            folder=folder,
            resume=resume is not None,
            device=opt.choose_device(device),
            progress=progress,
            data_progress=progress.rows,
            say=progress.say,
        )
    _show(result, f"{settings.model}, pruned")
    first = [technique_text(method) for method in settings.methods]
    methods = "+".join([*first, technique_text(pruning.method(min(result.pruned)))])
    screen.line("One seed means little. To compare with magnitude pruning over several seeds:")
    screen.command("compare", "--methods", f"{BASELINE},{methods}", *opt.run_words(settings))
    _explain(result, settings, plots=not no_plots)
    screen.line(f"\nSaved in {result.folder}. To score data with the smallest model:")
    screen.command("predict", "--model", str(result.folder / str(min(result.pruned))))


def _show(result: "PruneResult", title: str) -> None:
    """Print one line per budget, and the unpruned model first; with the spread of learned thresholds."""
    whole, rows = result.unpruned, []
    for kept, found in [(result.entries, whole), *result.pruned.items()]:
        change = None
        if found is not whole and found.test.auc is not None and whole.test.auc is not None:
            change = found.test.auc - whole.test.auc
        rows.append(
            [
                f"{kept:,}",
                f"{kept / result.entries:.1%}",
                size(found.table_bytes),
                _number(found.test.auc),
                "" if found is whole else _number(change, "+.4f"),
                _number(found.test.rarest.auc if found.test.rarest else None),
                result.learned_levels(kept),
            ]
        )
    header = ["entries left", "of all", "tables", "test AUC", "against unpruned", "rarest fifth"]
    header.append("learned s")
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    screen.table(header, rows, title=title)


def _explain(result: "PruneResult", settings: "RunSettings", *, plots: bool) -> None:
    from rarebit.pruning import explain_pruning
    from rarebit.training.settings import load_splits

    train = load_splits(settings.data).train
    try:
        files = explain_pruning(result, train, plots=plots)
    except MissingExtraError as missing:
        screen.line(f"no plots: {missing}", to=screen.errors)
        files = explain_pruning(result, train, plots=False)
    names = ", ".join(path.name for path in files)
    screen.line(f"How much each row kept: {names} in {files[0].parent}")


def _numbers(option: str, text: str | None, read: Callable[[str], float]) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(read(part.strip().replace("_", "")) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"{option} takes numbers separated by commas, got {text!r}") from None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+)\s*([kMG]?B?)", text, flags=re.IGNORECASE)
    unit = found[2].upper() if found else ""
    if found is None or unit not in UNITS:
        raise ValueError(text)
    return int(float(found[1]) * UNITS[unit])


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)
