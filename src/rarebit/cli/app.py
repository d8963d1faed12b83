"""The commands of `rarebit`."""

import csv
import itertools
import json
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
import typer
from typer.core import TyperGroup

from rarebit import __version__
from rarebit.bench import bench_names, run_bench
from rarebit.cli.data import choose_bad_rows, data_app
from rarebit.cli.show import (
    BarProgress,
    console,
    errors,
    how_to_call,
    show_evaluation,
    show_run,
    show_scored,
)
from rarebit.data.dataset import Dataset, Splits
from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import ModelFileError, RarebitError, SettingsError, TrainingInterrupted
from rarebit.models import model_names
from rarebit.settings import read_toml, suggest
from rarebit.training.evaluate import Evaluation, evaluate, predict
from rarebit.training.model_file import load_model
from rarebit.training.run import (
    CHECKPOINTS,
    PreparedLog,
    RunResult,
    RunSettings,
    load_splits,
    read_run,
    run,
)
from rarebit.training.score import bad_rows_file, score_log

__all__ = ["app", "start"]

EXAMPLES = """[bold]Examples[/bold]

rarebit demo

rarebit train --model dcn_v2 --epochs 3 --out runs/first

rarebit train --config run.toml --set training.lr=0.003

rarebit data prepare clicks.csv --label click --out data/clicks

rarebit train --data data/clicks --out runs/clicks

rarebit predict --model runs/clicks --input new.csv --out scores.csv

rarebit bench train --json
"""

DEMO = {"model": {"name": "deepfm", "hidden": [128, 128]}, "training": {"epochs": 3}}
DEMO_FOLDER = Path("runs/demo")


class _Commands(TyperGroup):
    """All commands; Ctrl-C is an answer in one line, where Typer ends without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _stop("stopped; nothing unfinished is left behind", code=130)


app = typer.Typer(
    name="rarebit",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(data_app)

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]


def start() -> None:
    """Run a command; a user's mistake is one paragraph and exit code 2, never a traceback."""
    try:
        app(prog_name="rarebit")
    except RarebitError as error:
        _stop(str(error), code=2)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__)
        raise typer.Exit


@app.callback(epilog=EXAMPLES)
def _rarebit(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Embedding tables that are better on rare items, smaller, and able to grow."""
    del version


@app.command()
def demo(
    rows: Annotated[
        int, typer.Option(help="Rows of the generated click log.")
    ] = SyntheticLog().rows,
    device: DeviceOption = "auto",
) -> None:
    """Generate the built-in click log, train DeepFM on it, and say what to try next."""
    settings = RunSettings.from_mapping({**DEMO, "data": {"rows": rows}})
    shutil.rmtree(DEMO_FOLDER / CHECKPOINTS, ignore_errors=True)  # of the demo before
    result = _train(settings, DEMO_FOLDER, device)
    if _lags_on_rare_rows(result.test):
        console.print("It is furthest from what is possible on rows of rare values.")
    command = how_to_call()
    console.print("\nWhat to try next:")
    for purpose, words in {
        "score the test split again with the saved model": f"predict --model {DEMO_FOLDER}",
        f"train another model: {', '.join(model_names())}": "train --model dcn_v2",
        "see every option, and what a settings file may hold": "train --help",
        "compare a training step with hand-written torch": "bench train",
    }.items():
        console.print(f"  {purpose}\n    {command} {words}", markup=False, soft_wrap=True)
    console.print("The README shows how to use it on a model of your own.")


@app.command()
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
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, as section.name=value. May be repeated."),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Train a ranking model and keep it in a folder. Options win over the settings file."""
    values = _first_settings(config, resume, out)
    _override(values, "model", "name", model)
    if data is not None:
        values["data"] = {"source": data} if data == "synthetic" else {"folder": data}
    _override(values, "data", "rows", rows)
    _override(values, "training", "epochs", epochs)
    _override(values, "training", "batch_size", batch_size)
    _override(values, "training", "lr", lr)
    _override(values, "training", "tables", tables)
    _override(values, "training", "seed", seed)
    for assignment in set_ or []:
        _override(values, *_parse_assignment(assignment))
    settings = RunSettings.from_mapping(values)
    folder = resume or out or _new_folder(settings.model)
    result = _train(settings, folder, device, resume=resume is not None)
    place = shlex.quote(str(result.folder))
    console.print(f"\nSaved in {result.folder}. To score with it:", soft_wrap=True, markup=False)
    console.print(f"  {how_to_call()} predict --model {place}", soft_wrap=True, markup=False)


@app.command(name="predict")
def predict_(  # noqa: PLR0917  # typer calls it by name
    model: Annotated[
        Path, typer.Option(help="Folder of a run, as rarebit train leaves it.", readable=False)
    ],
    input_: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="A raw log to score: .csv .tsv .txt (.gz ...) or .parquet.",
            readable=False,
        ),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Without --input, which split to score: train, valid or test.")
    ] = "test",
    out: Annotated[
        Path | None, typer.Option(help="Write the score of every row to this CSV file.")
    ] = None,
    bad_rows: Annotated[
        str, typer.Option(help="stop at rows that cannot be read, or set them aside in a file.")
    ] = "stop",
    device: DeviceOption = "auto",
) -> None:
    """Score a raw log, or a split of the log a model was trained on, and measure the scores."""
    if input_ is not None:
        _score(model, input_, out, choose_bad_rows(bad_rows), device)
        return
    if split not in Splits._fields:
        raise SettingsError(f"unknown split {split!r}{suggest(split, Splits._fields)}")
    settings = read_run(model)
    loaded = load_model(model, device=_device(device))
    with BarProgress() as progress:
        splits = load_splits(settings.data, progress=progress.rows)
    chosen: Dataset = getattr(splits, split)
    if out is not None:
        _write_scores(out, torch.sigmoid(predict(loaded, chosen)), chosen)
        console.print(f"{len(chosen):,} scores in {out}", soft_wrap=True, markup=False)
    evaluation = evaluate(loaded, chosen, counts=splits.train.counts())
    show_evaluation(evaluation, f"{settings.model} from {model}, {split} split")


