"""Kill a training run again and again, resume it each time, and compare its end with one never killed.

    python benchmarks/kills.py --kills 100 --out benchmarks/results/kills.json

The run has everything that has a state: lazy Adam by rows, averaged weights, a learning rate that is cut
on a plateau, a row-gradient rule, dropout. It writes a checkpoint every few steps, so that many kills fall
into the writing of one. A kill is SIGKILL at a random time after training began; times are drawn from a
printed seed. The run counts as killed only if it was still going on.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

import rarebit as rb
from rarebit.machine import machine
from rarebit.models.deepfm import DeepFM
from rarebit.training.fit import Silence

READY = "training"
SETTINGS = rb.Training(
    epochs=20,
    batch_size=64,
    lr=0.02,
    tables="rowwise",
    ema_decay=0.95,
    plateau_factor=0.5,
    patience=None,
    checkpoint_minutes=0.01 / 60,
)


def main() -> None:
    """Kill and resume until the kills are used up, then let the last one end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    parser.add_argument("--worker", type=Path, help="train in this folder, once")
    options = parser.parse_args()
    if options.worker is not None:
        train(options.worker)
        return
    facts = machine()  # before the runs: the commit is that of the code that runs
    result = kill_and_resume(options.kills, options.seed) | {"machine": facts}
    print(json.dumps(result))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if result["different"] == 0 else 1)


def kill_and_resume(kills: int, seed: int) -> dict[str, int]:
    """Return how many runs were killed, how often inside a write, and how many ended differently."""
    print(f"seed {seed}", file=sys.stderr)
    chance = random.Random(seed)  # noqa: S311  # when to kill, nothing secret
    done = inside = runs = different = 0
    with tempfile.TemporaryDirectory() as place:
        expected, seconds = undisturbed(Path(place) / "undisturbed")
        while done < kills:
            folder, ended = Path(place) / f"run-{runs}", False
            runs += 1
            while not ended:
                wait = chance.uniform(0.0, 0.6 * seconds) if done < kills else None
                ended = run_until(folder, wait)
                done += not ended
                inside += any((folder / "checkpoints").glob(".*.writing"))
            different += (folder / "digest").read_text() != expected
            print(f"{done} kills, {runs} runs, {different} different", file=sys.stderr)
    return {
        "kills": done,
        "inside_a_write": inside,
        "runs": runs,
        "different": different,
        "seed": seed,
    }


def undisturbed(folder: Path) -> tuple[str, float]:
    """Return the digest of a run that is not killed, and how long it trained."""
    assert run_until(folder, None)
    return (folder / "digest").read_text(), float((folder / "seconds").read_text())


def run_until(folder: Path, seconds: float | None) -> bool:
    """Run or resume a run; kill it after so many seconds of training. Return whether it ended."""
    command = [sys.executable, __file__, "--worker", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # this file
        assert process.stdout is not None
        process.stdout.readline()  # that it is ready, or nothing when it had ended before
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return False
    assert process.returncode == 0, f"the run failed with {process.returncode}"
    return True


class Ready(Silence):
    """Says when the first step is near."""

    begin = 0.0

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:
        """Say so, once."""
        del epoch, epochs, rows
        if not self.begin:
            self.begin = time.perf_counter()
            print(READY, flush=True)


def train(folder: Path) -> None:
    """Train, or go on training, in a folder; write a digest of everything that came out."""
    torch.set_num_threads(1)
    schema = rb.data.Schema(
        (rb.data.Field(name="user", rows=3000), rb.data.Field(name="item", rows=500))
    )
    train, valid = draw(schema, 8192, seed=1), draw(schema, 512, seed=2)
    torch.manual_seed(0)
    model = DeepFM(schema, dim=8, hidden=(16,), dropout=0.2)
    with rb.RowGradients(model, bounded) as rows:
        progress = Ready()
        history = rb.fit(
            model,
            train,
            valid,
            settings=SETTINGS,
            folder=folder / "checkpoints",
            resume=True,
            backward=rows.backward,
            progress=progress,
        )
    (folder / "seconds").write_text(str(time.perf_counter() - progress.begin))
    (folder / "digest").write_text(digest(model.state_dict(), history))


def bounded(ids: Tensor, gradients: Tensor) -> Tensor:
    """Bound how far a row moves: a rule that is not linear."""
    del ids
    total = gradients.sum(dim=0)
    return total / total.norm(dim=1, keepdim=True).clamp(min=1e-3)


def draw(schema: rb.data.Schema, n: int, seed: int) -> rb.Dataset:
    """Return rows whose label depends on their user."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([field.rows for field in schema.fields])
    ids = (sizes * torch.rand(n, len(sizes), generator=generator) ** 2).long()
    noise = torch.rand(n, generator=generator) < 0.3
    return rb.Dataset(schema, ids, label=(ids[:, 0] % 2 == 0) ^ noise)


def digest(weights: dict[str, Tensor], history: rb.training.History) -> str:
    """Return a digest of all weights and of the history without its times."""
    found = hashlib.sha256()
    for name, weight in weights.items():
        found.update(name.encode() + weight.numpy().tobytes())
    for record in history.epochs:
        found.update(repr((record.epoch, record.train_loss, record.lr, record.valid)).encode())
    return found.hexdigest()


if __name__ == "__main__":
    main()
