"""Data: raw files -> encoded arrays -> batches.

    schema, log_schema            fields of encoded data; columns of a raw log
    counter_random, order         random numbers; the order of rows in an epoch
    prepared, dataset             a prepared log on disk; arrays and batches
    co_occurrence, selection      which rare items may learn from frequent ones
    synthetic                     the built-in click log
    raw/                          readers, guessing of schemas, encoding, parts: needs Polars and PyArrow
    sources/                      well-known data sets
    prepare                       the calls that prepare a log

A file imports only from files above it.
"""

from typing import TYPE_CHECKING, Any

from rarebit.data.dataset import Batch, Dataset, Splits, collate
from rarebit.data.log_schema import Column, LogSchema, Split, TextFormat
from rarebit.data.prepare import (
    count_part,
    encode_part,
    infer_log,
    merge_parts,
    prepare_source,
)
from rarebit.data.prepared import DataStatistics, PreparedFolder
from rarebit.data.schema import Field, Schema
from rarebit.data.selection import (
    CoOccurrence,
    FrequencySplit,
    Selection,
    load_selection,
    save_selection,
    select,
)
from rarebit.data.sources import source_names
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.errors import import_extra

if TYPE_CHECKING:
    from rarebit.data.raw.vocabulary import Growth, Vocabulary

__all__ = [
    "Batch",
    "CoOccurrence",
    "Column",
    "DataStatistics",
    "Dataset",
    "Field",
    "FrequencySplit",
    "Growth",
    "LogSchema",
    "PreparedFolder",
    "Schema",
    "Selection",
    "Split",
    "Splits",
    "SyntheticLog",
    "TextFormat",
    "Vocabulary",
    "collate",
    "count_part",
    "encode_part",
    "generate",
    "infer_log",
    "load_selection",
    "merge_parts",
    "prepare_source",
    "save_selection",
    "select",
    "source_names",
]


def __getattr__(name: str) -> Any:
    if name in ("Growth", "Vocabulary"):  # they need Polars, importing this does not
        import_extra("polars", "data", "vocabularies that grow")
        from rarebit.data.raw import vocabulary

        return getattr(vocabulary, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
