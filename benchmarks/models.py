"""The test AUC of every model on prepared logs, or on the generated one beside its ceiling.

    python benchmarks/models.py --data prepared/ml-1m prepared/frappe --seeds 5 --out models.json
    python benchmarks/models.py --synthetic --out models-synthetic.json
    python benchmarks/models.py --data prepared/ml-1m-pep --models fm@pep,deepfm@pep --out pep.json

A seed draws the initial weights and the order of the rows, the same for all models. Validation AUC picks
the epoch; the AUC of all test rows at once is reported, and that of the fifth of them whose values are
rarest in training. Nothing is tuned: all models have the same settings of training, and their own
defaults otherwise.

Each finished run is a line in a file beside `--out`, written at once: a run that is there is not run
again, so the same command goes on where it was stopped. All models and logs have their first seed before
any has its second.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rarebit as rb
from rarebit.data.order import shuffled_order
from rarebit.errors import RarebitError
from rarebit.machine import machine
from rarebit.models import build_model, model_class, model_names
from rarebit.training.metrics import Evaluation
from rarebit.training.settings import Training

Run = dict[str, Any]
"""One line of the file: what was run ("what") and what it gave."""


def main() -> None:
    """Run what is missing, print a table, and write the report."""
    options = parse()
    facts = machine() | {"device": device_name(options.device)}  # before the runs: of this code
    facts["commit"] = options.commit or facts["commit"]
    runs = read_runs(options.runs)
    logs = list(read_logs(options))
    stop = time.monotonic() + 60 * options.minutes
    wanted = list(plan(logs, options))
    for log, what in wanted:
        if key(what) in runs:
            continue
        if time.monotonic() > stop:
            sys.stderr.write("the time is up: start the same command again to go on\n")
            break
        run = train(log, what, facts)
        if run is not None:
            runs[key(what)] = run
            append(options.runs, run)
    results = report_of([runs[key(what)] for _, what in wanted if key(what) in runs])
    print(table(results))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"command": command(options), "machine": facts, "results": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", nargs="+", default=[], metavar="DIR", help="prepared logs")
    parser.add_argument("--synthetic", action="store_true", help="the generated log")
    parser.add_argument("--rows", type=int, default=rb.data.SyntheticLog().rows, help="of that log")
    parser.add_argument("--models", default="all", help='names with commas between them, or "all"')
    parser.add_argument("--seeds", type=int, help="5; with --synthetic, 3")
    parser.add_argument(
        "--resplit",
        action="store_true",
        help="a seed also draws which rows are for training (8:1:1): for logs whose ids do not "
        "depend on it",
    )
    parser.add_argument("--dim", type=int, help="width of a row; each model's own if not given")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--weight-decay", type=float, default=1e-5, help="coupled, as papers do")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tables", default="dense", choices=["dense", "rowwise"])
    parser.add_argument(
        "--model-settings",
        type=json.loads,
        default={},
        help="more settings as JSON, for the models that have them",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run later")
    parser.add_argument("--commit", help="what this copy is of, where git does not know")
    parser.add_argument("--out", type=Path, help="where to write the report as JSON")
    parser.add_argument("--runs", type=Path, help="the file of finished runs; beside --out")
    options = parser.parse_args(arguments)
    if not options.data and not options.synthetic:
        parser.error("say on what: --data DIR, or --synthetic")
    options.models = model_names() if options.models == "all" else options.models.split(",")
    options.seeds = options.seeds or (5 if options.data else 3)
    if options.runs is None and options.out is not None:
        options.runs = options.out.with_suffix(".jsonl")
    return options


@dataclass(frozen=True)
class Log:
    """A click log on the device, and how often each id of each field occurs in training."""

    name: str
    splits: rb.data.Splits
    counts: Mapping[str, torch.Tensor]

    @property
    def schema(self) -> rb.data.Schema:
        """The fields of the log."""
        return self.splits.train.schema


def read_logs(options: argparse.Namespace) -> Iterator[Log]:
    """Yield the logs that were asked for."""
    device = torch.device(options.device)
    found = [
        (Path(folder).resolve().name, rb.Dataset.open(folder).splits) for folder in options.data
    ]
    if options.synthetic:
        found.append(("synthetic", rb.data.generate(rb.data.SyntheticLog(rows=options.rows))))
    for name, splits in found:
        counts = {field: n.to(device) for field, n in splits.train.counts().items()}
        yield Log(name, rb.data.Splits(*(part.to(device) for part in splits)), counts)


def resplit(log: Log, seed: int) -> Log:
    """Return the same rows, other ones of them for training, to choose and to report: 8:1:1."""
    ids, numeric, label = (
        torch.cat([getattr(part, name) for part in log.splits])
        for name in ("ids", "numeric", "label")
    )
    order = shuffled_order(len(label), seed=seed, epoch=0, device=label.device)
    parts = order.tensor_split([int(0.8 * len(label)), int(0.9 * len(label))])
    splits = rb.data.Splits(
        *(rb.Dataset(log.schema, ids[rows], numeric[rows], label[rows]) for rows in parts)
    )
    return Log(log.name, splits, splits.train.counts())


def plan(logs: Sequence[Log], options: argparse.Namespace) -> Iterator[tuple[Log, dict[str, Any]]]:
    """Yield every run: a seed on all logs and models, then the next one."""
    training = Training(
        epochs=options.epochs,
        patience=options.patience,
        batch_size=options.batch,
        lr=options.lr,
        weight_decay=options.weight_decay,
        precision=options.precision,
        tables=options.tables,
    )
    asked = ({} if options.dim is None else {"dim": options.dim}) | options.model_settings
    for seed in range(options.seeds):
        for log in (resplit(log, seed) if options.resplit else log for log in logs):
            for model in options.models:
                settings = {name: asked[name] for name in asked if name in known_settings(model)}
                yield (
                    log,
                    {
                        "set": log.name,
                        "resplit": options.resplit,
                        "rows": [len(part) for part in log.splits],
                        "table_rows": sum(field.rows for field in log.schema.table_fields),
                        "model": model,
                        "settings": settings,
                        "training": dataclasses.asdict(dataclasses.replace(training, seed=seed)),
                    },
                )


def known_settings(model: str) -> set[str]:
    """Return the names of the settings that a model has."""
    names = set(inspect.signature(model_class(model)).parameters) - {"schema"}
    return names - {"tables"} | {"init", "std"} if "tables" in names else names


def key(what: Mapping[str, Any]) -> str:
    """Return what tells one run from another."""
    return json.dumps(what, sort_keys=True)


def train(log: Log, what: dict[str, Any], facts: Mapping[str, Any]) -> Run | None:
    """Train one model with one seed; None where that is not possible, which is told."""
    training = Training(**what["training"])
    label = f"{what['set']}, {what['model']}, seed {training.seed}"
    torch.manual_seed(training.seed)
    start = time.perf_counter()
    try:
        model = build_model(what["model"], log.schema, what["settings"])
        model.to(log.splits.train.device)
        train, valid, test = log.splits
        history = rb.fit(model, train, valid, settings=training, progress=False)
        result = rb.evaluate(model, test, counts=log.counts)
    except (RarebitError, torch.OutOfMemoryError) as error:
        sys.stderr.write(f"{label}: {error}\n")
        return None
    seconds = time.perf_counter() - start
    sys.stderr.write(f"{label}: {result.overall}, epoch {history.best_epoch}, {seconds:.1f} s\n")
    return {
        "what": what,
        **figures(result),
        "best_epoch": history.best_epoch,
        "epochs": len(history.epochs),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(seconds, 2),
        "commit": facts["commit"],
        "device": facts["device"],
    }


def figures(result: Evaluation) -> dict[str, float | None]:
    """Return what is reported of a run."""
    parts = {
        "auc": result.overall,
        "rarest_auc": result.rarest,
        "ceiling": result.ceiling,
        "rarest_ceiling": result.rarest_ceiling,
    }
    found = {name: None if metrics is None else metrics.auc for name, metrics in parts.items()}
    return found | {"logloss": result.logloss}


def read_runs(path: Path | None) -> dict[str, Run]:
    """Return the finished runs; a line that was cut off while it was written is no run."""
    runs: dict[str, Run] = {}
    for line in path.read_text("utf-8").splitlines() if path and path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            run = json.loads(line)
            runs[key(run["what"])] = run
    return runs


def append(path: Path | None, run: Run) -> None:
    """Write a run behind the others, on a line of its own even after one that was cut off."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(run) + "\n")


