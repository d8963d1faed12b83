"""Averaged weights with statistics of batch normalisation of their own, compared with those that the last step left.

    python benchmarks/averages.py --data data/frappe data/criteo-80k data/book-crossing data/ml-1m-ids --out averages.json

DCN-V2 of width 16 is trained with `Tail`, in the settings of recipes/tail.toml, in both precisions. After each epoch the same averages are
validated with statistics of both kinds; each kind picks its best epoch on validation rows, and training ends when both have stalled.
So both are measured on one training, and differ in nothing else. Finished runs are in OUT: the same command resumes.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import rarebit as rb
from rarebit.data.order import batch_bounds
from rarebit.errors import RarebitError
from rarebit.machine import machine
from rarebit.storage.files import read_json, write_json
from rarebit.text import TextTable
from rarebit.training.run import start_model
from rarebit.training.settings import PreparedLog, load_splits

BATCH, PATIENCE, EPOCHS, ROWS = 1024, 6, 60, 1 << 14
PRECISIONS = ("float32", "bfloat16")
KINDS = ("last step", "own")


def main() -> None:
    """Measure what is missing, store each run as it ends, and print the differences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", nargs="+", default=[], help="prepared logs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)  # of each run
    report = read_json(options.out) if options.out.exists() else {"machine": machine(), "runs": []}
    made = [(run["log"], run["precision"], run["seed"]) for run in report["runs"]]
    cases = product(range(options.seeds), PRECISIONS, options.data)
    missing = [case for case in cases if (Path(case[2]).name, case[1], case[0]) not in made]
    with ProcessPoolExecutor(options.workers) as pool:
        for ended in as_completed([pool.submit(measure, *case) for case in missing]):
            run = ended.result()
            report["runs"].append(run)
            write_json(options.out, report, error=RarebitError)
            print(run, flush=True)
    report["differences"] = differences(report["runs"])
    write_json(options.out, report, error=RarebitError)
    header = ("log", "precision", "runs", "validation", "test", "spread", "rarest fifth")
    rows = [
        (
            *(log, precision, str(len(gains["test"]))),
            *(f"{statistics.mean(gains[name]):+.4f}" for name in ("valid", "test")),
            "-" if len(gains["test"]) < 2 else f"{statistics.stdev(gains['test']):.4f}",
            f"{statistics.mean(gains['rarest']):+.4f}",
        )
        for log, found in report["differences"].items()
        for precision, gains in found.items()
    ]
    print(TextTable("AUC with own statistics minus AUC with those of the last step", header, rows))


def measure(seed: int, precision: str, folder: str) -> dict[str, Any]:
    """Train once, and return the figures of both kinds."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    log = PreparedLog(folder=folder)
    splits = load_splits(log)
    train, counts = splits.train, splits.train.counts()
    settings = rb.RunSettings(
        model="dcn_v2@me", model_settings={"dim": 16, "init": "normal"}, data=log
    )
    model = start_model(settings, train.schema, say=lambda _: None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    bounds = batch_bounds(len(train), BATCH)
    tail = rb.Tail().start(model, optimizer, counts, steps_per_epoch=len(bounds))
    places = torch.arange(0, len(train), max(len(train) // ROWS, 1))[:ROWS]
    number = len(places) // BATCH

    def averaged(kind: str) -> AbstractContextManager[None]:
        return tail.averaged(
            [train[places[k::number]] for k in range(number)] if kind == "own" else None
        )

    found: dict[str, dict[str, Any]] = {kind: {"valid": 0.0, "epoch": 0} for kind in KINDS}
    curves: dict[str, list[float | None]] = {kind: [] for kind in KINDS}
    for epoch in range(1, EPOCHS + 1):
        if epoch > 1:
            tail.between_epochs()
        model.train()
        order = train.order(seed=seed, epoch=epoch)
        for start, stop in bounds:
            batch = train[order[start:stop]]
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                logits = model(batch)
            loss = F.binary_cross_entropy_with_logits(logits.float(), batch.label.float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for kind, best in found.items():
            with averaged(kind):
                valid = rb.evaluate(model, splits.valid).overall.auc
                curves[kind].append(valid)
                if valid is not None and valid > best["valid"]:
                    test = rb.evaluate(model, splits.test, counts=counts)
                    assert test.rarest is not None
                    best |= {"valid": valid, "epoch": epoch, "test": test.overall.auc}
                    best |= {"rarest": test.rarest.auc}
        if all(epoch - best["epoch"] >= PATIENCE for best in found.values()):
            break
    for kind, best in found.items():
        best["valid_aucs"] = curves[kind]
    return {"log": Path(folder).name, "precision": precision, "seed": seed, **found}


def differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return own statistics minus those of the last step, by log, precision and figure; one number per seed."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        gains = found.setdefault(run["log"], {}).setdefault(run["precision"], {})
        for name in ("valid", "test", "rarest"):
            gains.setdefault(name, []).append(run["own"][name] - run["last step"][name])
    return found


if __name__ == "__main__":
    main()
