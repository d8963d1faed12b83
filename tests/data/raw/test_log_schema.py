import dataclasses
import tomllib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rarebit.data.log_schema import Column, LogSchema, Split, TextFormat
from rarebit.errors import DataError, SettingsError

USER = Column(name="user")
TABS = TextFormat(separator="\t", quote="", encoding="latin-1", header=False, names=("a", 'b "c"'))
TAGS = Column(name="tags", kind="multi", separator="|", max_length=4, min_count=2, pooling="sum")
PRICE = Column(name="price", kind="numeric")
BINS = Column(name="bins", kind="numeric", treatment="quantile", bins=7)
SQUARES = Column(name="squares", kind="numeric", treatment="log_square")
WHEN = Column(name="when", kind="time")
NOTE = Column(name="note", kind="ignored")
HASHED = Column(name="hashed", buckets=100)
ALL = LogSchema(label="click", columns=(USER, TAGS, PRICE, BINS, SQUARES, WHEN, NOTE, HASHED))

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@st.composite
def columns(draw):
    kind = draw(st.sampled_from(["categorical", "multi", "numeric", "time", "ignored"]))
    has_buckets = kind in ("categorical", "multi") and draw(st.booleans())
    return Column(
        name=draw(texts),
        kind=kind,
        min_count=draw(st.integers(1, 99)),
        buckets=draw(st.integers(1, 10**6)) if has_buckets else None,
        separator=draw(texts | st.just("")) if kind == "multi" else "",
        max_length=draw(st.integers(1, 50)) if kind == "multi" else 1,
        pooling=draw(st.sampled_from(["mean", "sum"])),
        treatment=draw(st.sampled_from(["standardised", "log_square", "quantile"])),
        bins=draw(st.integers(2, 100)),
    )


@st.composite
def schemas(draw):
    listed = draw(st.lists(columns(), min_size=1, max_size=4, unique_by=lambda c: c.name))
    assume(any(column.kind not in ("time", "ignored") for column in listed))
    label = draw(texts.filter(lambda name: name not in [column.name for column in listed]))
    kinds = {"time": "time", "user": "categorical"}
    kind = draw(st.sampled_from(["random", "order", "given", *kinds]))
    fitting = [c.name for c in listed if c.kind == kinds.get(kind, c.kind) and c.buckets is None]
    assume(fitting or kind not in kinds)
    test = draw(st.sampled_from([0.0, 0.1, 0.25]))
    split = Split(
        kind=kind,
        column=draw(st.sampled_from(fitting)) if kind in kinds else "",
        shares=(0.75 - test, 0.25, test),
        seed=draw(st.integers(0, 2**40)),
    )
    return LogSchema(
        label=label,
        columns=listed,
        split=split,
        missing=draw(st.lists(texts, max_size=3)),
        counts=draw(st.sampled_from(["train", "all"])),
        text=draw(st.sampled_from([None, TextFormat(), TABS])),
        unknown_share=draw(st.floats(0, 1, exclude_max=True)),
    )


@given(schemas())
def test_a_schema_written_as_toml_reads_back_the_same(schema):
    assert LogSchema.from_mapping(tomllib.loads(schema.to_toml())) == schema


@given(schemas())
def test_a_schema_as_plain_values_reads_back_the_same(schema):
    assert LogSchema.from_mapping(schema.to_mapping()) == schema


def test_a_schema_is_read_from_a_file(tmp_path):
    file = tmp_path / "schema.toml"
    file.write_text(ALL.to_toml(), "utf-8")
    assert LogSchema.read(file) == ALL


@pytest.mark.parametrize(
    "name", ["-", "a\x7fb", 'say "hi"', "back\\slash", "new\nline", "naïve 表", "a.b"]
)
def test_any_name_survives_the_file(name, tmp_path):
    schema = LogSchema(label=name, columns=(Column(name=f"{name}2"),), missing=(name,))
    file = tmp_path / "schema.toml"
    file.write_text(schema.to_toml(), "utf-8")
    assert LogSchema.read(file) == schema


def test_what_an_editor_writes_by_hand_is_read():
    by_hand = tomllib.loads("""
        label = "click"
        missing = ["NULL"]
        [split]
        kind = "time"
        column = "when"
        [[columns]]
        name = "user"
        min_count = 3
        [[columns]]
        name = "when"
        kind = "time"
    """)
    assert LogSchema.from_mapping(by_hand) == LogSchema(
        label="click",
        missing=("NULL",),
        split=Split(kind="time", column="when"),
        columns=(Column(name="user", min_count=3), WHEN),
    )


def test_columns_are_told_apart():
    assert ALL.id_columns == (USER, TAGS, BINS, SQUARES, HASHED)
    assert ALL.vocabularies == {"user": [USER], "tags": [TAGS], "squares": [SQUARES]}
    used = ("user", "tags", "price", "bins", "squares", "hashed")
    assert ALL.columns_read == ("click", *used)


def test_a_time_is_read_only_where_the_split_needs_it():
    split = Split(kind="time", column="when")
    schema = LogSchema(label="click", columns=(WHEN, USER), split=split)
    assert set(schema.columns_read) == {"click", "user", "when"}
    assert dataclasses.replace(schema, split=Split()).columns_read == ("click", "user")


def test_a_treatment_left_over_from_a_number_does_not_take_the_vocabulary():
    edited = dataclasses.replace(BINS, kind="categorical")
    assert LogSchema(label="click", columns=(edited,)).vocabularies == {"bins": [edited]}


