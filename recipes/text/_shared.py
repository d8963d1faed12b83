"""What the three recipes share: arms, one training, resumable runs, trials, compression, verdicts and the page.

A recipe has a `Task`: its data, its model, the loss of a batch and its scores. Everything else is here:

    ARMS        ways of training, the same for all tasks: `--arms baseline,averaged,adversarial-lexico,tail`
    Training    one run between two steps: an arm, its settings and a seed
    Study       the runs of a command, each in a folder: a checkpoint while it trains, a result when it is done
    report_of   picked settings, test scores and paired verdicts of all that is done

Validation picks the epoch and the settings of an arm (`--trials`, by the search of studies); test reports. All arms of a seed have
the same initial weights and the same batches. An arm whose best epoch is the last one in most runs gets no verdict.
"""

import argparse
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import shlex
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import rarebit as rb
from rarebit.errors import NotFiniteError, SettingsError
from rarebit.machine import machine
from rarebit.methods.tail import RunningTail
from rarebit.study.statistics import judge
from rarebit.study.tuning import Axis, Search, search
from rarebit.tables.apply import table_bytes
from rarebit.text import TextTable
from rarebit.training.checkpoints import CheckpointFolder, map_tensors, stop_requests
from rarebit.transfer.lexico import TransferRule
from rarebit.transfer.running import RunningTransfer

SAVE_SECONDS = 300.0
"""How much training a crash may lose; a stop by Ctrl-C, SIGTERM or `--minutes` loses none."""
RESULT, STATE, WEIGHTS = "result.json", "step-", "weights"
COMPRESSED = [*itertools.product(("evidence coding", "low rank"), (4, 8, 16)), ("integers", 4)]
"""Ways to compress, each with the part of the bytes that the tables take then; integers of 8 bits are a quarter."""
SEEDS_APART = 1_000_003
BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of training."""

    loss: rb.transfer.TransferLoss | None = None
    rule: TransferRule = "lexico"
    scale: float = 1.0
    """The weight of the transfer loss."""
    per_word: bool = False
    """Whether that is divided by the number of words."""
    select: bool = False
    """Whether rare words without a frequent relative are left out, by what they co-occur with."""
    average: bool = False
    """Whether the average of the weights is evaluated and kept."""
    tail: bool = False
    """Whether rare rows are shrunk and forgotten as well."""
    controls: tuple[str, ...] = ()
    """What it must beat besides the baseline."""

    @property
    def step(self) -> float | None:
        """The factor from one setting of its own dial to the next; None for an arm without a dial."""
        return 10.0 if self.loss is not None else 3.0 if self.average or self.tail else None


ARMS: Mapping[str, Arm] = {
    BASELINE: Arm(),
    "averaged": Arm(average=True),
    # Gao et al. divide by the square of the number of words and have a weight of 1; CosReg divides by it once
    "cosreg-sum": Arm(loss=rb.transfer.CosReg(), rule="sum", per_word=True),
    # the weight of FRAGE
    "adversarial-sum": Arm(loss=rb.transfer.Adversarial(), rule="sum", scale=0.02),
    "cosreg-lexico": Arm(loss=rb.transfer.CosReg(), per_word=True, controls=("cosreg-sum",)),
    "adversarial-lexico": Arm(loss=rb.transfer.Adversarial(), controls=("adversarial-sum",)),
    "adversarial-select-lexico": Arm(
        loss=rb.transfer.Adversarial(), select=True, controls=("adversarial-sum",)
    ),
    "tail": Arm(tail=True, controls=("averaged",)),
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a model is trained: Adam, a rate that rises and then falls with the root of the steps, patience."""

    epochs: int
    """At most so many."""
    batch_size: int
    lr: float
    """The highest rate."""
    patience: int = 10
    """Training ends after so many epochs without a better one on validation."""
    warm_up: int = 500
    """Steps in which the rate rises."""
    clip: float = 5.0
    weight_decay: float = 0.0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return what trains a model."""
        betas = (0.9, 0.98)
        return torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=self.weight_decay)

    def rate(self, step: int) -> float:
        """Return the rate of a step, counted from 0, in parts of the highest.

        >>> schedule = Schedule(epochs=1, batch_size=1, lr=1.0, warm_up=4)
        >>> [schedule.rate(step) for step in (0, 3, 15)]
        [0.25, 1.0, 0.5]
        """
        return min((step + 1) / self.warm_up, math.sqrt(self.warm_up / (step + 1)))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: an arm, a seed, and multiples of the task's rate and of the arm's own dial."""

    arm: str
    seed: int = 0
    lr: float = 1.0
    dial: float = 1.0
    """Of the weight of the transfer loss, or of the epochs that an average remembers."""

    def __str__(self) -> str:
        changed = [
            f" {name} x{x:.3g}" for name in ("lr", "dial") if (x := getattr(self, name)) != 1
        ]
        return f"{self.arm}{''.join(changed)}, seed {self.seed}"


