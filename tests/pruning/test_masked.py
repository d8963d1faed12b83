"""e(i) = m_i ⊙ V_i: masked entries are zero under any optimizer; tickets in memory and on disk."""

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import ModelFileError, NoTableError, TableError, UnsupportedTableError
from rarebit.models.fm import FM
from rarebit.pruning.masked import Masked, MaskedTable, Ticket, load_ticket, save_ticket
from rarebit.pruning.pep import PEP, take_ticket
from rarebit.tables.table import full_table

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)
WIDTH = 4
NAMES = [f"backbone.tables.{field.name}" for field in FIELDS]


def fm() -> FM:
    return FM(rb.data.Schema(FIELDS), dim=WIDTH)


def random_masks() -> dict[str, Tensor]:
    shapes = zip(NAMES, FIELDS, strict=True)
    return {name: torch.rand(field.rows, WIDTH) < 0.4 for name, field in shapes}


def ids_of(rows: int = 8) -> Tensor:
    return torch.cat([torch.randint(f.rows, (rows, f.max_length)) for f in FIELDS], dim=1)


def masked_tables(model: FM) -> dict[str, MaskedTable]:
    tables = dict(zip(NAMES, model.backbone.tables.tables(), strict=True))
    assert all(isinstance(table, MaskedTable) for table in tables.values())
    return tables


def without_padding(name: str, rows: Tensor) -> Tensor:
    return rows.index_fill(0, torch.tensor([0]), 0.0) if name.endswith("tags") else rows


def test_a_model_hands_out_rows_times_mask():
    model, masks = fm(), random_masks()
    plain = {n: full_table(t) for n, t in zip(NAMES, model.backbone.tables.tables(), strict=True)}
    rb.apply_(model, Masked(Ticket(masks)), verbose=False)
    for name, table in masked_tables(model).items():
        assert torch.equal(table.kept, masks[name])
        for row in range(len(masks[name])):
            for column in range(WIDTH):
                expected = float(plain[name][row, column]) if masks[name][row, column] else 0.0
                assert float(table.weight[row, column].detach()) == expected


def test_a_table_equals_the_product_with_its_mask_and_so_does_its_gradient():
    mask = torch.rand(9, 5) < 0.5
    model = nn.Sequential(nn.Embedding(9, 5))
    weight = model[0].weight.detach().clone().requires_grad_()
    rb.apply_(model, Masked(Ticket({"0": mask})), verbose=False)
    ids, upstream = torch.tensor([3, 8, 3]), torch.randn(3, 5)
    (model(ids) * upstream).sum().backward()
    ((weight * mask)[ids] * upstream).sum().backward()
    assert_close(model[0].inner.weight.grad, weight.grad)
    assert not bool(model[0].inner.weight.grad[~mask].any())


OPTIMIZERS = {
    "SGD with momentum": {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.1, "lr": 0.05},
    "Adam": {"kind": "adam", "weight_decay": 0.1, "lr": 0.05},
    "AdamW": {"kind": "adam", "weight_decay": 0.1, "lr": 0.05, "decoupled": True},
    "Adagrad": {"kind": "adagrad", "weight_decay": 0.1, "lr": 0.05},
}


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masked_entries_stay_zero_whatever_trains_them(kind, tables):
    model, masks = fm(), random_masks()
    rb.apply_(model, Masked(Ticket(masks)), verbose=False)
    optimizer = rb.optimizer(model, tables=tables, **OPTIMIZERS[kind])
    ema = rb.EMA(model, optimizer, decay=0.9)
    for table in masked_tables(model).values():
        table.inner.weight.data[~table.kept] = 7.0  # what is stored there must not matter
    ids, wanted = ids_of(), torch.randn(8, 3, WIDTH)
    before = model.backbone.tables(ids).detach()
    for _ in range(5):
        optimizer.zero_grad()
        (model.backbone.tables(ids) - wanted).square().mean().backward()
        optimizer.step()
    assert not torch.equal(model.backbone.tables(ids), before)
    assert_zeros(model, masks)
    with ema.applied():
        assert_zeros(model, masks)
    rb.merge_(model, verbose=False)
    for name, table in zip(NAMES, model.backbone.tables.tables(), strict=True):
        assert type(table) is nn.Embedding
        assert not bool(table.weight[~masks[name]].any())


def assert_zeros(model: FM, masks: dict[str, Tensor]) -> None:
    for name, table in masked_tables(model).items():
        rows = full_table(table)
        assert not bool(rows[~masks[name]].any())
        assert bool(rows[masks[name]].any())


def test_what_is_stored_in_a_masked_entry_may_even_be_infinite():
    model = nn.Sequential(nn.Embedding(3, 2))
    rb.apply_(model, Masked(Ticket({"0": torch.eye(3, 2).bool()})), verbose=False)
    model[0].inner.weight.data[~torch.eye(3, 2).bool()] = float("inf")
    rows = model(torch.arange(3))
    rows.sum().backward()
    assert not bool(rows[~torch.eye(3, 2).bool()].any())
    assert torch.equal(model[0].inner.weight.grad, torch.eye(3, 2))


