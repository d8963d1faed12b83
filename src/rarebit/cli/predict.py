"""`rarebit predict`: score data with a trained model."""

import csv
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.errors import DataError, ModelFileError, SettingsError
from rarebit.settings import suggest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rarebit.data.dataset import Dataset
    from rarebit.training.score import RowScorer

SPLITS = ("train", "valid", "test")


def predict_(  # noqa: PLR0917  # typer calls it by name
    model: Annotated[
        Path,
        Option(help="Folder of a run, or an .onnx file that rarebit export made.", readable=False),
    ],
    input_: Annotated[
        Path | None,
        Option(
            "--input",
            help="A raw log to score: .csv .tsv .txt .ndjson or .parquet.",
            readable=False,
        ),
    ] = None,
    split: Annotated[
        str,
        Option(
            help="Without --input, the split to score: train, valid or test.",
            autocompletion=opt.complete(lambda: SPLITS),
        ),
    ] = "test",
    out: Annotated[
        Path | None, Option(help="Write the score of every row to this CSV file.")
    ] = None,
    bad_rows: opt.BadRows = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Score a raw log, or a split of the training log, and measure the scores."""
    from rarebit.training.metrics import evaluate, predict
    from rarebit.training.model_file import load_model
    from rarebit.training.run import read_run
    from rarebit.training.settings import load_splits

    if input_ is None and split not in SPLITS:
        raise SettingsError(f"unknown split {split!r}{suggest(split, SPLITS)}")
    chosen_bad_rows = opt.choose_bad_rows(bad_rows)
    if model.suffix == ".onnx":
        if input_ is None:
            raise SettingsError("an exported file has no split to score; name a log with --input")
        from rarebit.export.raw import FileScorer

        _score_log(FileScorer(model), model, input_, out, chosen_bad_rows)
        return
    if input_ is None:
        settings = read_run(model)
    loaded = load_model(model, device=opt.choose_device(device))
    opt.choose_threads(threads)
    if input_ is not None:
        _score_log(loaded, model, input_, out, chosen_bad_rows)
        return
    with screen.RunBars() as progress:
        splits = load_splits(settings.data, progress=progress.rows)
    chosen = getattr(splits, split)
    if not len(chosen):
        having = " or ".join(name for name in SPLITS if len(getattr(splits, name)))
        raise DataError(f"the {split} split has no rows to score; choose --split {having}")
    if out is not None:
        _write_scores(out, predict(loaded, chosen).sigmoid(), chosen)
        screen.line(f"{_counted(len(chosen), 'score')} in {out}")
    evaluation = evaluate(loaded, chosen, counts=splits.train.counts())
    title = f"{settings.model} from {model}, {split} split"
    screen.figures(title, screen.evaluation_figures(evaluation))


def _score_log(
    model: "nn.Module | RowScorer", folder: Path, log: Path, out: Path | None, bad_rows: opt.Choice
) -> None:
    from rarebit.training.score import bad_rows_file, score_log

    with screen.RunBars() as progress:
        scored = score_log(
            model,
            log,
            out=out,
            bad_rows=bad_rows,
            progress=lambda done, total: progress.stage("reading", done, total),
        )
    figures = {"rows scored": f"{scored.rows:,}"}
    if scored.bad_rows:
        figures["rows skipped"] = f"{scored.bad_rows:,}"
    unknown = {name: count for name, count in scored.unknown.items() if count}
    figures |= {f"unknown values of {name}": f"{count:,}" for name, count in unknown.items()}
    if not unknown:
        figures["unknown values"] = "0"
    if scored.metrics is not None:
        figures["AUC"] = screen.auc_text(scored.metrics.auc)
        figures["logloss"] = f"{scored.metrics.logloss:.4f}"
    screen.figures(f"{folder} on {log}", figures)
    read = scored.rows + scored.bad_rows
    parts = f"{scored.rows:,} scored + {scored.bad_rows:,} skipped"
    screen.console.print(f"{_counted(read, 'row')} read = {parts}.")
    if out is None:
        screen.console.print("To keep the scores: --out scores.csv")
        return
    screen.line(f"{_counted(scored.rows, 'score')} in {out}")
    if scored.bad_rows:
        screen.line(f"Skipped rows, written to {bad_rows_file(out)}.")


def _write_scores(path: Path, scores: "torch.Tensor", data: "Dataset") -> None:
    from rarebit.storage.files import write_file

    def fill(partial: Path) -> None:
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "score", "label"])
            labels = data.label.int().tolist()
            writer.writerows(zip(itertools.count(), scores.tolist(), labels, strict=False))

    write_file(path, fill, error=ModelFileError)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
