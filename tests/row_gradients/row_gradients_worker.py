"""One of two processes that train one model with row gradients; also the one process they are held to.

python row_gradients_worker.py RANK FOLDER
"""

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rarebit as rb
from rarebit.row_gradients.seam import RowGradients, sum_losses
from rarebit.tables.collection import TableCollection

FIELDS = (
    rb.data.Field(name="item", rows=9),
    rb.data.Field(name="words", kind="multi", rows=8, max_length=3),
)
NUM_RANKS, NUM_STEPS, SIZES = 2, 20, (17, 12)


class Net(nn.Module):
    """Every kind of table: plain, bag, stacked, made by methods, and tied."""

    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(14, 4)
        self.tags = nn.EmbeddingBag(14, 4, mode="sum", padding_idx=0)
        self.fields = TableCollection(FIELDS, 4, std=1.0)
        self.shop = nn.Embedding(14, 4)
        self.tied = nn.Embedding(14, 4)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 14, bias=False)
        self.out.weight = self.tied.weight
        self.directly = False

    def forward(self, ids):
        rows = self.user(ids[:, 0]) + self.shop(ids[:, 0]) + self.tied(ids[:, 1])
        rows = rows + self.fields(ids[:, 1:5] % 8).sum(dim=1)
        if len(ids) == SIZES[0]:  # the other process never looks into the bag
            rows = rows + self.tags(ids[:, 2:])
            if self.directly:  # nor uses this weight
                rows = rows + self.fields.stacks[0].embedding.weight.mean(dim=0)
        if self.directly:
            rows = rows + self.user.weight.mean(dim=0) + self.shop.weight.mean(dim=0)
        return self.out(torch.tanh(self.hidden(rows)))


def unit_rows(ids, gradients):
    """Each row's gradient at length 1, and only for ids that 3 does not divide."""
    total = gradients.sum(dim=0)
    total = total / total.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return torch.where((ids % 3 != 0).unsqueeze(-1), total, 0.0)


def less_conflict(ids, gradients):
    """The first loss, plus the second without what opposes the first."""
    main, other = gradients
    dot = (main * other).sum(dim=1, keepdim=True)
    square = (main * main).sum(dim=1, keepdim=True).clamp(min=1e-12)
    return main + other - dot.clamp(max=0) / square * main


@dataclass(frozen=True)
class Story:
    """One training; `late` makes the row gradients before the processes know of each other.

    `directly` uses weights without a lookup, too.
    """

    rule: object
    num_losses: int = 1
    num_parts: int = 1
    late: bool = False
    directly: bool = False


STORIES = {
    "sum": Story(sum_losses, late=True),
    "unit": Story(unit_rows),
    "conflict": Story(less_conflict, num_losses=2),
    "micro": Story(unit_rows, num_parts=2),
    "direct": Story(less_conflict, num_losses=2, num_parts=2, directly=True),
}
ALONE = Story(unit_rows)
"""What one process trains while the other one does nothing of the kind."""


def make_model(seed, story=ALONE):
    """Return a model in float64 whose weights depend on the seed."""
    torch.manual_seed(seed)
    model = Net()
    model.directly = story.directly
    rb.apply_(model, rb.Hashing(buckets=6), where=lambda t: t.name == "shop", verbose=False)
    rb.apply_(model, rb.LowRank(rank=2), where=lambda t: t.name == "shop", verbose=False)
    return model.double()


def batches(step):
    """Return what each process trains on: other sizes, and ids that overlap only partly."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randint(5 * rank, 9 + 5 * rank, (size, 5), generator=generator)
        for rank, size in enumerate(SIZES)
    ]


def losses_of(scores, num_losses, weight):
    """Return losses that are a sum over the rows, each row with a given weight."""
    return [F.softplus(scores * (1 - 3 * k)).sum() * weight for k in range(num_losses)]


def train(story, model, rows, wrapped, ranks):
    """Train on the batches of these ranks; of all of them, each loss is the mean over all rows."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    weight = NUM_RANKS / len(ranks) / sum(SIZES) / story.num_parts
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for part in range(story.num_parts):
            last = part == story.num_parts - 1
            quiet = nullcontext() if last or wrapped is model else wrapped.no_sync()
            with quiet:
                ids = [batches(step * story.num_parts + part)[rank] for rank in ranks]
                losses = [losses_of(wrapped(i), story.num_losses, weight) for i in ids]
                rows.backward(*map(sum, zip(*losses, strict=True)), last=last)
        optimizer.step()


def train_alone(story, ranks=range(NUM_RANKS)):
    """Return what one process makes of the batches of all, or of some."""
    model = make_model(0, story)
    with RowGradients(model, story.rule) as rows:
        train(story, model, rows, model, ranks)
    return {key: value.clone() for key, value in model.state_dict().items()}


def main(rank, folder):
    """Train each story with the other process, and write the weights down."""
    torch.set_num_threads(1)
    start = f"file://{folder}/meet"
    for name, story in STORIES.items():
        model = make_model(rank, story)
        early = RowGradients(model, story.rule) if story.late else None
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", init_method=start, rank=rank, world_size=2)
        with early or RowGradients(model, story.rule) as rows:
            train(story, model, rows, DistributedDataParallel(model), [rank])
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        save_file(weights, folder / f"{name}-{rank}.safetensors")
    if rank == 0:
        save_file(train_alone(ALONE, ranks=[0]), folder / "alone.safetensors")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # gloo's threads may outlive the group and abort a process that ends by itself