def test_without_a_ticket_the_zeros_of_a_table_stay_zero():
    model = fm()
    rb.apply_(model, PEP(init=-5.0), verbose=False)
    ticket = take_ticket(model)
    assert 0 < ticket.num_kept < 39 * WIDTH
    rb.merge_(model, verbose=False)
    rb.apply_(model, Masked(), verbose=False)
    for name, table in masked_tables(model).items():
        assert torch.equal(table.kept, ticket.kept[name])


def test_masking_twice_is_masking_once():
    model, masks = fm(), random_masks()
    rows = []
    for _ in range(2):
        rb.apply_(model, Masked(Ticket(masks)), verbose=False)
        rb.merge_(model, verbose=False)
        rows.append(torch.cat([full_table(t) for t in model.backbone.tables.tables()]))
    assert torch.equal(*rows)


def test_a_table_starts_at_the_values_of_the_ticket():
    model, masks = fm(), random_masks()
    start = {name: torch.randn(mask.shape) for name, mask in masks.items()}
    rb.apply_(model, Masked(Ticket(masks, start=start)), verbose=False)
    for name, table in masked_tables(model).items():
        expected = without_padding(name, start[name] * masks[name])
        assert torch.equal(full_table(table), expected)


def test_training_a_model_does_not_change_the_ticket():
    ticket = Ticket({"0": torch.eye(3).bool()}, start={"0": torch.ones(3, 3)})
    model = nn.Sequential(nn.Embedding(3, 3))
    rb.apply_(model, Masked(ticket), verbose=False)
    model[0].inner.weight.data.zero_()
    model[0].kept.zero_()
    assert ticket.num_kept == 3
    assert bool((ticket.start["0"] == 1).all())


def test_first_values_are_of_plain_tables():
    mask = torch.ones(9, 4).bool()
    ticket = Ticket({"0": mask}, start={"0": torch.randn(9, 4)})
    model = nn.Sequential(nn.Embedding(9, 4))
    rb.apply_(model, rb.MLET(inner_dim=8), verbose=False)
    with pytest.raises(
        UnsupportedTableError, match="initial values for '0', which is no plain table"
    ):
        rb.apply_(model, Masked(ticket), verbose=False)
    rb.apply_(model, Masked(ticket.with_start(None)), verbose=False)
    assert len(model[0].methods) == 2


def test_a_saved_model_needs_no_ticket(tmp_path):
    model, masks = fm(), random_masks()
    folder = str(save_ticket(Ticket(masks), tmp_path / "ticket"))
    rb.apply_(model, Masked(folder), verbose=False)
    rb.save_model(model, tmp_path / "model")
    (tmp_path / "ticket").rename(tmp_path / "gone")
    twin = rb.load_model(tmp_path / "model")
    for name, table in masked_tables(twin).items():
        assert torch.equal(table.kept, masks[name])
    ids = ids_of()
    assert torch.equal(twin.backbone.tables(ids), model.backbone.tables(ids))


def test_a_table_that_the_model_lacks_is_named():
    masks = random_masks() | {"backbone.tables.city": torch.ones(2, WIDTH).bool()}
    with pytest.raises(NoTableError, match=r"a mask for 'backbone\.tables\.city', which is not"):
        rb.apply_(fm(), Masked(Ticket(masks)), verbose=False)


def test_a_table_that_the_ticket_lacks_is_named_and_can_be_left_out():
    masks = random_masks()
    del masks[NAMES[2]]
    model, ticket = fm(), Ticket(masks)
    with pytest.raises(NoTableError, match=r"no mask for 'backbone\.tables\.item', only for"):
        rb.apply_(model, Masked(ticket), verbose=False)
    assert all(not info.methods for info in rb.find_tables(model))
    rb.apply_(model, Masked(ticket), where=lambda t: t.name in ticket.kept, verbose=False)
    assert [bool(info.methods) for info in rb.find_tables(model)][:3] == [True, True, False]


def test_a_mask_of_another_shape_is_named():
    masks = random_masks() | {NAMES[0]: torch.ones(21, WIDTH).bool()}
    with pytest.raises(UnsupportedTableError, match=r"21 x 4 for .*user', which is 20 x 4"):
        rb.apply_(fm(), Masked(Ticket(masks)), verbose=False)


def test_several_masks_need_the_names_of_a_model():
    with pytest.raises(UnsupportedTableError, match="masks of several tables, by name"):
        Masked(Ticket(random_masks())).wrap(nn.Embedding(20, WIDTH))


def test_a_ticket_of_pruning_fits_hashed_tables():
    model = fm()
    for method in (rb.Hashing(buckets=7), PEP(init=-5.0)):
        rb.apply_(model, method, verbose=False)
    ticket, twin = take_ticket(model), fm()
    for method in (rb.Hashing(buckets=7), Masked(ticket)):
        rb.apply_(twin, method, verbose=False)
    for name, table in zip(NAMES, twin.backbone.tables.tables(), strict=True):
        assert torch.equal(table.inner.kept, ticket.kept[name])


