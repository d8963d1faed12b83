"""A prepared log in use: splits, counts, batches, loaders, chunked order, and training without Polars."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb  # noqa: E402  # after the check that Polars is there
from rarebit.data.dataset import Batch, Dataset, collate  # noqa: E402  # the same
from rarebit.data.log_schema import (  # noqa: E402  # the same
    Column,
    LogSchema,
    TextFormat,  # the same
)
from rarebit.data.order import chunk_shuffled_order  # noqa: E402  # the same
from rarebit.data.prepare import prepare  # noqa: E402  # the same
from rarebit.errors import DataError  # noqa: E402  # the same
from rarebit.models.fm import FM  # noqa: E402  # the same

SRC = Path(__file__).parents[2] / "src"
SCHEMA = LogSchema(
    label="click",
    columns=(
        Column(name="user", min_count=2),
        Column(name="tags", kind="multi", separator=" ", max_length=3),
        Column(name="price", kind="numeric"),
        Column(name="age", kind="numeric", treatment="quantile", bins=4),
        Column(name="ad", buckets=6),
    ),
)
ROWS = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A prepared log of 2,000 rows with every kind of column."""
    place = tmp_path_factory.mktemp("prepared")
    rng = np.random.default_rng(0)
    tags = [" ".join(rng.choice(list("abcde"), rng.integers(0, 4))) for _ in range(ROWS)]
    ads = (rng.random(ROWS) ** 2 * 40).astype(int)
    frame = pl.DataFrame(
        {
            "user": [f"u{n}" if n % 11 else "" for n in (rng.random(ROWS) ** 3 * 500).astype(int)],
            "tags": tags,
            "price": rng.normal(size=ROWS).round(3),
            "age": rng.integers(10, 80, ROWS),
            "ad": [f"a{n}" for n in ads],
            "click": (rng.random(ROWS) < (0.2 + 0.6 * (ads % 2))).astype(int),
        }
    )
    frame.write_csv(place / "log.csv")
    prepare(place / "log.csv", place / "data", schema=SCHEMA)
    return place / "data"


@pytest.fixture
def data(folder):
    return Dataset.open(folder)


def test_all_rows_and_the_splits_of_them(folder, data):
    assert len(data) == ROWS
    assert [len(part) for part in data.splits] == [1600, 200, 200]
    assert torch.equal(torch.cat([part.ids for part in data.splits]), data.ids)
    assert torch.equal(torch.cat([part.label for part in data.splits]), data.label)
    assert torch.equal(torch.cat([part.numeric for part in data.splits]), data.numeric)
    assert np.array_equal(data.ids, np.load(folder / "ids.npy"))
    assert data.splits.train.ids.data_ptr() == data.ids.data_ptr()
    names = ["user", "tags", "price", "age", "ad"]
    assert [field.name for field in data.schema.fields] == names
    with pytest.raises(DataError, match="these rows are not split"):
        _ = data.splits.train.splits


def test_the_counts_of_training_are_a_recount(data):
    for part in (data, *data.splits):
        counts = part.counts()
        assert list(counts) == ["user", "tags", "age", "ad"]
        for field in data.schema.table_fields:
            ids = part.ids[:, data.schema.slots[field.name]].reshape(-1)
            recount = torch.bincount(ids, minlength=field.rows)
            if field.kind == "multi":
                recount[0] = 0
            assert torch.equal(counts[field.name], recount)
            assert counts[field.name].dtype == torch.int64


def test_changing_counts_does_not_change_the_folder(folder, data):
    data.splits.train.counts()["user"].zero_()
    again = Dataset.open(folder, verify=True).splits.train.counts()["user"]
    assert again.sum() == 1600


def test_single_rows(data):
    for row in (0, 1, 999, ROWS - 1, -1, -2, -ROWS):
        found = data[row]
        assert len(found) == 1
        assert torch.equal(found.ids[0], data.ids[row])
        assert torch.equal(found.numeric[0], data.numeric[row])
        assert found.label.item() == data.label[row].item()
    for row in (ROWS, ROWS + 1, -ROWS - 1, 10**9):
        with pytest.raises(IndexError, match=f"row {row} of a data set of 2000 rows"):
            data[row]
    with pytest.raises(IndexError):
        data[torch.tensor([ROWS])]
    assert len(data[ROWS:]) == 0


