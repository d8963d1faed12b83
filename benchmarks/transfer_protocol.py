"""Harmless transfer in the cell of its paper: ML-1M, a PEP mask, transfer on the zip code, averaged weights.

    python benchmarks/transfer_protocol.py --minutes 8 --together 5 --out benchmarks/results/transfer-protocol.json

Gong et al. (table 6, figure 4): DeepFM with 10,000 entries, batches of 1024, 90 epochs of Adam without an early stop,
measured every five epochs. A split draws which rows are for training (8:1:1), the initial weights, the order of the
rows, and one mask by pruning; all arms share them. The arms are plain training, the paper's plain sum ("+T": the whole
table in every step, weight 0.01), and harmless transfer. Averaged weights are measured, by two protocols:

    auc            validation rows pick the epoch; one AUC of all test rows
    best_on_test   as the code released for PEP, which the paper builds on: the mean of the AUCs of test batches, the
                   best of all epochs. It picks on the rows that it reports

The rest of tables 6 to 8, in the same folder of runs; on Criteo, prepared with the protocol pep, all fields with more
than 100 values transfer:

    --models deepfm@pep autoint@pep --keep 10000 20000 30000
    --keep 10000 20000 --training '{"optimizer": "sgd"}' --lr 0.05 0.1 0.2 0.4 0.8 1.6
    --keep 10000 20000 --training '{"optimizer": "sgd", "momentum": 0.9}' --lr 0.0125 0.025 0.05 0.1 0.2 0.4
    --data data/criteo --models deepfm@pep autoint@pep --keep 50000 20000
        --methods baseline harmless-transfer:rule=sum:scale=0.01:select=frequency:absent=all harmless-transfer

With several learning rates, each arm tries all of them on the first split, and validation picks one. A finished run is
a file in --runs and is not run again, so the same command resumes; a run that would not end in time is not started.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rarebit import Dataset, RunSettings, Training, evaluate, fit, predict
from rarebit.callbacks import Callback, TrainingData, TrainingMethod
from rarebit.data.order import batch_bounds, shuffled_order
from rarebit.data.prepared import PreparedFolder
from rarebit.ema import EMA
from rarebit.errors import RarebitError
from rarebit.machine import machine
from rarebit.pruning import Ticket, prune
from rarebit.pruning.masked import load_ticket, save_ticket
from rarebit.pruning.pruned import masked_model
from rarebit.settings import require
from rarebit.storage.files import read_json, write_json
from rarebit.study.statistics import judge
from rarebit.technique import parse_techniques
from rarebit.training.fit import OPTIMIZER_SETTINGS
from rarebit.training.metrics import auc
from rarebit.training.optimizers import optimizer as build_optimizer
from rarebit.training.run import start_model

ARMS = (
    "baseline",
    "harmless-transfer:rule=sum:scale=0.01:select=frequency:absent=all:fields=zip",
    "harmless-transfer:fields=zip",
)
WAYS = ("auc", "best_on_test")


@dataclasses.dataclass(frozen=True)
class Job:
    """One training; without an arm, the pruning that makes its mask."""

    data: str
    checksum: str
    model: str
    keep: int
    split: int
    pruning_epochs: int
    training: Training
    every: int
    arm: str | None = None

    @property
    def what(self) -> dict[str, Any]:
        """Return what tells it from others, wherever the data is stored."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "data"}

    @property
    def key(self) -> str:
        """Return its name in the folder of runs."""
        text = json.dumps(self.what, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where and how long runs are made."""

    runs: Path
    device: str
    commit: str | None
    deadline: float  # seconds since the epoch, as processes share no other clock

    def file(self, one: Job) -> Path:
        """Return the file that is there when a run or a mask is finished."""
        return self.runs / (
            f"masks/{one.key}/ticket.json" if one.arm is None else f"{one.key}.json"
        )

    def read(self, one: Job) -> dict[str, Any] | None:
        """Return a finished run."""
        return read_json(self.file(one)) if self.file(one).exists() else None


def main() -> None:
    """Make the runs that are missing, print a table, and write the report."""
    options = parse()
    facts: dict[str, Any] = dict(machine())
    facts["commit"] = options.commit or facts["commit"]
    if options.device.startswith("cuda"):
        facts["device"] = torch.cuda.get_device_name()
    deadline = time.time() + 60 * options.minutes
    place = Place(options.runs, options.device, facts["commit"], deadline)
    cells = [(model, keep) for model in options.models for keep in options.keep]
    with ExitStack() as stack:
        pool = None
        if options.together > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(options.together, mp_context=context))
        if len(options.lr) > 1:
            arms = [(cell, arm) for cell in cells for arm in options.methods]
            first = [job(options, cell, 0, arm, lr) for cell, arm in arms for lr in options.lr]
            work(place, first, pool)
        picked = {cell: picks(place, options, cell) for cell in cells}
        every = [
            job(options, cell, split, arm, lr)
            for split in range(options.splits)
            for cell in cells
            for arm, lr in picked[cell].items()
            if lr is not None
        ]
        work(place, every, pool)
    runs = {one: found for one in every if (found := place.read(one)) is not None}
    missing = len(cells) * len(options.methods) * options.splits - len(runs)
    results = [result for cell in cells for result in summary(cell, options.methods, runs)]
    for found in results:
        found["edge"] = len(options.lr) > 1 and found["lr"][0] in (min(options.lr), max(options.lr))
    report = {
        "machine": facts,
        "settings": {
            "splits": options.splits,
            "lr": options.lr,
            "training": dataclasses.asdict(options.training),
        },
        "missing": missing,
        "results": results,
    }
    print(table(results))
    if missing:
        print(f"{missing} runs are missing: start the same command again", file=sys.stderr)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, report, error=RarebitError)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--data", default="data/ml-1m", help="ML-1M as rarebit data prepare leaves it")
    add("--models", nargs="+", default=["deepfm@pep"])
    add("--keep", type=int, nargs="+", default=[10_000], help="entries that pruning leaves")
    add("--methods", nargs="+", default=list(ARMS), help="the arms; the first is the control")
    add("--splits", type=int, default=5)
    add("--epochs", type=int, default=90)
    add("--every", type=int, default=5, help="epochs between two measurements")
    add("--pruning-epochs", type=int, default=15)
    add("--lr", type=float, nargs="+", default=[1e-3])
    add("--ema-epochs", type=float, default=1.0, help="the memory of averaged weights; 0: none")
    add("--training", type=json.loads, default={}, help="other settings of training, as JSON")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--together", type=int, default=1, help="runs side by side, which a GPU does sooner")
    add("--minutes", type=float, default=math.inf, help="start no run that would end later")
    add("--commit", help="what this copy is of, where git does not know")
    add("--runs", type=Path, default=Path("studies/transfer-protocol"), help="finished runs")
    add("--out", type=Path, help="where to write the report as JSON")
    options = parser.parse_args(arguments)
    options.training = Training(
        **{
            "epochs": options.epochs,
            "patience": None,
            "weight_decay": 1e-5,
            "ema_epochs": options.ema_epochs or None,
            **options.training,
        }
    )
    return options


def job(options: argparse.Namespace, cell: tuple[str, int], split: int, arm: str, lr: float) -> Job:
    """Return the run of one arm on one split."""
    return Job(
        data=options.data,
        checksum=PreparedFolder(options.data).checksum,
        model=cell[0],
        keep=cell[1],
        split=split,
        pruning_epochs=options.pruning_epochs,
        training=dataclasses.replace(options.training, lr=lr, seed=split),
        every=options.every,
        arm=arm,
    )


def mask_of(one: Job) -> Job:
    """Return the pruning that makes the mask of a run: by Adam, whatever trains the run."""
    training = Training(
        epochs=one.pruning_epochs,
        batch_size=one.training.batch_size,
        weight_decay=1e-5,
        tables="rowwise",
        seed=one.split,
    )
    return dataclasses.replace(one, training=training, arm=None, every=0)


def picks(
    place: Place, options: argparse.Namespace, cell: tuple[str, int]
) -> dict[str, float | None]:
    """Return the learning rate of each arm that is best on the first split; None while one is missing."""
    if len(options.lr) == 1:
        return dict.fromkeys(options.methods, options.lr[0])
    found: dict[str, float | None] = {}
    for arm in options.methods:
        tried = {lr: place.read(job(options, cell, 0, arm, lr)) for lr in options.lr}
        valid = {lr: run["valid_auc"] for lr, run in tried.items() if run is not None}
        found[arm] = max(valid, key=lambda lr: valid[lr]) if len(valid) == len(tried) else None
    return found


def work(place: Place, jobs: Sequence[Job], pool: ProcessPoolExecutor | None) -> None:
    """Make the runs that are missing: their masks first, which several runs share."""
    for wanted in (list(dict.fromkeys(map(mask_of, jobs))), jobs):
        todo = [one for one in wanted if not place.file(one).exists()]
        places = [place] * len(todo)
        for line in (map if pool is None else pool.map)(make, places, todo):
            print(line, file=sys.stderr, flush=True)


def make(place: Place, one: Job) -> str:
    """Make one run or mask and write it, if there is time; return a line about it."""
    name = f"{one.model}, {one.keep} entries, split {one.split}, {one.arm or 'mask'}"
    mask = place.file(one if one.arm is None else mask_of(one))
    took = [read_json(path)["seconds"] for path in place.runs.glob("*.json")]
    if time.time() + (max(took, default=0.0) if one.arm else 0.0) > place.deadline:
        return f"{name}: no time left"
    if one.arm is not None and not mask.exists():
        return f"{name}: its mask is missing"
    start = time.perf_counter()
    splits = load(one.data, one.split, place.device)
    if one.arm is None:
        save_ticket(pruned(one, splits[0]), mask.parent)
        return f"{name}: {time.perf_counter() - start:.1f} s"
    values = train(one, splits, load_ticket(mask.parent))
    seconds = round(time.perf_counter() - start, 2)
    values |= {"what": one.what, "seconds": seconds, "commit": place.commit}
    write_json(place.file(one), values, error=RarebitError)
    return f"{name}: AUC {values['auc']:.4f} at epoch {values['epoch']}, {seconds} s"


@cache
def load(folder: str, split: int, device: str) -> tuple[Dataset, Dataset, Dataset]:
    """Return the rows for training, validation and test (8:1:1) that a split draws, on the device."""
    parts = [part.to(device) for part in Dataset.open(folder).splits]
    ids, numeric, label = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "numeric", "label")
    )
    order = shuffled_order(len(label), seed=split, epoch=0, device=label.device)
    train, valid, test = (
        Dataset(parts[0].schema, ids[rows], numeric[rows], label[rows])
        for rows in order.tensor_split([int(0.8 * len(label)), int(0.9 * len(label))])
    )
    return train, valid, test


def build(one: Job, train: Dataset) -> nn.Module:
    """Return the model of a split before pruning: the same for its mask and all of its arms."""
    settings = RunSettings(model=one.model, training=one.training)
    return start_model(settings, train.schema, say=len).to(train.device)


def pruned(one: Job, train: Dataset) -> Ticket:
    """Return the entries that are left when a threshold has risen until it meets the budget."""
    found = prune(
        build(one, train), train, budgets=[one.keep], settings=one.training, progress=False
    )
    return found.tickets[0]


def train(one: Job, splits: tuple[Dataset, Dataset, Dataset], ticket: Ticket) -> dict[str, Any]:
    """Train one arm from the initial values of the entries that are left; return its curve and figures."""
    rows, training = splits[0], one.training
    [expression] = parse_techniques(one.arm or "")
    methods = expression.build([], 1.0)
    require(
        all(isinstance(method, TrainingMethod) for method in methods),
        f"an arm is a method of training on the same pruned tables, got {one.arm}",
    )
    model = masked_model(lambda: build(one, rows), ticket.with_start(None))
    options = {name: getattr(training, name) for name in OPTIMIZER_SETTINGS}
    optimizer = build_optimizer(model, kind=training.optimizer, **options)
    decay = training.average_decay(len(batch_bounds(len(rows), training.batch_size)))
    with ExitStack() as stack:
        ema = None if decay is None else stack.enter_context(closing(EMA(model, optimizer, decay)))
        curve = Curve(model, ema, splits, one.every)
        history = fit(
            model,
            rows,
            settings=dataclasses.replace(training, ema_epochs=None, ema_decay=None),
            optimizer=optimizer,
            callbacks=[curve, *methods],
            progress=False,
        )
    return {**figures(curve.points), "curve": curve.points, "reports": history.reports}


class Curve(Callback):
    """Measures a model every few epochs, with its averaged weights."""

    def __init__(
        self,
        model: nn.Module,
        ema: EMA | None,
        splits: tuple[Dataset, Dataset, Dataset],
        every: int,
    ) -> None:
        self.model, self.ema, self.every = model, ema, every
        _, self.valid, self.test = splits
        self.points: list[dict[str, float]] = []

    def start(self, model: nn.Module, data: TrainingData) -> None:
        """Find out how long an epoch is."""
        del model
        self.steps_per_epoch, self.batch_size = data.steps_per_epoch, data.batch_size

    def after_step(self, num_steps: int) -> None:
        """Measure, if this many epochs have just ended."""
        epoch, rest = divmod(num_steps, self.steps_per_epoch)
        if rest or epoch % self.every:
            return
        with ExitStack() as stack:
            if self.ema is not None:
                stack.enter_context(self.ema.applied())
            scores, labels = predict(self.model, self.test), self.test.label
            valid = evaluate(self.model, self.valid).auc
        parts = zip(scores.split(self.batch_size), labels.split(self.batch_size), strict=True)
        loss = F.binary_cross_entropy_with_logits(scores.double(), labels.double())
        self.points.append(
            {
                "epoch": epoch,
                "valid_auc": valid or 0.5,
                "test_auc": auc(scores, labels) or 0.5,
                "test_logloss": float(loss),
                "batch_auc": statistics.fmean(auc(*part) or 0.5 for part in parts),
            }
        )


def figures(curve: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of a run, by both protocols.

    >>> points = [(0.8, 0.7, 0.76), (0.9, 0.6, 0.75)]
    >>> names = ("valid_auc", "test_auc", "batch_auc")
    >>> curve = [{"epoch": e, "test_logloss": 0.5} | dict(zip(names, p)) for e, p in enumerate(points)]
    >>> found = figures(curve)
    >>> found["epoch"], found["auc"], found["best_on_test"], found["test_epoch"]
    (1, 0.6, 0.76, 0)
    """
    valid = max(curve, key=lambda point: point["valid_auc"])
    test = max(curve, key=lambda point: point["batch_auc"])
    return {
        "epoch": valid["epoch"],
        "valid_auc": valid["valid_auc"],
        "auc": valid["test_auc"],
        "logloss": valid["test_logloss"],
        "best_on_test": test["batch_auc"],
        "test_epoch": test["epoch"],
    }


def summary(
    cell: tuple[str, int], arms: Sequence[str], runs: Mapping[Job, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the means of each arm of a cell, its curve, and its differences to the arms before it."""
    found = {
        arm: {
            one.split: run
            for one, run in runs.items()
            if (one.model, one.keep, one.arm) == (*cell, arm)
        }
        for arm in arms
    }
    for arm, own in found.items():
        if not own:
            continue
        several = list(own.values())
        lrs = sorted({run["what"]["training"]["lr"] for run in several})
        last = max(point["epoch"] for point in several[0]["curve"])
        result: dict[str, Any] = {"model": cell[0], "keep": cell[1], "arm": arm, "n": len(own)}
        result |= {"lr": lrs, "epochs": [run["epoch"] for run in several]}
        result["cut_off"] = sum(run["epoch"] == last for run in several) > len(several) / 2
        for name in (*WAYS, "logloss"):
            values = [run[name] for run in several]
            result[name] = statistics.fmean(values)
            result[f"{name}_spread"] = statistics.stdev(values) if len(values) > 1 else None
        result["against"] = {
            other: {way: difference(own, found[other], way) for way in WAYS}
            for other in arms[: arms.index(arm)]
        }
        result["curve"] = [
            {name: statistics.fmean(point[name] for point in points) for name in points[0]}
            for points in zip(*(run["curve"] for run in several), strict=True)
        ]
        result["accuracy"] = accuracy(several)
        result["seconds"] = statistics.median(run["seconds"] for run in several)
        yield result


def difference(
    own: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]], way: str
) -> dict[str, Any] | None:
    """Return the mean difference over the splits that both have, and its interval."""
    both = sorted(own.keys() & other.keys())
    if len(both) < 2:  # an interval needs two
        return None
    values = [own[split][way] - other[split][way] for split in both]
    found = judge({"arm": values})["arm"]
    names = ("mean", "low", "high", "confidence", "wins", "n")
    return {name: getattr(found, name) for name in names}


def accuracy(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean accuracy of the discriminators, where there are any."""
    found = [
        table["discriminator_accuracy"]
        for run in runs
        for report in run["reports"].values()
        for table in report.get("tables", {}).values()
        if table.get("discriminator_accuracy") is not None
    ]
    return statistics.fmean(found) if found else None


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a table, a line per arm."""
    lines = ["| model | entries | arm | n | AUC | best on test, mean of batches | epochs |"]
    lines.append("|---" * 7 + "|")
    for found in results:
        ways = [f"{found[way]:.4f}" for way in WAYS]
        epochs = " ".join(map(str, found["epochs"])) + (", cut off" if found["cut_off"] else "")
        epochs += ", edge of the grid" if found["edge"] else ""
        cells = [found["model"], str(found["keep"]), found["arm"], str(found["n"]), *ways, epochs]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
