"""`apply_` and `merge_`: which tables change, where they are put, and what is said about it."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import NoTableError, OptimizerError, UnsupportedTableError
from rarebit.models.fm import FM

HASHING = rb.Hashing(buckets=5)


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(30, 4)
        self.item = nn.Embedding(20, 6)
        self.bias = nn.Embedding(30, 1)


def kinds(model: nn.Module) -> dict[str, tuple[str, ...]]:
    return {info.name: info.methods for info in rb.find_tables(model)}


def test_all_tables_but_the_narrow_ones_change_by_default():
    model = TwoTables()
    changes = rb.apply_(model, HASHING, verbose=False)
    assert [info.name for info in changes.after] == ["user", "item"]
    assert changes.skipped == (("bias", "narrower than min_width=2"),)
    assert kinds(model) == {"user": (str(HASHING),), "item": (str(HASHING),), "bias": ()}


def test_narrow_tables_change_when_they_are_asked_for():
    model = TwoTables()
    changes = rb.apply_(model, HASHING, min_width=1, verbose=False)
    assert [info.name for info in changes.after] == ["user", "item", "bias"]
    assert model.bias(torch.tensor([29])).shape == (1, 1)


def test_first_order_weights_of_a_model_are_left_alone():
    model = FM(
        rb.data.Schema((rb.data.Field(name="user", rows=9), rb.data.Field(name="item", rows=8))),
        dim=3,
    )
    changes = rb.apply_(model, HASHING, verbose=False)
    assert [name for name, _ in changes.skipped] == ["wide.tables.user", "wide.tables.item"]


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (lambda t: t.rows > 25, ["user"]),
        (lambda t: t.width == 6, ["item"]),
        (lambda t: t.name == "item", ["item"]),
        (lambda t: t.field in {"user", "item"}, ["user", "item"]),
        (lambda t: t.kind == "embedding" and not t.methods and t.trainable, ["user", "item"]),
    ],
)
def test_where_chooses_tables(where, chosen):
    changes = rb.apply_(TwoTables(), HASHING, where=where, verbose=False)
    assert [info.name for info in changes.after] == chosen
    assert {name for name, why in changes.skipped if why == "not chosen"} == {
        "user",
        "item",
    } - set(chosen)


def test_where_chooses_fields_of_a_stack():
    model = FM(
        rb.data.Schema((rb.data.Field(name="user", rows=9), rb.data.Field(name="item", rows=8))),
        dim=3,
    )
    rb.apply_(model, HASHING, where=lambda t: t.field == "item", verbose=False)
    assert kinds(model.backbone) == {"tables.user": (), "tables.item": (str(HASHING),)}


def test_what_changed_is_returned():
    changes = rb.apply_(TwoTables(), HASHING, where=lambda t: t.name == "user", verbose=False)
    (before,), (after,) = changes.before, changes.after
    assert (before.num_parameters, after.num_parameters) == (120, 20)
    assert (before.methods, after.methods) == ((), ("Hashing(buckets=5)",))
    assert bool(changes)


def test_what_changed_is_printed(capsys):
    changes = rb.apply_(TwoTables(), HASHING, where=lambda t: t.rows > 25)
    printed = capsys.readouterr().out
    assert printed == f"{changes}\n"
    assert printed.splitlines() == [
        "Hashing(buckets=5): 1 of 3 tables, 120 -> 20 weights stored",
        "  user  30 x 4, 120 -> 20",
        "  left alone, not chosen: item",
        "  left alone, narrower than min_width=2: bias",
    ]


def test_nothing_is_printed_when_not_wanted(capsys):
    rb.apply_(model := TwoTables(), HASHING, verbose=False)
    rb.merge_(model, verbose=False)
    assert capsys.readouterr() == ("", "")


def test_a_long_report_is_shortened():
    model = nn.ModuleList(
        [*(nn.Embedding(2000, 4) for _ in range(12)), *(nn.Embedding(9, 1) for _ in range(5))]
    )
    lines = str(rb.apply_(model, HASHING, verbose=False)).splitlines()
    assert lines[0] == "Hashing(buckets=5): 12 of 17 tables, 96,000 -> 240 weights stored"
    assert lines[1] == "  0  2,000 x 4, 8,000 -> 20"
    assert lines[8] == "  and 5 more"
    assert lines[9:] == ["  left alone, narrower than min_width=2: 12, 13, 14 and 2 more"]


def test_eight_tables_are_not_shortened():
    model = nn.ModuleList([nn.Embedding(9, 4) for _ in range(8)])
    lines = str(rb.apply_(model, HASHING, verbose=False)).splitlines()
    assert len(lines) == 9
    assert "more" not in lines[-1]


def test_merge_tells_what_it_did(capsys):
    rb.apply_(model := TwoTables(), HASHING, where=lambda t: t.name == "user", verbose=False)
    assert bool(rb.merge_(model))
    assert capsys.readouterr().out.splitlines() == [
        "merge: 1 of 3 tables, 20 -> 120 weights stored",
        "  user  30 x 4, 20 -> 120",
        "  left alone, already plain: item, bias",
    ]


def test_merging_a_plain_model_is_false_and_says_so(capsys):
    assert not rb.merge_(TwoTables())
    assert capsys.readouterr().out.splitlines() == [
        "merge: nothing to do in 3 tables",
        "  left alone, already plain: user, item, bias",
    ]
    assert not rb.merge_(nn.Linear(2, 2), verbose=False)


def test_merge_where_leaves_the_others():
    rb.apply_(model := TwoTables(), HASHING, verbose=False)
    changes = rb.merge_(model, where=lambda t: t.name == "item", verbose=False)
    assert dict(changes.skipped) == {"user": "not chosen", "bias": "already plain"}
    assert kinds(model) == {"user": (str(HASHING),), "item": (), "bias": ()}


def test_nothing_matched_lists_the_tables_and_the_reasons():
    message = (
        r"Hashing\(buckets=25\) matched no table; the model has user \(not chosen\), "
        r"item \(no more than 25 rows\), bias \(narrower than min_width=2\)"
    )
    with pytest.raises(NoTableError, match=message):
        rb.apply_(TwoTables(), rb.Hashing(buckets=25), where=lambda t: t.name != "user")


def test_nothing_matched_in_a_model_of_many_tables_is_shortened():
    model = nn.ModuleList([nn.Embedding(3, 4) for _ in range(10)])
    with pytest.raises(NoTableError, match=r"7 \(no more than 5 rows\) and 2 more$"):
        rb.apply_(model, HASHING)


def test_a_model_without_tables_is_an_error():
    with pytest.raises(NoTableError, match=r"no table: the model has no nn.Embedding and no nn.E"):
        rb.apply_(nn.Sequential(nn.Linear(3, 3)), HASHING)


def test_either_all_chosen_tables_change_or_none():
    model = nn.ModuleDict({"good": nn.Embedding(9, 4), "bad": nn.Embedding(9, 4, max_norm=1.0)})
    with pytest.raises(UnsupportedTableError, match="cannot be applied to 'bad'"):
        rb.apply_(model, HASHING)
    assert type(model["good"]) is nn.Embedding
    rb.apply_(model, HASHING, where=lambda t: t.name != "bad", verbose=False)  # as the message says
    assert isinstance(model["good"], rb.Table)


def test_an_error_while_a_table_is_made_changes_none():
    model = nn.ModuleDict({"good": nn.Embedding(9, 4), "bad": nn.Embedding(9, 4)})
    model["bad"].weight.data[0, 0] = float("nan")
    with pytest.raises(
        UnsupportedTableError, match="'bad': its row 0 has numbers that are not finite"
    ):
        rb.apply_(model, rb.LowRank(rank=2))
    assert kinds(model) == {"good": (), "bad": ()}


def test_an_optimizer_that_is_none_changes_nothing():
    model = TwoTables()
    for change in (lambda: rb.apply_(model, HASHING, optimizer=rb.optimizer), nothing_to_merge):
        with pytest.raises(OptimizerError, match="optimizer= takes a torch optimizer, got a func"):
            change()
    assert not any(kinds(model).values())


def nothing_to_merge():
    rb.merge_(TwoTables(), optimizer=rb.optimizer)


def test_merging_is_all_or_nothing_too():
    model = nn.ModuleDict({"good": nn.Embedding(9, 4), "bad": nn.Embedding(9, 4)})
    rb.apply_(model, HASHING, verbose=False)
    model["bad"].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedTableError, match="cannot merge 'bad': it has hooks"):
        rb.merge_(model)
    assert isinstance(model["good"], rb.Table)


def test_a_table_in_two_places_is_replaced_in_both():
    shared = nn.Embedding(9, 4)
    model = nn.ModuleDict(
        {
            "own": shared,
            "row": nn.Sequential(shared, nn.Linear(4, 2)),
            "list": nn.ModuleList([nn.Identity(), shared]),
            "dict": nn.ModuleDict({"x": shared}),
        }
    )
    changes = rb.apply_(model, HASHING, verbose=False)
    assert [info.name for info in changes.after] == ["own"]
    places = [model["own"], model["row"][0], model["list"][1], model["dict"]["x"]]
    assert all(place is places[0] for place in places)
    assert isinstance(places[0], rb.Table)
    rb.merge_(model, verbose=False)
    places = [model["own"], model["row"][0], model["list"][1], model["dict"]["x"]]
    assert all(place is places[0] for place in places)
    assert type(places[0]) is nn.Embedding


def test_a_part_in_two_places_is_changed_once():
    tower = nn.Sequential(nn.Embedding(9, 4))
    model = nn.ModuleDict({"left": tower, "right": tower})
    rb.apply_(model, HASHING, verbose=False)
    assert model["left"][0] is model["right"][0]
    assert [info.name for info in rb.find_tables(model)] == ["left.0"]


def test_a_sequential_still_runs_in_order():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    rb.apply_(model, rb.LowRank(rank=4), verbose=False)
    assert isinstance(model[0], rb.Table)
    assert model(torch.tensor([1, 8])).shape == (2, 2)


def test_what_no_gradient_reaches_is_not_copied_or_kept():
    model = nn.Sequential(nn.Embedding(9, 4))
    model(torch.tensor([1])).sum().backward()
    rb.apply_(model, HASHING, verbose=False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_reads_weight_itself_goes_on_working():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.item = nn.Embedding(9, 4)

        def forward(self, ids):
            return self.item(ids) @ self.item.weight.T

    model, ids = Tied(), torch.tensor([[1, 2], [3, 8]])
    expected = model(ids)
    rb.apply_(model, rb.LowRank(rank=4), verbose=False)
    assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
    model(ids).sum().backward()
    assert bool(model.item.right.grad.any())


def test_int32_and_int64_ids_give_the_same_rows():
    model = nn.ModuleList([nn.Embedding(9, 4, padding_idx=0), nn.EmbeddingBag(9, 4, padding_idx=0)])
    rb.apply_(model, HASHING, verbose=False)
    ids = torch.tensor([[0, 8], [6, 6]])
    for table in model:
        assert_close(table(ids.int()), table(ids), rtol=0, atol=0)
    ids, offsets = ids.flatten(), torch.tensor([0, 1])
    assert_close(model[1](ids.int(), offsets.int()), model[1](ids, offsets), rtol=0, atol=0)
    assert_close(model[1](ids.int(), offsets), model[1](ids, offsets), rtol=0, atol=0)


def test_a_table_too_long_to_be_built_at_once_is_merged_whole():
    model = nn.Sequential(nn.Embedding(70_000, 2))
    rb.apply_(model, HASHING, verbose=False)
    stored = model[0].inner.weight.detach()
    rb.merge_(model, verbose=False)
    assert_close(model[0].weight.detach(), stored.repeat(14_000, 1), rtol=0, atol=0)


def test_an_empty_bag_without_ids_is_zero():
    model = nn.ModuleList([nn.EmbeddingBag(9, 4, mode="sum"), nn.EmbeddingBag(9, 4, padding_idx=0)])
    rb.apply_(model, HASHING, verbose=False)
    nothing, offsets = torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])
    for table in model:
        assert not bool(table(nothing, offsets).any())


def test_bag_weights_get_the_gradient_that_torch_gives_them():
    plain = nn.EmbeddingBag(9, 4, mode="sum")
    model = nn.ModuleList([nn.EmbeddingBag.from_pretrained(plain.weight.detach(), mode="sum")])
    rb.apply_(model, rb.Hashing(buckets=9), verbose=False)
    ids, gradients = torch.tensor([[1, 2, 8]]), []
    for table in (plain, model[0]):
        weights = torch.ones(1, 3, requires_grad=True)
        table(ids, per_sample_weights=weights).square().sum().backward()
        gradients.append(weights.grad)
    assert_close(*gradients)


def test_a_bag_refuses_what_torch_refuses():
    model = nn.ModuleList([nn.EmbeddingBag(9, 4, mode="mean")])
    rb.apply_(model, HASHING, verbose=False)
    with pytest.raises(ValueError, match="offsets has to be a 1D Tensor"):
        model[0](torch.tensor([1, 2]))
    with pytest.raises(NotImplementedError, match="per_sample_weights"):
        model[0](torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2))


def test_a_table_shows_what_it_is():
    model = nn.ModuleList([nn.Embedding(9, 4), nn.EmbeddingBag(9, 4, mode="max")])
    rb.apply_(model, HASHING, verbose=False)
    assert "HashedTable(\n    9, 4\n" in repr(model)
    assert "mode='max'" in repr(model)
