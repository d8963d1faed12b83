"""One of several processes that train with checkpoints, of which one may be killed, fail or hang; the first writes the weights.

torchrun ... fault_worker.py FOLDER WEIGHTS [kill|fail|hang RANK STEP]
"""

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import rarebit as rb
from rarebit.data.dataset import _rows
from rarebit.data.synthetic import SyntheticLog
from rarebit.models import build_model
from rarebit.sharding.processes import (
    gather_weights,
    join_processes,
    leave_processes,
    spread_,
)
from rarebit.training.settings import Training, load_splits

SETTINGS = Training(
    epochs=3,
    batch_size=101,
    optimizer="sgd",
    momentum=0.5,
    tables="rowwise",
    lr=0.05,
    ema_decay=0.9,
    patience=None,
    checkpoint_minutes=1e-6,
    seed=1,
)


class Fault(rb.Callback):
    """Does what is asked for, once, in one process."""

    def __init__(self, kind=None, rank=0, step=0):
        self.kind, self.rank, self.step = kind, int(rank), int(step)

    def after_step(self, num_steps):
        if self.kind is None or (dist.get_rank(), num_steps) != (self.rank, self.step):
            return
        if self.kind == "kill" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "fail":
            raise RuntimeError("the disk of this process is on fire")
        if self.kind == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun need not wait for it
            threading.Event().wait()


def train(splits, fault, folder=None, *, spread):
    torch.manual_seed(1)
    model = build_model("deepfm", splits.train.schema, {"dim": 6, "dropout": 0.0})
    if spread:
        spread_(model)
    train, resume = _rows(splits.train, slice(1515)), folder is not None
    options = {"folder": folder, "resume": resume, "callbacks": [fault], "progress": False}
    rb.fit(model, train, splits.valid, settings=SETTINGS, **options)
    return model


def main():
    torch.set_num_threads(1)
    splits = load_splits(SyntheticLog(rows=20_000))
    folder, out, *fault = sys.argv[1:]
    if "RANK" not in os.environ:
        save_file(train(splits, Fault(), spread=False).state_dict(), out)
        return
    join_processes(timeout=timedelta(seconds=20 if "hang" in fault else 120))
    model = train(splits, Fault(*fault), folder, spread=True)
    weights = gather_weights(model)
    if dist.get_rank() == 0:
        save_file(weights, out)
    leave_processes()


if __name__ == "__main__":
    main()
