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

__all__ = [
    "Batch",
    "CoOccurrence",
    "Column",
    "DataStatistics",
    "Dataset",
    "Field",
    "FrequencySplit",
    "LogSchema",
    "PreparedFolder",
    "Schema",
    "Selection",
    "Split",
    "Splits",
    "SyntheticLog",
    "TextFormat",
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
