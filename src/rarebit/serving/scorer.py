"""A loaded model: arrays of raw values to scores.

`OnnxScorer` runs an exported file in ONNX Runtime. `EagerScorer` is for a run folder that cannot be exported:
it encodes the values as `rarebit predict` does and calls torch.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rarebit.errors import RequestError, ServingError, import_extra
from rarebit.serving.columns import Arrays, Input
from rarebit.serving.forms import from_columns
from rarebit.serving.open_inference import IdSlots

if TYPE_CHECKING:
    from rarebit.data.raw.encoder import LogEncoder

FORMAT = 1
TOLERANCE = 1e-5
"""Largest difference between the scores of the stored examples and those computed now."""
KINDS = ("categorical", "multi", "numeric")


class Scores(NamedTuple):
    """The result of a batch."""

    score: NDArray[np.float32]
    """`(rows,)`"""
    unknown: NDArray[np.bool_] | None
    """`(rows, fields)`: whether a value is unknown; None where the model does not say."""


class Scorer:
    """A model that scores arrays."""

    inputs: Mapping[str, Input] | IdSlots
    outputs: tuple[str, ...]
    facts: dict[str, Any]
    """What the file says about itself."""
    fields: tuple[str, ...] = ()
    """The columns of `unknown`."""
    platform: str

    def run(self, arrays: Arrays) -> Scores:
        """Return the scores of a batch."""
        raise NotImplementedError

    def check(self) -> float | None:
        """Score the stored examples; return the largest difference, None without examples."""
        examples = self.facts.get("examples")
        if not examples or isinstance(self.inputs, IdSlots):
            return None
        stored = np.asarray(examples["scores"], dtype=np.float64)
        try:
            rows = from_columns(examples["columns"], self.inputs, max(len(stored), 1))
        except RequestError as error:
            raise ServingError(f"its examples cannot be scored: {error}") from None
        found = self.run(rows.arrays).score
        if found.shape != stored.shape or not np.isfinite(found).all():
            raise ServingError("its examples have no valid scores")
        difference = float(np.abs(found - stored).max())
        if difference > TOLERANCE:
            raise ServingError(
                f"its scores differ from those of the trained model by up to {difference:.2g} on its "
                f"{len(stored)} examples; at most {TOLERANCE:g} is allowed"
            )
        return difference

    def tensors(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return inputs and outputs as the Open Inference Protocol describes them."""
        if isinstance(self.inputs, IdSlots):
            inputs = [{"name": "ids", "datatype": "INT64", "shape": [-1, self.inputs.slots]}]
            if self.inputs.numbers:
                shape = [-1, self.inputs.numbers]
                inputs.append({"name": "numeric", "datatype": "FP32", "shape": shape})
        else:
            inputs = [
                {
                    "name": column.name,
                    "datatype": "FP64" if column.kind == "numeric" else "BYTES",
                    "shape": [-1, column.max_length] if column.is_list else [-1],
                }
                for column in self.inputs.values()
            ]
        outputs: list[dict[str, Any]] = [{"name": "score", "datatype": "FP32", "shape": [-1]}]
        if "unknown" in self.outputs:
            shape = [-1, len(self.fields)]
            outputs.append({"name": "unknown", "datatype": "BOOL", "shape": shape})
        return inputs, outputs


class OnnxScorer(Scorer):
    """An exported file in ONNX Runtime."""

    platform = "onnxruntime_onnx"

    def __init__(self, path: Path, threads: int) -> None:
        ort = import_extra("onnxruntime", "serve", "serving")
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors are raised as well
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = ort.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # noqa: BLE001  # its errors have no common base
            raise ServingError(
                f"ONNX Runtime cannot load it: {_first_line(error)}; serve a file made by rarebit export"
            ) from None
        self.facts = _read_facts(self._session.get_modelmeta().custom_metadata_map)
        shapes = {one.name: one.shape for one in self._session.get_inputs()}
        self.outputs = tuple(
            name
            for name in ("score", "unknown")
            if name in {one.name for one in self._session.get_outputs()}
        )
        if "score" not in self.outputs:
            raise ServingError("it has no output 'score'; make it with rarebit export")
        if "columns" not in self.facts:
            self.inputs = _id_slots(shapes, self.facts.get("fields", []))
            return
        columns = self.facts["columns"]
        self.inputs = {column.name: column for column in map(_input, columns)}
        if set(shapes) != set(self.inputs):
            differing = ", ".join(sorted(set(shapes) ^ set(self.inputs))[:5])
            raise ServingError(f"its inputs are not its columns; they differ in: {differing}")
        if "unknown" in self.outputs:
            width = {one.name: one.shape for one in self._session.get_outputs()}["unknown"][1]
            self.fields = tuple(one["name"] for one in columns if one.get("has_ids"))
            if width != len(self.fields):
                raise ServingError(
                    f"its output 'unknown' has {width} fields, but {len(self.fields)} columns have ids"
                )

    def run(self, arrays: Arrays) -> Scores:
        found = self._session.run(list(self.outputs), arrays)
        return Scores(found[0], found[1] if len(found) > 1 else None)


