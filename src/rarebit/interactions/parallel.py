"""Several interactions of the same embeddings, side by side."""

from torch import Tensor, nn

__all__ = ["Parallel"]


class Parallel(nn.Module):
    """Each interaction's features, `(..., F, D)` to a tuple with one tensor an interaction."""

    def __init__(self, *interactions: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(interactions)

    def forward(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        """Return the features of every branch."""
        return tuple(branch(embeddings) for branch in self.branches)
