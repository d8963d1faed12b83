"""Rules that change row gradients, against loops over the rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import TrainingError
from rarebit.row_gradients.seam import RowGradients
from rarebit.tables.collection import TableCollection


class Net(nn.Module):
    """Any table, then a network that is not linear."""

    def __init__(self, table, width=6):
        super().__init__()
        self.table = table
        self.out = nn.Linear(width, 3)

    def forward(self, *args, **kwargs):
        return self.out(torch.tanh(self.table(*args, **kwargs)))


def embedding(**options):
    return Net(nn.Embedding(12, 6, **options))


def losses_of(model, args, number=1):
    scores = model(*args)
    return [F.softplus(scores * (k + 1)).mean() for k in range(number)]


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


def unit_rows(ids, gradients):
    """Each row's summed gradient, at length 1; odd ids get nothing."""
    total = gradients.sum(dim=0)
    total = total / total.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return torch.where((ids % 2 == 0).unsqueeze(-1), total, 0.0)


def squares(ids, gradients):
    """The square of each number, whatever the row is."""
    return gradients.sum(dim=0).square() * 100


def less_conflict(ids, gradients):
    """The first loss, plus the second without what opposes the first: not linear in either."""
    main, other = gradients
    dot = (main * other).sum(dim=1, keepdim=True)
    square = (main * main).sum(dim=1, keepdim=True).clamp(min=1e-12)
    return main + other - dot.clamp(max=0) / square * main


def row_gradients_by_hand(model, ids, number):
    """The gradient of each loss for each row of a plain table, lookup by lookup."""
    weight = model.table.weight.detach()
    rows = [weight[i].clone().requires_grad_() for i in ids.tolist()]
    scores = model.out(torch.tanh(torch.stack(rows)))
    found = {}
    for k in range(number):
        loss = F.softplus(scores * (k + 1)).mean()
        for i, g in zip(
            ids.tolist(), torch.autograd.grad(loss, rows, retain_graph=True), strict=True
        ):
            found.setdefault(i, [torch.zeros(6) for _ in range(number)])[k] += g
    return found


@pytest.mark.parametrize("static", [False, True], ids=["compact", "static"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("rule", "number"),
    [(unit_rows, 1), (unit_rows, 2), (less_conflict, 2)],
    ids=["one loss", "two losses", "two losses apart"],
)
@settings(max_examples=15)
@given(ids=st.lists(st.integers(0, 11), min_size=1, max_size=30))
def test_a_rule_is_applied_row_by_row(rule, number, sparse, static, ids):
    model, ids = embedding(sparse=sparse, padding_idx=3), torch.tensor(ids)
    by_hand = row_gradients_by_hand(model, ids, number)
    with RowGradients(model, rule) as rows:
        rows._static = static
        rows.backward(*losses_of(model, (ids,), number))
    expected = torch.zeros(12, 6)
    for i, gradients in by_hand.items():
        if i != 3:
            gradient = rule(torch.tensor([i]), torch.stack(gradients)[:, None])
            expected[i] = gradient[0]
    assert_close(dense(model.table.weight.grad), expected)


METHODS = {
    "hashing": [rb.Hashing(buckets=5)],
    "low rank": [rb.LowRank(rank=2)],
    "composition": [rb.Hashing(buckets=5), rb.LowRank(rank=2)],
}


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_a_rule_works_on_the_rows_of_the_outermost_table(methods):
    model, ids = embedding(), torch.randint(12, (40,))
    for method in methods:
        rb.apply_(model, method, verbose=False)
    for i, gradients in row_gradients_by_hand(model, ids, 2).items():
        answer = less_conflict(torch.tensor([i]), torch.stack(gradients)[:, None])
        model.table(torch.tensor([i])).backward(answer)
    expected = [parameter.grad for parameter in model.table.parameters()]
    model.zero_grad()
    with RowGradients(model, less_conflict) as rows:
        rows.backward(*losses_of(model, (ids,), 2))
    for parameter, gradient in zip(model.table.parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weights"])
def test_a_rule_works_on_the_rows_of_a_bag(mode, padding, sparse):
    weights = (None, torch.randn(90, 3)) if mode == "weights" else ()
    mode, sparse = ("sum" if weights else mode), sparse and mode != "max"
    model = Net(nn.EmbeddingBag(12, 6, mode=mode, padding_idx=padding, sparse=sparse))
    args = (torch.randint(12, (90, 3)), *weights)
    losses_of(model, args)[0].backward()
    plain = dense(model.table.weight.grad)
    model.zero_grad()
    with RowGradients(model, unit_rows) as rows:
        rows.backward(*losses_of(model, args))
    found = model.table.weight.grad
    assert found.is_sparse == sparse
    assert_close(dense(found), unit_rows(torch.arange(12), plain[None]))


class Fields(nn.Module):
    """The fields of a collection as tables of their own."""

    def __init__(self, tables):
        super().__init__()
        user, tags = tables
        self.user = nn.Embedding.from_pretrained(user.weight.detach().clone(), freeze=False)
        self.tags = nn.EmbeddingBag.from_pretrained(
            tags.weight.detach().clone(), freeze=False, mode="mean", padding_idx=0
        )

    def forward(self, ids):
        return torch.stack([self.user(ids[:, 0]), self.tags(ids[:, 1:])], dim=1)


def test_a_stack_is_the_tables_of_its_fields():
    fields = (
        rb.data.Field(name="user", rows=9),
        rb.data.Field(name="tags", kind="multi", rows=7, max_length=3),
    )
    stacked = Net(TableCollection(fields, 6, std=1.0))
    apart = Net(Fields(stacked.table.tables()))
    apart.out.load_state_dict(stacked.out.state_dict())
    ids = torch.cat([torch.randint(9, (30, 1)), torch.randint(7, (30, 3))], dim=1)
    for model in (stacked, apart):
        with RowGradients(model, squares) as rows:
            rows.backward(*losses_of(model, (ids,), 2))
    expected = torch.cat([apart.table.user.weight.grad, apart.table.tags.weight.grad])
    assert expected.any()
    assert_close(stacked.table.stacks[0].embedding.weight.grad, expected)


def test_zeros_of_a_rule_are_exact_zeros():
    model, ids = embedding(), torch.randint(12, (40,))
    with RowGradients(model, unit_rows) as rows:
        rows.backward(*losses_of(model, (ids,)))
    assert not model.table.weight.grad[1::2].any()
    assert model.table.weight.grad[0::2].any()


@pytest.mark.parametrize(
    "answer",
    [lambda g: g, lambda g: g[0, :, 0], lambda g: g.sum(), lambda g: None],
    ids=["all losses", "no width", "one number", "nothing"],
)
def test_an_answer_of_another_shape_is_refused(answer):
    model = embedding()
    with (
        pytest.raises(
            TrainingError, match=r"one gradient per row, a tensor of shape \(2, 6\), got"
        ),
        RowGradients(model, lambda i, g: answer(g)) as rows,
    ):
        rows.backward(*losses_of(model, (torch.tensor([1, 2]),)))
