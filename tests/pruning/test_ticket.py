"""Tickets with the thresholds that cut their tables: in memory, on disk, damaged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from stored import sign, tensors_file
from torch import Tensor, nn

import rarebit as rb
from rarebit.errors import ModelFileError, TableError
from rarebit.pruning.masked import (
    Ticket,
    load_ticket,
    save_ticket,
)

LEVELS = {"one for all": (1,), "by column": (3,), "by row": (5, 1), "by entry": (5, 3)}


def ticket_of(*, levels: Tensor | None = None) -> Ticket:
    return Ticket(
        {"user": torch.rand(5, 3) < 0.5, "item": torch.rand(2, 3) < 0.5},
        start={"user": torch.randn(5, 3)},
        levels=None if levels is None else {"user": levels},
        facts={"step": 40, "budget": 9},
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same(found: Ticket, ticket: Ticket) -> None:
    for part in ("kept", "start", "levels"):
        assert same(getattr(found, part), getattr(ticket, part))
    assert found.facts == ticket.facts


@pytest.mark.parametrize("shape", LEVELS.values(), ids=LEVELS)
def test_thresholds_of_every_kind_come_back(tmp_path, shape):
    ticket = ticket_of(levels=torch.randn(shape))
    found = load_ticket(save_ticket(ticket, tmp_path))
    assert_same(found, ticket)
    assert found.levels["user"].dtype == torch.float32


@settings(max_examples=20)
@given(data=st.data())
def test_any_mixture_of_what_tables_have_comes_back(data, tmp_path_factory):
    names = data.draw(st.lists(st.text(max_size=8), min_size=1, max_size=4, unique=True))
    some = st.sets(st.sampled_from(names))
    started, levelled = data.draw(some), data.draw(some)
    ticket = Ticket(
        {name: torch.rand(3, 2) < 0.5 for name in names},
        start={name: torch.randn(3, 2) for name in names if name in started},
        levels={name: torch.randn(2) for name in names if name in levelled},
    )
    assert_same(load_ticket(save_ticket(ticket, tmp_path_factory.mktemp("ticket"))), ticket)


def test_other_first_values_leave_the_rest_as_it_is():
    ticket = ticket_of(levels=torch.randn(3))
    start = {"item": torch.randn(2, 3)}
    moved, without = ticket.with_start(start), ticket.with_start(None)
    assert (list(moved.start), without.start) == (["item"], {})
    assert torch.equal(moved.start["item"], start["item"])
    for other in (moved, without):
        assert same(other.kept, ticket.kept)
        assert same(other.levels, ticket.levels)
        assert other.facts == ticket.facts
    assert list(ticket.start) == ["user"]


def test_of_one_table_only_what_is_its_own_is_left():
    ticket = ticket_of(levels=torch.randn(3))
    user, item = ticket.of("user"), ticket.of("item")
    assert (list(user.kept), list(user.start), list(user.levels)) == (["user"],) * 3
    assert (list(item.kept), list(item.start), list(item.levels)) == (["item"], [], [])
    assert user.facts == item.facts == ticket.facts


def test_thresholds_of_a_table_without_mask_are_refused():
    with pytest.raises(TableError, match="there are thresholds of 'tags', but no mask"):
        Ticket({"user": torch.eye(2).bool()}, levels={"tags": torch.zeros(1)})


def test_a_ticket_with_thresholds_is_applied_as_one_without(tmp_path):
    ticket = Ticket({"0": torch.eye(4).bool()}, levels={"0": torch.zeros(4)})
    model = nn.Sequential(nn.Embedding(4, 4))
    rb.apply_(model, rb.pruning.Masked(str(save_ticket(ticket, tmp_path))), verbose=False)
    assert torch.equal(model[0].weight != 0, torch.eye(4).bool())


def test_levels_that_are_slices_of_one_tensor_are_saved(tmp_path):
    shared = torch.randn(4, 3)  # safetensors refuses tensors that share memory
    masks = {name: torch.eye(3).bool() for name in ("a", "b")}
    ticket = Ticket(masks, levels={"a": shared[0], "b": shared[1]}, start={"a": shared[:3]})
    assert_same(load_ticket(save_ticket(ticket, tmp_path)), ticket)


def test_a_ticket_saved_again_replaces_the_first_and_leaves_two_files(tmp_path):
    for _ in range(2):
        ticket = ticket_of(levels=torch.randn(3))
        save_ticket(ticket, tmp_path)
    assert_same(load_ticket(tmp_path), ticket)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("part", ["start", "levels", "middle", "end"])
def test_a_bit_that_changes_anywhere_in_the_tensors_is_told(tmp_path, part):
    save_ticket(ticket_of(levels=torch.randn(5, 3)), tmp_path)
    path = tensors_file(tmp_path)
    content = bytearray(path.read_bytes())
    place = {"start": 0, "levels": content.index(b"levels"), "middle": len(content) // 2}
    content[place.get(part, len(content) - 1)] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="is damaged or belongs to another save"):
        load_ticket(tmp_path)


@pytest.mark.parametrize("file", ["tensors", "ticket.json"])
def test_a_file_cut_short_or_gone_is_told(tmp_path, file):
    save_ticket(ticket_of(), tmp_path)
    path = tensors_file(tmp_path) if file == "tensors" else tmp_path / file
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelFileError, match="is damaged"):
        load_ticket(tmp_path)
    path.unlink()
    with pytest.raises(ModelFileError, match="is missing"):
        load_ticket(tmp_path)


@pytest.mark.parametrize(("word", "other"), [("40", "41"), ("user", "uses"), ("budget", "gadget")])
def test_a_word_that_changes_in_the_description_is_told(tmp_path, word, other):
    path = save_ticket(ticket_of(), tmp_path) / "ticket.json"
    text = path.read_text("utf-8")
    assert text.count(word) >= 1
    path.write_text(text.replace(word, other))
    with pytest.raises(ModelFileError, match="is damaged"):
        load_ticket(tmp_path)


def test_tensors_that_lack_a_mask_are_told(tmp_path):
    save_ticket(ticket_of(levels=torch.zeros(3)), tmp_path)
    path = tensors_file(tmp_path)
    tensors = load_file(path)
    del tensors["1.kept"]
    save_file(tensors, path)
    # a file that someone made so, with checksums that are right
    sign(tmp_path, "ticket.json")
    with pytest.raises(ModelFileError, match=r"holds no readable ticket: '1\.kept'"):
        load_ticket(tmp_path)


def test_a_tensors_file_that_leads_out_of_the_folder_is_refused(tmp_path):
    folder = save_ticket(Ticket({"user": torch.eye(3).bool()}), tmp_path / "ticket")
    (file,) = folder.glob("*.safetensors")
    (tmp_path / "link").symlink_to(folder)
    assert load_ticket(tmp_path / "link").num_kept == 3
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelFileError, match="a link that leads out of its folder"):
        load_ticket(folder)
