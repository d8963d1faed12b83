"""Raw rows and exported files: rows of a log as the inputs of a file, and encoded rows as raw ones again."""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.raw.chunks import BadRows, RawChunk
from rarebit.data.raw.coding import RowCheck, RowCoder, text_of
from rarebit.data.raw.encoder import FREE, LogEncoder
from rarebit.data.raw.readers import read_frame
from rarebit.data.schema import FIRST_VALUE
from rarebit.errors import ModelFileError, import_extra
from rarebit.training.score import ScoredRows

Inputs = dict[str, NDArray[Any]]
SUREST = 1e-8
"""A file gives chances in 32 bits: no surer than this."""


class RowTexts(RowCoder):
    """Rows of a raw log as texts and numbers, which the graph of an exported file encodes."""

    def __init__(self, schema: LogSchema, *, with_label: bool = False) -> None:
        super().__init__(schema, {}, with_label=with_label, with_key=False)

    def inputs(
        self, chunk: RawChunk, bad: BadRows
    ) -> tuple[Inputs, NDArray[np.uint8], NDArray[np.bool_] | None]:
        """Return the inputs of the good rows, their labels, and which rows these are."""
        found, keep = self.good_rows(chunk, bad)
        inputs = {}
        for number, column in enumerate(self.schema.columns):
            name = f"input:{number}"
            if name in found.columns:
                values = found[name]
                is_list = isinstance(values.dtype, pl.List)
                inputs[column.name] = _padded(values) if is_list else values.to_numpy()
        label = found["label"].to_numpy() if self.with_label else np.empty(0, np.uint8)
        return inputs, label, keep

    def _checks(self, types: pl.Schema) -> Iterator[RowCheck]:
        yield from super()._checks(types)
        for column in self.schema.columns:
            if column.kind == "multi" and column.separator and column.name in types:
                dtype = types[column.name]
                if isinstance(dtype, pl.List):  # the file splits texts, and would split this one
                    parts = _texts_of_lists(column.name, dtype)
                    has_it = parts.list.eval(
                        pl.element().str.contains(column.separator, literal=True).any()
                    ).list.first()
                    reason = (
                        f"a value of {column.name} has the separator {column.separator!r} in it"
                    )
                    yield RowCheck(column.name, reason, has_it.fill_null(value=False))

    def _values(self, types: pl.Schema) -> Iterator[tuple[str, pl.Expr]]:
        for number, column in enumerate(self.schema.columns):
            if column.kind == "numeric":
                value = self._value(column.name, types[column.name]).fill_null(np.nan)
            elif column.kind == "categorical":
                value = text_of(pl.col(column.name), types[column.name]).fill_null("")
            elif column.kind == "multi":
                value = _several(column, types[column.name], self.schema.missing)
            else:
                continue
            yield f"input:{number}", value


def _texts_of_lists(name: str, dtype: pl.List) -> pl.Expr:
    return pl.col(name).list.eval(text_of(pl.element(), dtype.inner))  # type: ignore[arg-type]  # an instance here


def _several(column: Column, dtype: pl.DataType, missing: Sequence[str]) -> pl.Expr:
    """Return the values of a multi-valued column: one text with separators, or a list."""
    if not isinstance(dtype, pl.List):
        return text_of(pl.col(column.name), dtype).fill_null("")
    texts = _texts_of_lists(column.name, dtype).list.drop_nulls()
    if not column.separator:
        return texts
    joined = texts.list.join(column.separator).fill_null("")
    # one value that is spelled like a missing row is still a value
    return pl.when(joined.is_in(missing)).then(joined + column.separator).otherwise(joined)


def _padded(lists: pl.Series) -> NDArray[Any]:
    """Return lists of texts as `(B, W)`, "" where a list is shorter."""
    longest = int(lists.list.len().fill_null(0).to_numpy().max(initial=0))
    places = [lists.list.get(place, null_on_oob=True).fill_null("") for place in range(longest)]
    if not places:
        return np.empty((len(lists), 0), object)
    return np.stack([place.to_numpy() for place in places], axis=1)


def text_inputs(encoder: LogEncoder, frame: pl.DataFrame) -> Inputs:
    """Return the rows of a frame as inputs of a file; all of them must be good."""
    bad, coder = BadRows(), RowTexts(encoder.schema)
    columns = encoder.columns_read(with_label=False)
    chunks = read_frame(frame, columns, missing=encoder.schema.missing)
    found = [coder.inputs(chunk, bad)[0] for chunk in chunks]
    bad.raise_if_any()
    return {name: np.concatenate([inputs[name] for inputs in found]) for name in found[0]}


