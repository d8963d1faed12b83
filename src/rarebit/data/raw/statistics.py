"""What `rarebit data show` tells of a prepared log, from the counts of its values."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rarebit.data.raw.encoder import Encoder
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, UNKNOWN, Field
from rarebit.data.statistics import DataStatistics, FieldStatistics, value_statistics

__all__ = ["describe"]

Counts = Mapping[str, NDArray[np.int64]]


def describe(
    encoder: Encoder,
    codes: Counts,
    ids: Counts,
    *,
    missing: Mapping[str, int],
    parts: NDArray[np.uint8],
    label: NDArray[np.uint8],
    bad_rows: int,
) -> DataStatistics:
    """Describe a log: `codes` and `ids` count raw and encoded values by column, `(3, n)` each.

    `missing` counts the rows without a number, for columns that have no ids.
    """
    rows = np.bincount(parts, minlength=3)
    positives = np.bincount(parts, weights=label, minlength=3)
    return DataStatistics(
        rows=tuple(rows.tolist()),
        label_rates=tuple((positives / np.maximum(rows, 1)).tolist()),
        bad_rows=bad_rows,
        fields=tuple(
            _numeric(field.name, missing[field.name] / len(parts))
            if field.kind == "numeric"
            else _with_table(
                field,
                encoder.kind_of(field.name),
                codes[field.name],
                ids[field.name],
                len(parts),
            )
            for field in encoder.fields.fields
        ),
    )


def _numeric(name: str, missing_share: float) -> FieldStatistics:
    return FieldStatistics(
        name=name,
        kind="numeric",
        rows=0,
        missing_share=missing_share,
        unknown_shares=(0.0, 0.0, 0.0),
        **value_statistics(np.zeros(0, np.int64)),
    )


def _with_table(
    field: Field,
    kind: str,
    codes: NDArray[np.int64],
    ids: NDArray[np.int64],
    log_rows: int,
) -> FieldStatistics:
    values = ids.sum(axis=1) - ids[:, PADDING]
    return FieldStatistics(
        name=field.name,
        kind=kind,
        rows=field.rows,
        missing_share=int(ids[:, MISSING].sum()) / log_rows,  # once a row, multi-valued or not
        unknown_shares=tuple((ids[:, UNKNOWN] / np.maximum(values, 1)).tolist()),
        **value_statistics(codes[:, FIRST_VALUE:].sum(axis=0)),
    )
