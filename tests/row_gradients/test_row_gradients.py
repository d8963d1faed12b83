"""Row gradients: the sum rule is plain backward, for every table, and what a rule gets to see."""

import copy

import pytest
import torch
from contract.model_checks import lively, make_batch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.models.deepfm import DeepFM
from rarebit.row_gradients.seam import RowGradients, sum_losses
from rarebit.testing import counting_large_tensors


class Net(nn.Module):
    """Any table, then a network that is not linear."""

    def __init__(self, table, width=6):
        super().__init__()
        self.table = table
        self.out = nn.Linear(width, 3)

    def forward(self, *args, **kwargs):
        return self.out(torch.tanh(self.table(*args, **kwargs)))


class Tied(nn.Module):
    """A language model in small: the output's weight is the table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.hidden = nn.Linear(6, 6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.hidden(self.table(ids))))


def with_methods(model, *methods):
    for method in methods:
        rb.apply_(model, method, verbose=False)
    return model


def deepfm(*methods):
    return with_methods(lively(lambda schema: DeepFM(schema, dim=4, hidden=(8,))), *methods)


def embedding(**options):
    return Net(nn.Embedding(12, 6, **options))


def bag(**options):
    return Net(nn.EmbeddingBag(12, 6, **options))


def randoms(*shape, rows=12):
    return torch.randint(rows, shape)


def weighted_bag(**options):
    weights = torch.randn(90, 3, requires_grad=True)
    return bag(mode="sum", **options), (randoms(90, 3), None, weights)


HASHING, LOW_RANK = rb.Hashing(buckets=5), rb.LowRank(rank=2)
EXACT = {
    "plain": lambda: (embedding(), (randoms(40),)),
    "plain, ids of three axes": lambda: (embedding(), (randoms(4, 5, 2),)),
    "plain, narrow ids": lambda: (embedding(), (randoms(40).int(),)),
    "padding": lambda: (embedding(padding_idx=3), (randoms(40),)),
    "sparse": lambda: (embedding(sparse=True), (randoms(40),)),
    "sparse, padding": lambda: (embedding(sparse=True, padding_idx=-1), (randoms(40),)),
    "bag, sum": lambda: (bag(mode="sum"), (randoms(20, 3),)),
    "bag, padding": lambda: (bag(mode="sum", padding_idx=2), (randoms(20, 3),)),
    "bag, offsets": lambda: (bag(mode="sum"), (randoms(40), torch.arange(0, 40, 8))),
    "bag, max": lambda: (bag(mode="max"), (randoms(20, 3),)),
    "bag, max, padding": lambda: (bag(mode="max", padding_idx=2), (randoms(20, 3),)),
    "bag, sparse mean": lambda: (bag(mode="mean", sparse=True), (randoms(20, 3),)),
    "hashing": lambda: (with_methods(embedding(), HASHING), (randoms(40),)),
    "low rank": lambda: (with_methods(embedding(padding_idx=None), LOW_RANK), (randoms(40),)),
    "composition": lambda: (with_methods(embedding(), HASHING, LOW_RANK), (randoms(40),)),
    "bag with methods": lambda: (
        with_methods(bag(mode="mean", padding_idx=2), HASHING, LOW_RANK),
        (randoms(20, 3),),
    ),
    "tied": lambda: (Tied(), (randoms(40, rows=9),)),
    "stacked": lambda: (deepfm(), (make_batch(),)),
    "stacked, hashing": lambda: (deepfm(rb.Hashing(buckets=4)), (make_batch(),)),
    "stacked, low rank": lambda: (deepfm(LOW_RANK), (make_batch(),)),
    "stacked, composition": lambda: (deepfm(rb.Hashing(buckets=4), LOW_RANK), (make_batch(),)),
    "bag, mean": lambda: (bag(mode="mean"), (randoms(90, 3),)),
    "bag, mean, padding": lambda: (bag(mode="mean", padding_idx=2), (randoms(90, 3),)),
    "bag, mean, offsets": lambda: (bag(), (randoms(90), torch.tensor([0, 0, 3, 40, 90]))),
    "bag, mean, last offset": lambda: (
        bag(include_last_offset=True, padding_idx=2),
        (randoms(90), torch.tensor([0, 5, 40, 90], dtype=torch.int64)),
    ),
    "bag, weights": weighted_bag,
    "bag, weights, sparse": lambda: weighted_bag(sparse=True),
    "bag, weights, padding": lambda: weighted_bag(padding_idx=2),
}


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def losses_of(model, args, number=1):
    scores = model(*args)
    return [F.softplus(scores * (k + 1)).mean() for k in range(number)]


def plain_and_by_rule(case, number=1, static=None):
    """Return the gradients of plain backward, and those with the sum rule."""
    model, args = case()
    plain = copy.deepcopy(model)
    sum(losses_of(plain, args, number)).backward()
    with RowGradients(model, sum_losses) as rows:
        rows._static = static
        rows.backward(*losses_of(model, args, number))
    return gradients_of(plain), gradients_of(model)


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize("static", [None, True], ids=["compact", "static"])
@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_the_sum_rule_is_plain_backward_to_the_last_bit(case, static):
    plain, found = plain_and_by_rule(case, static=static)
    for name, gradient in plain.items():
        assert found[name].is_sparse == gradient.is_sparse, name
        assert torch.equal(dense(found[name]), dense(gradient)), name


def test_weights_of_a_bag_get_their_gradient():
    model, args = weighted_bag()
    losses_of(model, args)[0].backward()
    expected, args[2].grad = args[2].grad, None
    with RowGradients(model, sum_losses) as rows:
        rows.backward(*losses_of(model, args))
    assert_close(args[2].grad, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_two_losses_give_the_gradient_of_their_sum(case):
    plain, found = plain_and_by_rule(case, number=2)
    for name, gradient in plain.items():
        assert_close(dense(found[name]), dense(gradient), rtol=1e-5, atol=1e-7)


def unit_rows(ids, gradients):
    """Each row's summed gradient, at length 1; odd ids get nothing."""
    total = gradients.sum(dim=0)
    total = total / total.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return torch.where((ids % 2 == 0).unsqueeze(-1), total, 0.0)


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_compact_and_static_rows_give_the_same_answer(case):
    model, args = case()
    other = copy.deepcopy(model)
    for static, net in ((False, model), (True, other)):
        with RowGradients(net, unit_rows) as rows:
            rows._static = static
            rows.backward(*losses_of(net, args, 2))
    for name, gradient in gradients_of(model).items():
        assert torch.equal(dense(gradient), dense(gradients_of(other)[name])), name


