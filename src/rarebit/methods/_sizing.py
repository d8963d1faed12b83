"""Sizes of methods that make tables smaller, from the share of weights to keep."""

from collections.abc import Sequence

from rarebit.errors import SettingsError
from rarebit.settings import require


def check_share(share: float) -> None:
    """Raise unless this is a share."""
    require(0 < share <= 1, f"share must be above 0 and at most 1, got share={share}")


def plain_weights(shapes: Sequence[tuple[int, int]], share: float) -> int:
    """Check shapes and share, and return the number of weights of plain tables."""
    require(len(shapes) > 0, "the size of a method depends on the shapes of tables, got none")
    smallest = min(min(shape) for shape in shapes)
    require(smallest >= 1, f"a table has at least one row and one column, got {list(shapes)}")
    check_share(share)
    return sum(rows * width for rows, width in shapes)


def too_small(name: str, share: float, least: float) -> SettingsError:
    """Return the error for a share below what the smallest setting keeps."""
    return SettingsError(
        f"{name} cannot keep a share of {share:g} of the weights of these tables: the least it can "
        f"keep is {least:.3g}; ask for that or more"
    )
