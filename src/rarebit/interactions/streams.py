"""Features side by side: the fields themselves, several interactions, or two networks over the same fields.

    Concatenation    [v_1, ..., v_F], for a network that finds the interactions itself
    Parallel         [ interaction_1(v), interaction_2(v), ... ]
    TwoStreams       x = relu layers of [v_1, ..., v_F], y = other relu layers of the same (Mao et al., 2023)

In the paper of two streams, a gate on the fields makes them differ. It is left out here, as in the paper of
multi-embedding (Guo et al., 2024): the streams differ by how they start.
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
    """Each interaction's features, `(..., F, D)` to a tuple with one tensor per interaction."""

    def __init__(self, *interactions: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(interactions)

    def forward(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        """Return the features of every branch."""
        return tuple(branch(embeddings) for branch in self.branches)


class TwoStreams(nn.Module):
    """The features of both streams, `(..., F, D)` to `(..., X)` and `(..., Y)`.

    With `num_sets`, the input is `(M, B, F, D)` and every set has its own streams.
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
