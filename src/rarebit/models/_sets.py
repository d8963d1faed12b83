"""The set form of a model: what each embedding set has of its own, before the mean over sets.

    one set      features = interaction(v)                         head: all hidden layers
    M sets       features = mean over m of block_m(interaction_m(v^m))      head: without the first

An interaction without a nonlinearity would make of M sets no more than one wide set, so a layer is put
behind each, and the head has one less (Guo et al., 2024).
"""

from collections.abc import Sequence

from torch import nn

from rarebit.interactions.block import Block
from rarebit.settings import require

__all__ = ["with_layer_a_set"]


def with_layer_a_set(
    interaction: nn.Module,
    width: int,
    hidden: Sequence[int],
    *,
    num_sets: int | None,
    dropout: float,
    batch_norm: bool,
) -> tuple[nn.Module, int, Sequence[int]]:
    """Return an interaction, the width of its features, and the hidden layers left for the head.

    >>> with_layer_a_set(nn.Identity(), 6, (8, 4), num_sets=None, dropout=0.0, batch_norm=False)
    (Identity(), 6, (8, 4))
    """
    if num_sets is None:
        return interaction, width, hidden
    require(len(hidden) >= 1, "several embedding sets need a hidden layer each, got hidden=()")
    block = Block(width, hidden[0], dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
    return nn.Sequential(interaction, block), hidden[0], tuple(hidden[1:])