def report_of(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return mean, spread and number of seeds for each log and model."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["what"]["set"], run["what"]["model"]), []).append(run)
    return [
        {
            "set": log,
            "model": model,
            "n": len(group),
            **summary("auc", group),
            **summary("rarest_auc", group),
            **summary("logloss", group),
            "ceiling": group[0]["ceiling"],
            "rarest_ceiling": group[0]["rarest_ceiling"],
            "best_epochs": [run["best_epoch"] for run in group],
            "seeds": [run["what"]["training"]["seed"] for run in group],
            "parameters": group[0]["parameters"],
            "median_seconds": statistics.median(run["seconds"] for run in group),
            "settings": group[0]["what"]["settings"],
            "training": group[0]["what"]["training"] | {"seed": None},
            "rows": group[0]["what"]["rows"],
            "commits": sorted({str(run["commit"]) for run in group}),
        }
        for (log, model), group in groups.items()
    ]


def summary(name: str, runs: Sequence[Run]) -> dict[str, float | None]:
    """Return the mean of a figure and its standard deviation from seed to seed."""
    values = [run[name] for run in runs if run[name] is not None]
    return {
        name: statistics.mean(values) if values else None,
        f"{name}_spread": statistics.stdev(values) if len(values) > 1 else None,
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a table, a line a model, AUC in points (x 100)."""
    lines = ["| log | model | n | AUC | rarest fifth | below the ceiling | seconds |"]
    lines.append("|---" * 7 + "|")
    for log in dict.fromkeys(result["set"] for result in results):
        for result in (result for result in results if result["set"] == log):
            cells = [log, f"`{result['model']}`", str(result["n"])]
            cells += [points(result, name) for name in ("auc", "rarest_auc")]
            cells += [gap(result), f"{result['median_seconds']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
        ceiling = next(result["ceiling"] for result in results if result["set"] == log)
        if ceiling is not None:
            lines.append(f"| {log} | the true chances | | {100 * ceiling:.2f} | | 0.00 | |")
    return "\n".join(lines)


def points(result: Mapping[str, Any], name: str) -> str:
    """Return a mean and its spread in points.

    >>> points({"auc": 0.85, "auc_spread": 0.0012}, "auc")
    '85.00 ± 0.12'
    """
    mean, spread = result[name], result[f"{name}_spread"]
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def gap(result: Mapping[str, Any]) -> str:
    """Return how far below the ceiling a model is, in points, where there is one."""
    if result["ceiling"] is None or result["auc"] is None:
        return "-"
    return f"{100 * (result['ceiling'] - result['auc']):.2f}"


def command(options: argparse.Namespace) -> str:
    """Return the command that gave a report, without where it was written and when it stopped."""
    hidden = ("out", "runs", "minutes", "commit", "device")
    shown = {name: value for name, value in vars(options).items() if name not in hidden}
    shown["models"] = ",".join(options.models)
    shown["data"] = " ".join(Path(folder).resolve().name for folder in options.data)
    shown["model_settings"] = f"'{json.dumps(options.model_settings)}'"
    shown["synthetic"] = "" if options.synthetic else None
    shown["resplit"] = "" if options.resplit else None
    if not options.synthetic:
        shown["rows"] = None
    if not options.model_settings:
        shown["model_settings"] = None
    words = [
        f"--{name.replace('_', '-')} {value}".strip()
        for name, value in shown.items()
        if value is not None and (value != "" or name in ("synthetic", "resplit"))
    ]
    return f"python benchmarks/models.py {' '.join(words)}"


def device_name(device: str) -> str:
    """Return what the models are trained on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


if __name__ == "__main__":
    main()
