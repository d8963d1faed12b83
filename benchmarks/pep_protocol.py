"""PEP's figures as its released code takes them: picked on the test split, the mean of the AUCs of batches.

    python benchmarks/pep_protocol.py --data data/ml-1m --out benchmarks/results/pep-protocol.json

That code evaluates on the test rows after every epoch and reports the best value; its AUC is the mean over
batches of 1024. Here the same trainings are measured both ways: so, and by our own protocol, in which
validation rows pick the epoch and all test rows make one AUC. The pruned models are those of the study
benchmarks/results/study-pep-ml-1m.json: a threshold on a schedule, fifteen epochs, and what is left trained
again. Besides, the epochs are counted that the learned thresholds of that study take to meet the budgets.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rarebit import PEP, Dataset, RunSettings, apply_, evaluate, fit, predict
from rarebit.callbacks import Callback
from rarebit.data.order import batch_bounds
from rarebit.machine import machine
from rarebit.pruning import Masked, prune
from rarebit.training.metrics import auc
from rarebit.training.run import start_model
from rarebit.training.settings import load_splits

BATCH = 1024
PRUNING_EPOCHS = 15
LEARNED_EPOCHS, LEARNED_INIT, LEARNED_DECAY = 20, -8.0, 1e-4


def main() -> None:
    """Train, measure both ways, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--data", default="data/ml-1m", help="ML-1M as rarebit data prepare leaves it"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[30_000, 10_000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    settings = RunSettings.from_mapping(
        {
            "model": {"name": "deepfm@pep"},
            "data": {"folder": options.data},
            "training": {"epochs": options.epochs, "patience": None, "weight_decay": 1e-5},
        }
    )
    splits = [part.to(options.device) for part in load_splits(settings.data)]
    rows: dict[str, list[dict[str, float]]] = {}
    learned: list[dict[str, float]] = []
    for seed in range(options.seeds):
        for name, found in one_seed(settings, splits, seed, options.budgets).items():
            rows.setdefault(name, []).append(found)
            print(name, seed, found, flush=True)
        learned.append(learned_epochs(settings, splits[0], seed, options.budgets))
        print("learned thresholds", seed, learned[-1], flush=True)
    facts: dict[str, Any] = dict(machine())
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    results = [{"side": name, **summary(found)} for name, found in rows.items()]
    report = {
        "results": results,
        "learned_epochs": learned,
        "seeds": options.seeds,
        "machine": facts,
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def one_seed(
    settings: RunSettings, splits: list[Dataset], seed: int, budgets: list[int]
) -> dict[str, dict[str, float]]:
    """Return the figures of the unpruned model and of each budget."""
    train, valid, _ = splits
    training = dataclasses.replace(settings.training, seed=seed)
    seeded = dataclasses.replace(settings, training=training)

    def build() -> nn.Module:
        return start_model(seeded, train.schema, say=len).to(train.device)  # not a word

    def train_and_measure(model: nn.Module) -> dict[str, float]:
        watch = Watch(model, splits)
        fit(model, train, valid, settings=training, callbacks=[watch], progress=False)
        return watch.figures()

    found = {"unpruned": train_and_measure(build())}
    for budget in budgets:
        pruning = prune(
            build(),
            train,
            budgets=[budget],
            settings=dataclasses.replace(training, epochs=PRUNING_EPOCHS, tables="rowwise"),
            progress=False,
        )
        model, ticket = build(), pruning.tickets[0]
        apply_(model, Masked(ticket), where=lambda info: info.width > 1, verbose=False)
        found[str(budget)] = train_and_measure(model)
    return found


def learned_epochs(
    settings: RunSettings, train: Dataset, seed: int, budgets: list[int]
) -> dict[str, float]:
    """Return after how many epochs of pruning learned thresholds meet each budget."""
    training = dataclasses.replace(
        settings.training, seed=seed, epochs=LEARNED_EPOCHS, threshold_weight_decay=LEARNED_DECAY
    )
    seeded = dataclasses.replace(settings, training=training, methods=(PEP(init=LEARNED_INIT),))
    model = start_model(seeded, train.schema, say=len).to(train.device)
    pruning = prune(model, train, budgets=budgets, settings=training, progress=False)
    steps = len(batch_bounds(len(train), BATCH))
    return {str(t.facts["budget"]): t.facts["step"] / steps for t in pruning.tickets}


class Watch(Callback):
    """Measures a model after every epoch, both ways."""

    def __init__(self, model: nn.Module, splits: list[Dataset]) -> None:
        self.model = model
        self.train, self.valid, self.test = splits
        self.steps = len(batch_bounds(len(self.train), BATCH))
        self.of_batches: list[float] = []
        self.valid_auc: list[float] = []
        self.test_auc: list[float] = []

    def after_step(self, num_steps: int) -> None:
        """Measure, if an epoch has just ended."""
        if num_steps % self.steps:
            return
        scores = predict(self.model, self.test)
        parts = zip(scores.split(BATCH), self.test.label.split(BATCH), strict=True)
        self.of_batches.append(statistics.fmean(auc(*part) or 0.5 for part in parts))
        self.test_auc.append(auc(scores, self.test.label) or 0.5)
        self.valid_auc.append(evaluate(self.model, self.valid).auc or 0.5)

    def figures(self) -> dict[str, float]:
        """Return the best mean over batches of any epoch, and the AUC of the epoch that validation picks."""
        best = max(range(len(self.valid_auc)), key=lambda epoch: self.valid_auc[epoch])
        return {"paper": max(self.of_batches), "ours": self.test_auc[best]}


def summary(found: list[dict[str, float]]) -> dict[str, float]:
    """Return mean and spread over seeds, both ways."""
    told = {}
    for way in ("paper", "ours"):
        values = [row[way] for row in found]
        told[f"{way}_auc"] = statistics.fmean(values)
        told[f"{way}_spread"] = statistics.stdev(values)
    return told


if __name__ == "__main__":
    main()