class Task(ABC):
    """The data, the model and the scores of a recipe, on one device."""

    name: ClassVar[str]
    metric: ClassVar[str]
    higher: ClassVar[bool] = True
    """Whether more is better."""
    least: ClassVar[float]
    """The smallest difference in the metric that matters."""
    parts: ClassVar[tuple[str, ...]] = ("head", "tail")
    """Scores that are shown besides `all`."""

    schedule: Schedule
    device: torch.device

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return all that decides a result besides arm and seed: text, sizes, schedule."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a model with initial weights from torch's generator."""

    @abstractmethod
    def batches(self, seed: int, epoch: int) -> Sequence[Any]:
        """Return the batches of an epoch, which only depend on the seed and the epoch."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch."""

    @abstractmethod
    def scores(self, model: nn.Module, part: str) -> dict[str, Any]:
        """Return the scores on "valid" or "test"; `all` is the metric."""

    @abstractmethod
    def streams(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the training text as each table of words reads it, by the name of the table."""

    def word_counts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return how often training reads each row of the tables of words."""
        return {
            name: tokens.bincount(minlength=len(model.get_submodule(name).weight))
            for name, tokens in self.streams(model).items()
        }

    def training(self, run: Run) -> "Training":
        """Return a run before its first step."""
        return Training(self, run)

    @functools.cache  # noqa: B019  # a task lives as long as its process
    def counts_of(self, kind: type[nn.Module]) -> dict[str, Tensor]:
        """Return how often an epoch looks up each row of each table, also of those that hold no words."""
        del kind
        model = self.model().to(self.device)
        with torch.no_grad():
            return rb.count_lookups(model, self.batches(0, 0), self.loss)


def generator(seed: int, number: int) -> torch.Generator:
    """Return random numbers of a seed's epoch or step."""
    return torch.Generator().manual_seed(seed * SEEDS_APART + number)


class Training:
    """A model, its optimizer and what the arm adds to them, between two steps."""

    def __init__(self, task: Task, run: Run) -> None:
        torch.manual_seed(run.seed)
        self.task, self.run, self.arm = task, run, ARMS[run.arm]
        self.model = task.model().to(task.device)
        self.optimizer = task.schedule.optimizer(self.model)
        self.batches = task.batches(run.seed, 0)
        self.addition = self._addition()
        self.loss_sum = torch.zeros((), device=task.device)
        self.step = self.place = 0
        """Steps made, and those of the present epoch."""
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] = {}
        """The weights of the best epoch, in plain tables."""

    def train_step(self, say: Callable[[str], object]) -> bool:
        """Make a step, and validate after the last one of an epoch; return whether training is over."""
        torch.manual_seed(
            self.run.seed * SEEDS_APART + self.step
        )  # so a resumed run drops the same
        batch = self.batches[self.place]
        self._set_rate(self.task.schedule.lr * self.run.lr * self._rate(batch))
        self.update(batch)
        self.step, self.place = self.step + 1, self.place + 1
        if self.place < len(self.batches):
            return False
        self._end_epoch(say)
        self.place = 0
        if self._is_over():
            return True
        self.batches = self.task.batches(self.run.seed, len(self.history))
        return False

    def update(self, batch: Any) -> None:
        """Train on a batch."""
        self.optimizer.zero_grad()
        self.model.train()
        loss = self.task.loss(self.model, batch)
        self.backward(loss)
        self.loss_sum += loss.detach()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss, with those of the transfer, and step."""
        if isinstance(self.addition, RunningTransfer):
            self.addition.backward(loss)
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.schedule.clip)
        self.optimizer.step()

    def result(self) -> dict[str, Any]:
        """Return the scores of the weights of the best epoch on validation; the model has these weights then."""
        ledger = None
        if isinstance(self.addition, RunningTransfer):
            ledger = self.addition.ledger.read()
            self.addition.close()
        elif isinstance(self.addition, RunningTail):
            self.addition.end()
        self.model.load_state_dict(self.best)
        best = self._best_epoch()
        return {
            "best_epoch": best + 1,
            "valid": self.history[best]["valid"],
            "test": self.task.scores(self.model, "test"),
            "history": self.history,
            "ledger": ledger,
        }

    def state(self) -> dict[str, Any]:
        """Return all that the coming steps depend on."""
        more = self.addition
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "addition": None
            if more is None
            else more.training_state()
            if isinstance(more, rb.EMA)
            else more.state_dict(),
            "step": self.step,
            "place": self.place,
            "loss_sum": self.loss_sum,
            "history": self.history,
            "best": self.best,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, before the first step."""
        optimizer = state["optimizer"]
        state = map_tensors(state, lambda tensor: tensor.to(self.task.device))
        self.model.load_state_dict(state["model"])
        # torch moves the rest, and leaves the numbers of steps on the CPU where Adam reads them there
        self.optimizer.load_state_dict(
            optimizer | {"param_groups": state["optimizer"]["param_groups"]}
        )
        if isinstance(self.addition, rb.EMA):
            self.addition.load_training_state(state["addition"])
        elif self.addition is not None:
            self.addition.load_state_dict(state["addition"])
        self.step, self.place = state["step"], state["place"]
        self.loss_sum, self.history, self.best = state["loss_sum"], state["history"], state["best"]
        self.batches = self.task.batches(self.run.seed, len(self.history))

    def averaged(self) -> AbstractContextManager[None]:
        """Put the weights that are evaluated into the model for the time of a `with` block."""
        if isinstance(self.addition, RunningTail):
            return self.addition.averaged()
        return self.addition.applied() if isinstance(self.addition, rb.EMA) else nullcontext()

    def _addition(self) -> RunningTransfer | RunningTail | rb.EMA | None:
        arm, dial, task = self.arm, self.run.dial, self.task
        if arm.average:
            decay = math.exp(-1 / (dial * len(self.batches)))
            return rb.EMA(self.model, self.optimizer, decay)
        if arm.tail:
            method = rb.Tail(memory=dial)
            counts = task.counts_of(type(self.model))
            return method.start(
                self.model, self.optimizer, counts, steps_per_epoch=len(self.batches)
            )
        if arm.loss is None:
            return None
        streams = task.streams(self.model)
        counts = task.word_counts(self.model)
        words = max(map(len, counts.values()))
        scale = dial * (arm.scale / words if arm.per_word else arm.scale)
        settings = rb.HarmlessTransfer(loss=arm.loss, rule=arm.rule, scale=scale)
        return settings.start(
            self.model,
            counts=None if arm.select else counts,
            select=selection_of(streams, counts) if arm.select else None,
            where=lambda info: info.name in streams,
            seed=self.run.seed,
        )

    def _rate(self, batch: Any) -> float:
        del batch
        return self.task.schedule.rate(self.step)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a recording on a GPU reads it
            else:
                group["lr"] = rate

    def _is_over(self) -> bool:
        epochs, patience = len(self.history), self.task.schedule.patience
        stalled = patience and epochs - self._best_epoch() > patience
        return epochs == self.task.schedule.epochs or bool(stalled)

    def _best_epoch(self) -> int:
        """Return the best epoch on validation, counted from 0."""
        scores = [epoch["valid"]["all"] for epoch in self.history]
        return scores.index(max(scores) if self.task.higher else min(scores))

    def _end_epoch(self, say: Callable[[str], object]) -> None:
        train = float(self.loss_sum) / self.place
        self.loss_sum.zero_()
        if not math.isfinite(train):
            raise NotFiniteError(
                f"the training loss must be finite, got {train} in epoch {len(self.history) + 1}; lower --lr"
            )
        with self.averaged():
            valid = self.task.scores(self.model, "valid")
            self.history.append({"train": train, "valid": valid})
            if self._best_epoch() == len(self.history) - 1:
                self.best = self._plain_weights()
        if isinstance(self.addition, RunningTail):
            self.addition.between_epochs()
        say(
            f"epoch {len(self.history)}: loss {train:.4f}, {self.task.metric} {scores_text(self.task, valid)}"
        )

    def _plain_weights(self) -> dict[str, Tensor]:
        model = self.model
        if isinstance(self.addition, RunningTail):
            model = copy.deepcopy(model)
            rb.merge_(model, verbose=False)
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def scores_text(task: Task, scores: Mapping[str, Any]) -> str:
    """Return the metric of all, and of the parts."""
    parts = [f"{part} {scores[part]:.2f}" for part in task.parts if scores.get(part) is not None]
    return f"{scores['all']:.2f} ({', '.join(parts)})"


