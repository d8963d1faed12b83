"""`rarebit predict`: scores of a trained model."""

import csv
import itertools
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from rarebit.cli.common import DeviceOption, choose_device
from rarebit.cli.data import choose_bad_rows
from rarebit.cli.show import BarProgress, console, show_evaluation, show_scored
from rarebit.data.dataset import Dataset, Splits
from rarebit.errors import DataError, ModelFileError, SettingsError
from rarebit.settings import suggest
from rarebit.training.metrics import evaluate, predict
from rarebit.training.model_file import load_model
from rarebit.training.run import read_run
from rarebit.training.run_settings import load_splits
from rarebit.training.score import bad_rows_file, score_log

__all__ = ["predict_"]


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
    loaded = load_model(model, device=choose_device(device))
    with BarProgress() as progress:
        splits = load_splits(settings.data, progress=progress.rows)
    chosen: Dataset = getattr(splits, split)
    if not len(chosen):
        having = " or ".join(name for name in Splits._fields if len(getattr(splits, name)))
        raise DataError(f"the {split} split has no rows to score; choose --split {having}")
    if out is not None:
        _write_scores(out, torch.sigmoid(predict(loaded, chosen)), chosen)
        console.print(f"{_counted(len(chosen), 'score')} in {out}", soft_wrap=True, markup=False)
    evaluation = evaluate(loaded, chosen, counts=splits.train.counts())
    show_evaluation(evaluation, f"{settings.model} from {model}, {split} split")


def _score(
    folder: Path, log: Path, out: Path | None, bad_rows: Literal["stop", "aside"], device: str
) -> None:
    loaded = load_model(folder, device=choose_device(device))
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
    parts = f"{scored.rows:,} scored + {scored.bad_rows:,} set aside"
    console.print(f"{_counted(read, 'row')} read = {parts}.")
    if out is None:
        console.print("To keep the scores: --out scores.csv")
        return
    console.print(f"{_counted(scored.rows, 'score')} in {out}", soft_wrap=True, markup=False)
    if scored.bad_rows:
        console.print(f"Set aside in {bad_rows_file(out)}.", soft_wrap=True, markup=False)


def _write_scores(path: Path, scores: torch.Tensor, data: Dataset) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "score", "label"])
            labels = data.label.int().tolist()
            writer.writerows(zip(itertools.count(), scores.tolist(), labels, strict=False))
    except OSError as error:
        raise ModelFileError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
