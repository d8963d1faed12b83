"""`rarebit train`: train one model and save it in a folder."""

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

from typer import Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.cli.report import write_page
from rarebit.settings import read_toml, size

if TYPE_CHECKING:
    from rarebit.training.run import RunResult
    from rarebit.training.settings import RunSettings


def train(  # noqa: PLR0917  # typer calls it by name
    model: opt.Model = None,
    data: opt.Data = None,
    methods: Annotated[
        str | None,
        Option(
            help="Methods joined by +, such as low-rank:rank=4. See rarebit methods.",
            autocompletion=opt.complete_methods,
        ),
    ] = None,
    config: opt.Config = None,
    out: opt.Out = None,
    resume: opt.Resume = None,
    rows: opt.Rows = None,
    epochs: opt.Epochs = None,
    batch_size: opt.BatchSize = None,
    lr: opt.Lr = None,
    tables: Annotated[
        str | None,
        Option(help="Rows that a step updates: all (dense) or those in the batch (rowwise)."),
    ] = None,
    one_pass: Annotated[
        bool,
        Option(
            "--one-pass",
            help="Train once over all rows in file order; score each batch before training on it.",
        ),
    ] = False,
    seed: opt.Seed = None,
    set_: opt.Set = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    engine: Annotated[
        str | None,
        Option(
            help="torchrec: tables over the processes of torchrun, which starts this command. Default: one process."
        ),
    ] = None,
    plan: Annotated[
        str, Option(help="With an engine: how tables lie: auto, table, row or column.")
    ] = "auto",
    timeout: Annotated[
        float, Option(help="With an engine: seconds to wait for another process.")
    ] = 300.0,
) -> None:
    """Train a ranking model and save it in a folder. Options override the settings file."""
    from rarebit.training.run import read_run, run, run_spread
    from rarebit.training.settings import RunSettings

    if resume is not None:
        others = {"--config": config, "--out": out, "--methods": methods}
        opt.refuse_with("--resume", others, ": the run has its own")
        values = read_run(resume).to_mapping()
    else:
        values = read_toml(config) if config is not None else {}
    training = opt.given(epochs=epochs, batch_size=batch_size, lr=lr, tables=tables, seed=seed)
    training |= {"one_pass": True} if one_pass else {}
    opt.override_run(values, model=model, data=data, training=training, assignments=set_)
    opt.override(values, "data", "rows", rows)
    if methods is not None:
        values["methods"] = opt.read_methods(methods)
    settings = RunSettings.from_mapping(values)
    if engine is not None:
        folder = opt.shared_folder(engine, resume or out)
        words = ("--engine", engine, "--plan", plan, "--resume", str(folder))
        with opt.one_of_several("train", *words), screen.RunBars() as progress:
            result = run_spread(
                settings,
                folder=folder,
                resume=resume is not None or opt.was_restarted(folder),
                device=str(opt.choose_device(device)),
                plan=opt.choose_plan(plan),
                timeout=timedelta(seconds=timeout),
                progress=progress,
                say=progress.say,
            )
        if result is not None:
            _report(settings, result)
        return
    folder = resume or out or opt.new_folder(settings.model)
    again = opt.choose_threads(threads) + ([] if device == "auto" else ["--device", device])
    with opt.resumable("train", "--resume", str(folder), *again), screen.RunBars() as progress:
        done = run(
            settings,
            folder=folder,
            resume=resume is not None,
            device=opt.choose_device(device),
            progress=progress,
            data_progress=progress.rows,
            say=progress.say,
        )
    _report(settings, done)


def _report(settings: "RunSettings", result: "RunResult") -> None:
    from rarebit.training.settings import PreparedLog

    log = settings.data
    name = log.folder if isinstance(log, PreparedLog) else "the built-in click log"
    figures = {
        **screen.evaluation_figures(result.test),
        "parameters": f"{result.num_parameters:,}",
        "bytes of tables": size(result.table_bytes),
        "training speed": f"{result.history.samples_per_second:,.0f} samples/s",
    }
    if settings.training.one_pass:
        screen.figures(f"{settings.model} in one pass over {name}", figures)
        aucs = result.history.reports["one-pass"]["auc"]
        shown = ", ".join("-" if auc is None else f"{auc:.4f}" for auc in aucs)
        screen.console.print(f"AUC of each tenth of the rows, before training on it: {shown}.")
    else:
        screen.figures(f"{settings.model} on the test split of {name}", figures)
        best, trained = result.history.best_epoch, len(result.history.epochs)
        screen.console.print(
            f"Weights of epoch {best} of {trained}, the best on the validation split."
        )
        for hint in filter(None, (epoch_hint(best, trained), *result.hints)):
            screen.console.print(hint)
    screen.line(f"\nSaved in {result.folder}. To score data with it:")
    screen.command("predict", "--model", str(result.folder))
    if result.folder is not None:
        write_page(result.folder)


def epoch_hint(best: int | None, epochs: int) -> str:
    """Return what the best epoch suggests, or nothing."""
    if epochs > 1 and best == epochs:
        return "The last epoch was the best: more epochs may be better (--epochs)."
    if epochs > 1 and best == 1:
        return "The first epoch was the best: later ones may overfit rare rows."
    return ""