def test_the_column_of_a_given_split_is_read_once():
    split = Split(kind="given", column="part")
    schema = LogSchema(label="click", columns=(USER,), split=split)
    assert schema.columns_read == ("click", "user", "part")
    schema = dataclasses.replace(schema, columns=(USER, Column(name="part")))
    assert schema.columns_read == ("click", "user", "part")


def test_columns_may_share_a_vocabulary():
    seen, bought = (Column(name=name, vocabulary="item") for name in ("seen", "bought"))
    schema = LogSchema(label="click", columns=(seen, bought, USER))
    assert schema.vocabularies == {"item": [seen, bought], "user": [USER]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": ""}, "a column needs a name, got name=''"),
        ({"name": 3}, "3: name must be str, got 3"),
        ({"kind": "text"}, "a: kind must be one of 'categorical', 'multi', 'numeric', 'time',"),
        ({"min_count": 0}, "a: min_count must be at least 1, got min_count=0"),
        ({"buckets": 0}, "a: buckets must lie in [1, 100,000,000], got buckets=0"),
        (
            {"buckets": 9, "kind": "numeric"},
            "a: buckets are for categorical and multi columns, got kind='numeric'",
        ),
        ({"buckets": 9, "vocabulary": "b"}, "a: a hashed column has no vocabulary to share;"),
        ({"max_length": 2}, "a: max_length must be 1, or at least 1 for kind='multi', got kind="),
        ({"max_length": 0, "kind": "multi"}, "got kind='multi', max_length=0"),
        ({"treatment": "log"}, "a: treatment must be one of 'standardised', 'log_square', 'qu"),
        ({"pooling": "max"}, "a: pooling must be one of 'mean', 'sum', got 'max'"),
        ({"bins": 1}, "a: bins must be at least 2, got bins=1"),
    ],
)
def test_a_wrong_column_is_refused(values, message):
    with pytest.raises(SettingsError) as caught:
        Column(**{"name": "a", **values})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"kind": "weekly"},
            "split: kind must be one of 'random', 'order', 'time', 'user', 'given'",
        ),
        (
            {"shares": (0.8, 0.2)},
            "split: shares must be three parts that add up to 1, got (0.8, 0.2)",
        ),
        ({"shares": (0.8, 0.1, 0.2)}, "three parts that add up to 1, got (0.8, 0.1, 0.2)"),
        ({"shares": (1.2, -0.1, -0.1)}, "three parts that add up to 1, got (1.2, -0.1, -0.1)"),
        ({"shares": (0.0, 0.5, 0.5)}, "split: the share for training must be above 0"),
        ({"kind": "time"}, "split: kind='time' needs the name of its column"),
        ({"kind": "user"}, "split: kind='user' needs the name of its column"),
    ],
)
def test_a_wrong_split_is_refused(values, message):
    with pytest.raises(SettingsError) as caught:
        Split(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"label": ""}, "a schema needs the name of the label column, got label=''"),
        ({"columns": (USER, WHEN, USER)}, "column names must be distinct, got ['user'] more than"),
        ({"label": "user"}, "column names must be distinct, got ['user'] more than once"),
        ({"columns": ()}, "a schema needs at least one column for the model, got none"),
        ({"columns": (WHEN, NOTE)}, "a schema needs at least one column for the model, got none"),
        ({"unknown_share": 1.0}, "unknown_share must be in [0, 1), got 1.0"),
        ({"unknown_share": -0.1}, "unknown_share must be in [0, 1), got -0.1"),
        ({"counts": "test"}, "schema: counts must be one of 'train', 'all', got 'test'"),
        (
            {"split": Split(kind="time", column="user")},
            "a split by time needs a column of kind time; 'user' is kind='categorical'",
        ),
        (
            {"split": Split(kind="user", column="when")},
            "a split by user needs a column of kind ignored or categorical; 'when' is kind='time'",
        ),
    ],
)
def test_a_wrong_schema_is_refused(values, message):
    with pytest.raises(SettingsError) as caught:
        LogSchema(**{"label": "click", "columns": (USER, WHEN, HASHED), **values})
    assert message in str(caught.value)


def test_columns_that_share_values_must_agree():
    seen = Column(name="seen", vocabulary="item")
    often = Column(name="often", vocabulary="item", min_count=5)
    number = Column(name="number", kind="numeric", treatment="log_square", vocabulary="item")
    for other in (often, number):
        with pytest.raises(SettingsError, match=f"'seen' and '{other.name}' share the vocabulary"):
            LogSchema(label="click", columns=(seen, other))


def test_a_column_that_is_not_there_is_suggested():
    with pytest.raises(DataError, match=r"no column 'users'; did you mean 'user'\?"):
        ALL["users"]
    with pytest.raises(DataError, match=r"no column 'whe'; did you mean 'when'\?"):
        LogSchema(label="click", columns=(USER, WHEN), split=Split(kind="time", column="whe"))


def test_a_later_format_is_refused_and_none_is_the_first():
    values = ALL.to_mapping()
    for version in (2, "1"):
        with pytest.raises(DataError, match=f"of format {version!r}; this version reads up to 1"):
            LogSchema.from_mapping({**values, "format": version})
    del values["format"]
    assert LogSchema.from_mapping(values) == ALL


def test_an_unknown_setting_is_suggested():
    values = {"label": "click", "columns": [{"name": "user", "mincount": 2}]}
    with pytest.raises(SettingsError, match="unknown setting 'mincount' for Column; did you mean"):
        LogSchema.from_mapping(values)
    with pytest.raises(SettingsError, match="schema: LogSchema needs label"):
        LogSchema.from_mapping({"columns": [{"name": "user"}]})
