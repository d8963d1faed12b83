"""Parts of a packed table that come from elsewhere: states, files, and what a disk made of them."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capabilities import reason, slow_after
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close

from rarebit.codes import packed
from rarebit.codes.packed import (
    Pack,
    find_entries,
    load_packed,
    offset_type,
    pack_rows,
    problem_of,
    save_packed,
)
from rarebit.errors import ModelFileError


def sparse_weight(rows: int, width: int, kept: float, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=draw)
    weight[torch.rand(rows, width, generator=draw) >= kept] = 0.0
    return weight


def dense(weight: Tensor, **options) -> nn.Embedding:
    return nn.Embedding.from_pretrained(weight.clone(), freeze=False, **options)


weights = st.builds(
    sparse_weight,
    rows=st.integers(1, 200),
    width=st.one_of(st.integers(1, 20), st.sampled_from([64, 256, 257, 300])),
    kept=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)


# ---- state


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("kept", [0.1, 0.9])
def test_a_table_takes_the_state_of_one_with_other_entries(kept, bits):
    table = Pack(bits=bits).wrap(dense(sparse_weight(90, 9, kept)))
    other = Pack(bits=bits).wrap(dense(sparse_weight(90, 9, 0.4, seed=1)))
    if bits is None:
        other(torch.arange(90)).sum().backward()
    other.load_state_dict(table.state_dict())
    assert torch.equal(other.weight, table.weight)
    assert set(table.state_dict()) == {*table.parts._fields, *(["scale"] if bits else [])}
    if bits is None:
        other(torch.arange(90)).sum().backward()
        assert other.values.grad.shape == table.values.shape


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    table = Pack().wrap(dense(sparse_weight(90, 9, 0.1)))
    before = table.weight.detach().clone()
    good = Pack().wrap(dense(sparse_weight(90, 9, 0.4))).state_dict()
    for name in good:
        part = {key: tensor for key, tensor in good.items() if key != name}
        with pytest.raises(RuntimeError, match=f"is damaged: it lacks its {name}"):
            table.load_state_dict(part, strict=False)
    wild = good | {"offsets": good["offsets"] + 1}
    with pytest.raises(RuntimeError, match="is damaged: its offsets go from 1 to"):
        table.load_state_dict(wild)
    eight = Pack(bits=8).wrap(dense(sparse_weight(90, 9, 0.4))).state_dict()
    with pytest.raises(RuntimeError, match=r"are torch.int8 and not torch.float32"):
        table.load_state_dict(eight, strict=False)
    assert torch.equal(table.weight, before)


PARTS = pack_rows(sparse_weight(90, 9, 0.1))
BITS = pack_rows(sparse_weight(90, 9, 0.9))


def changed(part: Tensor, at: int, value: int) -> Tensor:
    part = part.clone()
    part.view(-1)[at] = value
    return part


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (PARTS._replace(values=PARTS.values.long()), "its values are torch.int64"),
        (PARTS._replace(values=PARTS.values[1:]), "its columns are torch.uint8 of shape"),
        (PARTS._replace(values=PARTS.values[1:], columns=PARTS.columns[1:]), "its offsets go from"),
        (PARTS._replace(filled=PARTS.filled[:1]), "its marks of filled rows are not those of 90"),
        (PARTS._replace(filled=changed(PARTS.filled, 1, -1)), "it marks rows that the table does"),
        (PARTS._replace(filled=changed(PARTS.filled, 0, 0)), "filled rows and has offsets of"),
        (PARTS._replace(offsets=changed(PARTS.offsets, 0, 1)), "its offsets go from 1 to"),
        (PARTS._replace(offsets=PARTS.offsets.float()), "its offsets are torch.float32"),
        (
            PARTS._replace(offsets=changed(PARTS.offsets, 2, 0)),
            "do not give every filled row a value",
        ),
        (PARTS._replace(offsets=changed(PARTS.offsets, 2, -5)), "do not give every filled row"),
        (PARTS._replace(offsets=changed(PARTS.offsets, 2, 99)), "do not give every filled row"),
        (PARTS._replace(columns=changed(PARTS.columns, 5, 9)), "columns beyond its width of 9"),
        (PARTS._replace(columns=PARTS.columns * 0), "columns of a row are not in order"),
        (PARTS._replace(columns=PARTS.columns.int()), "its columns are torch.int32"),
        (BITS._replace(columns=changed(BITS.columns, 1, 255)), "columns beyond its width of 9"),
        (BITS._replace(columns=changed(BITS.columns, 0, 0)), "bits of a row are not as many"),
    ],
)
@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_parts_that_do_not_fit_each_other_are_found(parts, message, chunk, monkeypatch):
    monkeypatch.setattr(packed, "CHECKED", chunk)
    assert message in problem_of(parts, rows=90, width=9, padding=None)


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_one_column_or_offset_out_of_order_is_found_wherever_it_is(chunk, monkeypatch):
    monkeypatch.setattr(packed, "CHECKED", chunk)
    columns, offsets = PARTS.columns.tolist(), PARTS.offsets.tolist()
    within = [at for at in range(1, len(columns)) if at not in offsets]
    assert len(within) > 10
    for at in within:
        parts = PARTS._replace(columns=changed(PARTS.columns, at, columns[at - 1]))
        assert "not in order" in problem_of(parts, rows=90, width=9, padding=None)
    for at in range(1, len(offsets) - 1):
        parts = PARTS._replace(offsets=changed(PARTS.offsets, at, offsets[at - 1]))
        assert "every filled row a value" in problem_of(parts, rows=90, width=9, padding=None)


@given(weight=weights, chunk=st.sampled_from([2, 7, 1 << 20]))
def test_parts_that_we_made_fit(weight, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "CHECKED", chunk)
        shape = {"rows": len(weight), "width": weight.shape[1]}
        assert problem_of(pack_rows(weight), **shape, padding=None) is None


def test_a_padding_row_with_entries_is_found():
    rows = (PARTS.filled[0] & 1).item()
    assert rows == 1
    for padding, message in ((0, "row 0 is not empty"), (90, "row 90 is not one of 90 rows")):
        assert message in problem_of(PARTS, rows=90, width=9, padding=padding)


# ---- files


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.9])
def test_a_file_holds_the_table(kept, bits, tmp_path):
    table = Pack(bits=bits).wrap(dense(sparse_weight(90, 9, kept), padding_idx=4))
    loaded = load_packed(save_packed(table, tmp_path / "table"))
    assert torch.equal(loaded.weight, table.weight)
    assert (loaded.padding_idx, loaded.method) == (4, Pack(bits=bits))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert [file.name for file in tmp_path.iterdir()] == ["table"]


def test_a_loaded_table_is_trained_and_its_file_stays_as_it_is(tmp_path):
    table = Pack().wrap(dense(sparse_weight(90, 9, 0.2)))
    file = save_packed(table, tmp_path / "table")
    loaded = load_packed(file, trainable=True)
    loaded(torch.arange(90)).sum().backward()
    torch.optim.SGD(loaded.parameters(), lr=1.0).step()
    assert torch.equal(loaded.values, table.values - 1)
    assert torch.equal(load_packed(file).weight, table.weight)


@pytest.mark.parametrize("sparsity", [0.9, 0.97, 0.99, 0.999])
@pytest.mark.parametrize("full_rows", [False, True])
def test_the_bytes_on_disk_are_within_the_bound(sparsity, full_rows, tmp_path):
    rows, width = 100_000, 64
    weight = sparse_weight(rows, width, 1.0 if full_rows else 1 - sparsity)
    if full_rows:
        weight[torch.rand(rows) < sparsity] = 0.0
    values, filled = int((weight != 0).sum()), int((weight != 0).any(dim=1).sum())
    bound = 4 * values + min(filled * width / 8, values) + 4 * filled + rows / 8
    file = save_packed(Pack().wrap(dense(weight)), tmp_path / "table")
    assert file.stat().st_size <= 1.1 * bound
    assert file.stat().st_size > 0.9 * bound
    eight = save_packed(Pack(bits=8).wrap(dense(weight)), tmp_path / "eight")
    assert eight.stat().st_size <= 1.1 * (bound - 3 * values)


@pytest.mark.parametrize("missing", ["nowhere/table", "nowhere"])
def test_what_cannot_be_read_or_written_is_said(missing, tmp_path):
    with pytest.raises(ModelFileError, match="does not exist"):
        load_packed(tmp_path / missing)
    (tmp_path / "other").write_bytes(b"no table at all")
    with pytest.raises(ModelFileError, match="is no packed table, or damaged"):
        load_packed(tmp_path / "other")
    save_file({"values": torch.zeros(3)}, tmp_path / "plain")
    with pytest.raises(ModelFileError, match="does not call itself a rarebit packed table"):
        load_packed(tmp_path / "plain")
    with pytest.raises(ModelFileError, match=r"cannot write .*nowhere' is missing; choose another"):
        save_packed(Pack().wrap(dense(sparse_weight(9, 3, 0.5))), tmp_path / "nowhere" / "table")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": "-1"}, "'-1' is no number of rows"),
        ({"rows": "9" * 40}, "is no number of rows"),
        ({"rows": "900"}, "its marks of filled rows are not those of 900 rows"),
        ({"width": "0"}, "no table is 90 x 0"),
        ({"width": "999999999999"}, "no table is 90 x 999999999999"),
        ({"width": "300"}, "its columns are torch.uint8"),
        ({"padding": "90"}, "its padding row 90 is not one of 90 rows"),
    ],
)
def test_a_file_that_describes_another_table_is_refused(change, message, tmp_path):
    tensors = Pack().wrap(dense(sparse_weight(90, 9, 0.1))).state_dict()
    about = {"kind": "rarebit packed table 1", "rows": "90", "width": "9"}
    save_file(tensors, tmp_path / "good", about)
    assert load_packed(tmp_path / "good").num_embeddings == 90
    save_file(tensors, tmp_path / "bad", about | change)
    with pytest.raises(ModelFileError, match=message):
        load_packed(tmp_path / "bad")


def test_integers_need_a_scale(tmp_path):
    about = {"kind": "rarebit packed table 1", "rows": "90", "width": "9"}
    tensors = Pack(bits=8).wrap(dense(sparse_weight(90, 9, 0.1))).state_dict()
    wrong = [
        {name: tensor for name, tensor in tensors.items() if name != "scale"},
        tensors | {"scale": torch.ones(2)},
        tensors | {"scale": torch.tensor(1)},
        tensors | {"values": tensors["values"].float()},
        tensors | {"more": torch.ones(2)},
    ]
    for case in wrong:
        save_file(case, tmp_path / "bad", about)
        with pytest.raises(ModelFileError, match="is no packed table, or damaged"):
            load_packed(tmp_path / "bad")


def test_any_changed_byte_is_noticed(tmp_path):
    table = Pack().wrap(dense(sparse_weight(70, 9, 0.1), padding_idx=2))
    file = save_packed(table, tmp_path / "table")
    good, harmless = file.read_bytes(), 0
    for place in range(0, len(good), 5):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            loaded = load_packed(file)
        except ModelFileError:
            continue
        harmless += 1
        assert torch.equal(loaded.weight, table.weight)
        assert loaded.padding_idx == 2
    assert harmless < 4, "a key of the description may be spelled in other ways"


def test_a_file_that_is_cut_while_its_table_is_in_use_does_no_harm(tmp_path):
    table = Pack().wrap(dense(sparse_weight(4000, 64, 0.5)))
    file = save_packed(table, tmp_path / "table")
    loaded = load_packed(file)
    os.truncate(file, 0)  # a mapped file would end this process with SIGBUS
    assert torch.equal(loaded.weight, table.weight)


def test_offsets_beyond_31_bits_take_64():
    assert offset_type(0) is offset_type(2**31 - 1) is torch.int32
    assert offset_type(2**31) is torch.int64


@pytest.mark.parametrize(("kept", "bits"), slow_after([(0.1, 8), (0.1, None), (0.9, None)]))
def test_a_thousand_mutations_without_a_checksum_are_refused_or_harmless(kept, bits, tmp_path):
    table = Pack(bits=bits).wrap(dense(sparse_weight(70, 9, kept), padding_idx=2))
    about = {"kind": "rarebit packed table 1", "rows": "70", "width": "9", "padding": "2"}
    save_file(table.state_dict(), tmp_path / "table", about)
    good = (tmp_path / "table").read_bytes()
    draw = random.Random(0)  # noqa: S311  # mutations, no secrets
    refused = 0
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        file = tmp_path / "mutated"
        file.write_bytes(data[: draw.choice([len(data), len(data), draw.randrange(len(data))])])
        try:
            loaded = load_packed(file)
        except ModelFileError:
            refused += 1
            continue
        # what was accepted is a table: every row can be had, and nothing beyond the parts is read
        parts, ids = loaded.parts, torch.arange(loaded.num_embeddings)
        entries = find_entries(ids, parts, loaded.before, loaded.embedding_dim)
        assert torch.equal(entries.position, torch.arange(len(parts.values)))
        assert bool((entries.place.diff() > 0).all())
        rows = loaded(ids)
        assert rows.shape == (loaded.num_embeddings, loaded.embedding_dim)
        assert_close(rows, loaded._served_rows(ids).view_as(rows), rtol=0, atol=0, equal_nan=True)
        if loaded.padding_idx is not None:
            assert not loaded(torch.tensor([loaded.padding_idx])).any()
    assert 300 < refused < 1000


LOOK_UP = """
import sys
from pathlib import Path
import torch
from rarebit.codes.packed import load_packed

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

torch.set_num_threads(1)
load_packed(sys.argv[1])(torch.tensor([0]))  # what torch and safetensors allocate once
before = resident()
table = load_packed(sys.argv[2])
rows = table(torch.arange(7, table.num_embeddings, 1000))
print(resident() - before, float(rows.double().sum()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason=reason("Linux", "no /proc"))
def test_a_fresh_process_needs_little_memory(tmp_path):
    weight = sparse_weight(400_000, 32, 0.01)
    small = save_packed(Pack().wrap(dense(weight[:100])), tmp_path / "small")
    large = save_packed(Pack().wrap(dense(weight)), tmp_path / "large")
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP, str(small), str(large)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    grown, total = done.stdout.split()
    assert float(total) == pytest.approx(float(weight[7::1000].double().sum()))
    # the file, what the one look at its offsets and columns allocates, and nothing of the dense size
    assert int(grown) < 3 * large.stat().st_size + (8 << 20) < weight.nbytes / 2
