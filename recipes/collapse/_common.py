"""What the recipes of this folder share: options, data, training, tables of figures, files."""

import argparse
import io
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import rarebit as rb
from rarebit.diagnosis.rows import rows_of_table, scan
from rarebit.errors import MissingExtraError, RarebitError, import_extra
from rarebit.machine import machine
from rarebit.models import build_model
from rarebit.models._base import RankingModel
from rarebit.settings import to_mapping
from rarebit.tables.spectrum import abundance_of
from rarebit.training.fit import EpochRecord
from rarebit.training.settings import load_splits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "ORANGE",
    "Report",
    "Trained",
    "abundances",
    "arguments",
    "blocks_of",
    "by_variant",
    "count",
    "log_of",
    "mean",
    "new_figure",
    "numbers",
    "print_table",
    "quieten",
    "set_abundances",
    "show",
    "start",
    "start_model",
    "summary",
    "train",
    "weighted_mean",
]

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#c8661b", "#2f7d4f", "#9a9a9a"


def arguments(
    doc: str, *, seeds: int = 3, trains: bool = True, epochs: int = 100
) -> argparse.ArgumentParser:
    """Return a parser with the options of all recipes; `trains`: those of data and training, too."""
    parser = argparse.ArgumentParser(description=doc.split("\n", 1)[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/collapse"), help="folder to write to"
    )
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--seeds", type=count, default=seeds, help="runs of each, from seed 0")
    if trains:
        parser.add_argument("--data", type=Path, help="folder of a prepared log")
        parser.add_argument(
            "--rows", type=count, default=250_000, help="of the built-in log, without --data"
        )
        parser.add_argument("--epochs", type=count, default=epochs, help="at most")
        parser.add_argument("--batch-size", type=count, default=2048)
        parser.add_argument("--lr", type=float, default=1e-3)
    return parser


def numbers(text: str) -> list[int]:
    """Return the numbers of an option such as `10,20,40`."""
    return [count(part) for part in text.split(",")]


def count(text: str) -> int:
    """Return the number of an option that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def log_of(options: argparse.Namespace) -> rb.data.Splits:
    """Return the log that the options name: a prepared one, or the built-in one."""
    if options.data is not None:
        return load_splits(rb.training.PreparedLog(folder=str(options.data)))
    return load_splits(rb.data.SyntheticLog(rows=options.rows))


def start_model(name: str, splits: rb.data.Splits, seed: int, **settings: Any) -> RankingModel:
    """Return an untrained model; the seed decides its weights."""
    torch.manual_seed(seed)
    return build_model(name, splits.train.schema, settings)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training gave."""

    auc: float
    """Of the test rows, with the weights of the best epoch by validation AUC."""
    best_epoch: int
    epochs: list[EpochRecord]

    def curves(self) -> dict[str, list[float]]:
        """Return what each epoch gave: the mean training loss, and the AUC of validation rows."""
        return {
            "train_loss": [epoch.train_loss for epoch in self.epochs],
            "valid_auc": [epoch.valid.auc for epoch in self.epochs],
        }


def train(
    model: RankingModel,
    splits: rb.data.Splits,
    options: argparse.Namespace,
    *,
    seed: int,
    patience: int | None = 3,
    penalty: Callable[[], Tensor] | None = None,
) -> Trained:
    """Train as the paper does, and leave the best epoch's weights in the model, on the CPU.

    Adam, weight decay 1e-6 on everything and every row, and validation AUC picks the epoch. `penalty` is
    added to what is minimised and left out of the loss that is recorded.
    """
    training = rb.Training(
        epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        weight_decay=1e-6,
        patience=patience,
        seed=seed,
    )
    history = rb.fit(
        model.to(options.device),
        splits.train,
        splits.valid,
        settings=training,
        backward=None if penalty is None else lambda loss: (loss + penalty()).backward(),
        progress=False,
    )
    auc = rb.evaluate(model, splits.test).auc
    model.cpu()
    return Trained(auc=auc, best_epoch=history.best_epoch, epochs=history.epochs)


def abundances(model: nn.Module) -> dict[str, float]:
    """Return the information abundance of each field's table, all embedding sets side by side."""
    return {
        table.field: table.information_abundance
        for table in rb.diagnose(model).tables
        if table.name.startswith("backbone.tables.")
    }


def set_abundances(model: RankingModel) -> dict[str, list[float]]:
    """Return the information abundance of each field's table in each of M embedding sets."""
    backbone = model.backbone
    found = {}
    for field, table in zip(backbone.tables.fields, backbone.tables.tables(), strict=True):
        triangle = scan(rows_of_table(table)).triangle  # (k, M * D): the R of all sets side by side
        sets = triangle.chunk(backbone.num_sets or 1, dim=1)
        found[field.name] = [abundance_of(torch.linalg.svdvals(own)) for own in sets]
    return found


def blocks_of(weight: Tensor, num_fields: int) -> Tensor:
    """Return the projections W_ij of cross layers: `(..., F D, F D)` to `(..., F, F, D, D)`, first j, then i."""
    rows = weight.unflatten(-2, (num_fields, -1)).unflatten(
        -1, (num_fields, -1)
    )  # (..., F, D, F, D)
    return rows.transpose(-3, -2)


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return statistics.fmean(values)


def weighted_mean(values: Mapping[str, float], splits: rb.data.Splits) -> float:
    """Return the mean over fields, each as heavy as its table has rows."""
    rows = {field.name: field.rows for field in splits.train.schema.table_fields}
    return sum(rows[name] * value for name, value in values.items()) / sum(
        rows[name] for name in values
    )


def by_variant(runs: Sequence[Mapping[str, Any]], *keys: str) -> dict[str, dict[str, list[float]]]:
    """Return the figures of runs as lists over seeds, by variant.

    >>> by_variant([{"model": "fm", "seed": n, "auc": 0.7 + n} for n in (0, 1)], "model")
    {'fm': {'auc': [0.7, 1.7]}}
    """
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        variant = found.setdefault("-".join(str(run[key]) for key in keys), {})
        for name, value in run.items():
            if isinstance(value, float):
                variant.setdefault(name, []).append(value)
    return found


def summary(values: Sequence[float], digits: int = 4) -> str:
    """Return mean and standard deviation over seeds; "-" where they are not known.

    >>> summary([0.5, 0.7], 2), summary([0.5], 1), summary([math.nan, math.nan])
    ('0.60 ± 0.14', '0.5', '-')
    """
    if not all(map(math.isfinite, values)):
        return "-"
    text = f"{mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"


class Report:
    """What a recipe leaves behind: NAME.json and NAME.png in the folder of `--out`."""

    def __init__(
        self, name: str, options: argparse.Namespace, splits: rb.data.Splits | None
    ) -> None:
        # before the runs, so that they are of the code that is run
        self.facts: dict[str, Any] = dict(machine())
        if torch.device(options.device).type == "cuda":
            self.facts["device"] = torch.cuda.get_device_name(options.device)
        self.name, self.options, self.splits = name, options, splits
        self.begin = time.perf_counter()

    def write(self, figures: Mapping[str, Any], draw: "Callable[[], Figure]") -> dict[str, Any]:
        """Write the figures, and the plot where matplotlib is installed; return what the JSON file holds."""
        given = {
            name: value.name if isinstance(value, Path) else value
            for name, value in vars(self.options).items()
            if name != "out"
        }
        report = {
            "recipe": self.name,
            "options": given,
            "machine": self.facts,
            "seconds": round(time.perf_counter() - self.begin, 1),
            **({} if self.splits is None else {"log": _described(self.splits)}),
            **figures,
        }
        folder = self.options.out
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_stored(report), indent=1, ensure_ascii=False)
        # a list of numbers in one line
        text = re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()), text)
        (folder / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        show(f"\nwritten: {folder / self.name}.json")
        image = io.BytesIO()
        try:
            draw().savefig(image, format="png")
        except MissingExtraError as missing:
            show(f"no plot: {missing}")
        else:
            (folder / f"{self.name}.png").write_bytes(image.getvalue())
            show(f"written: {folder / self.name}.png")
        return report


def _described(splits: rb.data.Splits) -> dict[str, Any]:
    return {
        "rows": [len(part) for part in splits],
        "fields": [to_mapping(field) for field in splits.train.schema.fields],
    }


def _stored(value: Any) -> Any:
    """Return plain values that every reader of JSON takes, six digits of each number."""
    if isinstance(value, Mapping):
        return {str(name): _stored(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_stored(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def show(text: str) -> None:
    """Print at once, so that a long run is seen to go on."""
    print(text, flush=True)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of the same columns, aligned.

    >>> print_table([{"field": "user", "IA": "4.1"}, {"field": "city", "IA": "10.0"}])
    field    IA
    user    4.1
    city   10.0
    """
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        first, *rest = zip(line, widths, strict=True)
        show("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]))


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of so many inches, apart from matplotlib's global state."""
    agg = import_extra("matplotlib.backends.backend_agg", "plots", "drawing plots")
    figure: Figure = import_extra("matplotlib.figure", "plots", "drawing plots").Figure(
        figsize=(width, height), dpi=130, layout="constrained"
    )
    agg.FigureCanvasAgg(figure)
    return figure


def quieten(axes: "Axes", x_label: str, y_label: str, title: str) -> None:
    """Name a plot and its axes, and leave it what is needed to read it."""
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def start(main: Callable[[], Any]) -> None:
    """Run a recipe; a mistake of the user's ends it with one sentence."""
    try:
        main()
    except RarebitError as error:
        sys.exit(f"error: {error}")
