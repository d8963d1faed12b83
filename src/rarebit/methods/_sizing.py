"""What methods that make tables smaller share: how many weights a share of them is."""

from collections.abc import Sequence

from rarebit.errors import SettingsError
from rarebit.settings import require

__all__ = ["check_share", "plain_weights", "too_small"]


def check_share(share: float) -> None:
    """Raise when a share of the weights is none."""
    require(0 < share <= 1, f"share must be above 0 and at most 1, got share={share}")


def plain_weights(shapes: Sequence[tuple[int, int]], share: float) -> int:
    """Return the weights of plain tables of these shapes, having checked that a share can be taken.

    >>> plain_weights([(1000, 8), (50, 8)], share=0.5)
    8400
    """
    require(len(shapes) > 0, "a method is sized by the shapes of tables, and none were given")
    smallest = min(min(shape) for shape in shapes)
    require(smallest >= 1, f"a table has at least one row and one column, got {list(shapes)}")
    check_share(share)
    return sum(rows * width for rows, width in shapes)


def too_small(name: str, share: float, least: float) -> SettingsError:
    """Return the error that says that not even the smallest setting keeps so little."""
    return SettingsError(
        f"{name} cannot keep a share of {share:g} of the weights of these tables: the least it can "
        f"keep is {least:.3g}; ask for that or more"
    )
