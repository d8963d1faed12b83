"""The fully connected part of a model."""

from collections.abc import Sequence

from torch import Tensor, nn

from rarebit.interactions.aligned import Linear
from rarebit.settings import require

__all__ = ["MLP"]


class MLP(nn.Module):
    """Hidden layers of `Linear, [BatchNorm,] ReLU, [Dropout]` and one output, `(B, W)` to `(B,)`."""

    def __init__(
        self, width: int, hidden: Sequence[int], *, dropout: float = 0.0, batch_norm: bool = False
    ) -> None:
        super().__init__()
        require(
            all(units >= 1 for units in hidden), f"hidden layers need at least 1 unit, got {hidden}"
        )
        require(0.0 <= dropout < 1.0, f"dropout must lie in [0, 1), got dropout={dropout}")
        layers: list[nn.Module] = []
        for units in hidden:
            layers.append(Linear(width, units))
            if batch_norm:
                layers.append(nn.BatchNorm1d(units))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = units
        self.layers = nn.Sequential(*layers, Linear(width, 1))

    def forward(self, features: Tensor) -> Tensor:
        """Return one number a row."""
        score: Tensor = self.layers(features).squeeze(-1)
        return score
