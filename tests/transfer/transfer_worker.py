"""One of two processes that train one model with harmless transfer; also the one they are held to.

python transfer_worker.py RANK FOLDER
"""

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rarebit as rb
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.tables.collection import TableCollection
from rarebit.transfer.losses import MMD, Adversarial, AdversarialMLP, SlicedWasserstein

FIELDS = (
    rb.data.Field(name="item", rows=19),
    rb.data.Field(name="words", kind="multi", rows=18, max_length=3),
)
NUM_RANKS, NUM_STEPS, SIZES, ROWS = 2, 12, (17, 12), 24
COUNTS = {
    name: torch.arange(rows) + 1
    for name, rows in (("user", ROWS), ("tags", ROWS), ("tied", ROWS), ("item", 19), ("words", 18))
}


class Net(nn.Module):
    """Every kind of table: plain, made by a method, bag, stacked and tied."""

    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(ROWS, 4)
        self.tags = nn.EmbeddingBag(ROWS, 4, mode="sum", padding_idx=0)
        self.fields = TableCollection(FIELDS, 4, std=1.0)
        self.tied = nn.Embedding(ROWS, 4)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, ROWS, bias=False)
        self.out.weight = self.tied.weight

    def forward(self, ids):
        rows = self.user(ids[:, 0]) + self.tied(ids[:, 1]) + self.tags(ids[:, 2:])
        rows = rows + self.fields(ids[:, 1:5] % 18).sum(dim=1)
        return self.out(torch.tanh(self.hidden(rows)))


@dataclass(frozen=True)
class Story:
    """One training."""

    options: dict = field(default_factory=dict)
    num_parts: int = 1


STORIES = {
    "lexico": Story({"loss": Adversarial(lr=0.5)}),
    "hidden": Story({"loss": AdversarialMLP(lr=0.5), "absent": "all"}),
    "global": Story({"rule": "global", "both": True}),
    "micro": Story({"loss": MMD(sample=6)}, num_parts=2),
    "sliced": Story({"loss": SlicedWasserstein(directions=4, sample=6)}),
}


def make_model(seed):
    """Return a model in float64 whose weights depend on the seed."""
    torch.manual_seed(seed)
    model = Net()
    rb.apply_(model, rb.MLET(inner_dim=6), where=lambda t: t.name == "user", verbose=False)
    return model.double()


def batches(step):
    """Return what each process trains on: other sizes, and ids that overlap only partly."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randint(8 * rank, 16 + 8 * rank, (size, 5), generator=generator)
        for rank, size in enumerate(SIZES)
    ]


def train(story, model, transfer, wrapped, ranks):
    """Train on the batches of these ranks; of all of them, the loss is the mean over all rows."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    weight = NUM_RANKS / len(ranks) / sum(SIZES) / story.num_parts
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for part in range(story.num_parts):
            last = part == story.num_parts - 1
            quiet = nullcontext() if last or wrapped is model else wrapped.no_sync()
            with quiet:
                ids = [batches(step * story.num_parts + part)[rank] for rank in ranks]
                loss = sum(F.softplus(wrapped(i)).sum() for i in ids) * weight
                transfer.backward(loss, last=last)
        optimizer.step()


def started(story, model):
    """Return the transfer of a story on all tables."""
    settings = HarmlessTransfer(**{"samples": 8, "scale": 5.0} | story.options)
    return settings.start(model, counts=COUNTS, where=lambda t: True)


def all_values(model, transfer):
    """Return weights, discriminators and the mean main loss."""
    found = {key: value.clone() for key, value in model.state_dict().items()}
    for name, state in transfer.state_dict()["losses"].items():
        found |= {
            f"{name}/{key}": value.clone() for key, value in state.items() if key != "optimizer"
        }
    found["main_loss"] = torch.tensor(transfer.ledger.read()["main_loss"], dtype=torch.float64)
    return found


def train_alone(story):
    """Return what one process makes of the batches of all."""
    model = make_model(seed=0)
    with started(story, model) as transfer:
        train(story, model, transfer, model, range(NUM_RANKS))
        return all_values(model, transfer)


def main(rank, folder):
    """Train each story with the other process, and write the values down."""
    torch.set_num_threads(1)
    start = f"file://{folder}/meet"
    distributed.init_process_group("gloo", init_method=start, rank=rank, world_size=2)
    for name, story in STORIES.items():
        model = make_model(seed=rank)
        with started(story, model) as transfer:
            train(story, model, transfer, DistributedDataParallel(model), [rank])
            save_file(all_values(model, transfer), folder / f"{name}-{rank}.safetensors")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # gloo's threads may outlive the group and abort a process that ends by itself
