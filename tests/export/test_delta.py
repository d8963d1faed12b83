"""A delta makes the next file of an exported one, bit for bit, and nothing else of anything else."""

import hashlib
import json
import re
import struct

import numpy as np
import onnx
import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import rarebit as rb
from rarebit.cli.app import app
from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.raw.encoder import LogEncoder
from rarebit.errors import ExportError, ModelFileError, SettingsError
from rarebit.export import delta as deltas
from rarebit.export.delta import apply_delta, read_delta, write_delta
from rarebit.models import build_model


def encoder_node(values, name="user"):
    keys = TensorProto(name="keys", dims=[len(values)], data_type=TensorProto.STRING)
    keys.string_data.extend(value.encode() for value in values)
    ids = numpy_helper.from_array(np.arange(3, 3 + len(values)), "values")
    return helper.make_node(
        "LabelEncoder", [name], [f"{name}_ids"], keys_tensor=keys, values_tensor=ids
    )


def model_bytes(tables, vocabularies=(), text=""):
    """Return a file with tensors and vocabularies; one vocabulary lies in a branch."""
    nodes = [encoder_node(values, f"c{n}") for n, values in enumerate(vocabularies)]
    branch = helper.make_graph(nodes[:1], "branch", [], [])
    nodes.append(helper.make_node("If", ["c"], ["d"], then_branch=branch, else_branch=branch))
    tensors = [numpy_helper.from_array(table, f"t{n}") for n, table in enumerate(tables)]
    graph = helper.make_graph(nodes, "g", [], [], tensors)
    model = helper.make_model(graph, doc_string=text)
    return model.SerializeToString()


def written(folder, base, new):
    """Return the paths of two files and of the delta between them."""
    paths = [folder / name for name in ("monday.onnx", "tuesday.onnx", "tuesday.delta")]
    for path, data in zip(paths, (base, new), strict=False):
        path.write_bytes(data)
    write_delta(*paths)
    return paths


def made(folder, base, new):
    """Return what a delta makes of its base."""
    monday, _, delta = written(folder, base, new)
    return apply_delta(monday, delta, folder / "made.onnx").read_bytes()


values = st.lists(st.text(max_size=6), max_size=12, unique=True)
shapes = st.tuples(st.integers(0, 9), st.sampled_from([(), (1,), (3,), (2, 2)]))


@st.composite
def pairs(draw):
    """Draw two models: the second one has changed, new and removed rows and values, in any order."""
    found = [], []
    for rows, width in draw(st.lists(shapes, max_size=4)):
        dtype = draw(st.sampled_from([np.float32, np.int64, np.int8, np.float16]))
        seed = np.random.default_rng(draw(st.integers(0, 5)))
        base = seed.integers(0, 50, (rows, *width)).astype(dtype)
        kept = base[draw(st.lists(st.integers(0, max(rows - 1, 0)), max_size=12 if rows else 0))]
        fresh = seed.integers(0, 99, (draw(st.integers(0, 3)), *width)).astype(dtype)
        place = draw(st.integers(0, len(kept)))
        found[0].append(base)
        found[1].append(np.concatenate([kept[:place], fresh, kept[place:]]))
    both = [
        model_bytes(tables, draw(st.lists(values, max_size=3)), draw(st.text(max_size=9)))
        for tables in found
    ]
    return both[0], both[1] if draw(st.booleans()) else both[0]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(pair=pairs())
def test_a_delta_makes_the_next_file_bit_for_bit(pair, tmp_path):
    assert made(tmp_path, *pair) == pair[1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 2**30)] * 3), min_size=1))
def test_steps_survive_their_code(steps):
    steps = np.array(steps, np.int64)
    assert (deltas._decoded(deltas._coded(steps)) == steps).all()


def grown(table, share=0.03, new=50, seed=0):
    """Return a table with changed rows and, in the middle, new ones; and the bytes of both."""
    draw = np.random.default_rng(seed)
    table = table.copy()
    changed = draw.random(len(table)) < share
    table[changed] += draw.normal(size=table[changed].shape).astype(np.float32)
    fresh = draw.normal(size=(new, table.shape[1])).astype(np.float32)
    middle = len(table) // 2
    found = np.concatenate([table[:middle], fresh, table[middle:]])
    return found, table[changed].nbytes + fresh.nbytes


