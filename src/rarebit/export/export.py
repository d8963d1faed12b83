"""Export a model to a file that scores without Rarebit, and check that it does: `rb.export`, `rarebit export`.

    onnx     one file: raw values in, scores out; vocabulary, bins and tables inside
    triton   the same as a version in the folder of a Triton model repository
    pt2      a program of torch.export: ids in, scores out
    torch    a folder: tables as they are in `nn.Embedding`, the other weights, and the vocabulary as Parquet

With `since`, an ONNX file becomes a delta: what changed since an earlier file (`delta.py`).

The file is loaded again in a fresh process that imports no Rarebit, and scores the same rows as the model: rows of the log
where they are at hand, and rows with unknown, missing, rare and odd values. The largest difference is part of the file.
A file that differs by more than 1e-5 is not written.
"""

import copy
import hashlib
import inspect
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rarebit.data.dataset import Batch, Dataset
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, Schema
from rarebit.errors import ExportError, SettingsError, import_extra
from rarebit.export.delta import write_delta
from rarebit.models._base import RankingModel
from rarebit.settings import size as shown
from rarebit.settings import suggest
from rarebit.storage.files import explain, file_checksum, fresh_folder, write_file
from rarebit.tables.apply import end_training_, find_sites, find_tables, merge_, table_bytes
from rarebit.tables.collection import Stack
from rarebit.tables.table import Table, full_table
from rarebit.training.metrics import predict

if TYPE_CHECKING:
    from rarebit.data.raw.encoder import LogEncoder
    from rarebit.export.encoding import EncodingGraph

