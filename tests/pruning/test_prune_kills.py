"""A pruning whose process is really killed, again and again, ends with the same bits as one that is not."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.models.deepfm import DeepFM
from rarebit.pruning.pruned import TicketFolder, read_scans

SCHEMA = rb.data.Schema((rb.data.Field(name="user", rows=300), rb.data.Field(name="item", rows=60)))
BUDGETS = (900, 400, 200)
OPTIONS = {"batch_size": 64, "every": 3, "checkpoint_minutes": 1e-3 / 60, "ema_decay": 0.9}
CASES = {
    # weight decay carries learned thresholds up, and weights down, in a few steps
    "learned": {"epochs": 6, "lr": 0.02, "table_lr": 0.05}
    | {"threshold_weight_decay": 1.0, "table_weight_decay": 1.0},
    "scheduled": {"epochs": 3, "lr": 0.02},
}
STEPS = 48
"""Of three epochs; learned thresholds take about as many."""


def log() -> rb.Dataset:
    chance = torch.Generator().manual_seed(1)
    ids = [torch.randint(field.rows, (1024,), generator=chance) for field in SCHEMA.fields]
    noise = torch.rand(1024, generator=chance) < 0.2
    return rb.Dataset(SCHEMA, torch.stack(ids, dim=1), label=(ids[0] % 2 == 0) ^ noise)


def work(folder: Path, case: str, *, tell: bool) -> None:
    """Prune, or go on pruning, in a folder; write a digest of everything that came out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DeepFM(SCHEMA, dim=4, hidden=(8,), dropout=0.2)
    if case == "learned":
        rb.apply_(model, rb.PEP(init=-4.5), verbose=False)
    if tell:
        model.register_forward_pre_hook(say_step)
    found = rb.pruning.prune(
        model, log(), budgets=BUDGETS, folder=folder, resume=True, progress=False,
        **OPTIONS, **CASES[case],
    )  # fmt: skip
    (folder / "digest.json").write_text(json.dumps(digest(model, found)))


def say_step(module: nn.Module, inputs: tuple) -> None:
    if module.training:
        sys.stdout.write("step\n")
        sys.stdout.flush()


def digest(model: nn.Module, found: rb.pruning.Pruning) -> dict[str, str]:
    """Return a digest of the weights, of each ticket, and of all else."""
    told = {"weights": dict(model.state_dict())}
    for ticket in found.tickets:
        parts = {"kept": ticket.kept, "start": ticket.start, "levels": ticket.levels}
        told[f"ticket {ticket.facts['budget']}"] = {
            f"{part} {name}": tensor
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
        }
    made = {name: _digest_of(tensors) for name, tensors in told.items()}
    records = [(r.epoch, r.steps, r.train_loss, r.lr) for r in found.history.epochs]
    facts = [ticket.facts for ticket in found.tickets]
    return made | {
        "history": repr((records, found.history.stopped_early)),
        "facts": repr(facts),
        "scans": repr(found.scans),
    }


def _digest_of(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def killed_after(folder: Path, case: str, steps: int | None) -> bool:
    """Run or resume in a process of its own, and kill it after so many steps; return whether it was."""
    command = [sys.executable, __file__, str(folder), case]
    source = str(Path(rb.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        for made, _ in enumerate(process.stdout, start=1):
            if made == steps:
                process.send_signal(signal.SIGKILL)
                break
    if process.returncode == -signal.SIGKILL:
        return True
    assert process.returncode == 0
    return False


def kill_and_compare(folder: Path, case: str, kills: int, seed: int) -> None:
    work(folder / "whole", case, tell=False)
    expected = json.loads((folder / "whole" / "digest.json").read_text())
    assert len(expected) == len(BUDGETS) + 4
    chance = random.Random(seed)  # noqa: S311  # when to kill, nothing secret
    done = runs = 0
    while done < kills:
        place, runs = folder / f"run {runs}", runs + 1
        while killed_after(place, case, chance.randint(1, STEPS // 2) if done < kills else None):
            done += 1
        assert json.loads((place / "digest.json").read_text()) == expected
        assert list(TicketFolder(place / "tickets")) == sorted(BUDGETS)
        assert read_scans(place) == read_scans(folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_killed_pruning_ends_with_the_same_bits(tmp_path, case):
    kill_and_compare(tmp_path, case, kills=2, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_many_kills_end_with_the_same_bits(tmp_path, case):
    kill_and_compare(tmp_path, case, kills=8, seed=5)


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2], tell=True)
