"""The tail method around your own loop: a matrix factorisation whose rare users and items overfit.

    python examples/matrix_factorisation.py

Three lines are added: start, averaged and between_epochs. At the end the tables are plain.
"""

import torch
from _shared import frequent_first
from torch import Tensor, nn
from torch.nn import functional as F

import rarebit as rb

USERS, ITEMS, DIM, ROWS, BATCH, EPOCHS = 3_000, 2_000, 16, 20_000, 500, 6


class Factors(nn.Module):
    """Users times items."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Return the logit of a click, `(B,)`."""
        return (self.user(user) * self.item(item)).sum(dim=1) + self.bias


def train(
    log: tuple[Tensor, Tensor, Tensor], held: tuple[Tensor, Tensor, Tensor], use_tail: bool
) -> float:
    """Train, and return the loss of the best epoch on held-out rows."""
    torch.manual_seed(0)
    user, item, label = log
    model = Factors()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    counts = {"user": user.bincount(minlength=USERS), "item": item.bincount(minlength=ITEMS)}
    steps = -(-len(label) // BATCH)
    tail = rb.Tail().start(model, optimizer, counts, steps_per_epoch=steps) if use_tail else None
    best = float("inf")
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(label)).split(BATCH):
            loss = F.binary_cross_entropy_with_logits(model(user[rows], item[rows]), label[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad(), tail.averaged() if tail else torch.no_grad():
            found = F.binary_cross_entropy_with_logits(model(*held[:2]), held[2])
            best = min(best, found.item())
        if tail:
            tail.between_epochs()
    if tail:
        tail.end()
        assert type(model.user) is nn.Embedding
    return best


def main() -> None:
    """Compare plain training and the tail."""
    random = torch.Generator().manual_seed(0)
    user, item = (frequent_first(rows, (2 * ROWS,), random) for rows in (USERS, ITEMS))
    label = torch.bernoulli(torch.where(user % 4 == item % 4, 0.8, 0.2), generator=random)
    log, held = ((user[part], item[part], label[part]) for part in (slice(ROWS), slice(ROWS, None)))
    print(f"held-out loss: plain {train(log, held, False):.4f}, tail {train(log, held, True):.4f}")


if __name__ == "__main__":
    main()