def _score(
    folder: Path, log: Path, out: Path | None, bad_rows: Literal["stop", "aside"], device: str
) -> None:
    loaded = load_model(folder, device=_device(device))
    with BarProgress() as progress:
        scored = score_log(
            loaded,
            log,
            out=out,
            bad_rows=bad_rows,
            progress=lambda done, total: progress.stage("reading", done, total),
        )
    show_scored(scored, f"{folder} on {log}")
    read = scored.rows + scored.bad_rows
    console.print(f"{read:,} rows read = {scored.rows:,} scored + {scored.bad_rows:,} set aside.")
    if out is None:
        console.print("To keep the scores: --out scores.csv")
        return
    console.print(f"{scored.rows:,} scores in {out}", soft_wrap=True, markup=False)
    if scored.bad_rows:
        console.print(f"Set aside in {bad_rows_file(out)}.", soft_wrap=True, markup=False)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(bench_names())}.")],
    json_: Annotated[
        bool, typer.Option("--json", help="Print nothing but the result as one JSON object.")
    ] = False,
) -> None:
    """Measure something beside its reference in one interleaved run. The last line is JSON."""
    result = run_bench(name, say=_be_quiet if json_ else errors.print)
    print(json.dumps(result))


def _first_settings(config: Path | None, resume: Path | None, out: Path | None) -> dict[str, Any]:
    """Return the settings that options change: of a file, of the run to go on with, or none."""
    if resume is None:
        return read_toml(config) if config is not None else {}
    for name, given in {"--config": config, "--out": out}.items():
        if given is not None:
            raise SettingsError(f"{name} has no place beside --resume: the run has its own")
    return read_run(resume).to_mapping()


def _train(settings: RunSettings, folder: Path, device: str, *, resume: bool = False) -> RunResult:
    again = f"{how_to_call()} train --resume {shlex.quote(str(folder))}"
    try:
        with BarProgress() as progress:
            result = run(
                settings,
                folder=folder,
                resume=resume,
                device=_device(device),
                progress=progress,
                data_progress=progress.rows,
                say=errors.print,
            )
    except TrainingInterrupted as stopped:
        _stop(f"{stopped}. To go on: {again}", code=stopped.exit_code)
    except KeyboardInterrupt:
        _stop(f"stopped at once. To go on from the last checkpoint: {again}", code=130)
    log = settings.data
    name = log.folder if isinstance(log, PreparedLog) else "the built-in click log"
    show_run(result, f"{settings.model} on the test split of {name}")
    return result


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise SettingsError(f"device must be cpu, cuda or auto, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device cuda was asked for, but torch sees no GPU here")
    return torch.device(name)


def _override(values: dict[str, Any], section: str, name: str, value: object) -> None:
    """Put one value into a section, where it was given."""
    if value is None:
        return
    if not isinstance(values.setdefault(section, {}), dict):
        raise SettingsError(f"[{section}] must be a table, got {values[section]!r}")
    values[section][name] = value


def _parse_assignment(text: str) -> tuple[str, str, object]:
    """Read `section.name=value`; the value is TOML, or a word."""
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise SettingsError(f"--set takes section.name=value, got {text!r}")
    try:
        return section, name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return section, name, value.strip()


def _lags_on_rare_rows(test: Evaluation) -> bool:
    """Return whether the model is further below its ceiling on rare rows than on all."""
    gaps = [
        best.auc - reached.auc
        for best, reached in ((test.rarest_ceiling, test.rarest), (test.ceiling, test.overall))
        if best and reached and best.auc is not None and reached.auc is not None
    ]
    return len(gaps) == 2 and gaps[0] > gaps[1]


def _new_folder(model: str) -> Path:
    """Return the first folder runs/MODEL-N that is not there yet."""
    names = (Path("runs") / f"{model}-{number}" for number in itertools.count(1))
    return next(folder for folder in names if not folder.exists())


def _write_scores(path: Path, scores: torch.Tensor, data: Dataset) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "score", "label"])
            labels = data.label.int().tolist()
            writer.writerows(zip(itertools.count(), scores.tolist(), labels, strict=False))
    except OSError as error:
        raise ModelFileError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _be_quiet(line: str) -> None:
    del line


def _stop(message: str, *, code: int) -> NoReturn:
    errors.print(f"rarebit: {message}", markup=False, soft_wrap=True)
    sys.exit(code)
