"""What pruning kept, against loops over single rows and values worked by hand."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rarebit as rb
from rarebit.errors import DataError, ModelFileError, NoTableError, SettingsError
from rarebit.pruning import _insight as pruning
from rarebit.pruning._insight import FrequencyGroups, pruning_insight, write_insight
from rarebit.pruning.masked import Ticket
from rarebit.pruning.pep import set_threshold_, take_ticket
from rarebit.tables.collection import TableCollection

small_counts = st.lists(st.integers(0, 5), min_size=1, max_size=30)


def random_ticket(share=0.4, **shapes):
    return Ticket({name: torch.rand(*shape) < share for name, shape in shapes.items()})


def tables(**weights):
    return nn.ModuleDict({name: nn.Embedding.from_pretrained(w) for name, w in weights.items()})


def naive_interaction(left, right):
    total = 0.0
    for a in left.double().tolist():
        for b in right.double().tolist():
            total += abs(sum(x * y for x, y in zip(a, b, strict=True)))
    return total / (len(left) * len(right))


@given(small_counts, st.sampled_from([1, 5, 16, 17, 40]), st.integers(0, 1000))
def test_the_heat_map_is_that_of_loops(counts, width, seed):
    mask = torch.rand(len(counts), width, generator=torch.Generator().manual_seed(seed)) < 0.3
    counts = torch.tensor(counts)
    groups = FrequencyGroups({"x": counts}, ["x"])
    found = pruning_insight([Ticket({"x": mask})], {"x": counts}).tickets[0].heat_map
    covered = [kept for least, most in found.bins for kept in range(least, most + 1)]
    assert covered == list(range(width + 1))
    assert found.bins[0] == (0, 0)
    assert len(found.bins) <= 17
    for number, shares in enumerate(found.shares):
        rows = [row for row in range(len(counts)) if groups.of_row["x"][row] == number]
        for (least, most), share in zip(found.bins, shares, strict=True):
            inside = [row for row in rows if least <= int(mask[row].sum()) <= most]
            assert share == pytest.approx(len(inside) / len(rows), abs=1e-15)


def test_bins_of_a_paper_s_width():
    found = pruning_insight([random_ticket(x=(3, 64))], {"x": torch.arange(3)}).tickets[0]
    assert found.heat_map.bins[:3] == ((0, 0), (1, 4), (5, 8))
    assert found.heat_map.bins[-1] == (61, 64)


def test_widths_worked_by_hand():
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0]]).bool()
    counts = {"x": torch.tensor([6, 1, 3, 0])}
    [found] = pruning_insight([Ticket({"a.x": mask})], counts).tickets[0].tables
    assert (found.name, found.rows, found.width) == ("a.x", 4, 3)
    assert found.by_row.histogram == (2, 1, 0, 1)
    assert (found.by_row.mean, found.by_row.median, found.by_row.empty_share) == (1.0, 0, 0.5)
    assert found.by_lookup.histogram == (1, 3, 0, 6)
    assert (found.by_lookup.mean, found.by_lookup.median) == (2.1, 3)
    assert found.by_lookup.empty_share == 0.1


@given(small_counts, st.integers(0, 1000))
def test_a_lookup_counts_as_a_row_of_its_own_would(counts, seed):
    mask = torch.rand(len(counts), 4, generator=torch.Generator().manual_seed(seed)) < 0.5
    counts = torch.tensor(counts)
    [found] = pruning_insight([Ticket({"x": mask})], {"x": counts}).tickets[0].tables
    if not counts.any():
        assert found.by_lookup is None
        return
    each = mask.repeat_interleave(counts, dim=0)
    [repeated] = (
        pruning_insight([Ticket({"x": each})], {"x": torch.ones(len(each)).long()})
        .tickets[0]
        .tables
    )
    assert found.by_lookup == repeated.by_row == repeated.by_lookup
    kept = sorted(each.sum(dim=1).tolist())
    assert found.by_lookup.median == kept[(len(kept) - 1) // 2]
    assert found.by_lookup.mean == pytest.approx(sum(kept) / len(kept))


def test_tickets_come_largest_first_and_keep_their_facts():
    few, many = random_ticket(0.1, x=(9, 8)), random_ticket(0.9, x=(9, 8))
    many = Ticket(many.kept, facts={"step": 7})
    found = pruning_insight([few, many], {"x": torch.arange(9)}).tickets
    assert [ticket.kept for ticket in found] == [many.num_kept, few.num_kept]
    assert found[0].facts == {"step": 7}
    assert found[0].entries == 72


def test_scans_are_kept_and_checked():
    scan = {"step": 5, "kept": 3, "by_frequency": [0, 0.5], "threshold": 0.1}
    counts = {"x": torch.tensor([0, 2])}
    ticket = random_ticket(x=(2, 3))
    [found] = pruning_insight([ticket], counts, scans=[scan]).scans
    assert (found.step, found.kept, found.by_frequency) == (5, 3, (0.0, 0.5))
    with pytest.raises(DataError, match="2 frequency groups, but the scan of step 5 has 1 shares"):
        pruning_insight([ticket], counts, scans=[scan | {"by_frequency": [0.5]}])
    with pytest.raises(SettingsError, match="a scan: PruningScan needs kept"):
        pruning_insight([ticket], counts, scans=[{"step": 5, "by_frequency": [0.5, 1]}])
    with pytest.raises(SettingsError, match="kept must be int"):
        pruning_insight([ticket], counts, scans=[scan | {"kept": "many"}])


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_interactions_are_those_of_loops(monkeypatch, chunk):
    monkeypatch.setattr(pruning, "CHUNK_ROWS", chunk)
    before = tables(user=torch.randn(7, 4), item=torch.randn(5, 4), first=torch.randn(5, 1))
    ticket = random_ticket(user=(7, 4), item=(5, 4), first=(5, 1))
    after = tables(**{name: before[name].weight * mask for name, mask in ticket.kept.items()})
    counts = {name: torch.arange(len(mask)) for name, mask in ticket.kept.items()}
    found = pruning_insight([ticket], counts, before=before, after=after).interactions
    assert found.tables == ("user", "item")  # a first-order weight has no inner products
    assert found.rows == (7, 5)
    assert found.exact
    for model, matrix in ((before, found.before), (after, found.after)):
        for i, left in enumerate(found.tables):
            for j, right in enumerate(found.tables):
                expected = naive_interaction(model[left].weight, model[right].weight)
                assert matrix[i][j] == pytest.approx(expected, rel=1e-5)


def test_of_large_tables_some_rows_stand_for_all(monkeypatch):
    monkeypatch.setattr(pruning, "MOST_ROWS", 45)
    before = tables(user=torch.randn(100, 4), item=torch.randn(60, 4), day=torch.randn(5, 4))
    ticket = random_ticket(user=(100, 4), item=(60, 4), day=(5, 4))
    counts = {name: torch.arange(len(mask)) for name, mask in ticket.kept.items()}
    found = pruning_insight([ticket], counts, before=before, after=before).interactions
    assert found.rows == (20, 20, 5)
    assert not found.exact
    assert found.before == found.after
    user, item = before["user"].weight[::5], before["item"].weight[::3]
    assert found.before[0][1] == pytest.approx(naive_interaction(user, item), rel=1e-5)


def test_padding_is_left_out_where_a_model_tells_it():
    table = nn.Embedding(4, 2, padding_idx=1)
    model = nn.ModuleDict({"tags": table})
    ticket = Ticket({"tags": torch.tensor([[1, 1], [0, 0], [1, 0], [1, 1]]).bool()})
    counts = {"tags": torch.tensor([2, 0, 1, 0])}
    found = pruning_insight([ticket], counts, before=model, after=model)
    assert [group.rows for group in found.groups] == [1, 1, 1]
    assert found.tickets[0].tables[0].by_row.histogram == (0, 1, 2)
    assert found.interactions.rows == (3,)
    assert found.interactions.exact
    kept = table.weight[[0, 2, 3]]
    assert found.interactions.before[0][0] == pytest.approx(naive_interaction(kept, kept), rel=1e-5)


def test_fields_of_another_width_meet_as_the_model_projects_them():
    schema = rb.data.Schema(
        (rb.data.Field(name="user", rows=6), rb.data.Field(name="item", rows=5))
    )
    collection = TableCollection(schema.fields, 4, widths={"item": 2})
    model = nn.ModuleDict({"deep": collection})
    ticket = random_ticket(**{"deep.user": (6, 4), "deep.item": (5, 2)})
    counts = {"user": torch.arange(6), "item": torch.arange(5)}
    found = pruning_insight([ticket], counts, before=model, after=model).interactions
    user, item = (table.weight for table in collection.tables())
    expected = naive_interaction(user, item @ collection.projections["1"])
    assert found.before[0][1] == pytest.approx(expected, rel=1e-5)


def test_what_is_not_known_of_an_interaction_is_left_open():
    odd = tables(a=torch.tensor([[1.0, float("nan")]]), b=torch.ones(1, 2), c=torch.ones(1, 3))
    ticket = random_ticket(a=(1, 2), b=(1, 2), c=(1, 3))
    counts = {name: torch.tensor([1]) for name in "abc"}
    found = pruning_insight([ticket], counts, before=odd, after=odd).interactions
    assert found.before == ((None, None, None), (None, 2.0, None), (None, None, 3.0))


def test_a_run_of_hashed_tables_is_told_by_its_groups(tmp_path):
    model = nn.ModuleDict({"user": nn.Embedding(9, 4)})
    rb.apply_(model, rb.Hashing(buckets=3), verbose=False)
    rb.apply_(model, rb.PEP(schedule="given"), verbose=False)
    counts = {"user": torch.tensor([1, 0, 0, 1, 0, 0, 1, 0, 0])}
    groups = FrequencyGroups.of(model, counts)
    set_threshold_(model, 0.5)
    ticket = take_ticket(model, step=1)
    found = pruning_insight([ticket], groups)
    assert [(group.most, group.rows) for group in found.groups] == [(0, 2), (3, 1)]
    with pytest.raises(DataError, match="user has 3 rows, but there are training counts of 9"):
        pruning_insight([ticket], counts)


def test_what_does_not_belong_together_is_refused():
    ticket, counts = random_ticket(x=(2, 3)), {"x": torch.tensor([1, 2])}
    model = tables(x=torch.ones(2, 3))
    with pytest.raises(SettingsError, match="at least one ticket, got none"):
        pruning_insight([], counts)
    with pytest.raises(DataError, match="of one pruning run, got masks of different"):
        pruning_insight([ticket, random_ticket(x=(2, 4))], counts)
    with pytest.raises(SettingsError, match="give both or neither"):
        pruning_insight([ticket], counts, before=model)
    with pytest.raises(NoTableError, match="ModuleDict has no table 'x', which the ticket"):
        pruning_insight([ticket], counts, before=model, after=tables(y=torch.ones(2, 3)))
    with pytest.raises(DataError, match="differ in their numbers of rows"):
        pruning_insight([ticket], counts, before=model, after=tables(x=torch.ones(3, 3)))


def test_the_file_holds_all_figures(tmp_path):
    ticket = Ticket(random_ticket(x=(6, 3)).kept, facts={"step": 3})
    model = tables(x=torch.randn(6, 3))
    scan = {"step": 1, "kept": 9, "by_frequency": [0.5] * 6}
    counts = {"x": torch.arange(6)}
    insight = pruning_insight([ticket], counts, scans=[scan], before=model, after=model)
    [path] = write_insight(insight, tmp_path / "new" / "folder", plots=False)
    assert [file.name for file in path.parent.iterdir()] == ["insight.json"]
    read = json.loads(path.read_text())
    assert read == json.loads(json.dumps(insight.to_mapping()))
    assert read["format"] == 1
    assert read["groups"][0] == {"least": 0, "most": 0, "rows": 1}
    assert read["scans"] == [scan]
    assert read["tickets"][0]["facts"] == {"step": 3}
    assert read["tickets"][0]["tables"][0]["by_row"]["histogram"] == list(
        insight.tickets[0].tables[0].by_row.histogram
    )
    assert read["interactions"]["before"] == [[insight.interactions.before[0][0]]]


def test_what_cannot_be_written_is_said(tmp_path):
    ticket, counts = random_ticket(x=(2, 3)), {"x": torch.tensor([1, 2])}
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match=r"cannot write .*file"):
        write_insight(pruning_insight([ticket], counts), tmp_path / "file", plots=False)
    odd = Ticket(ticket.kept, facts={"loss": float("nan")})
    with pytest.raises(DataError, match="must be what JSON can hold"):
        write_insight(pruning_insight([odd], counts), tmp_path / "odd", plots=False)
    assert not (tmp_path / "odd").exists()
