"""A checkpoint is there whole or not at all, and comes back to the bit."""

import errno
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, namedtuple
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from capabilities import needs
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from rarebit import __version__
from rarebit.errors import CheckpointError
from rarebit.storage.files import DTYPES, MAX_DEPTH, Disk
from rarebit.training import checkpoints as checkpoint_file
from rarebit.training.checkpoints import CheckpointFolder

PARTS = ("state.json", "tensors.safetensors")


def bits(value):
    """Everything there is to know about a state, in a form that `==` compares to the bit."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return ("tensor", value.dtype, tuple(value.shape), bytes(flat.tolist()))
    if isinstance(value, dict):
        return ("dict", [(type(key), key, bits(inner)) for key, inner in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [bits(inner) for inner in value])
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    return (type(value).__name__, value)


def there_and_back(state):
    with TemporaryDirectory() as folder:
        CheckpointFolder(folder).write("0", state)
        return CheckpointFolder(folder).read("0")


def assert_same(actual, expected):
    assert bits(actual) == bits(expected)


def example(step):
    return {
        "model": {"weight": torch.full((3, 2), float(step)), "counts": torch.arange(step + 1)},
        "optimizer": {"state": {0: {"step": step, "moments": [torch.ones(2) * step, None]}}},
        "random": torch.get_rng_state(),
        "history": [(step, math.nan, -math.inf)],
    }


# ---------------------------------------------------------------------------------------- round trip


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    top = 1 if dtype is torch.bool else 255
    content = draw(st.lists(st.integers(0, top), min_size=size, max_size=size))
    return torch.tensor(content, dtype=torch.uint8).view(dtype).reshape(shape)


texts = st.text(st.characters(), max_size=5) | st.sampled_from(["tensor", "dict", "\ud83d\ude00"])
plain = st.none() | st.booleans() | st.integers() | st.floats() | texts
states = st.dictionaries(
    texts,
    st.recursive(
        plain | tensors(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(texts | st.integers(), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(states)
def test_a_state_comes_back_to_the_bit(state):
    assert_same(there_and_back(state), state)


@pytest.mark.parametrize(
    "value",
    [
        {"tensor": "0"},
        {"dict": [["a", 1]]},
        {"tuple": []},
        {"int": "0x1"},
        {"float": "nan"},
        {"text": "61"},
        {1: "int", "1": "str", -(2**80): "large"},
        [2**63, 2**63 - 1, -(2**63), -(2**63) - 1, 10**5000, True, 1, 1.0, -0.0, 5e-324],
        struct.unpack(">d", bytes.fromhex("fff0000000000123"))[0],
        "\ud83d\ude00 \x00 \udcff",
        (((),), [[]], {}),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, list) else "numbers",
)
def test_values_that_look_like_something_else_come_back(value):
    assert_same(there_and_back({"value": value}), {"value": value})


def test_tensors_of_every_kind_come_back():
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 5, dtype=torch.int32),
        "bfloat16": torch.tensor([1.5, math.nan], dtype=torch.bfloat16),
        "transposed": base.T,
        "row": base[1],
        "column": base[:, 2],
        "expanded": torch.ones(1).expand(5),
        "parameter": nn.Parameter(base),
        "nan": torch.tensor([0x7FC00123], dtype=torch.int32).view(torch.float32),
    }
    loaded = there_and_back(state)
    assert_same(loaded, state)
    assert all(type(tensor) is torch.Tensor for tensor in loaded.values())
    assert not any(tensor.requires_grad for tensor in loaded.values())


def test_a_tensor_that_is_there_twice_is_stored_once_and_comes_back_as_one(tmp_path):
    tensor = torch.zeros(10_000)
    path = CheckpointFolder(tmp_path).write("0", {"a": tensor, "b": [tensor, tensor.view(-1)]})
    assert (path / "tensors.safetensors").stat().st_size < 50_000
    loaded = CheckpointFolder(tmp_path).read("0")
    loaded["a"][0] = 1
    assert loaded["b"][0][0] == 1


def test_what_is_read_no_longer_needs_the_file(tmp_path):
    path = CheckpointFolder(tmp_path).write("0", example(3))
    loaded = CheckpointFolder(tmp_path).read("0")
    with (path / "tensors.safetensors").open("r+b") as file:
        file.write(b"\xff" * 10_000)
    assert_same(loaded, example(3))


def test_kinds_of_dictionaries_come_back_plain():
    state = nn.Linear(2, 2).state_dict()
    loaded = there_and_back({"model": state, "counts": Counter("aab")})
    assert_same(loaded, {"model": dict(state), "counts": {"a": 2, "b": 1}})
    assert type(loaded["model"]) is dict
    assert_same(there_and_back(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


def around(value):
    return {"optimizer": {"state": {0: {"closure": value}}}}


Pair = namedtuple("Pair", "a b")  # noqa: PYI024  # the kind of value that is refused


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: None, "a function"),
        (np.float64(1.0), "a float64"),
        (np.zeros(2), "a ndarray"),
        (Pair(1, 2), "a Pair"),
        (torch.Size([1]), "a Size"),
        (torch.float32, "a dtype"),
        (b"abc", "a bytes"),
        ({1, 2}, "a set"),
        (1j, "a complex"),
        (torch.zeros(2, dtype=torch.complex64), "a Tensor of torch.complex64"),
        (torch.zeros(2).to_sparse(), "a Tensor of torch.float32, torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "a Tensor of torch.float32, torch.strided, on meta"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "a Tensor of torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_held_is_named_before_anything_is_written(value, kind, tmp_path):
    with pytest.raises(CheckpointError, match=f"^optimizer.state.0.closure is {kind}.*; "):
        CheckpointFolder(tmp_path / "new").write("0", around(value))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("key", [True, 1.0, None, (1, 2)])
def test_keys_are_str_or_int(key, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"optimizer\.state\.0\.closure has the key .*; use str or"
    ):
        CheckpointFolder(tmp_path).write("0", around({key: 1}))


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return {"a": value}


def test_the_deepest_state_comes_back_and_a_deeper_or_endless_one_is_refused(tmp_path):
    assert_same(there_and_back(nested(MAX_DEPTH - 1)), nested(MAX_DEPTH - 1))
    endless = []
    endless.append(endless)
    for state in (nested(MAX_DEPTH), {"a": endless}):
        with pytest.raises(CheckpointError, match="more than 64 levels or holds itself"):
            CheckpointFolder(tmp_path).write("0", state)


def test_a_giant_structure_is_refused_when_written(tmp_path):
    with pytest.raises(CheckpointError, match="bytes besides its tensors; put long lists into"):
        CheckpointFolder(tmp_path).write("0", {"text": "x" * (64 << 20)})
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------- names and pruning


def test_names_sort_and_newest_is_the_last_of_its_kind(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    assert checkpoints.names() == []
    assert checkpoints.newest() is None
    for name in ("last-0010", "best-0011", "last-0002"):
        checkpoints.write(name, {"name": name})
    assert checkpoints.names() == ["best-0011", "last-0002", "last-0010"]
    assert checkpoints.newest().name == "last-0010"
    assert checkpoints.newest("best").state == {"name": "best-0011"}
    assert checkpoints.newest("other") is None
    assert CheckpointFolder(tmp_path / "missing").names() == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "a/b", "../a", "/a", "a\n", "lock", "x" * 101]
)
def test_a_name_leads_nowhere_else(name, tmp_path):
    for use in (CheckpointFolder(tmp_path).read, lambda n: CheckpointFolder(tmp_path).write(n, {})):
        with pytest.raises(CheckpointError, match="cannot be the name of a checkpoint; use"):
            use(name)


def test_a_name_that_is_taken_is_refused(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.write("0", {"a": 1})
    with pytest.raises(CheckpointError, match="is taken; use another name"):
        checkpoints.write("0", {"a": 2})
    assert checkpoints.newest().state == {"a": 1}


def test_pruning_keeps_what_is_named_and_what_is_not_ours(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    for name in "123":
        checkpoints.write(name, {"name": name})
    (tmp_path / "photos").mkdir()
    (tmp_path / "3" / "notes.txt").write_text("mine")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.safetensors").write_text("mine")
    (tmp_path / "file").write_text("mine")
    checkpoints.prune(keep={"2"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "file", "model", "photos"]
    with pytest.raises(CheckpointError, match="keep must be a collection of names"):
        checkpoints.prune(keep="2")
    CheckpointFolder(tmp_path / "missing").prune(keep=())


def test_pruning_removes_left_overs_of_dead_processes_only(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead, own, alive = f".0.{child.pid}.writing", f".0.{os.getpid()}.removing", ".0.1.writing"
    for name in (dead, own, alive, ".git"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("half of it")
    assert CheckpointFolder(tmp_path).names() == []
    CheckpointFolder(tmp_path).prune(keep=())
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive, ".git"]


# ------------------------------------------------------------------------------------------- faults


class PowerLossError(BaseException):
    """The machine stops here: not an error that anything could handle."""


class FailingDisk(Disk):
    """A disk whose k-th operation fails half-way: full, or off for good, or off and forgetful."""

    def __init__(self, fail_at, kind):
        self.left, self.kind, self.is_off, self.last = fail_at, kind, False, None

    def fail(self, name, arguments):
        do_half(name, arguments)
        if self.kind == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        self.is_off = True
        if self.kind == "cut" and self.last is not None and self.last.is_file():
            os.truncate(self.last, self.last.stat().st_size // 2)
        raise PowerLossError


def do_half(name, arguments):
    """Leave half a file, or half a folder, behind, where an operation can stop in its middle."""
    path = arguments[0]
    if name in {"write_bytes", "save_tensors"}:
        getattr(Disk(), name)(*arguments)
        os.truncate(path, path.stat().st_size // 2)
    if name == "remove" and path.is_dir():
        min(path.iterdir()).unlink()


def failing(name):
    def operation(self, *arguments):
        if self.is_off:
            return
        self.left -= 1
        if self.left == 0:
            self.fail(name, arguments)
        getattr(Disk, name)(self, *arguments)
        if name in {"write_bytes", "save_tensors"}:
            self.last = arguments[0]

    return operation


for _name in vars(Disk):
    if not _name.startswith("_"):
        setattr(FailingDisk, _name, failing(_name))


def saves_and_prunes(folder, disk):
    """Write a second checkpoint over time, and remove the first."""
    checkpoints = CheckpointFolder(folder, disk)
    checkpoints.write("2", example(2))
    checkpoints.prune(keep={"2"})


def failure_of(function, *arguments):
    try:
        function(*arguments)
    except (CheckpointError, PowerLossError) as failure:
        return failure
    return None


@pytest.mark.parametrize("kind", ["full", "off", "cut"])
@pytest.mark.parametrize("is_new", [False, True], ids=["beside an older one", "in a new folder"])
def test_whatever_fails_there_is_a_complete_state_and_writing_goes_on(kind, is_new, tmp_path):
    fail_at, has_failed = 0, True
    while has_failed:
        fail_at += 1
        folder = tmp_path / str(fail_at) / "below"
        if not is_new:
            CheckpointFolder(folder).write("1", example(1))
        failure = failure_of(saves_and_prunes, folder, FailingDisk(fail_at, kind))
        has_failed = failure is not None
        assert kind != "full" or not has_failed or "the disk is full" in str(failure)
        check_after_failure(folder, may_be_empty=is_new, is_clean=kind == "full")
    assert fail_at > 12


def check_after_failure(folder, *, may_be_empty, is_clean):
    checkpoints = CheckpointFolder(folder)
    found = checkpoints.newest()
    assert found is not None or may_be_empty
    if found is not None:
        assert found.damaged == ()
        assert_same(found.state, example(int(found.name)))
    if is_clean and folder.exists():
        assert not [path for path in folder.iterdir() if path.name.endswith(".writing")]
    checkpoints.write("3", example(3))
    checkpoints.prune(keep={"3"})
    assert_same(checkpoints.newest().state, example(3))
    assert [path.name for path in folder.iterdir()] == ["3"]


@pytest.mark.parametrize("kind", ["full", "off"])
def test_a_removal_that_is_cut_short_does_not_look_like_damage(kind, tmp_path):
    fail_at, has_failed = 0, True
    while has_failed:
        fail_at += 1
        folder = tmp_path / str(fail_at)
        for step in (1, 2):
            CheckpointFolder(folder).write(str(step), example(step))
        disk = FailingDisk(fail_at, kind)
        has_failed = failure_of(CheckpointFolder(folder, disk).prune, {"1"}) is not None
        found = CheckpointFolder(folder).newest()
        assert found.damaged == ()
        assert_same(found.state, example(int(found.name)))
        CheckpointFolder(folder).prune({"1"})
        assert [path.name for path in folder.iterdir()] == ["1"]
    assert fail_at == 5  # four operations: make way, rename, sync, remove


def test_every_operation_of_the_disk_is_made_to_fail():
    names = {name for name in vars(Disk) if not name.startswith("_")}
    assert len(names) == 8
    assert all(getattr(FailingDisk, name) is not getattr(Disk, name) for name in names)


class OrderedDisk(Disk):
    """A disk that notes what it does."""

    def __init__(self):
        self.log = []


def noting(name):
    def operation(self, *arguments):
        self.log.append((name, *(getattr(argument, "name", None) for argument in arguments)))
        getattr(Disk, name)(self, *arguments)

    return operation


for _name in vars(Disk):
    if not _name.startswith("_"):
        setattr(OrderedDisk, _name, noting(_name))


def test_everything_is_synced_before_it_gets_its_name(tmp_path):
    disk = OrderedDisk()
    CheckpointFolder(tmp_path, disk).write("1", example(1))
    partial = f".1.{os.getpid()}.writing"
    assert disk.log == [
        ("make_folder", tmp_path.name),
        ("remove", partial),
        ("make_folder", partial),
        ("save_tensors", "tensors.safetensors", None),
        ("write_bytes", "state.json", None),
        ("sync_file", "tensors.safetensors"),
        ("sync_file", "state.json"),
        ("sync_folder", partial),
        ("rename", partial, "1"),
        ("sync_folder", tmp_path.name),
    ]


def test_a_full_disk_says_how_much_was_needed(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"cannot write the checkpoint '0' to .* 4,0\d\d bytes"
    ):
        CheckpointFolder(tmp_path, FailingDisk(4, "full")).write("0", {"a": torch.zeros(1000)})


def test_a_file_that_the_system_does_not_let_grow_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match="the system reports 'File too large'; "):
            CheckpointFolder(tmp_path).write("0", {"a": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_a_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        checkpoints = CheckpointFolder(folder)
        with pytest.raises(CheckpointError, match="it is a file or lies below one; choose another"):
            checkpoints.write("0", {})
        with pytest.raises(CheckpointError, match="it is a file or lies below one"):
            checkpoints.names()
        with pytest.raises(CheckpointError, match="it is a file"), checkpoints.locked():
            pass


@needs("file permissions", os.geteuid() != 0, "root may write anywhere")
def test_a_read_only_folder_is_told(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="it is read-only or not yours; choose a folder"):
            CheckpointFolder(tmp_path).write("0", {})
    finally:
        tmp_path.chmod(0o700)


def test_one_process_at_a_time(tmp_path):
    with (
        CheckpointFolder(tmp_path / "new").locked(),
        pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}; wait"),
        CheckpointFolder(tmp_path / "new").locked(),
    ):
        pass
    with CheckpointFolder(tmp_path / "new").locked():
        CheckpointFolder(tmp_path / "new").write("0", {})


# ------------------------------------------------------------------------------------------- damage


def mutated(content, other, random):
    """One random change of a file: a flip, a cut, a gap, an insertion, or another one's content."""
    start = random.randrange(len(content))
    stop = min(len(content), start + random.randint(1, 8))
    match random.randrange(5):
        case 0:
            flipped = content[start] ^ (1 << random.randrange(8))
            return content[:start] + bytes([flipped]) + content[start + 1 :]
        case 1:
            return content[:start]
        case 2:
            return content[:start] + content[stop:]
        case 3:
            return content[:start] + random.randbytes(stop - start) + content[start:]
    return other


