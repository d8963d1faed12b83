"""Rules for rows in models that use tables their own way, against a rule on the weight's own gradient."""

import copy

import pytest
import torch
from contract.model_checks import lively, make_batch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import rarebit as rb
from rarebit.errors import TrainingError, UnsupportedTableError
from rarebit.models.deepfm import DeepFM
from rarebit.row_gradients.seam import RowGradients, sum_losses

ROWS, DIM = 11, 4


class Stranger(nn.Module):
    """A table, and a score of rows made of it in some way."""

    def __init__(self, table, use):
        super().__init__()
        self.table, self.use = table, use
        self.hidden = nn.Linear(DIM, DIM)

    def forward(self, ids):
        return self.use(self, ids)

    def network(self, rows):
        return torch.tanh(self.hidden(rows))


def scores_all_items(model, ids):
    """RecBole's SASRec: looked-up rows in, the product with the whole weight out."""
    return model.network(model.table(ids)) @ model.table.weight.T


def scales_in_place(model, ids):
    """The reference SASRec."""
    rows = model.table(ids)
    rows *= DIM**0.5
    rows[:, 1:].add_(0.5)
    return model.network(rows)


def propagates(model, ids):
    """LightGCN: no lookup at all."""
    graph = torch.ones(ROWS, ROWS).tril() / ROWS
    return model.network((graph @ model.table.weight)[ids])


def looks_up_without_grad(model, ids):
    with torch.no_grad():
        known = model.table(ids + 1)
    return model.network(model.table(ids) + known)


def checkpointed(reentrant):
    def use(model, ids):
        start = torch.zeros(
            (), requires_grad=True
        )  # a reentrant one needs an input with a gradient
        block = lambda ids, start: model.network(model.table(ids) + start)  # noqa: E731
        return checkpoint(block, ids, start, use_reentrant=reentrant)

    return use


def functional(look_up):
    return lambda model, ids: model.network(look_up(ids, model.table.weight))


USES = {
    "scores all items": scores_all_items,
    "scales in place": scales_in_place,
    "scales in place, scores": lambda m, i: scales_in_place(m, i) @ m.table.weight.T,
    "propagates the weight": propagates,
    "F.embedding": functional(F.embedding),
    "F.embedding by rows": functional(lambda ids, w: F.embedding(ids, w, sparse=True)),
    "F.embedding and a lookup": lambda m, i: m.network(m.table(i) * F.embedding(i, m.table.weight)),
    "F.embedding_bag": functional(F.embedding_bag),
    "indexing": functional(lambda ids, w: w[ids]),
    "index_select": functional(lambda ids, w: w.index_select(0, ids.reshape(-1))),
    "a penalty on the weight": lambda m, i: m.network(m.table(i)) + m.table.weight.norm(),
    "two lookups": lambda m, i: m.network(m.table(i) * m.table(i.flip(0))),
    "no_grad": looks_up_without_grad,
    "checkpoint": checkpointed(False),
    "checkpoint, reentrant": checkpointed(True),
}
TABLES = {
    "plain": lambda: nn.Embedding(ROWS, DIM),
    "padding": lambda: nn.Embedding(ROWS, DIM, padding_idx=0),
    "by rows": lambda: nn.Embedding(ROWS, DIM, sparse=True),
}


def unit_rows(ids, gradients):
    """Each row's summed gradient, at length 1; odd ids get nothing."""
    total = gradients.sum(dim=0)
    total = total / total.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return torch.where((ids % 2 == 0).unsqueeze(-1), total, 0.0)


def losses_of(model, ids, number=1):
    scores = model(ids)
    return [F.softplus(scores * (k + 1)).mean() for k in range(number)]


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


def own_gradients(model, batches, number):
    """Return the gradient of each loss for the weight, summed over the batches."""
    found = []
    for loss in range(number):
        model.zero_grad()
        for ids in batches:
            losses_of(model, ids, number)[loss].backward()
        found.append(dense(model.table.weight.grad))
    return torch.stack(found)


def some_ids(rows=7):
    return torch.randint(1, ROWS - 1, (rows, 3))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("number", [1, 2], ids=["one loss", "two losses"])
