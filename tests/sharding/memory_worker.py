"""Trains a model of 20 million rows of 16 numbers for a few steps, in a process whose addresses are limited to so many MB.

memory_worker.py MEGABYTES          in one process, or started by torchrun in several
"""

import os
import resource
import sys

import torch
import torch.distributed as dist

from rarebit.data.dataset import Dataset
from rarebit.data.schema import Field, Schema
from rarebit.sharding.processes import join_processes, leave_processes
from rarebit.training.run import train_model
from rarebit.training.settings import RunSettings, Training

ROWS = 20_000_000


def main():
    torch.set_num_threads(1)
    limit = int(sys.argv[1]) << 20
    spread = "RANK" in os.environ
    if spread:
        join_processes()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    random = torch.Generator().manual_seed(0)
    schema = Schema((Field(name="user", rows=ROWS), Field(name="item", rows=1000)))
    ids = torch.stack([torch.randint(n, (4000,), generator=random) for n in (ROWS, 1000)], dim=1)
    data = Dataset(schema, ids, None, (ids[:, 1] % 2).float())
    settings = RunSettings(
        model="fm",
        model_settings={"dim": 16},
        training=Training(epochs=1, batch_size=500, optimizer="sgd", tables="rowwise", lr=0.1),
    )
    options = {"plan": "auto"} if spread else {}
    _, history = train_model(
        settings, data, None, progress=not spread or not dist.get_rank(), **options
    )
    assert history.epochs[0].steps == 8
    leave_processes()


if __name__ == "__main__":
    main()
