import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rarebit import Training
from rarebit.errors import SettingsError
from rarebit.settings import (
    check_types,
    from_mapping,
    keyword_arguments,
    read_toml,
    require,
    suggest,
    to_mapping,
    updated,
)


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    rate: float = 0.5
    size: int | None = None
    layers: tuple[int, ...] = ()
    mode: Literal["fast", "exact", 1] = "fast"
    flag: bool = False
    inner: Inner = Inner()
    extra: Any = None


def read(**values):
    return from_mapping(Outer, {"name": "x"} | values)


def test_require_raises_the_message_only_when_broken():
    require(True, "fine")
    with pytest.raises(SettingsError, match=r"^dim must be 1$"):
        require(False, "dim must be 1")


def test_suggest_takes_the_closest_name_or_lists_all():
    assert suggest("batch-size", ["batch_size", "lr"]) == "; did you mean 'batch_size'?"
    assert suggest("zzz", ["lr", "epochs"]) == "; known: epochs, lr"
    assert suggest("zzz", []) == "; known: none"


def test_an_unknown_key_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match="unknown setting 'rat' for Outer; did you mean 'rate'"):
        read(rat=1.0)
    with pytest.raises(SettingsError, match=r"^train.toml: unknown setting 'zzz' .*; known: "):
        from_mapping(Outer, {"zzz": 1}, where="train.toml")


def test_a_missing_key_is_named():
    with pytest.raises(SettingsError, match=r"^model: Outer needs name$"):
        from_mapping(Outer, {"rate": 1.0}, where="model")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", 3, "name must be str, got 3"),
        ("size", True, "size must be int or none, got True"),
        ("size", "3", "size must be int or none, got '3'"),
        ("size", 3.0, "size must be int or none, got 3.0"),
        ("rate", "0.1", "rate must be float, got '0.1'"),
        ("rate", False, "rate must be float, got False"),
        ("rate", None, "rate must be float, got None"),
        ("flag", 1, "flag must be bool, got 1"),
        ("layers", 3, "layers must be a list, got 3"),
        ("layers", "34", "layers must be a list, got '34'"),
        ("layers", [3, 4.5], "layers must be int, got 4.5"),
        ("mode", "slow", "mode must be one of 'fast', 'exact', 1, got 'slow'"),
        ("mode", True, "mode must be one of 'fast', 'exact', 1, got True"),
        ("inner", 3, "inner must be Inner, got 3"),
        ("inner", {"depth": "2"}, "inner: depth must be int, got '2'"),
        ("inner", {"deep": 2}, "inner: unknown setting 'deep' for Inner; did you mean 'depth'"),
    ],
)
def test_a_wrong_type_is_refused_by_name(key, value, message):
    with pytest.raises(SettingsError) as caught:
        read(**{key: value})
    assert message in str(caught.value)


def test_words_that_may_stand_for_a_number_are_named():
    @dataclass(frozen=True, kw_only=True)
    class Dial:
        c: float | Literal["auto", "learned"]

    with pytest.raises(SettingsError, match=r"c must be float or 'auto' or 'learned', got 'atuo'"):
        from_mapping(Dial, {"c": "atuo"})


def test_values_of_the_right_type_are_taken():
    got = read(size=3, layers=[4, 5], mode=1, inner={"depth": 2}, flag=True, extra={"any": [1]})
    want = Outer(
        name="x", size=3, layers=(4, 5), mode=1, inner=Inner(depth=2), flag=True, extra={"any": [1]}
    )
    assert got == want
    assert read(size=None) == Outer(name="x")
    assert read(inner=Inner(depth=7)).inner == Inner(depth=7)


def test_a_whole_number_becomes_a_float_only_without_loss():
    assert type(read(rate=3).rate) is float
    assert read(rate=2**53).rate == 2.0**53
    for too_large in (2**53 + 1, -(2**53) - 1):
        with pytest.raises(SettingsError, match="rate must be float, got"):
            read(rate=too_large)


@pytest.mark.parametrize("name", ["size", "rate"])
@pytest.mark.parametrize(
    "value", [2**64, -(10**5000), float("nan"), float("inf")], ids=lambda v: type(v).__name__
)
def test_a_number_that_no_setting_can_be_is_refused_without_printing_it(name, value):
    with pytest.raises(
        SettingsError, match=f"{name} must (fit in 64 bits|be finite), got"
    ) as caught:
        read(**{name: value})
    assert len(str(caught.value)) < 100


def test_numpys_integers_become_plain_ones():
    assert type(read(size=np.int64(3)).size) is int
    assert type(read(rate=np.int32(3)).rate) is float
    with pytest.raises(SettingsError, match="size must be int or none"):
        read(size=np.float64(3.0))


