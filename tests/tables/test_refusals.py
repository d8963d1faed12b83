"""What a table can do that no method could keep: refused by name, in one sentence."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import rarebit as rb
from rarebit.errors import TableError, UnsupportedTableError
from rarebit.models.fm import FM

HASHING = rb.Hashing(buckets=3)


class OwnEmbedding(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


class OwnBag(nn.EmbeddingBag):
    pass


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def nothing(*_):
    return None


def refused(model: nn.Module, message: str) -> None:
    """Assert that the method is refused with this message, and that nothing has changed."""
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedTableError, match=re.escape(message)):
        rb.apply_(model, HASHING, verbose=False)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            OwnEmbedding(9, 4),
            (
                "Hashing(buckets=3) cannot be applied to '0': it is a OwnEmbedding, a subclass of "
                "nn.Embedding that may look rows up in its own way. "
                "Leave it out with where=lambda t: t.name != '0'"
            ),
        ),
        (OwnBag(9, 4), "it is a OwnBag, a subclass of nn.EmbeddingBag that may look"),
        (nn.Embedding(9, 4, max_norm=1.5), "max_norm=1.5 rewrites rows at every lookup"),
        (nn.EmbeddingBag(9, 4, max_norm=2), "max_norm=2 rewrites rows at every lookup"),
        (nn.Embedding(9, 4, scale_grad_by_freq=True), "scale_grad_by_freq=True rescales the"),
        (nn.EmbeddingBag(9, 4, scale_grad_by_freq=True), "scale_grad_by_freq=True rescales the"),
        (nn.Embedding(9, 4, device="meta"), "its weight is a Parameter on meta, no ordinary"),
        (nn.EmbeddingBag(9, 4, device="meta"), "its weight is a Parameter on meta, no ordinary"),
    ],
)
def test_a_table_with_ways_of_its_own_is_refused(table, message):
    refused(nn.Sequential(table), message)


def test_a_parametrized_table_is_refused():
    table = nn.Embedding(9, 4)
    parametrize.register_parametrization(table, "weight", Doubled())
    refused(nn.Sequential(table), "it is a ParametrizedEmbedding, a subclass of nn.Embedding")


def test_a_table_tied_to_a_layer_is_refused():
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    refused(model, "its weight is tied to 'head.weight', which would keep the old one")


def test_two_tables_tied_to_each_other_are_refused():
    model = nn.ModuleDict({"a": nn.Embedding(9, 4), "b": nn.EmbeddingBag(9, 4)})
    model["b"].weight = model["a"].weight
    refused(model, "cannot be applied to 'a': its weight is tied to 'b.weight'")


def test_a_table_tied_to_a_bare_parameter_is_refused():
    model = nn.Sequential(nn.Embedding(9, 4))
    model.register_parameter("copy", model[0].weight)
    refused(model, "its weight is tied to 'copy'")


def test_a_wrapped_table_that_was_tied_is_refused_too():
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 5, bias=False)})
    rb.apply_(model, rb.Hashing(buckets=5), verbose=False)
    model["head"].weight = model["embed"].inner.weight
    refused(model, "its weight is tied to 'head.weight', which would keep the old one")
    with pytest.raises(UnsupportedTableError, match="cannot merge 'embed': its weight is tied to"):
        rb.merge_(model)


def test_two_models_with_tied_stacks_are_refused():
    schema = rb.data.Schema(
        (rb.data.Field(name="user", rows=9), rb.data.Field(name="item", rows=8))
    )
    model = nn.ModuleDict({"a": FM(schema, dim=3), "b": FM(schema, dim=3)})
    stacks = [model[name].backbone.tables.stacks[0] for name in "ab"]
    stacks[1].embedding.weight = stacks[0].embedding.weight
    tied = "b.backbone.tables.stacks.0.embedding.weight"
    refused(model, f"cannot be applied to 'a.backbone.tables.user': its weight is tied to '{tied}'")


def test_a_collection_in_two_places_is_not_tied():
    tables = FM(rb.data.Schema((rb.data.Field(name="user", rows=9),)), dim=3).backbone.tables
    model = nn.ModuleDict({"a": nn.Sequential(tables), "b": nn.Sequential(tables)})
    assert rb.apply_(model, HASHING, verbose=False)
    assert model["a"][0] is model["b"][0]


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
        nn.Module.register_state_dict_pre_hook,
        nn.Module.register_state_dict_post_hook,
        nn.Module.register_load_state_dict_pre_hook,
        nn.Module.register_load_state_dict_post_hook,
    ],
)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_with_a_hook_is_refused_until_it_is_removed(register, kind):
    model = nn.Sequential(kind(9, 4))
    handle = register(model[0], nothing)
    refused(model, "it has hooks, which a replacement would not run: remove them first")
    handle.remove()
    assert rb.apply_(model, HASHING, verbose=False)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_with_a_hook_is_refused_until_it_is_removed(name):
    model = nn.Sequential(nn.Embedding(9, 4))
    handle = getattr(model[0].weight, name)(nothing)
    refused(model, "its weight has gradient hooks, which a replacement would not run")
    handle.remove()
    assert rb.apply_(model, HASHING, verbose=False)


def test_a_table_with_a_patched_forward_is_refused():
    model = nn.Sequential(nn.Embedding(9, 4))
    model[0].forward = nothing
    refused(model, "its forward was replaced by another function, which a new table would not call")
    del model[0].forward
    assert rb.apply_(model, HASHING, verbose=False)


def test_a_wrapped_table_with_a_hook_is_refused_a_second_method():
    model = nn.Sequential(nn.Embedding(9, 4))
    rb.apply_(model, rb.Hashing(buckets=8), verbose=False)
    handle = model[0].inner.weight.register_hook(nothing)
    refused(model, "its weight has gradient hooks")
    handle.remove()
    model[0].register_forward_hook(nothing)
    refused(model, "it has hooks")


def test_a_stacked_table_with_a_hook_is_refused():
    model = FM(
        rb.data.Schema((rb.data.Field(name="user", rows=9), rb.data.Field(name="item", rows=8))),
        dim=3,
    )
    handle = next(model.backbone.tables.parameters()).register_hook(nothing)
    refused(model, "cannot be applied to 'backbone.tables.user': its weight has gradient hooks")
    handle.remove()
    assert rb.apply_(model, HASHING, verbose=False)


def test_a_hook_inside_a_table_is_refused():
    model = nn.Sequential(nn.Embedding(9, 4))
    rb.apply_(model, rb.Hashing(buckets=8), verbose=False)
    model[0].inner.register_forward_hook(nothing)
    refused(model, "it has hooks")
    model = FM(
        rb.data.Schema((rb.data.Field(name="user", rows=9), rb.data.Field(name="item", rows=8))),
        dim=3,
    )
    model.backbone.tables.stacks[0].register_forward_hook(nothing)
    refused(model, "cannot be applied to 'backbone.tables.user': it has hooks")


def test_a_hook_on_a_collection_is_kept():
    tables, seen = (
        FM(rb.data.Schema((rb.data.Field(name="user", rows=9),)), dim=3).backbone.tables,
        [],
    )
    tables.register_forward_hook(lambda *_: seen.append(1))
    rb.apply_(tables, HASHING, verbose=False)
    tables(torch.tensor([[1]]))
    assert seen == [1]


def test_a_padding_row_that_is_not_zero_is_refused():
    table = nn.Embedding(9, 4, padding_idx=2)
    nn.init.ones_(table.weight)
    refused(nn.Sequential(table), "its padding row 2 is not zero; set it to zero first")
    table.weight.data[2] = 0.0
    assert rb.apply_(nn.Sequential(table), HASHING, verbose=False)


def test_a_bag_leaves_padding_out_whatever_its_row_holds():
    bag = nn.EmbeddingBag(9, 4, padding_idx=2)
    nn.init.ones_(bag.weight)
    ids = torch.tensor([[2, 5], [2, 2]])
    model, expected = nn.Sequential(bag), bag(ids)
    rb.apply_(model, HASHING, verbose=False)
    assert bool((model(ids) == expected).all())


def test_a_table_that_is_the_whole_model_is_refused():
    for table in (nn.Embedding(9, 4), nn.EmbeddingBag(9, 4)):
        refused(table, "it is the whole model, so there is nothing to replace it in: put it in")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_wrapped_table_alone_is_refused_too(kind):
    model = nn.Sequential(kind(9, 4))
    rb.apply_(model, rb.Hashing(buckets=8), verbose=False)
    refused(model[0], "it is the whole model")
    with pytest.raises(UnsupportedTableError, match="cannot merge '': it is the whole model"):
        rb.merge_(model[0])


def test_a_collection_may_be_the_whole_model():
    model = FM(
        rb.data.Schema((rb.data.Field(name="user", rows=9), rb.data.Field(name="item", rows=8))),
        dim=3,
    )
    changes = rb.apply_(model.backbone.tables, HASHING, verbose=False)
    assert [info.name for info in changes.after] == ["user", "item"]


def test_a_compiled_model_is_refused():
    model = nn.Sequential(nn.Embedding(9, 4))
    compiled = torch.compile(model, backend="eager")
    message = "is compiled, and a compiled module keeps calling its old tables; change the tables"
    refused(compiled, f"the model {message}")
    refused(nn.ModuleDict({"inner": compiled}), f"'inner' in the model {message}")
    model.compile(backend="eager")
    refused(model, f"the model {message}")


@pytest.mark.parametrize("call", [rb.merge_, rb.pack_])
@pytest.mark.parametrize(
    ("wrap", "instead", "inside"),
    [
        (
            lambda model: torch.compile(model, backend="eager"),
            r"model\._orig_mod, and compile that again",
            lambda model: model._orig_mod,
        ),
        (nn.DataParallel, r"model\.module, and wrap that again", lambda model: model.module),
        (compiled_in_place, r"copy\.deepcopy\(model\), which is not compiled", copy.deepcopy),
    ],
)
def test_after_training_the_model_inside_a_wrapper_is_changed(call, wrap, instead, inside):
    model = nn.Sequential(nn.Embedding(200, 4))
    rb.apply_(model, rb.Hashing(buckets=190), verbose=False)
    wrapped = wrap(model)
    with pytest.raises(UnsupportedTableError, match=f"; call {call.__name__} on {instead}"):
        call(wrapped, verbose=False)
    call(inside(wrapped), verbose=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model_is_refused():
    message = "the model is a TorchScript module, whose parts cannot be replaced; change the tables"
    with pytest.raises(UnsupportedTableError, match=message):
        rb.apply_(torch.jit.script(nn.Sequential(nn.Embedding(9, 4))), HASHING)


def test_a_model_wrapped_for_several_devices_is_refused():
    wrapped = nn.DataParallel(nn.Sequential(nn.Embedding(9, 4)))
    refused(wrapped, "the model is wrapped in DataParallel, which has already registered its par")


def test_every_refusal_is_listed_before_it_is_met():
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(9, 4))
    first, second = rb.find_tables(model)
    assert first.refusal == "max_norm=1 rewrites rows at every lookup"
    assert second.refusal is None


def test_a_table_that_is_not_chosen_is_not_refused():
    model = nn.Sequential(OwnEmbedding(9, 4), nn.Embedding(9, 4))
    assert rb.apply_(model, HASHING, where=lambda t: t.refusal is None, verbose=False)
    assert type(model[0]) is OwnEmbedding


def test_a_refusal_is_a_value_error_of_the_tree():
    assert issubclass(UnsupportedTableError, TableError)
    assert issubclass(TableError, ValueError)