class FileScorer:
    """An exported ONNX file that scores raw rows, as `rarebit predict` does with a run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        runtime = import_extra("onnxruntime", "export", "scoring with an exported file")
        try:
            self._session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
            stored = self._session.get_modelmeta().custom_metadata_map["rarebit"]
            self.described: dict[str, Any] = json.loads(stored)
            log, columns = self.described.get("log"), self.described.get("columns", [])
            self.schema = LogSchema.from_mapping(log or {})
        except Exception as error:  # noqa: BLE001  # ONNX Runtime raises errors of many kinds
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelFileError(
                f"{str(path)!r} is no file that rarebit export made for raw values: {why}"
            ) from None
        self._names = [column["name"] for column in columns]
        self._fields = [column["name"] for column in columns if column["has_ids"]]
        self._coders = tuple(RowTexts(self.schema, with_label=label) for label in (False, True))

    def columns_read(self, *, with_label: bool) -> list[str]:
        """Return the columns that raw rows need."""
        return [self.schema.label, *self._names] if with_label else list(self._names)

    def score(self, chunk: RawChunk, bad: BadRows, *, with_label: bool) -> ScoredRows:
        """Return the scores of the good rows of a chunk; malformed rows go to `bad`."""
        inputs, label, kept = self._coders[with_label].inputs(chunk, bad)
        if not len(inputs[self._names[0]]):
            nothing = np.empty(0, np.float32)
            return ScoredRows(nothing, nothing, label, {}, kept)
        scores, unknown = self._session.run(["score", "unknown"], inputs)
        counts = dict(zip(self._fields, unknown.sum(axis=0).tolist(), strict=True))
        chances = np.clip(scores.astype(np.float64), SUREST, 1.0 - SUREST)
        logits = np.log(chances / (1.0 - chances)).astype(np.float32)
        return ScoredRows(scores, logits, label, counts, kept)


def raw_frame(
    encoder: LogEncoder,
    ids: NDArray[np.int32],
    numeric: NDArray[np.float32],
    odd: Sequence[str] = (),
) -> pl.DataFrame:
    """Return encoded rows as raw ones, with `odd` texts among the last rows of every column of texts.

    A bin becomes a number inside it.
    """
    decoded, fields = encoder.decode(ids), encoder.fields
    columns: dict[str, pl.Series] = {}
    for field in fields.fields:
        column, name = encoder.schema[field.name], field.name
        if column.is_number and not column.has_ids:
            mean, std = encoder.scales[name]
            place = fields.numeric_fields.index(field)
            numbers = numeric[:, place].astype(np.float64) * std + mean
            columns[name] = pl.Series(numbers).round_sig_figs(6)  # as people write them
        elif column.kind == "numeric":
            columns[name] = pl.Series(_numbers_in_bins(encoder, column, ids[:, fields.slots[name]]))
        elif column.kind == "multi":
            lists = decoded[name]
            columns[name] = lists.list.join(column.separator) if column.separator else lists
        else:
            texts = decoded[name]
            last = min(len(odd), len(texts))
            columns[name] = texts[: len(texts) - last].append(
                pl.Series(odd[:last], dtype=pl.String)
            )
    return pl.DataFrame(columns).fill_nan(None)


def _numbers_in_bins(
    encoder: LogEncoder, column: Column, ids: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Return a number inside the bin of each id, NaN for a missing one."""
    if column.treatment == "quantile":
        edges = np.asarray(encoder.edges[column.name])
        inside = np.concatenate([edges[:1] - 1.0, (edges[:-1] + edges[1:]) / 2, edges[-1:] + 1.0])
    else:
        texts = encoder.values[column.vocabulary_name].to_list()
        bins = np.array([int(text) for text in texts], np.float64)
        inside = np.where(bins >= 0, np.exp(np.sqrt(np.maximum(bins, 0) + 0.5)), bins + 2.5)
    special = [np.nan, 1e9, np.nan]  # padding, unknown, missing
    return np.concatenate([special, inside])[np.minimum(ids[:, 0], FIRST_VALUE + len(inside) - 1)]


def vocabulary_frame(encoder: LogEncoder) -> pl.DataFrame:
    """Return all values with their ids: `vocabulary`, `value`, `id`."""
    frames = [
        pl.DataFrame(
            {
                "vocabulary": pl.repeat(name, len(values), eager=True),
                "value": values.cast(pl.String),
                "id": pl.int_range(FIRST_VALUE, FIRST_VALUE + len(values), eager=True),
            }
        )
        for name, values in encoder.values.items()
    ]
    return pl.concat(frames).filter(~pl.col("value").str.starts_with(FREE))