def test_check_types_checks_and_converts_at_construction():
    @dataclass(frozen=True, kw_only=True)
    class Checked:
        rate: float = 1.0
        sizes: tuple[int, ...] = ()

        def __post_init__(self):
            check_types(self, where="here")

    made = Checked(rate=2, sizes=[np.int64(1)])
    assert (made, type(made.rate), type(made.sizes[0])) == (
        Checked(rate=2.0, sizes=(1,)),
        float,
        int,
    )
    with pytest.raises(SettingsError, match=r"^here: rate must be float, got 'x'$"):
        Checked(rate="x")


def test_updated_replaces_checks_and_leaves_the_old_one():
    old = Training(epochs=3, lr=0.5)
    assert updated(old, {}) is old
    assert updated(old, {"lr": 1}) == Training(epochs=3, lr=1.0)
    assert old == Training(epochs=3, lr=0.5)
    with pytest.raises(SettingsError, match=r"unknown setting 'epoch'.*did you mean 'epochs'"):
        updated(old, {"epoch": 3})
    with pytest.raises(SettingsError, match="epochs must be at least 1, got epochs=0"):
        updated(old, {"epochs": 0})


def test_updated_keeps_nested_settings():
    outer = Outer(name="x", inner=Inner(depth=5), layers=(1, 2))
    assert updated(outer, {"rate": 0.1}) == Outer(
        name="x", inner=Inner(depth=5), layers=(1, 2), rate=0.1
    )


def test_keyword_arguments_are_checked_against_the_signature():
    def build(first: str, *, dim: int = 2, hidden: Sequence[int] = (3,)) -> None: ...

    got = keyword_arguments(build, {"dim": 4, "hidden": [5, 6]}, where="model m")
    assert got == {"dim": 4, "hidden": (5, 6)}
    with pytest.raises(SettingsError, match=r"unknown setting 'dimm'.*did you mean 'dim'"):
        keyword_arguments(build, {"dimm": 4}, where="model m")
    with pytest.raises(SettingsError, match="model m: dim must be int, got '4'"):
        keyword_arguments(build, {"dim": "4"}, where="model m")
    with pytest.raises(SettingsError, match="unknown setting 'first'"):
        keyword_arguments(build, {"first": "x"}, where="model m")


positive = st.floats(1e-9, 1e9, allow_nan=False)
trainings = st.builds(
    Training,
    epochs=st.integers(1, 10**6),
    batch_size=st.integers(1, 10**6),
    optimizer=st.sampled_from(["adam", "sgd", "adagrad"]),
    lr=positive,
    table_lr=st.none() | positive,
    weight_decay=st.floats(0, 1),
    table_weight_decay=st.none() | st.floats(0, 1),
    momentum=st.floats(0, 1),
    precision=st.sampled_from(["float32", "bfloat16"]),
    monitor=st.sampled_from(["auc", "logloss"]),
    patience=st.none() | st.integers(1, 99),
    plateau_factor=st.floats(1e-3, 1),
    plateau_patience=st.integers(1, 99),
    seed=st.integers(0, 2**63),
)


@given(trainings)
def test_settings_survive_json(training):
    text = json.dumps(to_mapping(training))
    assert from_mapping(Training, json.loads(text)) == training


@given(trainings)
def test_settings_survive_toml(training):
    # TOML has no null: what is None is left out. JSON's spelling of the rest is TOML's.
    values = {key: value for key, value in to_mapping(training).items() if value is not None}
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    base = dict.fromkeys(("table_lr", "table_weight_decay", "patience"))
    assert from_mapping(Training, base | tomllib.loads(text)) == training


def test_to_mapping_gives_plain_values():
    outer = Outer(name="x", layers=(1, 2), inner=Inner(depth=3))
    plain = to_mapping(outer)
    assert (plain["layers"], plain["inner"]) == ([1, 2], {"depth": 3})
    assert json.loads(json.dumps(plain)) == plain
    assert from_mapping(Outer, plain) == outer


def test_read_toml_reads(tmp_path):
    (tmp_path / "a.toml").write_text('[training]\nlr = 0.1\nname = "\u00fc"\n', encoding="utf-8")
    got = read_toml(tmp_path / "a.toml")
    assert isinstance(got, Mapping)
    assert got == {"training": {"lr": 0.1, "name": "\u00fc"}}


def test_read_toml_says_what_is_wrong(tmp_path):
    with pytest.raises(SettingsError, match=r"the settings file '.*none\.toml' does not exist"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("lr = = 3")
    with pytest.raises(SettingsError, match=r"bad\.toml' is not valid TOML: .*line 1"):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes('name = "\u00fc"'.encode("latin-1"))
    with pytest.raises(SettingsError, match=r"latin\.toml' is not valid TOML: .*utf-8"):
        read_toml(tmp_path / "latin.toml")
    with pytest.raises(SettingsError, match=r"cannot read '.*': Is a directory"):
        read_toml(tmp_path)