def selection_of(streams: Mapping[str, Tensor], counts: Mapping[str, Tensor]) -> rb.data.Selection:
    """Return which rare words of each table have frequent relatives, by what they stand next to."""
    settings = rb.data.CoOccurrence()
    found = {
        name: rb.data.select(tokens, {name: counts[name]}, settings)[name]
        for name, tokens in streams.items()
    }
    return rb.data.Selection(found, settings)


# Compression: bytes against the metric.


def coded(
    compressor: str, tables: nn.Module, counts: Mapping[str, Tensor], size: int
) -> nn.Module | None:
    """Return tables compressed to one part in `size`; None where they are too small for that."""
    shapes = [(info.rows, info.width) for info in rb.find_tables(tables)]
    try:
        if compressor == "evidence coding":
            rb.compress_(tables, counts=counts, size=f"1/{size}", verbose=False)
        elif compressor == "low rank":
            rb.apply_(tables, rb.LowRank.for_share(shapes, 1 / size), verbose=False)
        else:
            rb.apply_(tables, rb.Quantize(bits=32 // size), verbose=False)
    except SettingsError:
        return None
    return tables


@torch.no_grad()
def compressed(task: Task, model: nn.Module) -> list[dict[str, Any]]:
    """Return bytes and test scores of a trained model with its tables of words compressed; the model stays as it is.

    The rows are coded as they are stored, decoded, and put in their place. So tied weights have them at both ends.
    """
    counted = task.word_counts(model)
    weights = {name: model.get_submodule(name).weight for name in counted}
    before = {name: weight.clone() for name, weight in weights.items()}
    counts = {str(place): found for place, found in enumerate(counted.values())}
    plain = sum(weight.nbytes for weight in weights.values())
    points = [{"compressor": "none", "bytes": plain, **task.scores(model, "test")}]
    for compressor, size in COMPRESSED:
        held = nn.ModuleList(nn.Embedding.from_pretrained(w) for w in before.values())
        if coded(compressor, held, counts, size) is None:
            continue
        for weight, table in zip(weights.values(), held, strict=True):
            weight.copy_(table.weight)
        point = {"compressor": f"{compressor} 1/{size}", "bytes": table_bytes(held)}
        points.append(point | task.scores(model, "test"))
    for name, weight in weights.items():
        weight.copy_(before[name])
    return points


# Runs: each a folder with a checkpoint while it trains, and a result when it is done.


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all runs of a command share."""

    task: Task
    out: Path
    compress: bool = False
    together: int = 1
    deadline: float = math.inf
    """When to stop, on the clock `time.monotonic`."""

    @functools.cached_property
    def machine(self) -> dict[str, Any]:
        """What the figures depend on."""
        facts: dict[str, Any] = dict(machine()) | {"threads": torch.get_num_threads()}
        if self.task.device.type == "cuda":
            facts["device"] = torch.cuda.get_device_name(self.task.device)
        return facts

    def folder(self, run: Run) -> Path:
        """Return the folder of a run: a name that tells, and a hash of all that decides its result."""
        decides = {"arm": repr(ARMS[run.arm]), "run": asdict(run), "facts": self.task.facts()}
        name = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        return self.out / "runs" / f"{run.arm}-seed{run.seed}-{name}"

    def result(self, run: Run) -> dict[str, Any] | None:
        """Return the result of a run; None while there is none."""
        file = self.folder(run) / RESULT
        return json.loads(file.read_text("utf-8")) if file.exists() else None

    def make(self, runs: Sequence[Run]) -> bool:
        """Make the missing runs, some side by side; return whether all are there."""
        todo = [run for run in runs if self.result(run) is None]
        active: list[ActiveRun] = []
        with stop_requests() as asked, ExitStack() as locks:
            while (todo or active) and time.monotonic() < self.deadline and not asked.requested:
                while todo and len(active) < self.together:
                    run = todo.pop(0)
                    if self.result(run) is None:  # else another process has made it
                        active.append(ActiveRun(self, run, locks))
                active = [run for run in active if not run.advance()]
            for run in active:
                run.keep()
        return not todo and not active

    def compress_run(self, run: Run) -> str | None:
        """Add the figures of compressed tables to the result of a run; return why they are missing, if they are."""
        result, checkpoints = self.result(run), CheckpointFolder(self.folder(run) / "checkpoints")
        if result is None or "failed" in result or "compressed" in result:
            return None
        if WEIGHTS not in checkpoints.names():
            return (
                f"compressed tables of {run}: it was trained without --compress; use another --out"
            )
        model = self.task.model().to(self.task.device)
        model.load_state_dict(checkpoints.read(WEIGHTS)["model"])
        write_json(self.folder(run) / RESULT, result | {"compressed": compressed(self.task, model)})
        return None


class ActiveRun:
    """A run that this process trains."""

    def __init__(self, study: Study, run: Run, locks: ExitStack) -> None:
        self.study, self.run, self.folder = study, run, study.folder(run)
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints")
        self._unlock = locks.enter_context(ExitStack())
        self._unlock.enter_context(self.checkpoints.locked())
        self.training = study.task.training(run)
        found = self.checkpoints.newest(STATE)
        if found is not None:
            self.training.load(found.state["training"])
        self.seconds = 0.0 if found is None else found.state["seconds"]
        self.began = self.saved = time.monotonic()
        self._say(f"{'resumes' if found else 'starts'} at step {self.training.step}")

    def advance(self) -> bool:
        """Make a step; return whether the run is over, and its result written."""
        try:
            is_done = self.training.train_step(self._say)
        except NotFiniteError as error:  # the other runs continue
            self._finish({"failed": str(error)})
            return True
        if is_done:
            self._finish(self.training.result())
            return True
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.keep()
        return False

    def keep(self) -> None:
        """Write a checkpoint."""
        name = f"{STATE}{self.training.step:09d}"
        if self.training.step and name not in self.checkpoints.names():
            state = {"training": self.training.state(), "seconds": self._seconds()}
            self.checkpoints.write(name, state)
            self.checkpoints.prune(keep=[name])
        self.saved = time.monotonic()
        self._say(f"is kept at step {self.training.step}")

    def _finish(self, result: Mapping[str, Any]) -> None:
        facts: dict[str, Any] = {"seconds": self._seconds(), "machine": self.study.machine}
        task, why = self.study.task, result.get("failed")
        if self.study.compress and why is None and WEIGHTS not in self.checkpoints.names():
            self.checkpoints.write(WEIGHTS, {"model": self.training.model.state_dict()})
        write_json(self.folder / RESULT, asdict(self.run) | dict(result) | facts)
        self.checkpoints.prune(keep=[WEIGHTS])
        self._unlock.close()
        self._say(why or f"test {task.metric} {scores_text(task, result['test'])}")

    def _seconds(self) -> float:
        return round(self.seconds + time.monotonic() - self.began, 1)

    def _say(self, text: str) -> None:
        print(f"{self.run}: {text}; {self._seconds():.1f} s", flush=True)


# Trials: the same number for every arm, by the search of studies.


def axes_of(arm: Arm) -> list[Axis]:
    """Return what is tuned: the learning rate, and the arm's own dial."""

    def axis(name: str, step: float) -> Axis:
        return Axis(name, lambda run, steps: replace(run, **{name: step**steps}))

    return [axis("lr", 2.0), *([axis("dial", arm.step)] if arm.step else [])]


def trials_of(study: Study, arm: str, trials: int) -> Search:
    """Return which settings of an arm to try next with the first seed, or the best of all on validation."""

    def score(run: Run) -> float | None:
        result = study.result(run)
        if result is None or "failed" in result:
            return None if result is None else -math.inf
        found = result["valid"]["all"]
        return found if study.task.higher else -found

    return search(Run(arm=arm), axes_of(ARMS[arm]), trials, score)


def make_all(study: Study, arms: Sequence[str], *, seeds: int, trials: int) -> dict[str, Any]:
    """Make all runs that time allows, and return the report."""
    facts = study.machine  # before the runs, so that it is of the code that runs
    is_complete = True
    while True:
        found = {arm: trials_of(study, arm, trials) for arm in arms}
        wanted = [run for one in found.values() if one.best is None for run in one.trials]
        todo = [run for run in wanted if study.result(run) is None]
        if not todo or not is_complete:
            break
        is_complete = study.make(todo)
    picked = {arm: None if one.best is None else one.trials[one.best] for arm, one in found.items()}
    runs = [replace(run, seed=seed) for seed in range(seeds) for run in picked.values() if run]
    is_complete = is_complete and study.make(runs)
    whys = [study.compress_run(run) for run in runs] if study.compress and is_complete else []
    report = report_of(study, found, picked, seeds) | {"machine": facts}
    report["missing"] += [why for why in whys if why]
    return report


# The report.


def report_of(
    study: Study, found: Mapping[str, Search], picked: Mapping[str, Run | None], seeds: int
) -> dict[str, Any]:
    """Return all results that are there, the verdicts, and the names of what is missing."""
    task, missing, results, tried = study.task, [], {}, {}
    for arm, run in picked.items():
        results[arm] = {}
        for seed in range(seeds):
            result = None if run is None else study.result(replace(run, seed=seed))
            if result is None or "failed" in result:
                missing.append(str(replace(run or Run(arm=arm), seed=seed)))
            else:
                results[arm][str(seed)] = result
        tried[arm] = [
            {
                "lr": one.lr,
                "dial": one.dial,
                "valid": (study.result(one) or {}).get("valid", {}).get("all"),
            }
            for one in found[arm].trials
        ]
    cut_off = {arm: is_cut_off(by_seed) for arm, by_seed in results.items()}
    edges = {arm: list(one.edge) for arm, one in found.items()}
    return {
        "recipe": task.name,
        "metric": {
            "name": task.metric,
            "higher": task.higher,
            "least": task.least,
            "parts": task.parts,
        },
        "facts": task.facts(),
        "picked": {
            arm: None if run is None else {"lr": run.lr, "dial": run.dial}
            for arm, run in picked.items()
        },
        "tried": tried,
        "edges": edges,
        "cut_off": cut_off,
        "results": results,
        "verdicts": verdicts_of(task, results, cut_off, edges),
        "missing": missing,
    }


def is_cut_off(by_seed: Mapping[str, Any]) -> bool:
    """Return whether the best epoch is the last one in most runs: longer training might rank them otherwise.

    >>> runs = [{"best_epoch": best, "history": [{}] * 5} for best in (5, 4, 5)]
    >>> is_cut_off(dict(enumerate(runs))), is_cut_off(dict(enumerate(runs[:2])))
    (True, False)
    """
    last = [run["best_epoch"] == len(run["history"]) for run in by_seed.values()]
    return sum(last) > len(last) / 2


def verdicts_of(
    task: Task,
    results: Mapping[str, Mapping[str, Any]],
    cut_off: Mapping[str, bool],
    edges: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
    """Return the paired differences of each arm to its controls, on all words and on the parts; above zero is better."""
    pairs = [
        (arm, control)
        for arm in results
        for control in (BASELINE, *ARMS[arm].controls)
        if arm != control and control in results
    ]
    sign = 1 if task.higher else -1

    def differences(arm: str, control: str, part: str) -> list[float]:
        ours, theirs = results[arm], results[control]
        return [
            sign * (ours[seed]["test"][part] - theirs[seed]["test"][part])
            for seed in ours
            if seed in theirs and None not in (ours[seed]["test"][part], theirs[seed]["test"][part])
        ]

    every = {pair: differences(*pair, "all") for pair in pairs}
    judged = judge(
        {" - ".join(pair): found for pair, found in every.items()}, minimum_effect=task.least
    )
    found = []
    for (arm, control), comparison in zip(pairs, judged.values(), strict=True):
        doubts = [f"{one} is cut off" for one in (arm, control) if cut_off[one]]
        doubts += [
            f"{one} is best at the edge of what was tried" for one in (arm, control) if edges[one]
        ]
        verdict = comparison.verdict if comparison.n > 1 else f"{comparison.n} seed: no verdict"
        parts = {
            part: statistics.fmean(values) if (values := differences(arm, control, part)) else None
            for part in task.parts
        }
        found.append(
            {
                "arm": arm,
                "control": control,
                "verdict": f"no verdict: {doubts[0]}" if doubts and comparison.n > 1 else verdict,
                **{
                    name: getattr(comparison, name) for name in ("mean", "low", "high", "n", "wins")
                },
                "parts": parts,
            }
        )
    return found


def print_report(report: Mapping[str, Any]) -> None:
    """Print a line per arm, a line per comparison, and what is missing."""
    metric, parts = report["metric"]["name"], report["metric"]["parts"]
    rows = []
    for arm, by_seed in report["results"].items():
        runs = list(by_seed.values())
        cells = [summary([run["valid"]["all"] for run in runs])]
        cells += [summary([run["test"][part] for run in runs]) for part in ("all", *parts)]
        rows.append([arm, str(len(runs)), *cells])
    header = ["arm", "runs", "valid", "test", *parts]
    print(f"\n{TextTable(metric, header, rows)}\n")
    lines = [
        [
            one["arm"],
            one["control"],
            f"{one['mean']:+.2f}" if one["n"] else "-",
            str(one["n"]),
            one["verdict"],
        ]
        for one in report["verdicts"]
    ]
    if lines:
        title = "Paired differences (above zero is better)"
        print(TextTable(title, ["arm", "control", "difference", "seeds", "verdict"], lines))
    if report["missing"]:
        print(f"not there yet: {'; '.join(report['missing'])}")


def summary(values: Sequence[float | None]) -> str:
    """Return mean and standard deviation over seeds.

    >>> summary([1.0, 2.0]), summary([1.0]), summary([]), summary([None])
    ('1.50 ± 0.71', '1.00', '-', '-')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = f"{statistics.fmean(known):.2f}"
    return mean if len(known) == 1 else f"{mean} ± {statistics.stdev(known):.2f}"


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a file that is whole at any moment; what is not finite becomes null."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    text = json.dumps(_without_nan(values), indent=1, ensure_ascii=False, allow_nan=False)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(file)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The command line.


def options_of(
    recipe: str,
    doc: str | None,
    given: Sequence[str] | None,
    add: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """Return the options of a recipe: those that all have, and its own."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help="the text")
    text.add_argument(
        "--small", action="store_true", help="a small text and model, made on the spot"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/text"), help="folder to write to")
    parser.add_argument("--arms", type=_arms, help=", ".join(ARMS))
    parser.add_argument("--seeds", type=count, default=3, help="runs of each arm, from seed 0")
    parser.add_argument(
        "--trials", type=count, default=1, help="settings tried for each arm on validation"
    )
    parser.add_argument("--compress", action="store_true", help="measure compressed tables as well")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after so many; the same command resumes",
    )
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--together", type=count, default=1, help="runs side by side, for a GPU")
    parser.add_argument(
        "--model", help="a Hugging Face model: a name, or a folder with config.json"
    )
    for name, kind in (("epochs", count), ("batch-size", count), ("lr", float)):
        parser.add_argument(f"--{name}", type=kind, help="in place of the schedule's own")
    if add is not None:
        add(parser)
    options = parser.parse_args(given)
    words = sys.argv[1:] if given is None else given
    # folders by their names: where they are is nobody's business
    shown = [Path(word).name if "/" in word else word for word in words]
    options.command = shlex.join(["python", f"recipes/text/{recipe}", *shown])
    return options


def named(model: str) -> dict[str, str]:
    """Return what a result says of a Hugging Face model: its name, and the checksum of a folder's configuration."""
    file = Path(model) / "config.json"
    found = {"model": Path(model).name if file.is_file() else model}
    return found | (
        {"config": hashlib.sha256(file.read_bytes()).hexdigest()} if file.is_file() else {}
    )


def device_of(options: argparse.Namespace) -> torch.device:
    """Return the device; raise where it is not there."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda needs a CUDA device, and none is visible; leave it out")
    return device


def changed(schedule: Schedule, options: argparse.Namespace) -> Schedule:
    """Return a schedule with what the options say in place of its own."""
    names = ("epochs", "batch_size", "lr")
    return replace(schedule, **{n: v for n in names if (v := getattr(options, n)) is not None})


def run_recipe(task: Task, options: argparse.Namespace, began: float) -> dict[str, Any]:
    """Make the runs that time allows; print and write what is there, as JSON and as a page."""
    study = Study(
        task=task,
        out=options.out,
        compress=options.compress,
        together=options.together,
        deadline=began + 60 * options.minutes,
    )
    print(", ".join(f"{name}: {value}" for name, value in task.facts()["text"].items()), flush=True)
    report = make_all(study, options.arms or [*ARMS], seeds=options.seeds, trials=options.trials)
    report["command"] = options.command
    write_json(study.out / f"{task.name}.json", report)
    print_report(report)
    file = study.out / f"{task.name}.json"
    print(f"\nwritten: {file} and {rb.report(file, file.with_suffix('.html'))}", flush=True)
    return report


def count(text: str) -> int:
    """Return the number of an option that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _arms(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in ARMS:
            raise argparse.ArgumentTypeError(f"arms are {', '.join(ARMS)}; got {name!r}")
    return found