def test_static_rows_have_a_slot_for_every_row_there_is_and_for_no_row_and_not_one_more():
    model, seen = deepfm(), []
    batch = make_batch(200)
    with RowGradients(
        model, lambda i, g: seen.append(i) or g.sum(dim=0), where=lambda t: t.field == "item"
    ) as rows:
        rows._static = True
        rows.backward(model(batch).sum())
    assert seen[0].tolist() == [-1, *range(13)]


def test_a_rule_sees_each_row_of_the_batch_once_and_no_padding():
    seen = []
    model = embedding(padding_idx=3)
    with RowGradients(model, lambda i, g: seen.append((i, g)) or g.sum(dim=0)) as rows:
        rows.backward(*losses_of(model, (torch.tensor([5, 3, 1, 5, 3]),)))
        rows._static = True
        rows.backward(*losses_of(model, (torch.tensor([5, 3, 1, 5, 3]),)))
    (ids, gradients), (static_ids, static_gradients) = seen
    assert ids.tolist() == [1, 5]
    assert gradients.shape == (1, 2, 6)
    assert static_ids.tolist() == [-1, 1, 5, -1, -1]
    assert torch.equal(static_gradients[:, 1:3], gradients)
    assert not static_gradients[:, [0, 3, 4]].any()


def test_a_batch_of_padding_alone_asks_no_rule():
    model = embedding(padding_idx=3)
    with RowGradients(model, lambda i, g: 1 / 0) as rows:
        rows.backward(*losses_of(model, (torch.tensor([3, 3]),)))
    assert not model.table.weight.grad.any()


def test_several_lookups_of_one_table_are_rows_of_one_step():
    model = Net(nn.Embedding(12, 6))
    first, second = randoms(20), randoms(20)
    joined = copy.deepcopy(model)
    for net, batches in ((model, [first, second]), (joined, [torch.cat([first, second])])):
        with RowGradients(net, unit_rows) as rows:
            rows.backward(sum(F.softplus(net(batch)).sum() for batch in batches))
    assert_close(model.table.weight.grad, joined.table.weight.grad)