def test_a_rule_sees_all_that_reaches_the_weight(use, table, number):
    model, batches = Stranger(table(), use), [some_ids(), some_ids()]
    plain = copy.deepcopy(model)
    with RowGradients(model, unit_rows) as rows:
        for ids in batches:
            rows.backward(*losses_of(model, ids, number), last=ids is batches[-1])
    expected = unit_rows(torch.arange(ROWS), own_gradients(plain, batches, number))
    assert_close(dense(model.table.weight.grad), expected)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_rule_of_zeros_leaves_the_table_where_it_is(use):
    model = Stranger(nn.Embedding(ROWS, DIM, padding_idx=0), use)
    before = model.table.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with RowGradients(model, lambda ids, gradients: torch.zeros_like(gradients[0])) as rows:
        for _ in range(3):
            optimizer.zero_grad()
            rows.backward(*losses_of(model, some_ids()))
            optimizer.step()
    assert torch.equal(model.table.weight, before)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_penalty_on_the_weight_of_a_bag_reaches_the_rule(mode):
    model = Stranger(
        nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=2), USES["a penalty on the weight"]
    )
    plain, ids = copy.deepcopy(model), some_ids()
    with RowGradients(model, unit_rows) as rows:
        rows.backward(*losses_of(model, ids, 2))
    expected = unit_rows(torch.arange(ROWS), own_gradients(plain, [ids], 2))
    assert_close(model.table.weight.grad, expected)


def test_a_methods_table_with_a_frozen_part_trains_the_rest():
    model = Stranger(nn.Embedding(ROWS, DIM), USES["two lookups"])
    rb.apply_(model, rb.LowRank(rank=2), verbose=False)
    frozen, *rest = model.table.parameters()
    frozen.requires_grad_(False)
    with RowGradients(model, sum_losses) as rows:
        rows.backward(*losses_of(model, some_ids()))
    assert frozen.grad is None
    assert all(parameter.grad.any() for parameter in rest)


def test_a_gradient_of_the_weight_is_unscaled_for_the_rule_and_scaled_again():
    model, ids, seen = Stranger(nn.Embedding(ROWS, DIM), scores_all_items), some_ids(), []
    plain, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu")
    with RowGradients(model, lambda i, g: seen.append(g) or unit_rows(i, g)) as rows:
        rows.backward(*losses_of(model, ids), scaler=scaler)
    expected = own_gradients(plain, [ids], 1)
    assert_close(seen[0], expected)
    answer = unit_rows(torch.arange(ROWS), expected)
    assert_close(model.table.weight.grad, answer * scaler.get_scale())


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_sum_rule_in_place_of_backward_trains_the_same_model(use):
    model = Stranger(nn.Embedding(ROWS, DIM), use)
    plain, ids = copy.deepcopy(model), some_ids()
    losses_of(plain, ids)[0].backward()
    with RowGradients(model, sum_losses) as rows:
        rows.backward(*losses_of(model, ids))
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        assert_close(dense(gradient), dense(parameter.grad), rtol=1e-6, atol=1e-7)


METHODS = {
    "low rank": rb.LowRank(rank=2),
    "hashing": rb.Hashing(buckets=5),
    "mlet": rb.MLET(inner_dim=6),
}
COMPUTED = (
    "scores all items",
    "scales in place, scores",
    "propagates the weight",
    "a penalty on the weight",
)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("use", COMPUTED)
def test_the_computed_weight_of_a_methods_table_is_a_lookup_of_all_rows(use, method):
    model, ids = Stranger(nn.Embedding(ROWS, DIM), USES[use]), some_ids()
    rb.apply_(model, method, verbose=False)
    plain = Stranger(
        nn.Embedding.from_pretrained(model.table.weight.detach().clone(), freeze=False), USES[use]
    )
    plain.hidden.load_state_dict(model.hidden.state_dict())
    answer = unit_rows(torch.arange(ROWS), own_gradients(plain, [ids], 2))
    expected = torch.autograd.grad(model.table.weight, list(model.table.parameters()), answer)
    with RowGradients(model, unit_rows) as rows:
        rows.backward(*losses_of(model, ids, 2))
    for parameter, gradient in zip(model.table.parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient)


