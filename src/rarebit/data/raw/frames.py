"""Raw rows that are in memory already: a Polars or pandas frame, or arrays by column."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rarebit.data.dataset import Dataset
from rarebit.data.log_schema import LogSchema, Split
from rarebit.data.raw.encode import Origin, encode_log
from rarebit.data.raw.encoder import Encoder, encoder_of
from rarebit.data.raw.infer import SAMPLE_ROWS, infer_schema
from rarebit.data.raw.readers import read_frame
from rarebit.data.raw.rows import BadRows
from rarebit.errors import DataError, SettingsError

__all__ = ["as_polars", "encode_frame"]


def encode_frame(
    frame: Any,
    label: str | None = None,
    *,
    schema: LogSchema | None = None,
    split: Split | None = None,
    like: Dataset | None = None,
) -> Dataset:
    """Encode raw rows: with a vocabulary of their own, or with that of another data set.

    >>> clicks = {"user": ["ann", "bob"] * 20, "ad": list("abcd") * 10, "click": [0, 1] * 20}
    >>> data = encode_frame(clicks, label="click")
    >>> [len(part) for part in data.splits], data.schema["user"].rows
    ([32, 4, 4], 5)
    """
    rows = as_polars(frame)
    if like is not None:
        if schema is not None or split is not None:
            raise SettingsError("rows like another data set's have its schema and are not split")
        return _encode_like(rows, encoder_of(like))
    if schema is None:
        if label is None:
            raise SettingsError("which column is the label? Give label=, or a schema")
        schema = infer_schema(rows.head(SAMPLE_ROWS), label, split=split).schema
    elif split is not None:
        schema = schema.with_split(split)
    bad = BadRows()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "data"
        chunks = read_frame(rows, schema.columns_read, missing=schema.missing)
        encode_log(chunks, schema, place, origin=Origin(name="a frame"), bad=bad)
        return Dataset.open(place).in_memory(Encoder.open(place / "encoder"))


def _encode_like(rows: pl.DataFrame, encoder: Encoder) -> Dataset:
    bad = BadRows()
    with_label = encoder.schema.label in rows.columns
    columns = encoder.columns_read(with_label=with_label)
    encoded = [
        encoder.encode(chunk, bad, with_label=with_label)
        for chunk in read_frame(rows, columns, missing=encoder.schema.missing)
    ]
    bad.raise_if_any()
    return Dataset(
        encoder.fields,
        np.concatenate([part.ids for part in encoded]),
        np.concatenate([part.numeric for part in encoded]),
        np.concatenate([part.label for part in encoded]) if with_label else None,
    )


def as_polars(frame: Any) -> pl.DataFrame:
    """Return a frame of any kind as Polars has it.

    >>> as_polars({"user": np.array(["ann", "bob"])}).shape
    (2, 1)
    """
    if isinstance(frame, pl.LazyFrame):
        frame = frame.collect()
    if isinstance(frame, pl.DataFrame):
        return frame.fill_nan(None)
    try:
        if isinstance(frame, Mapping):
            return pl.DataFrame(dict(frame)).fill_nan(None)
        if type(frame).__module__.partition(".")[0] in ("pandas", "pyarrow"):
            return pl.DataFrame(frame, nan_to_null=True)
    except (pl.exceptions.PolarsError, TypeError, ValueError, ImportError) as error:
        raise DataError(f"the frame cannot be read: {error}") from None
    raise DataError(
        f"expected a Polars or pandas frame, or a mapping of arrays, got {type(frame).__name__}"
    )