class EagerScorer(Scorer):
    """A run folder, scored by torch. Slower than an exported file."""

    platform = "rarebit_torch"
    outputs = ("score", "unknown")

    def __init__(self, folder: Path, threads: int) -> None:
        import torch

        from rarebit.data.raw.encoder import encoder_of
        from rarebit.models._base import RankingModel
        from rarebit.tables.apply import table_bytes
        from rarebit.training.model_file import load_model

        torch.set_num_threads(threads)
        model = load_model(folder).eval()
        if not isinstance(model, RankingModel) or model.schema.encoder is None:
            raise ServingError(
                "the model has no vocabulary: it was not trained on a log that rarebit data prepare made"
            )
        self._model = model
        self._encoder: LogEncoder = encoder_of(model)
        schema = self._encoder.schema
        read = [schema[name] for name in self._encoder.columns_read(with_label=False)]
        self.inputs = {
            column.name: Input(
                column.name,
                column.kind,
                column.separator,
                column.max_length,
                schema.missing,
            )
            for column in read
        }
        self.fields = tuple(field.name for field in self._encoder.fields.table_fields)
        self.facts = {
            "model": type(model).__name__,
            "columns": [vars(column) for column in self.inputs.values()],
            "tables": {"kind": "torch", "bytes": table_bytes(model)},
        }

    def run(self, arrays: Arrays) -> Scores:
        pl = import_extra("polars", "data", "scoring a run folder")
        from rarebit.data.dataset import Dataset
        from rarebit.data.raw.chunks import BadRows, Place, RawChunk
        from rarebit.data.schema import UNKNOWN
        from rarebit.training.metrics import predict

        missing = {"", *self._encoder.schema.missing}
        columns = {name: _series(array, missing) for name, array in arrays.items()}
        frame = pl.DataFrame(columns)
        bad = BadRows("stop", None)
        encoded = self._encoder.encode(RawChunk(frame, lambda row: Place("", row, "", "row")), bad)
        bad.raise_if_any()
        fields = self._encoder.fields
        found = predict(self._model, Dataset(fields, encoded.ids, encoded.numeric))
        unknown = [(encoded.ids[:, fields.slots[name]] == UNKNOWN).any(1) for name in self.fields]
        return Scores(found.sigmoid().numpy(), np.stack(unknown, axis=1))


def load_scorer(path: Path, threads: int) -> Scorer:
    """Load a file, or a run folder, and check it on its examples."""
    scorer = EagerScorer(path, threads) if path.is_dir() else OnnxScorer(path, threads)
    scorer.facts["difference"] = scorer.check()
    return scorer


def _read_facts(stored: Mapping[str, str]) -> dict[str, Any]:
    if "rarebit" not in stored:
        raise ServingError("it has no metadata of Rarebit; make it with rarebit export")
    try:
        facts = json.loads(stored["rarebit"])
        version, columns = facts["format"], facts.get("columns", [])
        if version > FORMAT:
            raise ServingError(
                f"it is of format {version}; this version reads up to {FORMAT}: upgrade rarebit"
            )
        if not all(one["kind"] in KINDS and isinstance(one["name"], str) for one in columns):
            raise ServingError("its metadata has a column of unknown kind; upgrade rarebit")
        deciles = facts.get("score_deciles")
        if deciles is not None and np.shape(np.asarray(deciles, dtype=np.float64)) != (9,):
            raise ServingError("its score_deciles are not nine numbers")
    except (ValueError, TypeError, LookupError) as error:
        raise ServingError(f"its metadata is damaged: {type(error).__name__}: {error}") from None
    return dict(facts)


def _input(one: Mapping[str, Any]) -> Input:
    return Input(
        one["name"],
        one["kind"],
        one.get("separator") or "",
        one.get("max_length") or 1,
        tuple(one.get("missing") or ()),
    )


def _id_slots(shapes: Mapping[str, Any], fields: list[dict[str, Any]]) -> IdSlots:
    """Return what a file that takes ids reads; the ids of a slot lie below the rows of its table."""
    if "ids" not in shapes or not set(shapes) <= {"ids", "numeric"}:
        raise ServingError(
            f"its inputs must be columns, or ids and numeric; got {', '.join(shapes)}"
        )
    slots, numbers = shapes["ids"][1], shapes["numeric"][1] if "numeric" in shapes else 0
    tables = [one for one in fields if one.get("kind") != "numeric"]
    rows = [one.get("rows", 0) for one in tables for _ in range(one.get("max_length") or 1)]
    if not isinstance(slots, int) or not isinstance(numbers, int):
        raise ServingError("its inputs must have a fixed number of slots")
    return IdSlots(np.array(rows if len(rows) == slots else [], np.int64), slots, numbers)


def _series(array: NDArray[Any], missing: Collection[str]) -> Any:
    """Return an array as a column of a log, with null for what is missing."""
    pl = import_extra("polars", "data", "scoring a run folder")
    if array.ndim == 2:
        return pl.Series(array.tolist(), dtype=pl.List(pl.String))
    if array.dtype == object:
        texts = [None if text in missing else text for text in array]
        return pl.Series(texts, dtype=pl.String)
    return pl.Series(array).fill_nan(None)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
