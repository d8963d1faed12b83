"""The encoding inside an exported file gives the ids and numbers of `data prepare`, value by value."""

import numpy as np
import onnx
import onnxruntime
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rarebit as rb
from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.raw.encode import encode_like
from rarebit.data.raw.encoder import encoder_of
from rarebit.data.schema import MISSING, UNKNOWN
from rarebit.errors import ExportError
from rarebit.export.encoding import ML, ML_OPSET, OPSET, encoding_graph, with_other_spellings
from rarebit.export.raw import text_inputs

SESSION = onnxruntime.SessionOptions()
SESSION.log_severity_level = 4


def session_of(encoder):
    """Return a session that runs the encoding alone."""
    graph = encoding_graph(encoder)
    nodes = graph.nodes
    outputs = {graph.ids: "INT64", graph.numeric: "FLOAT", graph.unknown: "BOOL"}
    outputs |= {graph.is_bad: "BOOL"}
    values = [nodes.value(n, nodes.type(kind), None) for n, kind in outputs.items() if n]
    made = onnx.helper.make_graph(nodes.nodes, "g", graph.inputs, values, nodes.constants)
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(ML, ML_OPSET)]
    model = onnx.helper.make_model(made, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), SESSION)
    return lambda inputs: dict(
        zip(
            ("ids", "numeric", "unknown", "is_bad"),
            (
                session.run([name], inputs)[0] if name else None
                for name in (graph.ids, graph.numeric, graph.unknown, graph.is_bad)
            ),
            strict=True,
        )
    )


def assert_equal(frame, schema, later):
    """Both encoders agree on rows that come later."""
    encoder = encoder_of(rb.Dataset.from_frame(frame, schema=schema))
    wanted = encode_like(later, encoder)
    found = session_of(encoder)(text_inputs(encoder, later))
    np.testing.assert_array_equal(found["ids"], wanted.ids.numpy())
    if found["numeric"] is not None:
        np.testing.assert_array_equal(found["numeric"], wanted.numeric.numpy())
    for place, field in enumerate(encoder.fields.table_fields):
        slots = wanted.ids.numpy()[:, encoder.fields.slots[field.name]]
        np.testing.assert_array_equal(found["unknown"][:, place], (slots == UNKNOWN).any(axis=1))


def label(rows):
    return [number % 2 for number in range(rows)]


WORDS = [
    *(
        "",
        "a",
        "b",
        "NULL",
        "nan",
        "15",
        "15.0",
        "15.00",
        "+3",
        "-3.0",
        "-3",
        "0",
        "-0",
        "007",
        "7.0",
    ),
    *(
        "true",
        "True",
        "TRUE",
        "tRuE",
        "false",
        "FALSE",
        "1e5",
        "1_000",
        "٣",
        "٣.0",
        "²",
        "\uff11",
        "1.0.0",
    ),
    *(
        "é",
        "e\u0301",
        "🦊",
        " a",
        "a ",
        "a|b",
        "|",
        "||",
        "\n",
        "\t",
        "a\n",
        "15.0\n",
        '"',
        "x" * 300,
    ),
    *(
        "2024-02-29",
        "2024-02-29 23:30:00",
        "-",
        ".0",
        "5.",
        "\0",
        "a\0",
        "a\0b",
        "∞",
        "İ",
        "ß",
        "İstanbul",
        "K",
        "\u200b",
    ),
]
text = st.one_of(st.sampled_from(WORDS), st.text(max_size=4))
number = st.one_of(
    st.none(),
    st.sampled_from([0.0, -0.0, 1.0, 2.0, 2.0000001, 3.0, -1.0, -7.5, 1e-30, 1e30, -1e30, 99.0]),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.integers(-1000, 10**6).map(float),
)


@st.composite
def logs(draw):
    """Return a log, its schema, and rows that come later."""
    kinds = draw(
        st.lists(
            st.sampled_from(
                ["text", "shared", "multi", "list", "shared_multi", "std", "square", "bins"]
            ),
            min_size=1,
            max_size=5,
        )
    )
    columns, train, later = [], {}, {}
    rows, more = 24, draw(st.integers(1, 8))
    for place, kind in enumerate([*kinds, "text"]):  # a model has at least one table
        name = f"{kind} {place}"
        make = {
            "text": Column(name=name, min_count=draw(st.integers(1, 2))),
            "shared": Column(name=name, vocabulary="v"),
            "shared_multi": Column(
                name=name, kind="multi", separator="|", max_length=3, vocabulary="v"
            ),
            "multi": Column(name=name, kind="multi", separator="|", max_length=2),
            "list": Column(name=name, kind="multi", max_length=2),
            "std": Column(name=name, kind="numeric"),
            "square": Column(name=name, kind="numeric", treatment="log_square"),
            "bins": Column(name=name, kind="numeric", treatment="quantile", bins=4),
        }[kind]
        columns.append(make)
        for frame, n in ((train, rows), (later, more)):
            if make.kind == "numeric":
                values = pl.Series(draw(st.lists(number, min_size=n, max_size=n)), dtype=pl.Float64)
            elif kind == "list":
                lists = st.lists(st.one_of(st.none(), text), max_size=4)
                values = draw(st.lists(st.one_of(st.none(), lists), min_size=n, max_size=n))
                values = pl.Series(values, dtype=pl.List(pl.String))
            else:
                one = st.lists(text, max_size=4).map("|".join) if make.kind == "multi" else text
                values = draw(st.lists(st.one_of(st.none(), one), min_size=n, max_size=n))
                values = pl.Series(values, dtype=pl.String)
            frame[name] = values
    missing = draw(st.sampled_from([(), ("NULL",), ("-", "15", "-1", "99"), ("true", "a")]))
    schema = LogSchema(label="click", columns=tuple(columns), missing=missing)
    return pl.DataFrame(train | {"click": label(rows)}), schema, pl.DataFrame(later)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(logs())