Format = Literal["onnx", "triton", "pt2", "torch"]
FORMAT, METADATA = 1, "rarebit"
"""The format of the description, and where an ONNX file has it."""
TOLERANCE = 1e-5
CHECKED_ROWS, EXAMPLES, DECILE_ROWS = 1000, 3, 100_000
ONE_FILE_BYTES = 1_900_000_000
"""Larger weights lie in a second file: an ONNX file has at most 2 GB."""
OUTPUTS = ("score", "unknown")
PROGRAM = Path(__file__).with_name("check.py")
ODD_TEXTS = ("no such value", " ", "ß→é🦊", "0", "7.00", "true", "1e5", "x" * 200)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A model that was exported, and how it was checked."""

    path: Path
    """The file or the folder."""
    to: Format
    num_bytes: int
    """Bytes of all its files."""
    rows: int
    """Rows that were scored by the file and by the model."""
    largest_difference: float
    """Between the two scores of a row."""
    whole_bytes: int | None = None
    """Bytes of the whole file, where only a delta is written."""

    def __str__(self) -> str:
        size = f"{self.num_bytes / 1e6:.1f} MB"
        if self.whole_bytes is not None:
            size = (
                f"a delta of {shown(self.num_bytes)}; the whole file has {shown(self.whole_bytes)}"
            )
        what = f"{self.rows:,} rows, largest difference {self.largest_difference:.1g}"
        return f"{self.path}: {size}; checked in a fresh process: {what}"


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    to: Format = "onnx",
    ids: bool | None = None,
    example: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    rows: Dataset | None = None,
    facts: Mapping[str, Any] | None = None,
    since: str | os.PathLike[str] | None = None,
) -> Exported:
    """Write a model to a file that scores without Rarebit, and check its scores in a fresh process.

    A model that was trained on a prepared log takes raw values, or ids and numbers with `ids=True` (the only inputs of
    "pt2"). A model of your own class needs an `example` of its inputs, of at least two rows; all inputs have one
    number of rows, which may be any other later. `rows` are rows of the log to check the scores on; `facts` go into
    the file. `since` is an ONNX file that was exported earlier: then a delta is written, which makes the new file of it
    (`rarebit.export.delta.apply_delta`).

    >>> clicks = {"user": ["ann", "bob"] * 20, "click": [0, 1] * 20}
    >>> from rarebit.models.fm import FM
    >>> model = FM(Dataset.from_frame(clicks, label="click").schema, dim=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export(model, Path(folder) / "clicks.onnx")
    >>> exported.largest_difference < 1e-6
    True
    """
    choose_format(to)
    target, ours = Path(path), isinstance(model, RankingModel)
    if target.is_dir() and to in ("onnx", "pt2"):
        raise ExportError(
            f"cannot write {str(target)!r}: it is a folder; name a file for the model"
        )
    if since is not None and to != "onnx":
        raise SettingsError(f"a delta (since=) is for ONNX files, not for the format {to!r}")
    if since is not None and not Path(since).is_file():
        raise ExportError(f"{str(since)!r} does not exist; expected an exported ONNX file")
    if ours and example is not None:
        raise SettingsError("a model of Rarebit knows its inputs; leave out example=")
    if not ours and example is None and to != "torch":
        raise SettingsError(
            f"{type(model).__name__} is your own class: give an example of its inputs, such as "
            "example=(torch.randint(1000, (8, 2)),)"
        )
    model = copy.deepcopy(model).cpu().eval()
    end_training_(model)
    if to == "torch":
        return _export_torch(model, target)
    source = _Ours(model, _wanted_ids(model, ids, to), rows) if ours else _Theirs(model, example)
    source.facts = dict(facts or {})
    use_traced_tables_(model)
    if to == "pt2":
        return _export_pt2(source, target)
    if since is not None:
        return _export_delta(source, target, Path(since))
    if to == "onnx":
        return _export_onnx(source, target, to)
    return _export_triton(source, target)


def choose_format(to: str) -> Format:
    """Return a format by its name."""
    formats: dict[str, Format] = {name: name for name in get_args(Format)}
    if to not in formats:
        raise SettingsError(f"unknown format {to!r}{suggest(to, formats)}")
    return formats[to]


def _wanted_ids(model: nn.Module, ids: bool | None, to: Format) -> bool:
    assert isinstance(model, RankingModel)
    if to == "pt2":
        if ids is False:
            raise SettingsError("a program of torch.export has no texts: it takes ids (ids=True)")
        return True
    if ids is None and model.schema.encoder is None:
        raise SettingsError(
            "the model has no vocabulary, since it was not trained on a log that rarebit data prepare made, so "
            "it takes ids: export it with ids=True (--ids)"
        )
    return bool(ids)


# ------------------------------------------------------------------------------------------ what is exported


class _Source:
    """A model, the names and examples of its inputs, and a case that checks it."""

    facts: dict[str, Any]
    output = "score"
    encoding: "EncodingGraph | None" = None
    """What turns raw values into the inputs of the program."""

    def __init__(self, program: nn.Module, example: Mapping[str, Tensor]) -> None:
        self.program = program.eval()
        self.example = dict(example)

    def case(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
        """Return inputs of the file, and the scores of the model."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what the file says of itself."""
        from rarebit import __version__

        return {
            "format": FORMAT,
            "versions": {"rarebit": __version__, "torch": torch.__version__},
            "training": self.facts,
        }


class _Scores(nn.Module):
    """The chance of a click, from ids and numbers."""

    def __init__(self, model: RankingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, numeric: Tensor | None = None) -> Tensor:
        # not len(ids), which a trace takes for a constant
        numbers = torch.zeros(ids.shape[0], 0) if numeric is None else numeric
        logits: Tensor = self.model(Batch(ids, numbers, torch.zeros(0), self.model.schema))
        return logits.sigmoid()


class _Ours(_Source):
    """A model of Rarebit."""

    def __init__(self, model: nn.Module, takes_ids: bool, rows: Dataset | None) -> None:
        assert isinstance(model, RankingModel)
        self.model = model
        self.encoding = None if takes_ids else _encoding_of(model)  # first: it may be refused
        self.tables = {
            "kind": " + ".join(dict.fromkeys(m for t in find_tables(model) for m in t.methods))
            or "plain",
            "bytes": table_bytes(model),
        }
        self.real = None if rows is None or not len(rows) else rows
        encoded = _random_rows(model.schema, CHECKED_ROWS)
        if self.real is not None:
            encoded = _joined_rows(_first_rows(self.real, CHECKED_ROWS), encoded)
        self.rows = encoded
        example = {"ids": torch.from_numpy(encoded[0][:8]).long()}
        if model.schema.numeric_fields:
            example["numeric"] = torch.from_numpy(encoded[1][:8])
        super().__init__(_Scores(model), example)
        # before the tables are exchanged for those of an export
        self._case = self._ids_case() if self.encoding is None else self._raw_case()
        deciles = None
        if self.real is not None:
            scores = _scores(model, *_first_rows(self.real, DECILE_ROWS))
            deciles = np.quantile(scores, np.arange(1, 10) / 10).round(6).tolist()
        self.deciles = deciles

    @property
    def encoder(self) -> "LogEncoder":
        from rarebit.data.raw.encoder import encoder_of

        return encoder_of(self.model)

    def case(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
        return self._case

    def _ids_case(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
        inputs: dict[str, NDArray[Any]] = {
            "ids": self.rows[0].astype(np.int64),
            "numeric": self.rows[1],
        }
        scores = _scores(self.model, *self.rows)
        return {name: inputs[name] for name in self.example}, scores

    def _raw_case(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
        from rarebit.data.raw.encode import encode_like
        from rarebit.export.raw import raw_frame, text_inputs

        frame = raw_frame(self.encoder, *self.rows, odd=ODD_TEXTS)
        self.examples = frame.head(EXAMPLES)
        encoded = encode_like(frame, self.encoder)
        scores = _scores(self.model, encoded.ids.numpy(), encoded.numeric.numpy())
        self.example_scores = scores[:EXAMPLES].tolist()
        return text_inputs(self.encoder, frame), scores

    def describe(self) -> dict[str, Any]:
        schema = self.model.schema
        described = super().describe() | {
            "model": type(self.model).__module__.rpartition(".")[2],
            "settings": self.model.settings,
            "tables": self.tables,
            "fields": schema.to_mapping()["fields"],
            "vocabulary": vocabulary_signature(schema),
            "score_deciles": self.deciles,
        }
        if self.encoding is None:
            return described
        log = self.encoder.schema
        columns = [log[field.name] for field in schema.fields]
        return described | {
            "log": log.to_mapping(),
            "columns": [
                {
                    "name": column.name,
                    "kind": column.kind,
                    "separator": column.separator,
                    "max_length": column.max_length,
                    "missing": list(log.missing),
                    "has_ids": column.has_ids,
                    "rows": schema[column.name].rows,
                }
                for column in columns
            ],
            "examples": {
                "columns": self.examples.to_dict(as_series=False),
                "scores": self.example_scores,
            },
        }


def _encoding_of(model: RankingModel) -> "EncodingGraph":
    from rarebit.data.raw.encoder import encoder_of
    from rarebit.export.encoding import encoding_graph

    taken = [field.name for field in model.schema.fields if field.name in OUTPUTS]
    if taken:
        raise ExportError(
            f"the column {taken[0]!r} has the name of an output of the file ({', '.join(OUTPUTS)}); rename it "
            "in the log, or export the model with ids as inputs (--ids)"
        )
    return encoding_graph(encoder_of(model))


class _Theirs(_Source):
    """A model of another class."""

    output = "output"

    def __init__(
        self, model: nn.Module, example: Sequence[Tensor] | Mapping[str, Tensor] | None
    ) -> None:
        names, given = list(inspect.signature(model.forward).parameters), example or ()
        pairs = given.items() if isinstance(given, Mapping) else zip(names, given, strict=False)
        found: dict[str, Any] = dict(pairs)
        are_tensors = all(isinstance(value, Tensor) and value.dim() for value in found.values())
        if not found or len(found) < len(given) or not are_tensors or not set(found) <= set(names):
            raise SettingsError(
                f"example must have tensors for inputs of {type(model).__name__} ({', '.join(names)}), "
                f"whose first dimension is the rows; got {given if len(str(given)) < 200 else list(found)}"
            )
        sizes = {len(value) for value in found.values()}
        if len(sizes) > 1 or min(sizes) < 2:
            rows = ", ".join(f"{name}: {len(value)}" for name, value in found.items())
            raise SettingsError(
                f"all inputs of an example must have the same number of rows, at least 2, got {rows}"
            )
        super().__init__(model, {name: value.cpu() for name, value in found.items()})
        more = {name: torch.cat([value, value.flip(0)]) for name, value in self.example.items()}
        with torch.no_grad():
            output = model(**more)
        if not isinstance(output, Tensor):
            raise ExportError(
                f"{type(model).__name__} returns {type(output).__name__}; export a model that returns one tensor"
            )
        inputs = {name: value.numpy() for name, value in more.items()}
        self._case = (inputs, output.double().numpy())

    def case(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
        return self._case


def vocabulary_signature(schema: Schema) -> str:
    """Return a checksum of the fields and of all that decides which id a value gets."""
    parts = [(field.name, field.rows, field.vocabulary) for field in schema.fields]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


EncodedArrays = tuple[NDArray[np.int32], NDArray[np.float32]]


def _random_rows(schema: Schema, rows: int) -> EncodedArrays:
    """Return rows with every kind of value: any id of a table, also unknown, missing and padding ones."""
    generator = np.random.default_rng(0)
    ids = np.zeros((rows, schema.num_slots), np.int32)
    for field in schema.table_fields:
        slots = schema.slots[field.name]
        drawn = generator.integers(1, max(field.rows, 2), (rows, field.max_length))
        if field.kind == "multi":  # values first, then padding
            lengths = generator.integers(0, field.max_length + 1, (rows, 1))
            drawn = np.where(np.arange(field.max_length) < lengths, drawn, PADDING)
            drawn = np.where(drawn == MISSING, min(FIRST_VALUE, field.rows - 1), drawn)
            drawn[lengths[:, 0] == 0, 0] = min(MISSING, field.rows - 1)
        ids[:, slots] = np.minimum(drawn, field.rows - 1)
    numeric = generator.normal(size=(rows, len(schema.numeric_fields))).astype(np.float32)
    numeric[generator.random(numeric.shape) < 0.1] = 0.0
    return ids, numeric


def _first_rows(data: Dataset, rows: int) -> EncodedArrays:
    some = data[: min(rows, len(data))]
    return some.ids.numpy(), some.numeric.numpy()


def _joined_rows(first: EncodedArrays, second: EncodedArrays) -> EncodedArrays:
    ids, numeric = (np.concatenate(both) for both in zip(first, second, strict=True))
    return ids, numeric


def _scores(
    model: RankingModel, ids: NDArray[np.int32], numeric: NDArray[np.float32]
) -> NDArray[np.float64]:
    found = predict(model, Dataset(model.schema, ids, numeric)).double().sigmoid().numpy()
    return np.asarray(found, np.float64)


class _OneTable(nn.Module):
    """A stack of one table, looked up like the table."""

    def __init__(self, stack: Stack, table: Table) -> None:
        super().__init__()
        self.stack = stack
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = table.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.stack(ids.unsqueeze(-1)).squeeze(-2)
        return rows


def use_traced_tables_(module: nn.Module) -> None:
    """Exchange tables for ones with the same rows whose operations every exporter knows."""
    for name, child in module.named_children():
        traced: nn.Module | None = None
        if isinstance(child, Stack):
            traced = child.traced()
        elif isinstance(child, Table) and (stack := child.method.traced([child], [1])) is not None:
            traced = _OneTable(stack, child)
        if traced is None:
            use_traced_tables_(child)
        else:
            setattr(module, name, traced.eval())


# ------------------------------------------------------------------------------------------ formats


def _export_onnx(source: _Source, target: Path, to: Format) -> Exported:
    onnx = import_extra("onnx", "export", "exporting to ONNX")
    import_extra("onnxruntime", "export", "checking an exported file")
    with _scratch(target) as folder:
        weights = folder / "model.onnx.data"
        proto = _trace_onnx(source, folder / "traced.onnx", weights)
        if source.encoding is not None:
            _prepend(proto, source.encoding)
        is_large = weights.exists() and weights.stat().st_size > ONE_FILE_BYTES
        if weights.exists() and not is_large:
            onnx.load_external_data_for_model(proto, str(folder))
        candidate = folder / "model.onnx"
        _save_onnx(proto, candidate)
        difference, rows = _check(source, candidate, folder)
        described = source.describe() | {"check": {"rows": rows, "largest_difference": difference}}
        described["versions"]["onnx"] = onnx.__version__
        onnx.helper.set_model_props(proto, {METADATA: json.dumps(described, allow_nan=False)})
        if is_large:
            moved = target.with_name(f"{target.name}.{file_checksum(weights)[:8]}.data")
            _point_to(proto, moved.name)
            write_file(moved, weights.rename, error=ExportError)
        write_file(target, lambda partial: _save_onnx(proto, partial), error=ExportError)
    files = [target, *([moved] if is_large else [])]
    size = sum(file.stat().st_size for file in files)
    return Exported(path=target, to=to, num_bytes=size, rows=rows, largest_difference=difference)


def _export_delta(source: _Source, target: Path, since: Path) -> Exported:
    with _scratch(target) as folder:
        whole = _export_onnx(source, folder / "model.onnx", "onnx")
        write_delta(since, whole.path, target)
    size = target.stat().st_size
    return replace(whole, path=target, num_bytes=size, whole_bytes=whole.num_bytes)


def _trace_onnx(source: _Source, path: Path, weights: Path) -> Any:
    """Return the program as an ONNX model whose weights lie in a file."""
    import_extra("onnxscript", "export", "exporting to ONNX")
    from rarebit.export.encoding import ML, ML_OPSET, OPSET

    onnx = import_extra("onnx", "export", "exporting to ONNX")
    with _tracing(source):
        program = torch.onnx.export(
            source.program,
            kwargs=source.example,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=_dynamic(source),
            input_names=list(source.example),
            output_names=[source.output],
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=True)
    proto = onnx.load(path, load_external_data=False)
    written = path.with_name(f"{path.name}.data")
    if written.exists():
        written.rename(weights)
        _point_to(proto, weights.name)
    del proto.metadata_props[:], proto.graph.metadata_props[:]
    for node in proto.graph.node:  # where torch found it in our source: paths of this machine
        del node.metadata_props[:]
    if not any(opset.domain == ML for opset in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid(ML, ML_OPSET))
    return proto


def _dynamic(source: _Source) -> dict[str, Any]:
    batch = torch.export.Dim("batch", min=1, max=1 << 24)
    return {name: {0: batch} for name in source.example}


@contextmanager
def _tracing(source: _Source) -> Iterator[None]:
    """Let torch trace without its advice; what it cannot trace becomes an `ExportError`."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # torch raises errors of many kinds
        inner = error.__cause__ or error
        lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
        name = type(getattr(source, "model", source.program)).__name__
        raise ExportError(
            f"torch cannot trace {name}: {lines[0] if lines else type(inner).__name__}"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _prepend(proto: Any, encoding: "EncodingGraph") -> None:
    """Put the encoding of raw values before the inputs of a model, in place."""
    from rarebit.export.encoding import unlike

    onnx = import_extra("onnx", "export", "exporting to ONNX")
    graph, nodes, make = proto.graph, encoding.nodes, onnx.helper.make_node
    inside = unlike("model/", [column.name for column in encoding.inputs])
    onnx.compose.add_prefix(proto, inside, inplace=True)
    for name, source in (("ids", encoding.ids), ("numeric", encoding.numeric)):
        if source is not None:
            nodes.nodes.append(make("Identity", [source], [f"{inside}{name}"]))
    score = f"{inside}score"
    last = [make("Identity", [encoding.unknown], ["unknown"])]
    if encoding.is_bad is None:
        last.append(make("Identity", [score], ["score"]))
    else:
        nan = nodes.constant(np.nan, np.float32)
        last.append(make("Where", [encoding.is_bad, nan, score], ["score"]))
    every = [*nodes.nodes, *graph.node, *last]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(every)
    graph.input.extend(encoding.inputs)
    graph.initializer.extend(nodes.constants)
    graph.output.append(nodes.value("score", nodes.type("FLOAT"), ["batch"]))
    fields = encoding.num_fields
    graph.output.append(nodes.value("unknown", nodes.type("BOOL"), ["batch", fields]))


def _point_to(proto: Any, name: str) -> None:
    """Let the weights of a model lie in the file of this name."""
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name


def _save_onnx(proto: Any, path: Path) -> None:
    if proto.ByteSize() > ONE_FILE_BYTES:
        raise ExportError(
            f"the vocabulary alone takes {proto.ByteSize() / 1e9:.1f} GB, and an ONNX file has at most 2; raise "
            "min_count, hash the largest columns, or export with ids as inputs (--ids)"
        )
    path.write_bytes(proto.SerializeToString())


def _export_pt2(source: _Source, target: Path) -> Exported:
    with _scratch(target) as folder:
        with _tracing(source):
            program = torch.export.export(
                source.program, (), source.example, dynamic_shapes=_dynamic(source)
            )
        candidate = folder / "model.pt2"
        _save_pt2(program, candidate, {})
        difference, rows = _check(source, candidate, folder)
        described = source.describe() | {"check": {"rows": rows, "largest_difference": difference}}
        _save_pt2(program, candidate, described)
        write_file(target, candidate.rename, error=ExportError)
    size = target.stat().st_size
    return Exported(path=target, to="pt2", num_bytes=size, rows=rows, largest_difference=difference)


def _save_pt2(program: Any, path: Path, described: Mapping[str, Any]) -> None:
    torch.export.save(program, path, extra_files={f"{METADATA}.json": json.dumps(described)})


def _export_triton(source: _Source, target: Path) -> Exported:
    """Write the next version of a model of a Triton repository; its name is that of the folder."""
    if target.exists() and not (target / "config.pbtxt").exists() and any(target.iterdir()):
        raise ExportError(
            f"{str(target)!r} is no model of a Triton repository: it has no config.pbtxt; choose another folder"
        )
    versions = [int(p.name) for p in target.glob("*") if p.is_dir() and p.name.isdigit()]
    folder = target / str(max(versions, default=0) + 1)
    target.mkdir(parents=True, exist_ok=True)
    with fresh_folder(folder) as partial:  # Triton loads a version once it has its name
        exported = _export_onnx(source, partial / "model.onnx", "triton")
    onnx = import_extra("onnx", "export", "exporting to ONNX")
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    config = triton_config(target.resolve().name, graph)
    write_file(target / "config.pbtxt", config.encode(), error=ExportError)
    return replace(exported, path=target)


def triton_config(name: str, graph: Any) -> str:
    """Return the configuration of a model for Triton, which joins requests to batches."""
    helper = import_extra("onnx.helper", "export", "exporting to ONNX")
    lines = [f"name: {json.dumps(name)}", 'platform: "onnxruntime_onnx"', "max_batch_size: 65536"]
    for key, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            tensor = value.type.tensor_type
            kind = helper.tensor_dtype_to_string(tensor.elem_type).rpartition(".")[2]
            kind = {"FLOAT": "FP32", "DOUBLE": "FP64"}.get(kind, kind)
            shape = [dim.dim_value or -1 for dim in tensor.shape.dim[1:]]
            # Triton counts the dimensions behind the batch, of which a list of numbers has none
            reshape = "" if shape else " reshape { shape: [ ] }"
            dims = ", ".join(map(str, shape or [1]))
            text = (
                f"name: {json.dumps(value.name)} data_type: TYPE_{kind} dims: [ {dims} ]{reshape}"
            )
            lines.append(f"{key} {{ {text} }}")
    return "\n".join([*lines, "dynamic_batching { }"]) + "\n"


def _export_torch(model: nn.Module, target: Path) -> Exported:
    """Write plain tables by their names, all other weights, and the vocabulary."""
    from safetensors.torch import save_file

    merge_(model, verbose=False)
    sites = find_sites(model)
    tables = {f"{site.info.name}.weight": full_table(site.table) for site in sites}
    stacked = [f"{name}." for name, module in model.named_modules() if isinstance(module, Stack)]
    others = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in tables and not name.startswith(tuple(stacked))
    }
    tensors = {name: tensor.contiguous() for name, tensor in (tables | others).items()}
    described: dict[str, Any] = {"class": type(model).__name__}
    if isinstance(model, RankingModel):
        described |= {"settings": model.settings, **model.schema.to_mapping()}
    if target.exists():
        raise ExportError(f"{str(target)!r} exists; choose another folder for the weights")
    with _scratch(target) as scratch, fresh_folder(target) as folder:
        save_file(tensors, folder / "model.safetensors")
        (folder / "model.json").write_text(f"{json.dumps(described, indent=1)}\n", "utf-8")
        if isinstance(model, RankingModel) and model.schema.encoder is not None:
            from rarebit.data.raw.encoder import encoder_of
            from rarebit.export.raw import vocabulary_frame

            frame = vocabulary_frame(encoder_of(model))
            frame.write_parquet(folder / "vocabulary.parquet")
        source = _Tables(tables)
        difference, rows = _check(source, folder / "model.safetensors", scratch)
        size = _size_of(folder)
    return Exported(
        path=target, to="torch", num_bytes=size, rows=rows, largest_difference=difference
    )


# ------------------------------------------------------------------------------------------ the check


def _check(source: "_Source | _Tables", file: Path, folder: Path) -> tuple[float, int]:
    """Return the largest difference between the scores of a file and those of the model, and the number of rows.

    Raise where they differ, or where a fresh process cannot score with the file.
    """
    inputs, wanted = source.case()
    case, out = folder / "case.json", folder / "scores.json"
    case.write_text(json.dumps({name: _plain(value) for name, value in inputs.items()}), "utf-8")
    # isolated: of the environment it has the packages, and nothing of this process
    command = [sys.executable, "-I", str(PROGRAM), str(file), str(case), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own program
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ExportError(f"a fresh process cannot score with the exported file: {why[0]}")
    found = json.loads(out.read_text("utf-8"))
    scores = np.array(found["values"], np.float64).reshape(found["shape"])
    if scores.shape != wanted.shape:
        raise ExportError(
            f"the exported file returns scores of shape {scores.shape}, and the model of {wanted.shape}"
        )
    difference = float(np.abs(scores - wanted).max(initial=0.0))
    if not difference <= TOLERANCE * max(1.0, float(np.abs(wanted).max(initial=0.0))):
        raise ExportError(
            f"the exported file scores differently from the model, by up to {difference:.2g} on "
            f"{len(wanted):,} rows, so it was not kept"
        )
    return difference, len(wanted)


def _plain(value: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": str(value.dtype), "shape": value.shape, "values": value.reshape(-1).tolist()}


class _Tables:
    """The rows of plain tables: what the file of format "torch" is checked on."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        generator = np.random.default_rng(0)
        self._ids = {
            name: generator.integers(0, len(weight), min(len(weight), CHECKED_ROWS))
            for name, weight in tables.items()
        }
        rows = [tables[name][torch.from_numpy(ids)].reshape(-1) for name, ids in self._ids.items()]
        self._rows = torch.cat(rows).double().numpy()

    def case(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
        """Return ids of each table, and the numbers of their rows."""
        return dict(self._ids), self._rows


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """Give a folder on the disk of the target, which vanishes."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".exporting-", dir=target.parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise ExportError(f"cannot write {str(target)!r}: {explain(error)}") from None


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
