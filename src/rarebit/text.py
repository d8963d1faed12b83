"""Tables and shares as text: plain for `print`, and rendered by the command line."""

from collections.abc import Sequence
from dataclasses import dataclass

NOTHING = "-"
"""A cell without a value."""


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are text. `str()` aligns it: the first column left, the others right.

    >>> print(TextTable("Tables", ("table", "rows"), [("user", "9"), ("it", "12")]))
    Tables
    table  rows
    user      9
    it       12
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """What the columns mean."""

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (self.header, *self.rows)
        ]
        return "\n".join(filter(None, [self.title, *lines, self.note]))


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share as a percentage; only 0 is shown as 0 %, and only 1 as 100 %.

    >>> [percent(share) for share in (0, 0.0001, 0.1234, 0.9999, 1, None)]
    ['0 %', '<1 %', '12 %', '>99 %', '100 %', '-']
    >>> [percent(share, digits=1) for share in (0, 0.00001, 0.1234, 0.99999, 1)]
    ['0 %', '<0.1 %', '12.3 %', '>99.9 %', '100 %']
    """
    if share is None:
        return NOTHING
    least = 10.0 ** (-2 - digits)
    if 0 < share < least:
        return f"<{100 * least:g} %"
    if 1 - least < share < 1:
        return f">{100 - 100 * least:g} %"
    return f"{100 * share:.{0 if share in (0, 1) else digits}f} %"