def test_random_schemas_and_hostile_values_have_the_ids_of_data_prepare(log):
    assert_equal(*log)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(logs())
def test_many_random_schemas_and_hostile_values_have_the_ids_of_data_prepare(log):
    assert_equal(*log)


def test_every_word_is_found_in_every_spelling():
    known = [word for word in WORDS if word not in ("", "NULL")]
    columns = (Column(name="all"), Column(name="some"), Column(name="none"))
    schema = LogSchema(label="click", columns=columns, missing=("NULL",), unknown_share=0.0)
    some, rows = known[::2], len(known)
    frame = {
        "all": known,
        "some": [some[i % len(some)] for i in range(rows)],
        "none": ["other"] * rows,
        "click": label(rows),
    }
    later = pl.DataFrame(dict.fromkeys(("all", "some", "none"), WORDS))
    assert_equal(frame, schema, later)


def test_whole_numbers_are_found_as_decimals_and_decimals_as_whole_numbers():
    assert with_other_spellings({"15.0": 3, "2.00": 4, "True": 5, "7": 6}) == {
        "15.0": 3,
        "15": 3,
        "2.00": 4,
        "7": 6,
        **dict.fromkeys(_spellings("true"), 5),
    }
    schema = LogSchema(label="click", columns=(Column(name="id"),), unknown_share=0.0)
    frame = {"id": ["15", "8.0", "8.00"] * 8, "click": label(24)}
    encoder = encoder_of(rb.Dataset.from_frame(frame, schema=schema))
    texts = ["15.000", "15.00", "15", "8", "8.0", "8.00", "8.000", "15.001", ""]
    found = session_of(encoder)({"id": np.array(texts, object)})["ids"][:, 0].tolist()
    fifteen, eight, eights = found[2], found[4], found[5]
    unknown = [UNKNOWN, UNKNOWN, MISSING]
    assert found == [fifteen, fifteen, fifteen, eight, eight, eights, *unknown]
    assert len({fifteen, eight, eights} | {UNKNOWN}) == 4


def _spellings(word):
    found = [""]
    for letter in word:
        found = [text + one for text in found for one in (letter, letter.upper())]
    return found


def test_numbers_that_data_prepare_refuses_are_marked():
    schema = LogSchema(
        label="click",
        columns=(
            Column(name="a", kind="numeric"),
            Column(name="b", kind="numeric", treatment="quantile"),
        ),
    )
    frame = {"a": [1.0, 2.0, 3.0] * 4, "b": [1.0, 2.0, 3.0] * 4, "click": label(12)}
    session = session_of(encoder_of(rb.Dataset.from_frame(frame, schema=schema)))
    a, b = np.array([1.0, np.inf, 1.0, np.nan, 1.0]), np.array([1.0, 1.0, 1e39, 1.0, -np.inf])
    assert session({"a": a, "b": b})["is_bad"].tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_batch_may_have_any_number_of_rows(size):
    schema = LogSchema(
        label="click",
        columns=(
            Column(name="tags", kind="multi", separator=",", max_length=2),
            Column(name="user"),
        ),
    )
    frame = {"tags": ["1,2", "3"] * 6, "user": ["ann", "7"] * 6, "click": label(12)}
    later = pl.DataFrame(
        {"tags": ["1.0,9,2", "", "3"] * size, "user": ["7.00", "bob", "ann"] * size}
    )
    assert_equal(frame, schema, later.head(size))


def test_a_row_without_values_in_any_list_is_missing():
    schema = LogSchema(label="click", columns=(Column(name="tags", kind="multi", max_length=2),))
    frame = pl.DataFrame({"tags": [["a"], ["b", "a"]] * 6, "click": label(12)})
    later = pl.DataFrame({"tags": [[], None, [None, ""]]}, schema={"tags": pl.List(pl.String)})
    assert_equal(frame, schema, later)


def test_lists_may_come_where_the_log_had_separators():
    tags = Column(name="tags", kind="multi", separator="|", max_length=2)
    schema = LogSchema(label="click", columns=(tags,), missing=("NULL",), unknown_share=0.0)
    frame = {"tags": ["a|NULL", "b|a"] * 12, "click": label(24)}
    lists = [["NULL"], ["NULL", "b"], ["a"], [None, "b"], [], None, ["", "x"]]
    assert_equal(frame, schema, pl.DataFrame({"tags": lists}))


def test_hashed_columns_are_refused_by_name():
    schema = LogSchema(label="click", columns=(Column(name="url", buckets=50),))
    encoder = encoder_of(
        rb.Dataset.from_frame({"url": ["a", "b"] * 6, "click": label(12)}, schema=schema)
    )
    with pytest.raises(ExportError, match="'url' is hashed to 50 buckets by CRC-32"):
        encoding_graph(encoder)