@pytest.mark.parametrize("dim", [8, 16, 300])
def test_a_delta_is_hardly_larger_than_what_changed(tmp_path, dim):
    draw = np.random.default_rng(1)
    table = draw.normal(size=(5000, dim)).astype(np.float32)
    names = [f"value {number}" for number in range(5000)]
    after, changed = grown(table)
    # one value removed, one replaced, 50 new
    later = [*names[:7], *names[8:100], "other", *names[101:], *(f"new {n}" for n in range(50))]
    base, new = model_bytes([table], [names]), model_bytes([after], [later])
    _, _, delta = written(tmp_path, base, new)
    changed += sum(3 * (len(value) + 8) for value in later[-50:])  # with ids; twice in branches
    assert delta.stat().st_size < 1.2 * changed + 1500
    assert apply_delta(tmp_path / "monday.onnx", delta, tmp_path / "made").read_bytes() == new


def test_changes_in_place_need_no_search(tmp_path):
    """Every fifth row of one number changes: what lies between is too short to be found elsewhere."""
    table = np.random.default_rng(1).normal(size=(1000, 1)).astype(np.float32)
    after = table.copy()
    after[::5] += 1
    _, _, delta = written(tmp_path, model_bytes([table]), model_bytes([after]))
    assert len(read_delta(delta).literals) == 4 * 200
    assert delta.stat().st_size < 200 * (4 + 3) + 600


def test_nothing_new_is_a_delta_of_nothing(tmp_path):
    table = np.random.default_rng(0).normal(size=(5000, 16)).astype(np.float32)
    base = model_bytes([table])
    _, _, delta = written(tmp_path, base, base)
    assert len(read_delta(delta).literals) == 0
    assert delta.stat().st_size < 1000


def test_pieces_that_only_seem_equal_are_found_before_the_delta_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(deltas, "_hashes", lambda data, at: np.zeros(len(at) - 1, np.uint64))
    base, new = (model_bytes([np.full((9, 4), value, np.float32)]) for value in (1, 2))
    with pytest.raises(ModelFileError, match="another checksum"):
        written(tmp_path, base, new)
    assert not (tmp_path / "tuesday.delta").exists()


# ------------------------------------------------------------------------------------------ what is refused


def test_another_base_is_refused(tmp_path):
    base, new, other = (model_bytes([np.full((9, 4), value, np.float32)]) for value in (1, 2, 3))
    _, _, delta = written(tmp_path, base, new)
    (tmp_path / "other.onnx").write_bytes(other)
    first, found = (hashlib.sha256(data).hexdigest()[:12] for data in (base, other))
    message = f"the delta is for version {first}; 'other.onnx' is version {found}"
    with pytest.raises(ModelFileError, match=re.escape(message)):
        apply_delta(tmp_path / "other.onnx", delta, tmp_path / "made.onnx")
    assert not list(tmp_path.glob("*made*"))


DESCRIBED = {
    "format": 1,
    "base": hashlib.sha256(b"monday").hexdigest(),
    "base_bytes": 6,
    "result": hashlib.sha256(b"monXday").hexdigest(),
    "result_bytes": 7,
}
STEPS = [0, 0, 3, 1, 0, 3]
"""Copy "mon", insert "X", copy "day"."""


def file_of(steps=STEPS, literals=b"X", *, header=None, **described):
    """Return a delta of six bytes, or a wrong one."""
    steps = bytes(steps)
    parts = {"literals": [0, len(literals)], "steps": [len(literals), len(literals) + len(steps)]}
    tensors = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for name, (start, end) in parts.items()
    }
    metadata = {"rarebit_delta": json.dumps(DESCRIBED | described)}
    head = header or json.dumps({"__metadata__": metadata, **tensors}).encode()
    return struct.pack("<Q", len(head)) + head + literals + steps


