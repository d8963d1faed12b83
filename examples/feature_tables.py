"""Smaller tables in a model with one table or bag per feature, as torch-rechub and DeepCTR-Torch build them.

    python examples/feature_tables.py

Large tables are hashed, all others become low rank; small ones stay. The loop and the optimizer are yours.
"""

import torch
from _shared import frequent_first
from torch import Tensor, nn
from torch.nn import functional as F

import rarebit as rb

SIZES = {"user": 20_000, "item": 5_000, "category": 50, "history": 5_000}
DIM, ROWS, BATCH = 16, 10_000, 500


class FeatureModel(nn.Module):
    """A table for each feature, a bag for the history, and a network."""

    def __init__(self) -> None:
        super().__init__()
        single = {
            name: nn.Embedding(rows, DIM) for name, rows in SIZES.items() if name != "history"
        }
        self.tables = nn.ModuleDict(single)
        self.history = nn.EmbeddingBag(SIZES["history"], DIM, mode="mean")
        self.network = nn.Sequential(nn.Linear(len(SIZES) * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logit of a click, `(B,)`."""
        rows = [table(batch[name]) for name, table in self.tables.items()]
        return self.network(torch.cat([*rows, self.history(batch["history"])], dim=1)).squeeze(1)


def main() -> None:
    """Change the tables, train, and merge them."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    log = {
        name: frequent_first(rows, (ROWS, 5) if name == "history" else (ROWS,), random)
        for name, rows in SIZES.items()
    }
    label = torch.bernoulli(torch.where(log["item"] % 2 == 0, 0.8, 0.2), generator=random)
    model = FeatureModel()
    rb.apply_(model, rb.Hashing(buckets=2_000), where=lambda table: table.rows > 10_000)
    rb.apply_(model, rb.LowRank(rank=4), where=lambda table: 1_000 < table.rows <= 10_000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rb.check_optimizer(model, optimizer)
    losses = []
    for rows in torch.randperm(ROWS).split(BATCH):
        batch = {name: ids[rows] for name, ids in log.items()}
        loss = F.binary_cross_entropy_with_logits(model(batch), label[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    rb.merge_(model)
    print({name: type(table).__name__ for name, table in model.tables.items()})


if __name__ == "__main__":
    main()
