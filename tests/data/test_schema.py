import json

import numpy as np
import pytest

from rarebit.data import Field, Schema
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, UNKNOWN
from rarebit.errors import DataError, SettingsError

USER = Field(name="user", rows=9)
AGE = Field(name="age", kind="numeric")
TAGS = Field(name="tags", kind="multi", rows=5, max_length=3, pooling="sum")
ITEM = Field(name="item", rows=7)


def test_reserved_ids_are_the_first_three():
    assert (PADDING, UNKNOWN, MISSING, FIRST_VALUE) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "", "rows": 3}, "a field needs a name, got name=''"),
        ({"name": 3, "rows": 3}, "3: name must be str, got 3"),
        ({"name": "user"}, "user: rows must be at least 1, got rows=0"),
        ({"name": "user", "rows": -1}, "user: rows must be at least 1, got rows=-1"),
        ({"name": "user", "rows": "9"}, "user: rows must be int, got '9'"),
        ({"name": "user", "rows": 9.0}, "user: rows must be int, got 9.0"),
        (
            {"name": "age", "kind": "numeric", "rows": 2},
            "age: a numeric field has no table, got rows=2",
        ),
        ({"name": "user", "kind": "text", "rows": 2}, "user: kind must be one of 'categorical',"),
        ({"name": "t", "kind": "multi", "rows": 2, "max_length": 0}, "t: max_length must be 1, or"),
        ({"name": "t", "rows": 2, "max_length": 2}, "got kind='categorical', max_length=2"),
        ({"name": "t", "kind": "multi", "rows": 2, "pooling": "max"}, "t: pooling must be one of"),
    ],
)
def test_a_wrong_field_is_refused(values, message):
    with pytest.raises(SettingsError) as caught:
        Field(**values)
    assert message in str(caught.value)


def test_a_field_takes_numpys_integers_as_plain_ones():
    field = Field(name="user", rows=np.int64(9))
    assert (field, type(field.rows)) == (USER, int)


def test_a_schema_needs_distinct_fields():
    with pytest.raises(SettingsError, match="a schema needs at least one field, got none"):
        Schema(())
    with pytest.raises(
        SettingsError, match=r"names must be distinct, got \['user'\] more than once"
    ):
        Schema((USER, ITEM, USER))
    with pytest.raises(SettingsError, match="fields must be Field, got 'user'"):
        Schema(("user",))


def test_a_list_of_fields_makes_the_same_schema():
    assert Schema([USER, AGE]) == Schema((USER, AGE))
    assert hash(Schema([USER, AGE])) == hash(Schema((USER, AGE)))


def test_slots_lie_side_by_side_and_skip_numbers():
    schema = Schema((USER, AGE, TAGS, ITEM))
    assert schema.slots == {"user": slice(0, 1), "tags": slice(1, 4), "item": slice(4, 5)}
    assert schema.num_slots == 5
    assert schema.table_fields == (USER, TAGS, ITEM)
    assert schema.numeric_fields == (AGE,)


def test_a_schema_of_numbers_has_no_slots():
    schema = Schema((AGE,))
    assert (schema.slots, schema.num_slots, schema.table_fields) == ({}, 0, ())


def test_a_field_is_found_by_name_or_suggested():
    schema = Schema((USER, TAGS))
    assert schema["tags"] is TAGS
    with pytest.raises(DataError, match=r"no field 'users'; did you mean 'user'\?"):
        schema["users"]


def test_a_schema_survives_json():
    schema = Schema((USER, AGE, TAGS, ITEM))
    assert Schema.from_mapping(json.loads(json.dumps(schema.to_mapping()))) == schema


def test_a_schema_is_not_read_from_nonsense():
    with pytest.raises(
        SettingsError, match="schema: unknown setting 'row' for Field; did you mean"
    ):
        Schema.from_mapping({"fields": [{"name": "user", "row": 3}]})
    with pytest.raises(SettingsError, match="schema: Field needs name"):
        Schema.from_mapping({"fields": [{"rows": 3}]})
    with pytest.raises(SettingsError, match="a schema needs at least one field"):
        Schema.from_mapping({})