def test_micro_batches_are_one_step_for_the_rule():
    model, ids = embedding(), randoms(40)
    joined, one_by_one = copy.deepcopy(model), copy.deepcopy(model)
    with RowGradients(joined, unit_rows) as rows:
        rows.backward(F.softplus(joined(ids)).mean())
    for net, lasts in ((model, (False, True)), (one_by_one, (True, True))):
        with RowGradients(net, unit_rows) as rows:
            for part, last in zip(ids.chunk(2), lasts, strict=True):
                rows.backward(F.softplus(net(part)).mean() / 2, last=last)
    for name, gradient in gradients_of(joined).items():
        assert_close(gradients_of(model)[name], gradient, rtol=1e-6, atol=1e-7)
    apart = (one_by_one.table.weight.grad - joined.table.weight.grad).norm()
    assert apart > 0.1 * joined.table.weight.grad.norm()


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_micro_batches_with_the_sum_rule_are_plain_accumulation(case):
    model, args = case()
    plain = copy.deepcopy(model)
    with RowGradients(model, sum_losses) as rows:
        for last in (False, False, True):
            losses_of(plain, args)[0].backward()
            rows.backward(*losses_of(model, args), last=last)
    for name, gradient in gradients_of(plain).items():
        assert_close(dense(gradients_of(model)[name]), dense(gradient), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", [EXACT["plain"], EXACT["tied"]], ids=["plain", "tied"])
def test_a_gradient_that_was_there_before_is_added_to(case):
    model, args = case()
    plain = copy.deepcopy(model)
    for net in (model, plain):
        net.table.weight.grad = torch.ones_like(net.table.weight)
    losses_of(plain, args)[0].backward()
    with RowGradients(model, sum_losses) as rows:
        rows.backward(*losses_of(model, args))
    assert torch.equal(model.table.weight.grad, plain.table.weight.grad)


@pytest.mark.parametrize("static", [False, True], ids=["compact", "static"])
def test_a_step_touches_the_rows_of_the_batch_only(static):
    model = nn.ModuleList([nn.Embedding(50_000, 6), nn.EmbeddingBag(50_000, 6)])
    ids = randoms(20, 3, rows=50_000)
    with RowGradients(model, unit_rows) as rows:
        rows._static = static
        with counting_large_tensors(50_000) as made:
            rows.backward(model[0](ids).sum() + model[1](ids).square().sum())
    assert len(made) == 2, made  # a dense gradient for each table, as in any backward


def test_tied_rows_are_all_rows_of_the_weights_own_gradient():
    model, ids = Tied(), randoms(40, rows=9)
    plain = copy.deepcopy(model)
    F.softplus(plain(ids)).mean().backward()
    with RowGradients(model, unit_rows) as rows:
        assert rows.tables[0].names == ("table",)
        rows.backward(F.softplus(model(ids)).mean())
    expected = unit_rows(torch.arange(9), plain.table.weight.grad[None])
    assert torch.equal(model.table.weight.grad, expected)
    assert model.out.weight is model.table.weight


def test_one_field_of_a_stack_has_its_own_ids_and_the_others_keep_their_gradient():
    model, batch = deepfm(), make_batch()
    plain = copy.deepcopy(model)
    losses_of(plain, (batch,))[0].backward()
    seen = []

    def nothing(ids, gradients):
        seen.append(ids)
        return torch.zeros_like(gradients[0])

    with RowGradients(model, nothing, where=lambda t: t.field == "item") as rows:
        (group,) = rows.tables
        rows.backward(*losses_of(model, (batch,)))
    assert (group.names, group.first_rows, group.num_rows) == (("backbone.tables.item",), (0,), 13)
    assert seen[0].tolist() == sorted(set(batch["item"].tolist()))
    name = "backbone.tables.stacks.0.embedding.weight"
    found, expected = gradients_of(model)[name], gradients_of(plain)[name].clone()
    expected[-13:] = 0.0
    assert torch.equal(found, expected)


def test_rows_of_a_stack_are_numbered_one_chosen_field_after_the_other():
    model, batch = deepfm(), make_batch()
    seen = []
    chosen = ("tags", "item")
    with RowGradients(
        model, lambda i, g: seen.append(i) or g[0], where=lambda t: t.field in chosen
    ) as rows:
        (group,) = rows.tables
        rows.backward(*losses_of(model, (batch,)))
    assert group.first_rows == (0, 9)
    tags = set(batch["tags"].flatten().tolist()) - {0}
    assert seen[0].tolist() == sorted(tags | {9 + i for i in batch["item"].tolist()})


def test_one_group_a_stack_and_a_module():
    model = nn.ModuleDict({"zoo": deepfm(), "own": embedding()})
    with RowGradients(model, sum_losses) as rows:
        assert [group.names for group in rows.tables] == [
            ("own.table",),
            tuple(f"zoo.backbone.tables.{name}" for name in ("user", "tags", "words", "item")),
        ]
        assert rows.tables[1].first_rows == (0, 11, 20, 30)
    with RowGradients(model, sum_losses, min_width=1) as rows:
        assert len(rows.tables) == 3