def test_a_thousand_mutations_are_refused_or_harmless(tmp_path):
    checkpoints, rng = CheckpointFolder(tmp_path), random.Random(20)  # noqa: S311  # a seeded test
    paths = [checkpoints.write(str(step), example(step)) for step in (1, 2)]
    refused = 0
    for _ in range(1000):
        part = rng.choice(PARTS)
        file = paths[0] / part
        whole = file.read_bytes()
        file.write_bytes(mutated(whole, (paths[1] / part).read_bytes(), rng))
        failure = failure_of(lambda: assert_same(checkpoints.read("1"), example(1)))
        refused += failure is not None
        assert failure is None or str(failure).endswith("; use an older checkpoint")
        file.write_bytes(whole)
    assert refused > 980
    assert_same(checkpoints.read("1"), example(1))


def sealed(content):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def described(path):
    return json.loads((path / "state.json").read_bytes()[65:])


def test_a_thousand_mutations_under_a_right_checksum_do_no_harm(tmp_path):
    checkpoints, rng = CheckpointFolder(tmp_path), random.Random(21)  # noqa: S311  # a seeded test
    path = checkpoints.write("1", {"a": [1, (2.5, math.nan)], "b": torch.arange(4), 3: 10**30})
    text, weights = (path / "state.json").read_bytes()[65:], (path / PARTS[1]).read_bytes()
    counts = Counter()
    for number in range(1000):
        if number % 2:
            (path / PARTS[0]).write_bytes(sealed(mutated(text, b"[]", rng)))
        else:
            changed, description = mutated(weights, b"", rng), json.loads(text)
            checksum = hashlib.sha256(changed).hexdigest()
            description["files"] = {PARTS[1]: {"bytes": len(changed), "sha256": checksum}}
            (path / PARTS[0]).write_bytes(sealed(description))
            (path / PARTS[1]).write_bytes(changed)
        try:
            counts[type(checkpoints.read("1"))] += 1
        except CheckpointError:
            counts[CheckpointError] += 1
        (path / PARTS[1]).write_bytes(weights)
    assert set(counts) == {dict, CheckpointError}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ([], "does not describe its tensors"),
        ({"dict": []}, "does not describe its tensors"),
        ({"dict": [["a", {"tensor": "1"}]]}, "names a tensor that is missing"),
        ({"dict": [["a", {"tensor": "../0"}]]}, "names a tensor that is missing"),
        ({"dict": [["a", {"tensor": 0}]]}, "names a tensor that is missing"),
        ({"dict": [["a", {"tensor": "0", "int": "1"}]]}, "a value of an unknown kind"),
        ({"dict": [["a", {}]]}, "a value of an unknown kind"),
        ({"dict": [["a", {"pickle": "gASVAAAA"}]]}, "a value of an unknown kind"),
        ({"dict": [["a", {"tensor": "0"}], ["a", 1]]}, "a dictionary with wrong keys"),
        ({"dict": [[True, {"tensor": "0"}]]}, "a dictionary with wrong keys"),
        ({"dict": [[[], 1]]}, "cannot be read"),
        ({"dict": [["a"]]}, "cannot be read"),
        ({"dict": {"a": 1}}, "a value of an unknown kind"),
        ({"dict": [["a", {"int": "x"}]]}, "cannot be read"),
        ({"dict": [["a", {"float": "00"}]]}, "cannot be read"),
        ({"dict": [["a", {"text": "ff"}]]}, "cannot be read"),
        ({"dict": [["a", {"text": "zz"}]]}, "cannot be read"),
        (nested(MAX_DEPTH + 1)["a"], "nested deeper than 64 levels"),
    ],
)
def test_a_structure_that_was_never_written_is_refused(state, reason, tmp_path):
    path = CheckpointFolder(tmp_path).write("0", {"a": torch.zeros(1)})
    (path / "state.json").write_bytes(sealed(described(path) | {"state": state}))
    with pytest.raises(CheckpointError, match=f"{reason}.*; use an older checkpoint"):
        CheckpointFolder(tmp_path).read("0")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"{}", "cannot be read"),
        (b'{"format": true}', "does not describe a checkpoint"),
        (b'{"format": 0}', "does not describe a checkpoint"),
        (b'{"format": 1}', "cannot be read"),
        (b'{"format": 1, "files": 3}', "cannot be read"),
        (b'{"format": 1, "files": {"../../x": {}}}', "cannot be read"),
        (b"[" * 1_000_000, "cannot be read"),
        (b'{"format": ' + b"9" * 1_000_000 + b"}", "has a number of 1000000 digits"),
    ],
    ids=lambda value: str(value[:30]),
)
def test_hostile_text_is_refused(text, reason, tmp_path):
    path = CheckpointFolder(tmp_path).write("0", {})
    (path / "state.json").write_bytes(sealed(text))
    with pytest.raises(CheckpointError, match=f"{reason}.*; use an older checkpoint"):
        CheckpointFolder(tmp_path).read("0")


