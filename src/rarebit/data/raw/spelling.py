"""Values as text, the same whatever file they come from, or however a program spells them.

A frame has the number 15 where one program writes "15" and another, whose column has gaps, "15.0"; it
has true where others write "True" or "TRUE". A log keeps the spelling of its own file. Rows that come
later are looked up as they are spelled, then in the other ways.
"""

import polars as pl

__all__ = ["MAX_EXACT", "one_spelling", "other_spellings", "text_of"]

MAX_EXACT = 1 << 53
"""Up to here, a float tells two neighbouring whole numbers apart."""
WHOLE, WHOLE_AS_DECIMAL = r"^[+-]?\d+$", r"^([+-]?\d+)\.0+$"
TRUTHS = ("true", "false")


def text_of(column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Return values of any type as text: a whole number has no point, whatever its type is."""
    if dtype == pl.String:
        return column
    if dtype.is_float():
        whole = (column == column.floor()) & (column.abs() <= MAX_EXACT)
        as_whole = column.cast(pl.Int64, strict=False).cast(pl.String)
        text = pl.when(whole).then(as_whole).otherwise(column.cast(pl.String))
        return pl.when(column.is_nan()).then(None).otherwise(text)
    return column.cast(pl.String)


def other_spellings(text: pl.Expr) -> list[pl.Expr]:
    """Return other texts for the same values, the likeliest first; null where there is none.

    >>> texts = pl.DataFrame({"text": ["15", "15.0", "TRUE", "red"]})
    >>> texts.select(pl.coalesce(other_spellings(pl.col("text")))).to_series().to_list()
    ['15.0', '15', 'true', None]
    """
    lower = text.str.to_lowercase()
    is_truth = lower.is_in(TRUTHS)
    return [
        text.str.extract(WHOLE_AS_DECIMAL),
        pl.when(text.str.contains(WHOLE)).then(text + ".0"),
        pl.when(is_truth & (text != lower)).then(lower),
        pl.when(is_truth).then(lower.str.to_titlecase()),
        pl.when(is_truth).then(lower.str.to_uppercase()),
    ]


def one_spelling(texts: pl.Series) -> pl.Series:
    """Return texts in the one spelling that stands for all of a value.

    >>> one_spelling(pl.Series(["15.0", "True", "red"])).to_list()
    ['15', 'true', 'red']
    """
    lower = texts.str.to_lowercase()
    whole = texts.str.replace(WHOLE_AS_DECIMAL, "$1")
    return lower.zip_with(lower.is_in(TRUTHS), whole)
