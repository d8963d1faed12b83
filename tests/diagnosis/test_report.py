"""What is printed and written of a diagnosis."""

import json

import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.diagnosis.diagnose import diagnose
from rarebit.diagnosis.measure import short_names
from rarebit.diagnosis.report import Diagnosis, product_table, table_of_tables
from rarebit.errors import ModelFileError
from rarebit.models.ffm import FFM

SCHEMA = rb.data.Schema((rb.data.Field(name="user", rows=90), rb.data.Field(name="item", rows=40)))


@pytest.fixture
def found():
    counts = {"user": torch.arange(90), "item": torch.ones(40, dtype=torch.int64)}
    return diagnose(FFM(SCHEMA, dim=2), counts=counts)


def test_text_has_a_line_a_table_and_says_what_words_mean(found):
    text = str(found)
    header, user, item, meaning, *rest = text.splitlines()
    assert " ".join(header.split()) == ("table rows width size IA random rank dead never once norm")
    assert user.split()[:5] == ["user", "90", "4", "1.4", "kB"]
    assert item.split()[0] == "item"
    assert "stable rank" in meaning
    assert any("item: of 40 rows, 40 were seen once in training" in line for line in rest)
    assert "Sub-embeddings of FFM" in text
    assert "2 more tables have rows of one number, 520 B" in text


def test_columns_without_figures_are_left_out(found):
    table = diagnose(FFM(SCHEMA, dim=2)).sections(wide=True)[0]
    assert table.header == ["table", "rows", "width", "size", "IA", "random", "rank", "dead"]
    assert {len(line) for line in table.rows} == {8}
    assert found.sections(wide=False)[0].header[-1] == "once"


def test_methods_are_shown_where_there_are_any():
    model = nn.ModuleDict({"user": nn.Embedding(90, 4), "item": nn.Embedding(90, 4)})
    rb.apply_(model, rb.Hashing(buckets=9), where=lambda t: t.field == "user", verbose=False)
    table = table_of_tables(diagnose(model).tables, wide=True)
    assert table.header[-1] == "methods"
    assert [line[-1] for line in table.rows] == ["Hashing(buckets=9)", "-"]


def test_a_table_trained_as_a_product_has_a_line_of_its_own():
    model = nn.ModuleDict({"user": nn.Embedding(2, 3), "item": nn.Embedding(90, 3)})
    rb.apply_(model, rb.MLET(inner_dim=4), where=lambda t: t.name == "user", verbose=False)
    with torch.no_grad():
        # sigma2 is 2 and 1, sigma1 is 3, 1 and 0
        model["user"].inner.weight.copy_(torch.tensor([[2.0, 0, 0, 0], [0, 1.0, 0, 0]]))
        model["user"].projection.copy_(torch.diag(torch.tensor([3.0, 1.0, 0.0, 0.0]))[:, :3])
    found = diagnose(model)
    table = product_table(found.tables)
    assert table.header == ["table", "inner", "fastest", "mean", "learned", "shared"]
    # 9 + 4 at the most; 10 / 3 + 5 / 2 on average; all of 3 x 2 directions have a sigma2
    assert table.rows == [["user", "4", "13", "5.83", "6 of 6", "6"]]
    text = str(found)
    assert "Tables that MLET trains as products" in text
    assert "fastest: speedup of the fastest direction over a plain table under SGD" in text


def test_without_products_nothing_is_said_of_them(found):
    assert product_table(found.tables).rows == []
    assert "MLET" not in str(found)


def test_names_are_as_short_as_they_may_be():
    def names(*parts):
        model = nn.Module()
        for part in parts:
            holder, _, last = part.rpartition(".")
            if not hasattr(model, holder):
                model.add_module(holder, nn.Module())
            getattr(model, holder).add_module(last, nn.Embedding(9, 2))
        return short_names(diagnose(model).tables)

    assert names("a.user", "b.item") == ["user", "item"]
    assert names("a.user", "b.user", "b.item") == ["a.user", "b.user", "item"]
    assert names("a.weight", "b.item") == ["a", "b.item"]


def test_numbers_are_plain_and_complete(found, tmp_path):
    files = found.save(tmp_path / "new" / "folder", plots=False)
    assert [file.name for file in files] == ["diagnosis.json"]
    assert [path.name for path in files[0].parent.iterdir()] == ["diagnosis.json"]
    stored = json.loads(files[0].read_text("utf-8"))
    assert stored == json.loads(json.dumps(found.to_mapping()))
    user = stored["tables"][0]
    assert user["name"] == "backbone.tables.user"
    assert user["spectrum"] == list(found.tables[0].spectrum)
    assert user["abundance_ratio"] == found.tables[0].abundance_ratio
    assert user["norm_by_count"][0] == {
        "least": 0,
        "most": 0,
        "rows": 1,
        "mean_norm": found.tables[0].norm_by_count[0].mean_norm,
    }
    assert stored["sub_embeddings"][0]["abundance"][0][0] is None
    assert {finding["kind"] for finding in stored["findings"]} == {"rare"}


def test_numbers_that_are_not_finite_do_not_reach_the_file(tmp_path):
    weight = torch.full((9, 2), float("nan"))
    found = diagnose(nn.Sequential(nn.Embedding.from_pretrained(weight)))
    [file] = found.save(tmp_path, plots=False)
    assert json.loads(file.read_text("utf-8"))["tables"][0]["not_finite_rows"] == 9


def test_an_old_diagnosis_is_replaced_as_a_whole(found, tmp_path):
    (tmp_path / "diagnosis.json").write_text("old")
    found.save(tmp_path, plots=False)
    assert json.loads((tmp_path / "diagnosis.json").read_text("utf-8"))["format"] == 1
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_is_told(found, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match=r"cannot write .*it is a file"):
        found.save(tmp_path / "file", plots=False)


def test_an_empty_diagnosis_says_nothing():
    assert str(Diagnosis(tables=())) == ""