HOSTILE = {
    "nothing": (b"", "header too small"),
    "nonsense": (b"nonsense" * 9, "header"),
    "a pickle": (b"\x80\x04\x95" + bytes(60), "header"),
    "cut off": (file_of()[:-1], "incomplete"),
    "longer": (file_of() + b"x", "incomplete"),
    "no description": (file_of(header=b'{"literals":{"dtype":"U8","shape":[7],"data_offsets":[0,7]}}'), "__metadata__"),
    "a name twice": (
        file_of(header=b'{"steps":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                       b'"steps":{"dtype":"U8","shape":[7],"data_offsets":[0,7]}}'), "__metadata__"),
    "a later format": (file_of(format=2), "it is of format 2; this version reads 1"),
    "a larger result": (file_of(result_bytes=8), "do not make a file of the size"),
    "an absurd result": (file_of(result_bytes=1 << 40), "sizes of its files"),
    "a negative size": (file_of(base_bytes=-1), "sizes of its files"),
    "a size that is a truth": (file_of(base_bytes=True), "sizes of its files"),
    "a size that is a text": (file_of(base_bytes="6"), "sizes of its files"),
    "a checksum that is a number": (file_of(base=7), "checksums"),
    "a copy beyond the base": (file_of([0, 0, 3, 1, 2, 3]), "beyond its base"),
    "a copy before the base": (file_of([0, 1, 3, 1, 0, 3]), "beyond its base"),
    "a smaller base": (file_of(base_bytes=5), "beyond its base"),
    "literals that are not there": (file_of([0, 0, 3, 2, 0, 2]), "do not make"),
    "literals that nobody takes": (file_of(literals=b"XY"), "do not make"),
    "half a step": (file_of([0, 0, 3, 1]), "cut off"),
    "half a number": (file_of([0, 0, 3, 1, 0, 0x83]), "cut off"),
    "no steps": (file_of([]), "cut off"),
    "a number of six bytes": (file_of([0, 0, 3, 1, 0, *[0x80] * 5, 1]), "too large"),
    "a number of ten bytes": (file_of([0, 0, 3, 1, 0, *[0x80] * 9, 1]), "too large"),
    "a number of 35 bits": (file_of([0, 0, 3, 1, 0, *[0xFF] * 4, 0x7F]), "too large"),
    "deep JSON": (file_of(header=b"[" * 100_000), "header"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_delta_is_refused(name, tmp_path):
    data, message = HOSTILE[name]
    (tmp_path / "monday.onnx").write_bytes(b"monday")
    (tmp_path / "x.delta").write_bytes(data)
    with pytest.raises(ModelFileError, match=r"is no delta, or a damaged one: ") as error:
        apply_delta(tmp_path / "monday.onnx", tmp_path / "x.delta", tmp_path / "made")
    assert message in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["monday.onnx", "x.delta"]


def test_the_honest_one_among_them_is_applied(tmp_path):
    (tmp_path / "monday.onnx").write_bytes(b"monday")
    (tmp_path / "x.delta").write_bytes(file_of())
    made = apply_delta(tmp_path / "monday.onnx", tmp_path / "x.delta", tmp_path / "made")
    assert made.read_bytes() == b"monXday"


@pytest.mark.parametrize("changed", [{"literals": b"Y"}, {"result": "0" * 64}])
def test_a_delta_that_makes_another_file_leaves_nothing(changed, tmp_path):
    (tmp_path / "monday.onnx").write_bytes(b"monday")
    (tmp_path / "x.delta").write_bytes(file_of(**changed))
    with pytest.raises(ModelFileError, match="what it makes has another checksum"):
        apply_delta(tmp_path / "monday.onnx", tmp_path / "x.delta", tmp_path / "made")
    assert not list(tmp_path.glob("*made*"))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(place=st.integers(0, len(file_of()) - 1), value=st.integers(0, 255))
def test_a_damaged_byte_is_refused_or_changes_nothing(place, value, tmp_path):
    data = bytearray(file_of())
    data[place] = value
    (tmp_path / "monday.onnx").write_bytes(b"monday")
    (tmp_path / "x.delta").write_bytes(data)
    try:
        made = apply_delta(tmp_path / "monday.onnx", tmp_path / "x.delta", tmp_path / "made")
    except ModelFileError:
        return
    assert made.read_bytes() == b"monXday"


@pytest.mark.parametrize("data", [b"\x0a", b"\x0f\x01", b"\x0a\x05ab", b"\xff" * 20])
def test_a_file_that_is_no_model_has_no_delta(data, tmp_path):
    new = model_bytes([np.ones((2, 2))])
    with pytest.raises(ExportError, match=r"monday.onnx' has no delta"):
        written(tmp_path, data, new)


def test_weights_in_a_second_file_are_refused_by_name(tmp_path):
    model = onnx.load_from_string(model_bytes([np.ones((50, 50))]))
    onnx.save(model, tmp_path / "large.onnx", save_as_external_data=True, size_threshold=0)
    (tmp_path / "small.onnx").write_bytes(model_bytes([np.ones((2, 2))]))
    for pair in (("small", "large"), ("large", "small")):
        with pytest.raises(ExportError, match=r"large.onnx' has no delta: its weights lie in a s"):
            write_delta(*(tmp_path / f"{name}.onnx" for name in pair), tmp_path / "x.delta")


# ------------------------------------------------------------------------------------------ models


def vocabulary(users, items):
    columns = (Column(name="user"), Column(name="item"), Column(name="price", kind="numeric"))
    values = {"user": pl.Series(users), "item": pl.Series(items)}
    return LogEncoder(
        schema=LogSchema(label="click", columns=columns),
        values=values,
        scales={"price": (1.0, 2.0)},
    )


def next_day():
    """Return the models of two days: the second one has changed, new, replaced and removed values."""
    users, items = ([f"{name}{number}" for number in range(300)] for name in "ui")
    torch.manual_seed(0)
    monday = build_model("dcn_v2", vocabulary(users, items).fields, {"dim": 8, "hidden": [16]})
    later = [*users[:5], "new", *users[6:], *(f"u{n}" for n in range(300, 340))], items[:-20]
    tuesday = build_model("dcn_v2", vocabulary(*later).fields, {"dim": 8, "hidden": [16]})
    tuesday.load_state_dict(monday.state_dict() | dict(tables_of(monday, tuesday)))
    return monday, tuesday


def tables_of(monday, tuesday):
    """Yield the tables of the second day: the rows of the first, some of them changed, and new ones."""
    before, after = monday.state_dict(), tuesday.state_dict()
    for key, weight in after.items():
        if "tables" in key:
            users, items = before[key].split(303)
            new = torch.cat([users, weight[303:343], items[:-20]])
            new[[5, 17, 301]] += 1.0
            yield key, new
        elif "head" in key:
            yield key, weight + 0.1


def test_export_since_an_exported_file(tmp_path):
    monday, tuesday = next_day()
    rb.export(monday, tmp_path / "monday.onnx")
    whole = rb.export(tuesday, tmp_path / "tuesday.onnx")
    exported = rb.export(tuesday, tmp_path / "t.delta", since=tmp_path / "monday.onnx")
    made = apply_delta(tmp_path / "monday.onnx", tmp_path / "t.delta", tmp_path / "made.onnx")
    assert made.read_bytes() == (tmp_path / "tuesday.onnx").read_bytes()
    assert exported.whole_bytes == whole.num_bytes
    assert exported.num_bytes == (tmp_path / "t.delta").stat().st_size
    assert exported.num_bytes < 0.3 * whole.num_bytes
    assert "a delta of 6.7 kB; the whole file has 46.7 kB" in str(exported)
    with pytest.raises(SettingsError, match="is for ONNX files, not for the format 'pt2'"):
        rb.export(tuesday, tmp_path / "t", to="pt2", since=tmp_path / "monday.onnx")
    with pytest.raises(ExportError, match=r"nowhere.onnx' does not exist"):
        rb.export(tuesday, tmp_path / "t", since=tmp_path / "nowhere.onnx")


def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, model in zip(("monday", "tuesday"), next_day(), strict=True):
        rb.save_model(model, tmp_path / "runs" / name)

    def run(*words):
        done = CliRunner().invoke(app, ["export", *words])
        assert done.exit_code == 0, done.output
        return done.output.replace("\n", " ")

    for name in ("monday", "tuesday"):
        run(f"runs/{name}")
    versions = [
        hashlib.sha256((tmp_path / f"{name}.onnx").read_bytes()).hexdigest()[:12]
        for name in ("monday", "tuesday")
    ]
    of_file = run("runs/tuesday", "--since", "monday.onnx")
    assert f"It makes version {versions[1]} of version {versions[0]}." in of_file
    # an export of the same run is the same file
    run("runs/tuesday", "--since", "runs/monday", "--out", "again.delta")
    assert (tmp_path / "again.delta").read_bytes() == (tmp_path / "tuesday.delta").read_bytes()
    out = run("monday.onnx", "--apply", "tuesday.delta", "--out", "made.onnx")
    assert f"made.onnx: version {versions[1]}" in out
    assert (tmp_path / "made.onnx").read_bytes() == (tmp_path / "tuesday.onnx").read_bytes()
    refused = CliRunner().invoke(app, ["export", "tuesday.onnx", "--apply", "tuesday.delta"])
    assert refused.exit_code == 2 or isinstance(refused.exception, ModelFileError)


def test_files_name_no_path_of_this_machine(tmp_path):
    rb.export(next_day()[0], tmp_path / "monday.onnx")
    assert b"site-packages" not in (data := (tmp_path / "monday.onnx").read_bytes())
    assert b"export.py" not in data
