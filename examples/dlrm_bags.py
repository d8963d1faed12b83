"""DLRM-style bags with offsets, trained row by row, and stored in an eighth of their bytes.

    python examples/dlrm_bags.py

The optimizer updates only the rows of a step, so its time does not grow with the tables.
"""

import torch
from _shared import frequent_first
from torch import Tensor, nn
from torch.nn import functional as F

import rarebit as rb

FIELDS, VALUES, DIM, ROWS, BATCH = 3, 20_000, 16, 10_000, 500


class DLRM(nn.Module):
    """Summed bags, their products in pairs, and a network on both and on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(VALUES, DIM, mode="sum") for _ in range(FIELDS))
        self.bottom = nn.Sequential(nn.Linear(4, DIM), nn.ReLU())
        pairs = (FIELDS + 1) * FIELDS // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Return the logit of a click; ids are `(B, F, L)`."""
        offsets = torch.arange(0, ids[:, 0].numel(), ids.shape[2])
        dense = self.bottom(numbers)  # (B, D)
        rows = [bag(ids[:, f].flatten(), offsets) for f, bag in enumerate(self.bags)]
        all_rows = torch.stack([dense, *rows], dim=1)  # (B, F + 1, D)
        first, second = torch.triu_indices(FIELDS + 1, FIELDS + 1, offset=1)
        products = (all_rows @ all_rows.mT)[:, first, second]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)


def main() -> None:
    """Train by rows, then compress."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    ids = frequent_first(VALUES, (ROWS, FIELDS, 2), random)
    numbers = torch.randn(ROWS, 4, generator=random)
    label = torch.bernoulli(torch.where(ids[:, 0, 0] % 2 == 0, 0.8, 0.2), generator=random)
    model = DLRM()
    optimizer = rb.optimizer(model, lr=1e-2, tables="rowwise")
    losses = []
    for _ in range(3):
        for rows in torch.randperm(ROWS).split(BATCH):
            loss = F.binary_cross_entropy_with_logits(model(numbers[rows], ids[rows]), label[rows])
            loss.backward()
            rb.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    counts = {f"bags.{f}": ids[:, f].flatten().bincount(minlength=VALUES) for f in range(FIELDS)}
    before = model(numbers, ids).sigmoid()
    changes = rb.compress_(model, counts=counts, size="1/8", verbose=False)
    sizes = [sum(table.num_bytes for table in side) for side in (changes.before, changes.after)]
    change = (model(numbers, ids).sigmoid() - before).abs().max()
    print(f"{sizes[0]} bytes in {sizes[1]}; the largest change of a score is {change:.3f}")


if __name__ == "__main__":
    main()
