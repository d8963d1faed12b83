"""Harmless transfer in two processes: DistributedDataParallel over gloo, on the CPU.

    python examples/ddp.py

Start the transfer first, then wrap the model. All processes make the same update of the table.
"""

import tempfile
from pathlib import Path

import torch
from _shared import frequent_first, tell
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rarebit as rb

ITEMS, DIM, ROWS, BATCH, PROCESSES = 1000, 16, 10_000, 250, 2


def make_clicks(rank: int) -> tuple[Tensor, Tensor]:
    """Return the items and labels of one process."""
    random = torch.Generator().manual_seed(rank)
    item = frequent_first(ITEMS, (ROWS,), random)
    return item, torch.bernoulli(torch.where(item % 4 == 0, 0.8, 0.2), generator=random)


def train(rank: int, meeting: str) -> None:
    """Train as one of the processes; the first one prints what the transfer did."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=PROCESSES
    )
    torch.manual_seed(rank)
    item, label = make_clicks(rank)
    counts = item.bincount(minlength=ITEMS)
    distributed.all_reduce(counts)  # those of all processes: each must select the same rows
    model = nn.Sequential(nn.Embedding(ITEMS, DIM), nn.Linear(DIM, 1))
    transfer = rb.HarmlessTransfer().start(model, counts=counts)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        for rows in torch.randperm(ROWS).split(BATCH):
            loss = F.binary_cross_entropy_with_logits(wrapped(item[rows]).squeeze(1), label[rows])
            transfer.backward(loss)  # the only changed line; it was loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    tables = [torch.empty_like(model[0].weight) for _ in range(PROCESSES)]
    distributed.all_gather(tables, model[0].weight.detach())
    if rank == 0:
        tell(transfer, losses)
        print(f"the tables of both processes are equal: {torch.equal(*tables)}")
    transfer.close()
    del wrapped  # it holds the group, whose threads must end before the process does
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Start the processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (str(Path(folder) / "meeting"),), PROCESSES)


if __name__ == "__main__":
    main()
