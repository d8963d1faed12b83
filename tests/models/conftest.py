"""The papers' symbols, written again for one row at a time, and what a model is compared by."""

import pytest
import torch

from rarebit import Dataset
from rarebit.data import Field, Schema

USER = Field(name="user", rows=6)
ITEM = Field(name="item", rows=5)
SCHEMAS = {
    "categorical": Schema((USER, ITEM)),
    "numeric": Schema((Field(name="age", kind="numeric"), USER, Field(name="x", kind="numeric"))),
    "every kind": Schema(
        (
            USER,
            Field(name="age", kind="numeric"),
            Field(name="tags", kind="multi", rows=7, max_length=3, pooling="mean"),
            ITEM,
            Field(name="words", kind="multi", rows=4, max_length=2, pooling="sum"),
            Field(name="price", kind="numeric"),
        )
    ),
}


class NaiveRow:
    """One row of a data set and a model's weights: v_1, ..., v_F, w_i and the network, by loops."""

    def __init__(self, weights, batch, row):
        self.weights, self.batch, self.row = weights, batch, row

    def table_rows(self, part):
        """The row of each field with a table, multi-valued ones pooled over their values."""
        weight, start, found = self.weights[f"{part}.tables.stacks.0.embedding.weight"], 0, []
        for field in self.batch.schema.table_fields:
            ids = self.batch[field.name][self.row].reshape(-1).tolist()
            if field.kind == "multi":
                ids = [i for i in ids if i != 0]
            total = torch.zeros(weight.shape[1], dtype=torch.float64)
            for i in ids:
                total = total + weight[start + i]
            found.append(total / len(ids) if field.pooling == "mean" and ids else total)
            start += field.rows
        return found

    def numbers(self):
        return [float(self.batch[f.name][self.row]) for f in self.batch.schema.numeric_fields]

    def embeddings(self):
        """v_1, ..., v_F: a row of a table, or the vector of a numeric field times its value."""
        numeric = [x * self.weights["backbone.numeric"][p] for p, x in enumerate(self.numbers())]
        return self.table_rows("backbone") + numeric

    def first_order(self):
        """w_0 + sum_i w_i."""
        score = self.weights["wide.bias"]
        for weight in self.table_rows("wide"):
            score = score + weight[0]
        for p, x in enumerate(self.numbers()):
            score = score + x * self.weights["wide.numeric"][p]
        return score

    def pairs(self):
        """Sum over i < j of <v_i, v_j>."""
        v = self.embeddings()
        found = [v[i] @ v[j] for i in range(len(v)) for j in range(i + 1, len(v))]
        return sum(found, start=torch.zeros((), dtype=torch.float64))

    def network(self, part, x):
        """Linear layers with max(x, 0) between them; the last has one output."""
        layers = sorted({int(n.split(".")[-2]) for n in self.weights if n.startswith(f"{part}.")})
        for layer in layers:
            weight, bias = (self.weights[f"{part}.{layer}.{n}"] for n in ("weight", "bias"))
            outputs = [weight[i] @ x + bias[i] for i in range(len(bias))]
            x = torch.stack(outputs)
            if layer != layers[-1]:
                x = torch.stack([torch.clamp(value, min=0.0) for value in x])
        assert x.shape == (1,)
        return x[0]


@pytest.fixture(params=SCHEMAS.values(), ids=SCHEMAS.keys())
def schema(request):
    return request.param


@pytest.fixture
def batch(schema):
    """Seven random rows; in the last, every list is empty and every number zero."""
    columns = [
        torch.randint(field.rows, (7, field.max_length), dtype=torch.int32)
        for field in schema.table_fields
    ]
    for field, column in zip(schema.table_fields, columns, strict=True):
        if field.kind == "multi":
            column[-1], column[0] = 0, torch.arange(1, field.max_length + 1)
    numbers = torch.randn(7, len(schema.numeric_fields))
    numbers[-1] = 0.0
    return Dataset(schema, torch.cat(columns, dim=1), numbers, [0, 1, 0, 1, 1, 0, 1])[:]


@pytest.fixture
def assert_equals_naive(batch):
    """Compare scores and the gradient of every weight with a paper's score, one row at a time."""

    def compare(model, naive_score):
        model.double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        got = model(batch)
        want = torch.stack([naive_score(NaiveRow(weights, batch, r)) for r in range(len(batch))])
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert float(want.detach().std()) > 0.01  # the rows differ: the comparison means something
        pull = torch.randn(len(batch), dtype=torch.float64)
        torch.testing.assert_close(
            torch.autograd.grad((got * pull).sum(), list(model.parameters())),
            torch.autograd.grad((want * pull).sum(), list(weights.values())),
            rtol=1e-11,
            atol=1e-11,
        )

    return compare