def test_a_later_format_says_who_wrote_it(tmp_path):
    path = CheckpointFolder(tmp_path).write("0", {})
    assert described(path)["format"] == 1
    assert described(path)["rarebit"] == __version__
    (path / "state.json").write_bytes(sealed({"format": 2, "rarebit": "9.9"}))
    message = (
        r"by Rarebit '9\.9' in format 2; this version reads up to format 1: upgrade it, or use"
    )
    with pytest.raises(CheckpointError, match=message):
        CheckpointFolder(tmp_path).read("0")


def test_a_giant_structure_is_not_read(tmp_path):
    path = CheckpointFolder(tmp_path).write("0", {})
    os.truncate(path / "state.json", (64 << 20) + 1)
    with pytest.raises(CheckpointError, match="has 67,108,865 bytes, at most 67,108,864 are read"):
        CheckpointFolder(tmp_path).read("0")


def test_a_pickle_is_not_read_even_with_its_checksum(tmp_path):
    path = CheckpointFolder(tmp_path).write("0", {"a": torch.zeros(1)})
    torch.save({"0": torch.zeros(1)}, path / PARTS[1])
    content = (path / PARTS[1]).read_bytes()
    files = {PARTS[1]: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    (path / "state.json").write_bytes(sealed(described(path) | {"files": files}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointFolder(tmp_path).read("0")


def test_a_tensor_that_nothing_uses_is_refused(tmp_path):
    path = CheckpointFolder(tmp_path).write("0", {"a": torch.zeros(1)})
    save_file({"0": torch.zeros(1), "1": torch.zeros(1)}, path / PARTS[1])
    content = (path / PARTS[1]).read_bytes()
    files = {PARTS[1]: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    (path / "state.json").write_bytes(sealed(described(path) | {"files": files}))
    with pytest.raises(CheckpointError, match="does not describe its tensors"):
        CheckpointFolder(tmp_path).read("0")


def unlink(path):
    path.unlink()


def link(path):
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (unlink, "is missing"),
        (link, "is a symbolic link"),
        (pipe, "is not a file"),
        (cut, "wrong checksum|bytes in place of"),
    ],
)
def test_newest_passes_over_what_is_damaged_and_says_why(damage, reason, part, tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    for step in (1, 2):
        checkpoints.write(str(step), example(step))
    damage(tmp_path / "2" / part)
    found = checkpoints.newest()
    assert found.name == "1"
    assert_same(found.state, example(1))
    [(name, said)] = found.damaged
    assert name == "2"
    with pytest.raises(CheckpointError, match=f"{part} .*({reason}).*; use an older") as caught:
        checkpoints.read("2")
    assert str(caught.value) == said
    checkpoints.prune(keep={"1"})
    assert checkpoints.names() == ["1"]


def test_damaged_checkpoints_without_a_whole_one_are_an_error_and_not_a_new_start(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    for name in ("best-1", "last-1", "last-2"):
        unlink(checkpoints.write(name, {}) / "state.json")
    message = (
        "last-2' cannot be read: state.json is missing; no older one is complete either: choose"
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        checkpoints.newest("last")
    assert checkpoints.newest("other") is None


def test_a_checkpoint_behind_a_link_is_told_and_only_the_link_is_pruned(tmp_path):
    elsewhere, checkpoints = tmp_path / "elsewhere", CheckpointFolder(tmp_path / "here")
    CheckpointFolder(elsewhere).write("2", example(2))
    checkpoints.write("1", example(1))
    (tmp_path / "here" / "2").symlink_to(elsewhere / "2")
    found = checkpoints.newest()
    assert found.name == "1"
    assert "it is a symbolic link, which is not followed" in found.damaged[0][1]
    checkpoints.prune(keep={"1"})
    assert checkpoints.names() == ["1"]
    assert_same(CheckpointFolder(elsewhere).read("2"), example(2))


def test_parts_of_two_checkpoints_are_not_mixed(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    one, two = (checkpoints.write(str(step), example(step)) for step in (1, 2))
    for part in PARTS:
        mixed = tmp_path / f"3-{part}"
        shutil.copytree(one, mixed)
        shutil.copy(two / part, mixed)
        with pytest.raises(CheckpointError, match=r"tensors\.safetensors (has|is damaged or of)"):
            checkpoints.read(mixed.name)


def test_a_checkpoint_that_is_not_there_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read: it does not exist; use an older"):
        CheckpointFolder(tmp_path).read("0")


def test_a_failing_disk_is_an_error_of_ours_when_reading(tmp_path, monkeypatch):
    CheckpointFolder(tmp_path).write("0", {})

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_file, "load_file", fail)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error; use an older"):
        CheckpointFolder(tmp_path).read("0")
