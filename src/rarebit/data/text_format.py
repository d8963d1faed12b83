"""How a text file of a log is written: its separator, its quotes, its encoding, its header."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rarebit.settings import check_types, require

if TYPE_CHECKING:
    from rarebit.data.raw.csv_structure import Marks

__all__ = ["TextFormat"]


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How a text file is written. As it comes: a CSV file of RFC 4180 with a header.

    >>> TextFormat(separator=";", escape=chr(92), encoding="latin-1").header
    True
    """

    separator: str = ","
    """Stands between two values: one ASCII character."""
    quote: str = '"'
    """Stands around a value that holds a separator, a quote or the end of a line. Empty for none."""
    escape: str = ""
    """Stands before a quote inside a quoted value. Empty where such a quote is written twice."""
    encoding: Literal["utf-8", "latin-1"] = "utf-8"
    """How characters are written as bytes."""
    header: bool = True
    """Whether the first record is the names of the columns."""
    names: tuple[str, ...] = ()
    """Names of the columns of a file without a header; column_1, column_2 and so on if empty."""

    def __post_init__(self) -> None:
        check_types(self, where="format")
        for name, least in (("separator", 1), ("quote", 0), ("escape", 0)):
            text = getattr(self, name)
            require(
                least <= len(text) <= 1 and text.isascii() and text not in ("\n", "\r", "\0"),
                f"format: {name} must be one ASCII character, got {text!r}",
            )
        marks = [mark for mark in (self.separator, self.quote, self.escape) if mark]
        require(
            len(set(marks)) == len(marks),
            f"format: separator, quote and escape must differ, got {', '.join(map(repr, marks))}",
        )
        require(
            not self.escape or bool(self.quote),
            "format: an escape stands before a quote, so it needs one; got quote=''",
        )
        require(
            not (self.names and self.header),
            "format: names are for a file without a header; give header=False with them",
        )

    @property
    def marks(self) -> "Marks":
        """The bytes that structure the file."""
        from rarebit.data.raw.csv_structure import Marks

        quote, escape = (ord(mark) if mark else -1 for mark in (self.quote, self.escape))
        return Marks(ord(self.separator), quote, escape)
