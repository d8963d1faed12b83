"""What the examples share: text and clicks made on the spot, and the ledger in a few words."""

import torch
from torch import Tensor

import rarebit as rb

__all__ = ["VOCABULARY", "frequent_first", "make_text", "tell"]

VOCABULARY = 400
KINDS = 8


def frequent_first(number: int, size: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Return ids below `number`, the first of them most frequent, as items in any log are."""
    chance = 1.0 / torch.arange(1, number + 1)
    drawn = torch.multinomial(chance, int(torch.Size(size).numel()), True, generator=random)
    return drawn.reshape(size)


def make_text(lines: int, length: int, seed: int = 0) -> Tensor:
    """Return lines of tokens, `(lines, length)`: each kind of word is followed by the next."""
    random = torch.Generator().manual_seed(seed)
    words = frequent_first(VOCABULARY // KINDS, (lines, length), random) * KINDS
    first = torch.randint(KINDS, (lines, 1), generator=random)
    return words + (first + torch.arange(length)) % KINDS


def tell(transfer: rb.transfer.RunningTransfer, losses: list[float]) -> None:
    """Print how the loss went, and what the transfer did to the rare rows of each table."""
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    print(f"loss {first:.3f} at first, {last:.3f} at last, {len(losses)} steps")
    for name, table in transfer.ledger.read()["tables"].items():
        print(
            f"{name}: {table['rows']} updates of rare rows; the main loss opposed {table['opposed']:.0%} of them; "
            f"the optimizer realised {table['realised_over_promised']:.0%} of what the barrier promises"
        )
