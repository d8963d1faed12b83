"""Avazu: hand-made files of its format."""

import gzip

import pytest
import torch

pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb
from rarebit.data.prepare import prepare_source
from rarebit.data.raw.chunks import BadRows
from rarebit.data.sources import find_source
from rarebit.errors import DataError
from rarebit.models import build_model

HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,"
    "device_id,device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)
FIRST = (
    "1000009418151094273,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,"
    "a99f214a,ddd2926e,44956a24,1,2,15706,320,50,1722,0,35,-1,79"
)
SECOND = FIRST.replace(",0,14102100,", ",1,14102101,").replace("1000009418151094273", "3")
TEXT = f"{HEADER}\n{FIRST}\n{SECOND}\n"


@pytest.mark.parametrize("name", ["train.csv", "train.gz", "train.csv.gz", "train"])
def test_rows_are_what_the_file_says(name, tmp_path, read):
    content = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    reading = read("avazu", tmp_path)
    assert reading.frame.columns == list(find_source("avazu").schema().columns_read)
    assert [str(value) for value in reading.column("click")] == ["0", "1"]
    assert reading.rows[0][1:] == tuple(FIRST.split(",")[2:])
    assert reading.column("hour") == ["14102100", "14102101"]
    assert reading.lines() == [2, 3]


def test_the_papers_protocols_are_theirs():
    source = find_source("avazu")
    for name, min_count, counts in (("clean", 10, "train"), ("pep", 10, "all"), ("me", 4, "all")):
        schema = source.schema(name)
        assert len(schema.id_columns) == 22
        assert {column.min_count for column in schema.columns} == {min_count}
        assert schema.counts == counts


def test_mlets_protocol_keeps_the_hour_a_number_and_trains_its_dlrm(tmp_path):
    hours = [14102100 + hour for hour in range(20)] * 2
    lines = [
        FIRST.replace("0,14102100", f"{row % 2},{hour}").replace("ddd2926e", f"ip{row}")
        for row, hour in enumerate(hours)
    ]
    (tmp_path / "train.csv").write_text("\n".join([HEADER, *lines, ""]), "utf-8")
    prepare_source("avazu", tmp_path, tmp_path / "data", protocol="mlet")
    data = rb.Dataset.open(tmp_path / "data")
    assert [field.name for field in data.schema.numeric_fields] == ["hour"]
    assert len(data.schema.table_fields) == 21
    assert [len(part) for part in data.splits] == [36, 2, 2]
    rows = {field.name: field.rows for field in data.schema.table_fields}
    assert rows["device_ip"] == 3 + 40  # every value of all rows has an id
    train = data.splits.train.numeric[:, 0].double()
    assert float(train.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(train.std(correction=0)) == pytest.approx(1.0, abs=1e-4)
    model = build_model("dlrm@mlet_avazu", data.schema)
    before = model.backbone.bottom[0].weight.detach().clone()
    rb.fit(model, *data.splits[:2], epochs=1, optimizer="sgd", lr=0.2, progress=False)
    assert not torch.equal(model.backbone.bottom[0].weight, before)


def test_the_test_file_has_no_label_and_is_refused(tmp_path):
    (tmp_path / "train.csv").write_text(TEXT.replace("click,", "", 1), "utf-8")
    with pytest.raises(DataError, match="click"):
        list(find_source("avazu").rows(tmp_path, BadRows()))