def test_a_loop_over_the_rows_ends(data):
    valid = data.splits.valid
    assert torch.equal(torch.cat([row.ids for row in valid]), valid.ids)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_loader_gives_every_row_once(data, num_workers, shuffle):
    train = data.splits.train
    loader = DataLoader(
        train,
        batch_size=300,
        shuffle=shuffle,
        num_workers=num_workers,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(1),
    )
    batches = list(loader)
    assert [len(batch) for batch in batches] == [300] * 5 + [100]
    assert all(isinstance(batch, Batch) for batch in batches)
    found = torch.cat([torch.cat([b.ids, b.numeric, b.label[:, None]], 1) for b in batches])
    rows = torch.cat([train.ids, train.numeric, train.label[:, None]], 1)
    assert torch.equal(found, rows) != shuffle
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, rows.tolist()))


def test_collate_takes_rows_one_by_one(data):
    found = collate([data[3], data[5], data[-1]])
    rows = torch.tensor([3, 5, ROWS - 1])
    assert torch.equal(found.ids, data.ids[rows])
    assert torch.equal(found["price"], data.numeric[rows, 0])
    assert found["tags"].shape == (3, 3)
    for wrong in ([], [{"user": 1}]):
        with pytest.raises(DataError, match="collate takes rows of a rarebit Dataset"):
            collate(wrong)


def test_little_memory_reads_in_chunks(folder):
    assert Dataset.open(folder).chunks is None
    data = Dataset.open(folder, memory_bytes=20_000)
    train = data.splits.train
    assert data.chunks is not None
    assert train.chunks is not None
    orders = [train.order(seed=0, epoch=epoch) for epoch in range(2)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(1600))
    assert not torch.equal(*orders)
    chunk_rows, at_once = train.chunks
    wanted = chunk_shuffled_order(
        1600, seed=0, epoch=0, chunk_rows=chunk_rows, chunks_at_once=at_once
    )
    assert torch.equal(orders[0], wanted)
    touched = orders[0][: train.chunks[0] * train.chunks[1]]
    assert len(set((touched // train.chunks[0]).tolist())) <= 2 * train.chunks[1] + 1
    torch.manual_seed(0)
    model = FM(data.schema, dim=4)
    history = rb.fit(model, train, epochs=3, lr=0.05, batch_size=100, progress=False)
    assert history.epochs[-1].train_loss < history.epochs[0].train_loss


def test_the_schema_in_the_folder_prepares_the_same_again(folder, tmp_path):
    schema = LogSchema.read(folder / "schema.toml")
    assert schema == replace(SCHEMA, text=TextFormat())
    again = prepare(folder.parent / "log.csv", tmp_path / "again", schema=schema)
    assert torch.equal(again.ids, Dataset.open(folder).ids)
    names = [
        json.loads((place / "manifest.json").read_text())["files"]
        for place in (folder, tmp_path / "again")
    ]
    assert names[0] == names[1]


WITHOUT = """
import sys
import rarebit as rb
from rarebit.models.fm import FM

for name in ("polars", "pyarrow", "pandas"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is there")
data = rb.Dataset.open(sys.argv[1], verify=True)
history = rb.fit(
    FM(data.schema, dim=4), data.splits.train, data.splits.valid, epochs=1, progress=False
)
print(len(data), len(history.epochs), int(data.splits.train.counts()["user"].sum()))
"""


@pytest.mark.slow
def test_opening_and_training_need_torch_and_numpy_only(folder, tmp_path):
    for name in ("polars", "pyarrow", "pandas"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT, folder],
        env=dict(os.environ, PYTHONPATH=f"{tmp_path}{os.pathsep}{SRC}"),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2000", "1", "1600"]


def test_a_folder_trains_without_its_vocabulary(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "data", ignore=shutil.ignore_patterns("encoder"))
    data = Dataset.open(tmp_path / "data", verify=True)
    assert len(data) == ROWS
    assert data.schema.encoder is None
    with pytest.raises(DataError, match="its values are not known"):
        Dataset.from_frame({"user": ["u1"]}, like=data)
    (tmp_path / "data" / "label.npy").unlink()
    with pytest.raises(DataError, match=r"label\.npy is missing"):
        Dataset.open(tmp_path / "data")