def test_what_is_no_mask_is_refused():
    with pytest.raises(TableError, match="needs the mask of at least one table"):
        Ticket({})
    with pytest.raises(TableError, match=r"mask of 'a' must be rows x width of torch\.bool, got"):
        Ticket({"a": torch.ones(2, 2)})
    with pytest.raises(TableError, match=r"mask of 'a' must be .* got \(3,\)"):
        Ticket({"a": torch.ones(3).bool()})
    with pytest.raises(TableError, match="initial values of 'b', but no mask"):
        Ticket({"a": torch.ones(2, 2).bool()}, start={"b": torch.ones(2, 2)})
    with pytest.raises(TableError, match=r"initial values of 'a' must be \(2, 2\) of floats"):
        Ticket({"a": torch.ones(2, 2).bool()}, start={"a": torch.ones(2, 3)})


@settings(max_examples=25)
@given(data=st.data())
def test_a_ticket_comes_back_from_its_folder(data, tmp_path_factory):
    names = data.draw(st.lists(st.text(max_size=8), min_size=1, max_size=3, unique=True))
    sizes = st.tuples(st.integers(0, 5), st.integers(1, 9))
    kept = {name: torch.rand(data.draw(sizes)) < 0.5 for name in names}
    start = {n: torch.randn(m.shape) for n, m in kept.items() if data.draw(st.booleans())}
    facts = {"step": data.draw(st.integers()), "thresholds": [0.5, None]}
    folder = save_ticket(Ticket(kept, start=start, facts=facts), tmp_path_factory.mktemp("ticket"))
    found = load_ticket(folder)
    assert list(found.kept) == names
    assert all(torch.equal(found.kept[name], kept[name]) for name in names)
    assert found.start.keys() == start.keys()
    assert all(torch.equal(found.start[name], values) for name, values in start.items())
    assert found.facts == facts


def saved(folder, mask: Tensor | None = None):
    return save_ticket(Ticket({"a": torch.eye(4).bool() if mask is None else mask}), folder)


def test_a_second_ticket_takes_the_place_of_the_first(tmp_path):
    saved(tmp_path)
    saved(tmp_path, torch.zeros(4, 4).bool())
    assert load_ticket(tmp_path).num_kept == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_ticket_that_cannot_be_written_leaves_the_first_in_place(tmp_path):
    saved(tmp_path)
    ticket = Ticket({"a": torch.zeros(4, 4).bool()}, facts={"step": {1, 2}})
    with pytest.raises(ModelFileError, match=r"cannot write.*is not JSON serializable"):
        save_ticket(ticket, tmp_path)
    assert load_ticket(tmp_path).num_kept == 4
    assert len(list(tmp_path.iterdir())) == 2, "something half-written is left"


def test_a_missing_or_foreign_folder_is_told(tmp_path):
    with pytest.raises(ModelFileError, match=r"holds no ticket: ticket\.json is missing"):
        load_ticket(tmp_path / "nowhere")
    (tmp_path / "ticket.json").write_text('{"format": 1, "model": "fm"}')
    with pytest.raises(ModelFileError, match="does not describe a ticket of Rarebit"):
        load_ticket(tmp_path)
    (tmp_path / "ticket.json").write_bytes(b"\xff\x00not JSON")
    with pytest.raises(ModelFileError, match=r"is damaged: .*; save the ticket again"):
        load_ticket(tmp_path)


@pytest.mark.parametrize("file", ["ticket.json", "tensors"])
def test_every_byte_that_changes_is_told(tmp_path, file):
    path = next(p for p in saved(tmp_path).iterdir() if p.name.startswith(file))
    good = path.read_bytes()
    for place in range(0, len(good), 3):
        changed = bytearray(good)
        changed[place] ^= 1
        path.write_bytes(bytes(changed))
        try:
            ticket = load_ticket(tmp_path)
        except ModelFileError:
            continue
        assert json.loads(changed) == json.loads(good), f"byte {place} is not missed"
        assert torch.equal(ticket.kept["a"], torch.eye(4).bool())


def test_a_description_cannot_name_a_file_elsewhere(tmp_path):
    path = saved(tmp_path / "ticket") / "ticket.json"
    from rarebit.storage import files as module

    described = json.loads(path.read_text()) | {
        "tensors": "../tensors-0123456789abcdef.safetensors"
    }
    described[module.OWN_CHECKSUM] = module.own_checksum(described)
    path.write_text(json.dumps(described))
    with pytest.raises(ModelFileError, match="does not describe a ticket of Rarebit"):
        load_ticket(tmp_path / "ticket")


def test_a_later_format_and_a_missing_file_are_told(tmp_path):
    path = saved(tmp_path) / "ticket.json"
    good = path.read_text()
    path.write_text(re.sub(r'"format": \d', '"format": 9', good))
    with pytest.raises(
        ModelFileError, match=r"was written in format 9 by .*; this version reads up to format 2"
    ):
        load_ticket(tmp_path)
    path.write_text(good)
    next(p for p in tmp_path.iterdir() if p.name.startswith("tensors")).unlink()
    with pytest.raises(ModelFileError, match=r"is incomplete: tensors-.* is missing"):
        load_ticket(tmp_path)
