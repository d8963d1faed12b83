"""What the neighbours of shrinkage share: they are compared with it and with each other, one at a time."""

from rarebit.callbacks import TrainingMethod
from rarebit.technique import Technique, technique_name

__all__ = ["Neighbour"]


class Neighbour(TrainingMethod):
    """A known way to treat rare rows in training, to compare ours with."""

    @classmethod
    def refuses(cls, other: type[Technique]) -> str | None:
        """Refuse another neighbour and forgetting: each is compared by itself."""
        if issubclass(other, Neighbour) or technique_name(other) == "forgetting":
            return (
                "both treat rare rows in training, and each is compared by itself; use one of them"
            )
        return super().refuses(other)
