"""Harmless transfer in your own training loop: a click model, plain PyTorch.

    python examples/own_loop.py

Rare users and items learn from frequent ones that meet the same items and users, as far as the clicks let them.
"""

import torch
from _shared import frequent_first, tell
from torch import Tensor, nn
from torch.nn import functional as F

import rarebit as rb

USERS, ITEMS, DIM, ROWS, BATCH = 2000, 1000, 16, 20_000, 500


class ClickModel(nn.Module):
    """Two tables and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.item = nn.Embedding(ITEMS, DIM)
        self.network = nn.Sequential(nn.Linear(3 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Return the logit of a click, `(B,)`."""
        u, i = self.user(user), self.item(item)  # (B, D) both
        return self.network(torch.cat([u, i, u * i], dim=1)).squeeze(1)


def make_clicks() -> tuple[Tensor, Tensor, Tensor]:
    """Return users, items and labels: each user likes the items of one kind."""
    random = torch.Generator().manual_seed(0)
    user = frequent_first(USERS, (ROWS,), random)
    item = frequent_first(ITEMS, (ROWS,), random)
    chance = torch.where(user % 4 == item % 4, 0.8, 0.1)
    return user, item, torch.bernoulli(chance, generator=random)


def main() -> None:
    """Train, and print what the transfer did."""
    torch.manual_seed(0)
    user, item, label = make_clicks()
    schema = rb.data.Schema(
        (rb.data.Field(name="user", rows=USERS), rb.data.Field(name="item", rows=ITEMS))
    )
    log = rb.Dataset.from_columns({"user": user, "item": item}, label=label, schema=schema)
    model = ClickModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    with rb.HarmlessTransfer().start(model, log) as transfer:
        for _ in range(3):
            for rows in torch.randperm(ROWS).split(BATCH):
                loss = F.binary_cross_entropy_with_logits(
                    model(user[rows], item[rows]), label[rows]
                )
                transfer.backward(loss)  # the only changed line; it was loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    tell(transfer, losses)
    print(transfer.explain("item", ITEMS - 100))


if __name__ == "__main__":
    main()
