"""The encoder of a log as an ONNX graph: raw values in, the ids and numbers of `data prepare` out.

    categorical   text ──────────► LabelEncoder ─────────────────────┐
    multi         text ─► split ─► LabelEncoder ─► values, padding ──┤
    log-square    number ─► floor(ln(x)²) ─► LabelEncoder ───────────┼─► ids (B, S)
    quantile      number ─► edges at or below it ────────────────────┘
    standardised  number ─► (x - mean) / std ──────────────────────────► numeric (B, P)

A vocabulary is the keys of one LabelEncoder, however many columns share it. A value that it lacks may be another
spelling of one that it has (`data/raw/coding.py`). The finitely many other spellings are keys too. The others, "15.00" for "15",
need a regular expression, which runs only where a batch holds unknown values.

A graph cannot raise. `is_bad` marks rows that `data prepare` refuses: numbers that are infinite or do not fit 32 bits.

Shapes: B rows, S slots, P numbers, C categorical columns, L values of a multi-valued column, W values found in its texts.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rarebit.data.log_schema import Column
from rarebit.data.raw.coding import HIGHEST_BIN, LOWEST_BIN, TRUTHS, as_float
from rarebit.data.raw.encoder import LARGEST, LogEncoder
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, UNKNOWN
from rarebit.errors import ExportError, import_extra

OPSET, ML_OPSET = 21, 4
"""Versions of ONNX's operators, and of its operators for machine learning: LabelEncoder."""
ML = "ai.onnx.ml"
WHOLE, WHOLE_AS_DECIMAL = re.compile(r"[+-]?\d+"), r"[+-]?\p{Nd}+\.0+"
"""As in `data/raw/coding.py`. ONNX Runtime matches by RE2, whose digits are ASCII unless named like this."""

NO_TEXT = "\uffff"
"""No character, so in no text of a log."""