def test_a_penalty_on_the_parameters_inside_a_methods_table_is_refused_by_name():
    def penalised(model, ids):
        return model.network(model.table(ids)) + sum(p.norm() for p in model.parameters())

    model = Stranger(nn.Embedding(ROWS, DIM), penalised)
    rb.apply_(model, rb.LowRank(rank=2), verbose=False)
    with RowGradients(model, sum_losses) as rows:
        with pytest.raises(
            TrainingError, match=r"a loss depends on '.*' of table past the lookups"
        ):
            rows.backward(*losses_of(model, some_ids()))
        assert not any(p.grad.any() for p in model.table.parameters() if p.grad is not None)
        model.use = USES["two lookups"]
        rows.backward(*losses_of(model, some_ids()))


@pytest.mark.parametrize("fields", [("item",), ("user", "item"), None], ids=str)
def test_a_penalty_on_the_weight_of_a_stack_reaches_the_rule_by_fields(fields):
    model, batch = lively(lambda schema: DeepFM(schema, dim=4, hidden=(8,))), make_batch()
    plain = copy.deepcopy(model)

    def loss_of(net):
        penalty = sum(p.square().sum() for p in net.backbone.parameters())
        return F.softplus(net(batch)).mean() + 0.01 * penalty

    where = None if fields is None else lambda table: table.field in fields
    loss_of(plain).backward()
    with RowGradients(model, unit_rows, where=where) as rows:
        (group,) = rows.tables
        rows.backward(loss_of(model))
    (stack,) = model.backbone.tables.stacks
    gradient = plain.backbone.tables.stacks[0].embedding.weight.grad
    expected, place, number = gradient.clone(), 0, 0
    for field, size in zip(model.backbone.tables.fields, stack.sizes, strict=True):
        if fields is None or field.name in fields:
            part = slice(place, place + size)
            ids = torch.arange(number, number + size)
            expected[part] = unit_rows(ids, gradient[part][None])
            number += size
        place += size
    assert number == group.num_rows
    assert_close(stack.embedding.weight.grad, expected)


@pytest.mark.parametrize("part", [slice(None), slice(4, None)], ids=["all", "some rows"])
def test_a_weight_that_is_tied_by_memory_alone_is_refused_by_name(part):
    model = Stranger(nn.Embedding(ROWS, DIM), USES["two lookups"])
    model.out = nn.Linear(DIM, 1)
    model.out.weight = nn.Parameter(model.table.weight.data[part])
    with pytest.raises(
        UnsupportedTableError, match=r"'table' .* 'out.weight' is another parameter"
    ):
        RowGradients(model, sum_losses)
    model.out.weight.requires_grad_(False)
    RowGradients(model, sum_losses).close()


def test_a_plain_backward_past_the_rule_is_noticed_without_a_lookup():
    model = Stranger(nn.Embedding(ROWS, DIM), propagates)
    rows = RowGradients(model, sum_losses)
    losses_of(model, some_ids())[0].backward()
    with pytest.raises(TrainingError, match=r"call rows.backward\(loss\)"):
        rows.close()


@pytest.mark.parametrize("use", ["scores all items", "scales in place", "indexing"])
def test_a_transfer_sees_the_rows_themselves_whatever_the_model_does_to_them(use):
    model, ids, seen = Stranger(nn.Embedding(200, DIM), USES[use]), torch.randint(200, (64, 3)), []
    before = model.table.weight.detach().clone()
    with rb.HarmlessTransfer().start(model, counts=torch.arange(200).flip(0)) as transfer:
        (group,) = transfer.groups
        prepare = group.prepare
        group.prepare = lambda ids, rows, draws: (
            seen.append((ids, rows)) or prepare(ids, rows, draws)
        )
        transfer.backward(losses_of(model, ids)[0])
    ((found, rows),) = seen
    assert torch.equal(rows, before[found])
    assert torch.equal(found, ids.unique() if use == "scales in place" else torch.arange(200))
    rare = found[group.target[found]]
    assert model.table.weight.grad[rare].any(dim=1).all()
