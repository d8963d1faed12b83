"""Concatenation: the fields side by side, for a network that finds the interactions itself."""

from torch import Tensor, nn

__all__ = ["Concatenation"]


class Concatenation(nn.Module):
    """All fields in one vector, `(..., F, D)` to `(..., F * D)`."""

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the fields side by side."""
        return embeddings.flatten(-2)
