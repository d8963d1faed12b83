"""Folders that are old, damaged or hostile: an equal model, or our own error, and little memory."""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from capabilities import needs, slow_after
from safetensors.torch import load_file, save_file
from stored import sign, tensors_file

from rarebit import Hashing, LowRank, Quantize, apply_, find_tables, load_model, save_model
from rarebit.data import Field, Schema
from rarebit.errors import ModelFileError
from rarebit.models.dcn_v2 import DCNv2
from rarebit.models.deepfm import DeepFM
from rarebit.models.fm import FM
from rarebit.training.memory import AllocationLimit, available_memory

STORED = Path(__file__).parent / "stored" / "model-format-1"
MUTATIONS = 1000
MOST_BYTES = 128 << 20
"""Memory that loading a small model may take on top, whatever its folder says."""
SCHEMA = Schema(
    (
        Field(name="user", rows=9),
        Field(name="tags", kind="multi", rows=7, max_length=2, pooling="sum"),
        Field(name="age", kind="numeric"),
    )
)

PEAK_RESET = Path("/proc/self/clear_refs")


def peak_can_be_reset():
    try:
        PEAK_RESET.write_text("5")
    except OSError:
        return False
    return True


needs_peak = needs("peak of memory", peak_can_be_reset(), "the system does not tell it")


def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


@pytest.fixture
def bounded_memory():
    """Fail where a test took more memory than there was before it by `MOST_BYTES`."""
    PEAK_RESET.write_text("5")
    before = memory("VmRSS")
    yield
    assert memory("VmHWM") - before < MOST_BYTES


def small_model(kind=DeepFM):
    torch.manual_seed(0)
    settings = {FM: {}, DeepFM: {"hidden": (4,), "batch_norm": True}, DCNv2: {"hidden": (4,)}}
    return kind(SCHEMA, dim=3, **settings[kind])


def assert_same(model, other):
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def crafted(folder, change, kind=DeepFM):
    """Save a model, change its description in place, and make the checksums fit."""
    save_model(small_model(kind), folder)
    path = folder / "model.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))
    sign(folder)
    return folder


def test_a_folder_of_the_first_format_is_still_read():
    model = load_model(STORED)
    assert "description_sha256" not in json.loads((STORED / "model.json").read_text())
    assert (type(model), model.schema, model.settings["dim"]) == (FM, SCHEMA, 3)
    hashed = {table.field: table.methods for table in find_tables(model) if table.methods}
    assert hashed == {"user": ("Hashing(buckets=4)",)}
    # what was saved: each parameter counts up in steps of 1/64 from its own number
    for number, parameter in enumerate(model.parameters()):
        wanted = torch.arange(parameter.numel()) / 64 + number
        assert torch.equal(parameter.detach().flatten(), wanted)


def test_a_folder_of_today_has_a_checksum_of_its_description(tmp_path):
    save_model(small_model(), tmp_path)
    path = tmp_path / "model.json"
    description = json.loads(path.read_text())
    own = description.pop("description_sha256")
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    assert own == hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(description | {"description_sha256": own}, indent=7))
    assert_same(load_model(tmp_path), small_model())
    # weights and shapes would be the same: only the checksum can tell
    description["settings"]["dropout"] = 0.5
    path.write_text(json.dumps(description | {"description_sha256": own}))
    with pytest.raises(ModelFileError, match=r"model\.json' is damaged: it does not match"):
        load_model(tmp_path)


