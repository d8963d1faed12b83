"""Concatenation: the fields side by side, for a network that finds the interactions itself.

Several interactions of the same embeddings, side by side.

Two networks over the same fields, side by side (Mao et al., 2023, without feature selection).

    x = relu layers of [v_1, ..., v_F]        `first`
    y = other relu layers of the same         `second`

What makes the streams differ in the paper is a gate on the fields of each. It is left out here, as
the paper of multi-embedding does (Guo et al., 2024): the streams differ by how they start.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from rarebit.interactions.block import Blocks

__all__ = ["Concatenation", "Parallel", "TwoStreams"]


class Concatenation(nn.Module):
    """All fields in one vector, `(..., F, D)` to `(..., F * D)`."""

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the fields side by side."""
        return embeddings.flatten(-2)


class Parallel(nn.Module):
    """Each interaction's features, `(..., F, D)` to a tuple with one tensor an interaction."""

    def __init__(self, *interactions: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(interactions)

    def forward(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        """Return the features of every branch."""
        return tuple(branch(embeddings) for branch in self.branches)


class TwoStreams(nn.Module):
    """The features of both streams, `(..., F, D)` to `(..., X)` and `(..., Y)`.

    With `num_sets`, the input is `(M, B, F, D)` and every set has streams of its own.

    >>> import torch
    >>> x, y = TwoStreams(12, (8, 6), (5,))(torch.zeros(2, 3, 4))
    >>> x.shape, y.shape
    (torch.Size([2, 6]), torch.Size([2, 5]))
    """

    def __init__(
        self,
        width: int,
        first: Sequence[int],
        second: Sequence[int],
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
        num_sets: int | None = None,
    ) -> None:
        super().__init__()
        self.first, self.second = (
            Blocks(width, hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
            for hidden in (first, second)
        )

    def forward(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and y."""
        fields = embeddings.flatten(-2)  # (..., F * D)
        return self.first(fields), self.second(fields)