class Nodes:
    """The nodes of a graph; `nodes("Add", a, b)` adds one and returns the name of its output."""

    def __init__(self, prefix: str) -> None:
        self._onnx = import_extra("onnx", "export", "exporting to ONNX")
        self.prefix = prefix
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        return self.several(operator, *inputs, outputs=1, domain=domain, **attributes)[0]

    def several(
        self, operator: str, *inputs: str, outputs: int, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node and return the names of all its outputs."""
        names = [f"{self.prefix}{len(self.nodes)}/{number}" for number in range(outputs)]
        make = self._onnx.helper.make_node
        self.nodes.append(make(operator, inputs, names, domain=domain, **attributes))
        return names

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """Add a constant and return its name."""
        name = f"{self.prefix}constant/{len(self.constants)}"
        self.constants.append(self.tensor(name, value, dtype))
        return name

    def tensor(self, name: str, value: Any, dtype: Any = np.int64) -> Any:
        """Return a tensor as ONNX stores it."""
        if dtype is str:
            texts = [value] if isinstance(value, str) else value
            made = self._onnx.TensorProto(
                name=name, dims=[len(texts)], data_type=self.type("STRING")
            )
            # not by make_tensor, which cuts off a NUL at the end of a text
            made.string_data.extend(text.encode() for text in texts)
            return made
        return self._onnx.numpy_helper.from_array(np.asarray(value, dtype), name)

    def branch(self, name: str) -> "Nodes":
        """Return an empty graph for a branch of an If, which may use the names of this one."""
        return Nodes(f"{self.prefix}{name}/")

    def graph(self, outputs: Sequence[str], kind: str) -> Any:
        """Return the nodes as the graph of a branch, whose outputs are all of this type."""
        values = [self.value(name, self.type(kind), None) for name in outputs]
        return self._onnx.helper.make_graph(self.nodes, self.prefix, [], values, self.constants)

    def value(self, name: str, kind: int, shape: Sequence[str | int] | None) -> Any:
        """Return an input or output of a graph."""
        return self._onnx.helper.make_tensor_value_info(name, kind, shape)

    def type(self, name: str) -> int:
        """Return ONNX's number of a type, such as INT64."""
        return int(getattr(self._onnx.TensorProto, name))


@dataclass(frozen=True)
class EncodingGraph:
    """Nodes that turn the columns of a log into the inputs of a model."""

    nodes: Nodes
    inputs: list[Any] = field(repr=False)
    """One per column, by its name."""
    ids: str
    """`(B, S)`, int64."""
    numeric: str | None
    """`(B, P)`, float32; None where the model has no numbers."""
    unknown: str
    """`(B, F)`: whether a value of each field with a table is unknown."""
    num_fields: int
    """F."""
    is_bad: str | None
    """`(B,)`: whether the row has a number that `data prepare` refuses; None without numbers."""


@dataclass(frozen=True)
class _Segment:
    """Texts that are looked up together: those of categorical columns, one after the other, or of one multi-valued column."""

    columns: tuple[Column, ...]
    texts: str
    """Flat."""

    @property
    def is_multi(self) -> bool:
        return self.columns[0].kind == "multi"


@dataclass(frozen=True)
class _Lookup:
    """All that is looked up in one vocabulary."""

    ids: dict[str, int]
    """The id of each text that the LabelEncoder knows: values, their other spellings, and texts for missing values."""
    whole: dict[str, int]
    """The ids of values that are whole numbers: "15.00" is another spelling of "15"."""
    segments: tuple[_Segment, ...]
    texts: str


def encoding_graph(encoder: LogEncoder) -> EncodingGraph:
    """Return the graph of an encoder; raise where a column has no form in ONNX.

    >>> from rarebit import Dataset
    >>> from rarebit.data.raw.encoder import encoder_of
    >>> clicks = Dataset.from_frame({"user": ["ann", "bob"] * 20, "click": [0, 1] * 20}, label="click")
    >>> [column.name for column in encoding_graph(encoder_of(clicks)).inputs]
    ['user']
    """
    columns = [encoder.schema[found.name] for found in encoder.fields.fields]
    nodes = Nodes(unlike("encode/", [column.name for column in columns]))
    missing = encoder.schema.missing
    for column in columns:
        if column.buckets is not None:
            raise ExportError(
                f"the column {column.name!r} is hashed to {column.buckets} buckets by CRC-32, for which ONNX has "
                "no operator; export the model with ids as inputs (--ids), and encode the column before it"
            )
    slots = _texts_to_ids(nodes, encoder, columns)
    numeric, is_bad = None, None
    numbers = [column for column in columns if column.kind == "numeric"]
    if numbers:
        matrix, is_bad = _read_numbers(nodes, numbers, missing)
        slots += _numbers_to_ids(nodes, encoder, numbers, matrix)
        numeric = _standardise(nodes, encoder, numbers, matrix)
    with_ids = [column for column in columns if column.has_ids]
    ids = _in_order(nodes, slots, with_ids)
    inputs = [_input(nodes, column) for column in columns]
    unknown = _unknown(nodes, ids, with_ids)
    return EncodingGraph(nodes, inputs, ids, numeric, unknown, len(with_ids), is_bad)


def unlike(prefix: str, columns: Sequence[str]) -> str:
    """Return a prefix for the names of values inside a graph that no column begins with: a column may have any name."""
    while any(name.startswith(prefix) for name in columns):
        prefix += "/"
    return prefix


def _input(nodes: Nodes, column: Column) -> Any:
    if column.kind == "numeric":
        return nodes.value(column.name, nodes.type("DOUBLE"), ["batch"])
    is_list = column.kind == "multi" and not column.separator
    shape = ["batch", f"values of {column.name}"] if is_list else ["batch"]
    return nodes.value(column.name, nodes.type("STRING"), shape)


Slots = list[tuple[tuple[Column, ...], str]]
"""Columns and their ids `(B, slots)`."""


def _texts_to_ids(nodes: Nodes, encoder: LogEncoder, columns: Sequence[Column]) -> Slots:
    """Return the ids of categorical columns, all together, and of each multi-valued one."""
    multi = [column for column in columns if column.kind == "multi"]
    values = {c.name: _split(nodes, c, encoder.schema.missing) for c in multi}  # (B, W) each
    lookups = _lookups(nodes, encoder, columns, values)
    if not lookups:
        return []
    found = [_label_encoder(nodes, lookup.texts, lookup.ids) for lookup in lookups]
    ids = _other_spellings(nodes, lookups, found, _by_segment(nodes, lookups, found))
    segments = [segment for lookup in lookups for segment in lookup.segments]
    single = tuple(c for segment in segments if not segment.is_multi for c in segment.columns)
    slots: Slots = []
    if single:
        by_column = nodes("Reshape", ids.pop(0), nodes.constant([len(single), -1]))  # (C, B)
        slots.append((single, nodes("Transpose", by_column, perm=[1, 0])))
    several = [segment.columns[0] for segment in segments if segment.is_multi]
    for column, flat in zip(several, ids, strict=True):
        slots.append(((column,), _place_values(nodes, column, values[column.name], flat)))
    return slots


def _lookups(
    nodes: Nodes, encoder: LogEncoder, columns: Sequence[Column], values: Mapping[str, str]
) -> list[_Lookup]:
    """Return what is looked up in each vocabulary."""
    groups: dict[tuple[str, bool], list[Column]] = {}
    for column in columns:
        if column.kind in ("categorical", "multi"):
            # a text for missing values may be one of several values, and then it is a value
            is_apart = column.kind == "multi" and bool(encoder.schema.missing)
            groups.setdefault((column.vocabulary_name, is_apart), []).append(column)
    lookups = []
    for (vocabulary, is_apart), members in groups.items():
        single = tuple(column for column in members if column.kind == "categorical")
        names = [column.name for column in single]
        segments = [_Segment(single, _joined(nodes, names))] if single else []
        for column in members:
            if column.kind == "multi":
                flat = nodes("Reshape", values[column.name], nodes.constant([-1]))
                segments.append(_Segment((column,), flat))
        texts = _texts(encoder, vocabulary)
        known = {text: FIRST_VALUE + number for number, text in enumerate(texts)}
        missing = () if is_apart else ("", *encoder.schema.missing)
        joined = _joined(nodes, [segment.texts for segment in segments])
        whole = {text: found for text, found in known.items() if WHOLE.fullmatch(text)}
        ids = with_other_spellings(known) | dict.fromkeys(missing, MISSING)
        lookups.append(_Lookup(ids, whole, tuple(segments), joined))
    return lookups


def with_other_spellings(ids: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of values and of their other spellings, of which there are finitely many.

    >>> with_other_spellings({"15.0": 3, "True": 4})
    {'15.0': 3, 'True': 4, '15': 3, 'true': 4, 'TRUE': 4, ...}
    """
    found = dict(ids)
    for text, number in ids.items():
        if text.endswith(".0") and WHOLE.fullmatch(text[:-2]):
            found.setdefault(text[:-2], number)
    for truth in TRUTHS:
        # as `other_spellings` in data/raw/coding.py looks them up
        spellings = (truth, truth.title(), truth.upper())
        known = [ids[spelling] for spelling in spellings if spelling in ids]
        letters = [(letter, letter.upper()) for letter in truth]
        for spelling in (*spellings, *map("".join, itertools.product(*letters))) if known else ():
            found.setdefault(spelling, known[0])
    return found


def _label_encoder(nodes: Nodes, inputs: str, ids: Mapping[Any, int], dtype: Any = str) -> str:
    """Return the ids of texts or numbers, UNKNOWN where there is none."""
    # a LabelEncoder needs a key
    keys = dict(ids) or {(NO_TEXT if dtype is str else LOWEST_BIN - 1): UNKNOWN}
    return nodes(
        "LabelEncoder",
        inputs,
        domain=ML,
        keys_tensor=nodes.tensor("keys", list(keys), dtype),
        values_tensor=nodes.tensor("values", list(keys.values())),
        default_tensor=nodes.tensor("default", [UNKNOWN]),
    )


def _by_segment(nodes: Nodes, lookups: Sequence[_Lookup], found: Sequence[str]) -> list[str]:
    """Return flat ids: of all categorical columns, one after the other, then of each multi-valued one."""
    single: list[str] = []
    several: list[str] = []
    for lookup, ids in zip(lookups, found, strict=True):
        parts = [ids]
        if len(lookup.segments) > 1:
            sizes = [nodes("Size", segment.texts) for segment in lookup.segments]
            lengths = nodes("Concat", *(_vector(nodes, size) for size in sizes), axis=0)
            parts = nodes.several("Split", ids, lengths, outputs=len(sizes), axis=0)
        for segment, part in zip(lookup.segments, parts, strict=True):
            (several if segment.is_multi else single).append(part)
    return [_joined(nodes, single), *several] if single else several


def _other_spellings(
    nodes: Nodes, lookups: Sequence[_Lookup], found: Sequence[str], ids: list[str]
) -> list[str]:
    """Return the flat ids, where "15.00" has the id of "15" if it has none itself.

    The texts are looked at only where some are unknown, and looked up again only where one of these is such a number.
    """
    if not any(lookup.whole for lookup in lookups):
        return ids
    unknown = nodes("Equal", _joined(nodes, ids), nodes.constant(UNKNOWN))
    segments = [segment for lookup in lookups for segment in lookup.segments]
    ordered = sorted(segments, key=lambda segment: segment.is_multi)  # as the ids are
    look = nodes.branch("unknown")
    texts = _joined(look, [segment.texts for segment in ordered])
    places = look("Reshape", look("NonZero", unknown), look.constant([-1]))
    some = look("Gather", texts, places, axis=0)
    is_decimal = look("RegexFullMatch", some, pattern=WHOLE_AS_DECIMAL)
    again = look.branch("decimal")
    second = [_look_up_decimals(again, *each) for each in zip(lookups, found, strict=True)]
    resolved = _by_segment(again, lookups, second)
    decided = _if(look, is_decimal, again, resolved, ids)
    return _if(nodes, unknown, look, decided, ids)


def _look_up_decimals(nodes: Nodes, lookup: _Lookup, found: str) -> str:
    """Return the ids of a lookup, of "15" where "15.00" has none."""
    if not lookup.whole:
        return found
    is_decimal = nodes("RegexFullMatch", lookup.texts, pattern=WHOLE_AS_DECIMAL)
    is_new = nodes("And", is_decimal, nodes("Equal", found, nodes.constant(UNKNOWN)))
    zero = nodes.constant("0", str)
    # with a last text, so that the split texts have a first column
    texts = nodes("Concat", nodes("Where", is_new, lookup.texts, zero), zero, axis=0)
    parts, _ = nodes.several("StringSplit", texts, outputs=2, delimiter=".")
    whole = nodes("Gather", parts, nodes.constant(0), axis=1)
    ids = _label_encoder(nodes, whole, lookup.whole)
    ids = nodes("Slice", ids, nodes.constant([0]), nodes.constant([-1]))
    return nodes("Where", is_new, ids, found)


def _if(
    nodes: Nodes, conditions: str, then: Nodes, values: Sequence[str], otherwise: Sequence[str]
) -> list[str]:
    """Return the values of a branch where any condition holds, else those of the graph around it."""
    number = nodes("Cast", conditions, to=nodes.type("INT32"))
    any_ = nodes("Cast", nodes("ReduceSum", number, keepdims=0), to=nodes.type("BOOL"))
    kept = then.branch("kept")
    # an output of a branch must be made in it
    branches = [
        (then, [then("Identity", value) for value in values]),
        (kept, [kept("Identity", value) for value in otherwise]),
    ]
    then_graph, kept_graph = (branch.graph(names, "INT64") for branch, names in branches)
    return nodes.several(
        "If", any_, outputs=len(values), then_branch=then_graph, else_branch=kept_graph
    )


def _split(nodes: Nodes, column: Column, missing: Sequence[str]) -> str:
    """Return the values of a multi-valued column, `(B, W)`; "" where there is none."""
    if not column.separator:
        return column.name
    texts = column.name
    for text in missing:
        is_missing = nodes("Equal", texts, nodes.constant(text, str))
        texts = nodes("Where", is_missing, nodes.constant("", str), texts)
    values, _ = nodes.several("StringSplit", texts, outputs=2, delimiter=column.separator)
    return values


def _place_values(nodes: Nodes, column: Column, values: str, ids: str) -> str:
    """Return the ids of a multi-valued column `(B, L)`: its first values, then padding; MISSING without any."""
    length, last = column.max_length, nodes.constant([1])
    ids = nodes("Reshape", ids, nodes("Shape", values), allowzero=1)  # (B, W)
    is_value = nodes("Not", nodes("Equal", values, nodes.constant("", str)))
    count = nodes("Cast", is_value, to=nodes.type("INT64"))
    place = nodes("Sub", nodes("CumSum", count, nodes.constant(1)), last)
    is_kept = nodes("And", is_value, nodes("Less", place, nodes.constant(length)))
    # one more place for all that are left out
    place = nodes("Where", is_kept, place, nodes.constant(length))
    rows = nodes("Shape", values, start=0, end=1)
    shape = nodes("Concat", rows, nodes.constant([length + 1]), axis=0)
    empty = nodes("Expand", nodes.constant(PADDING), shape)
    placed = nodes("ScatterElements", empty, place, ids, axis=1)
    placed = nodes("Slice", placed, nodes.constant([0]), nodes.constant([length]), last)
    present = nodes("ReduceSum", count, last)  # (B, 1)
    nothing = nodes.constant([[MISSING] + [PADDING] * (length - 1)])
    return nodes("Where", nodes("Equal", present, nodes.constant(0)), nothing, placed)


def _read_numbers(
    nodes: Nodes, columns: Sequence[Column], missing: Sequence[str]
) -> tuple[str, str]:
    """Return all numbers `(B, numeric columns)`, NaN where missing, and which rows have one that is refused `(B,)`."""
    names = [column.name for column in columns]
    by_column = nodes("Reshape", _joined(nodes, names), nodes.constant([len(names), -1]))
    matrix = nodes("Transpose", by_column, perm=[1, 0])
    rounded = nodes("Cast", matrix, to=nodes.type("FLOAT"))
    infinite = nodes("Cast", nodes("IsInf", rounded), to=nodes.type("INT32"))
    is_bad = nodes(
        "Cast", nodes("ReduceMax", infinite, nodes.constant([1]), keepdims=0), to=nodes.type("BOOL")
    )
    for number in [found for found in map(as_float, missing) if found is not None]:
        is_missing = nodes("Equal", matrix, nodes.constant(number, np.float64))
        matrix = nodes("Where", is_missing, nodes.constant(np.nan, np.float64), matrix)
    return matrix, is_bad


def _standardise(
    nodes: Nodes, encoder: LogEncoder, columns: Sequence[Column], matrix: str
) -> str | None:
    """Return (x - mean) / std, `(B, P)`; the mean where a number is missing."""
    chosen = [place for place, column in enumerate(columns) if not column.has_ids]
    if not chosen:
        return None
    scales = np.array([encoder.scales[columns[place].name] for place in chosen])
    numbers = nodes("Gather", matrix, nodes.constant(chosen), axis=1)
    mean, std = (nodes.constant(found, np.float64) for found in scales.T)
    scaled = nodes("Div", nodes("Sub", numbers, mean), std)
    bounds = (nodes.constant(bound, np.float64) for bound in (-LARGEST, LARGEST))
    zero = nodes.constant(0.0, np.float64)
    scaled = nodes("Where", nodes("IsNaN", numbers), zero, nodes("Clip", scaled, *bounds))
    return nodes("Cast", scaled, to=nodes.type("FLOAT"))


def _numbers_to_ids(
    nodes: Nodes, encoder: LogEncoder, columns: Sequence[Column], matrix: str
) -> Slots:
    """Return the ids of the bins of numbers."""
    slots: Slots = []
    is_missing = nodes("IsNaN", matrix)
    for place, column in enumerate(columns):
        if not column.has_ids:
            continue
        at = nodes.constant([place])
        number = nodes("Gather", matrix, at, axis=1)  # (B, 1)
        if column.treatment == "quantile":
            edges = nodes.constant(encoder.edges[column.name], np.float64)  # (E,)
            passed = nodes("Cast", nodes("GreaterOrEqual", number, edges), to=nodes.type("INT64"))
            bins = nodes("ReduceSum", passed, nodes.constant([1]))
            ids = nodes("Add", bins, nodes.constant(FIRST_VALUE))
        else:
            ids = _log_square(nodes, encoder, column, number)
        missing = nodes("Gather", is_missing, at, axis=1)
        slots.append(((column,), nodes("Where", missing, nodes.constant(MISSING), ids)))
    return slots


def _log_square(nodes: Nodes, encoder: LogEncoder, column: Column, number: str) -> str:
    """Return the ids of floor(ln(x)²) above 2, of floor(x - 2) up to there."""
    two = nodes.constant(2.0, np.float64)
    log = nodes("Log", nodes("Max", number, two))
    is_large = nodes("Greater", number, two)
    square = nodes("Where", is_large, nodes("Mul", log, log), nodes("Sub", number, two))
    bounds = (nodes.constant(bound, np.float64) for bound in (LOWEST_BIN, HIGHEST_BIN))
    zero = nodes.constant(0.0, np.float64)  # no whole number stands for NaN
    bins = nodes("Clip", nodes("Floor", square), *bounds)
    bins = nodes("Where", nodes("IsNaN", bins), zero, bins)
    texts = _texts(encoder, column.vocabulary_name)
    ids = {int(text): FIRST_VALUE + number for number, text in enumerate(texts)}
    return _label_encoder(nodes, nodes("Cast", bins, to=nodes.type("INT64")), ids, np.int64)


def _in_order(nodes: Nodes, slots: Slots, columns: Sequence[Column]) -> str:
    """Return all ids `(B, S)` in the order of the columns."""
    ids = _joined(nodes, [found for _, found in slots], axis=1)
    starts, start = {}, 0
    for column in itertools.chain.from_iterable(members for members, _ in slots):
        starts[column.name] = start
        start += column.max_length
    order = [
        starts[column.name] + place for column in columns for place in range(column.max_length)
    ]
    if order == list(range(start)):
        return ids
    return nodes("Gather", ids, nodes.constant(order), axis=1)


def _unknown(nodes: Nodes, ids: str, columns: Sequence[Column]) -> str:
    """Return whether a value of each field is unknown, `(B, F)`."""
    unknown = nodes("Equal", ids, nodes.constant(UNKNOWN))
    lengths = [column.max_length for column in columns]
    if max(lengths) == 1:
        return unknown
    number = nodes("Cast", unknown, to=nodes.type("INT32"))
    sizes = nodes.constant(lengths)
    parts = nodes.several("Split", number, sizes, outputs=len(lengths), axis=1)
    axis = nodes.constant([1])
    most = [nodes("ReduceMax", part, axis) for part in parts]
    return nodes("Cast", _joined(nodes, most, axis=1), to=nodes.type("BOOL"))


def _joined(nodes: Nodes, names: Sequence[str], axis: int = 0) -> str:
    """Return one tensor of several; one alone is itself."""
    return names[0] if len(names) == 1 else nodes("Concat", *names, axis=axis)


def _vector(nodes: Nodes, number: str) -> str:
    return nodes("Reshape", number, nodes.constant([1]))


def _texts(encoder: LogEncoder, vocabulary: str) -> list[str]:
    return [str(text) for text in encoder.values[vocabulary].to_list()]