def mutated(content, rng):
    """Flip, cut, insert, repeat or exchange some bytes."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        start = rng.randrange(len(content) + 1)
        stop = min(len(content), start + rng.choice((1, 1, 2, 8, 64)))
        match rng.randrange(5):
            case 0:
                content[start:stop] = bytes(
                    byte ^ 1 << rng.randrange(8) for byte in content[start:stop]
                )
            case 1:
                del content[start:stop]
            case 2:
                content[start:start] = rng.choice(
                    (b"9", b"-", b"99999999", b"[", b'"', b"\0", b"e9")
                )
            case 3:
                content[start:start] = content[start:stop]
            case _:
                content[start:stop] = rng.randbytes(stop - start)
    return bytes(content)


def changed_numbers(content, rng):
    """Put other numbers in place of those of a description: it stays JSON."""
    description = json.loads(content)
    numbers = [0, -1, 1, 2, 3, 2**31, 2**62, 2**63, 10**9, 10**30, 1e300, True, None, "3", [], {}]

    def change(value):
        if isinstance(value, dict):
            return {key: change(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [change(inner) for inner in value] * rng.choice((1, 1, 1, 2))
        return rng.choice(numbers) if rng.random() < 0.1 else value

    return json.dumps(change(description)).encode()


@needs_peak
@pytest.mark.parametrize("kind", slow_after([FM, DeepFM, DCNv2]))
def test_a_thousand_mutations_give_an_equal_model_or_our_error(kind, tmp_path, bounded_memory):
    rng, model = random.Random(4), small_model(kind)  # noqa: S311  # no secrets here
    good = save_model(model, tmp_path / "good")
    contents = {path.name: path.read_bytes() for path in good.iterdir()}
    loaded, refused = 0, set()
    folder = tmp_path / "bad"
    folder.mkdir()
    for number in range(MUTATIONS):
        name = rng.choice(sorted(contents))
        change = changed_numbers if name == "model.json" and number % 3 == 0 else mutated
        for other, content in contents.items():
            (folder / other).write_bytes(change(content, rng) if other == name else content)
        is_signed = number % 2 == 0 and can_be_signed(folder)
        try:
            found = load_model(folder)
        except ModelFileError as error:
            refused.add(str(error).replace(str(folder), "")[:40])
        else:
            loaded += 1
            if name == "model.json" or not is_signed:
                assert_same(found, model)
    assert loaded > 10
    assert len(refused) > 10, "the mutations must reach many checks"


def can_be_signed(folder):
    """Sign the folder where its description can still be read."""
    try:
        sign(folder)
    except (AttributeError, TypeError, ValueError, RecursionError):
        return False
    return True


@pytest.mark.parametrize("number", [-1, 0, 10**9, 2**40, 2**62, 2**63, 10**30, 10**4000, 1e9, True])
@pytest.mark.parametrize("place", ["rows", "max_length", "dim", "hidden", "num_layers"])
@needs_peak
def test_absurd_numbers_are_refused_without_their_memory(number, place, tmp_path, bounded_memory):
    def change(description):
        field = description["schema"]["fields"][1]
        if place in field:
            field[place] = number
        else:
            description["settings"][place] = [number] if place == "hidden" else number

    with pytest.raises(ModelFileError) as caught:
        load_model(crafted(tmp_path, change, DCNv2))
    assert "does not describe a model this version knows" in str(caught.value)


def name_one_weight_often(description):
    weight = "head.mlp.layers.0.weight"
    description["aliases"] = {f"alias{n}": weight for n in range(100_000)}
    description["schema"]["fields"][0]["rows"] = 20_000_000


@pytest.mark.slow
@needs_peak
@pytest.mark.parametrize(
    "change",
    [
        name_one_weight_often,
        lambda d: d["settings"].update(hidden=[1] * 1_000_000),
        lambda d: d["settings"].update(hidden=[1000] * 1000),
        lambda d: d["schema"].update(fields=[{"name": str(n), "rows": 1} for n in range(50_000)]),
        lambda d: d["schema"]["fields"].extend(
            {"name": f"f{n}", "kind": "multi", "rows": 1, "max_length": 2**62} for n in range(4)
        ),
    ],
    ids=["many names", "many layers", "wide layers", "many fields", "lengths that overflow"],
)
def test_long_lists_are_refused_without_their_memory(change, tmp_path, bounded_memory):
    with pytest.raises(
        ModelFileError, match="does not describe a model this version knows: it asks"
    ):
        load_model(crafted(tmp_path, change))


@needs_peak
@pytest.mark.parametrize("method", [Hashing(buckets=4), LowRank(rank=1)])
def test_with_methods_the_memory_there_is_is_the_bound(method, tmp_path, bounded_memory):
    model = small_model(FM)
    apply_(model, method, verbose=False)
    save_model(model, tmp_path)
    path = tmp_path / "model.json"
    description = json.loads(path.read_text())
    rows = available_memory(torch.device("cpu")) // (4 * 3)
    description["schema"]["fields"][0]["rows"] = rows
    path.write_text(json.dumps(description))
    sign(tmp_path)
    with pytest.raises(ModelFileError, match=r"takes .* GB on cpu, where .* are free"):
        load_model(tmp_path)


@needs_peak
@pytest.mark.parametrize("method", [Hashing(buckets=4), LowRank(rank=1), Quantize()])
def test_with_methods_sizes_are_compared_before_the_model_is_built(
    method, tmp_path, bounded_memory
):
    model = small_model(FM)
    apply_(model, method, verbose=False)
    save_model(model, tmp_path)
    path = tmp_path / "model.json"
    description = json.loads(path.read_text())
    description["schema"]["fields"][0]["rows"] = 20_000_000  # 240 MB, and as much for a copy
    path.write_text(json.dumps(description))
    sign(tmp_path)
    with pytest.raises(ModelFileError, match=r"another architecture .*20000\d+"):
        load_model(tmp_path)


def test_a_hashed_table_may_be_much_larger_than_its_file(tmp_path):
    model = FM(Schema((Field(name="user", rows=300_000),)), dim=8)
    apply_(model, Hashing(buckets=4), verbose=False, min_width=1)
    save_model(model, tmp_path)
    assert tensors_file(tmp_path).stat().st_size < 2000
    assert_same(load_model(tmp_path), model)


@pytest.mark.parametrize("fields", [1, 400])
def test_many_small_fields_and_layers_are_no_attack(fields, tmp_path):
    schema = Schema(tuple(Field(name=f"f{n}", rows=2) for n in range(fields)))
    model = DeepFM(schema, dim=1, hidden=[2] * 50, batch_norm=True)
    assert_same(load_model(save_model(model, tmp_path)), model)


def test_half_precision_files_are_worth_as_much_as_others(tmp_path):
    model = FM(Schema((Field(name="user", rows=100_000),)), dim=16).to(torch.bfloat16)
    assert_same(load_model(save_model(model, tmp_path)), model)


def test_the_limit_counts_what_is_made_in_all():
    limit = AllocationLimit(100_000)
    with limit:
        torch.zeros(10_000)
        torch.nn.Linear(10, 100)
    assert limit.asked == 40_000 + 2 * 4096
    with limit, pytest.raises(ModelFileError, match="larger weights than the folder holds"):
        torch.nn.Linear(100, 200)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_no_floats_are_refused(dtype, tmp_path):
    save_model(small_model(), tmp_path)
    file = tensors_file(tmp_path)
    weights, name = load_file(file), "head.mlp.layers.0.weight"
    save_file(weights | {name: weights[name].to(dtype)}, file)
    sign(tmp_path)
    with pytest.raises(ModelFileError, match=f"{name} holds {dtype} in the file and torch.float32"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.json", "weights"])
def test_a_link_out_of_the_folder_is_refused(name, tmp_path):
    inside, outside = save_model(small_model(), tmp_path / "in"), tmp_path / "out"
    name = name if name == "model.json" else tensors_file(inside).name
    shutil.move(inside / name, outside)
    for target in (outside, Path("..") / "out"):
        (inside / name).symlink_to(target)
        with pytest.raises(ModelFileError, match=r"is a link that leads out of its folder"):
            load_model(inside)
        (inside / name).unlink()


def test_links_that_stay_inside_and_links_to_the_folder_are_followed(tmp_path):
    folder = save_model(small_model(), tmp_path / "in")
    shutil.move(folder / "model.json", folder / "real.json")
    (folder / "model.json").symlink_to("real.json")
    (tmp_path / "link").symlink_to(folder)
    assert_same(load_model(tmp_path / "link"), small_model())


@pytest.mark.parametrize("name", ["model.json", "weights"])
def test_what_is_no_file_is_refused(name, tmp_path):
    save_model(small_model(), tmp_path)
    name = name if name == "model.json" else tensors_file(tmp_path).name
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)  # reading it would wait for ever
    with pytest.raises(ModelFileError, match="is not a plain file"):
        load_model(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)
    with pytest.raises(ModelFileError, match="cannot read"):
        load_model(tmp_path)
