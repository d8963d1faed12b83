"""Models whose code writes to the weight of a table: after `apply_` this raises, and reading goes on as before."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import UnsupportedTableError

METHODS = [rb.Hashing(buckets=5), rb.LowRank(rank=2), rb.PEP(init=-9.0)]
MESSAGE = (
    r"what is written to its \.weight is lost; write before apply_ or after merge_, or take a copy"
)


class Scorer(nn.Module):
    """Scores all items by the weight of their table, as in SASRec and BPR."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(9, 4)

    def forward(self, ids):
        return self.item(ids) @ self.item.weight.T


def made(method=METHODS[0]) -> Scorer:
    model = Scorer()
    rb.apply_(model, method, verbose=False)
    return model


def set_data(weight):
    weight.data = torch.zeros(9, 4)


def set_row(weight):
    weight.data[5] = 7.0


def scale(weight):
    weight *= 2.0


def decay(weight):
    torch._foreach_mul_([weight], 0.9)


WRITES = {
    "row of data": set_row,
    "row": lambda weight: weight.__setitem__(5, 7.0),
    "data": set_data,
    "copy": lambda weight: weight.copy_(torch.zeros(9, 4)),
    "copy into data": lambda weight: weight.data.copy_(torch.zeros(9, 4)),
    "xavier": nn.init.xavier_normal_,
    "normal": nn.init.normal_,
    "uniform of data": lambda weight: nn.init.uniform_(weight.data),
    "scale": scale,
    "a view": lambda weight: weight[2].fill_(0.0),
    "a view of a view": lambda weight: weight.detach().T[1:].view(-1, 9).zero_(),
    "rows by rows": lambda weight: [row.zero_() for row in weight],
    "out": lambda weight: torch.mul(weight, 2.0, out=weight),
    "function": lambda weight: torch.clamp_(min=0.0, input=weight),
    "index": lambda weight: weight.index_fill_(0, torch.tensor([1]), 0.0),
    "many at once": decay,
    "freezing": lambda weight: weight.requires_grad_(False),
    "a parameter of it": nn.Parameter,
    "vector": lambda weight: nn.utils.vector_to_parameters(torch.zeros(36), [weight]),
}


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("bag", [False, True])
def test_a_write_raises(kind, bag):
    model = nn.Sequential(nn.EmbeddingBag(9, 4)) if bag else nn.Sequential(nn.Embedding(9, 4))
    rb.apply_(model, METHODS[0], verbose=False)
    with torch.no_grad(), pytest.raises(UnsupportedTableError, match=MESSAGE):
        WRITES[kind](model[0].weight)
    rb.merge_(model, verbose=False)
    with torch.no_grad():
        model[0].weight.data[5] = 7.0
    assert_close(model[0].weight[5], torch.full((4,), 7.0))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_reading_has_the_same_values_and_gradients(method):
    model = made(method)
    ids = torch.tensor([1, 8, 1])
    rows = model.item(torch.arange(9))
    expected = (model.item(ids) @ rows.T).square().sum()
    given = torch.autograd.grad(model(ids).square().sum(), [*model.parameters()], allow_unused=True)
    wanted = torch.autograd.grad(expected, [*model.parameters()], allow_unused=True)
    for one, other in zip(given, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other)


def test_results_are_ordinary_tensors_that_take_writes():
    weight = made().item.weight
    plain = torch.zeros(9, 4)
    plain.copy_(weight.detach())
    assert_close(plain, weight.detach().clone())
    for result in (
        weight.clone(),
        weight * 2,
        F.linear(torch.ones(2, 4), weight),
        F.embedding(torch.tensor([1, 2]), weight),
        weight[torch.tensor([1, 2])],
        torch.cat([weight, weight]),
        nn.Parameter(weight.clone()),
    ):
        assert type(result) in (torch.Tensor, nn.Parameter)
        with torch.no_grad():
            result.zero_()


def test_copies_and_files_hold_ordinary_tensors():
    rows = made().item.weight.detach()
    file = io.BytesIO()
    torch.save(rows, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for other in (loaded, copy.deepcopy(rows), nn.Embedding.from_pretrained(rows.clone()).weight):
        assert type(other) in (torch.Tensor, nn.Parameter)
        assert_close(other.detach(), rows.clone())
        assert_close(nn.Parameter(rows.clone()), rows)
        assert_close(rows, nn.Parameter(rows.clone()))
    assert repr(rows) == repr(rows.clone())
    assert rows.numpy().shape == (9, 4)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_func_and_tracing_read_the_weight():
    model = made()
    parameters, ids = dict(model.named_parameters()), torch.tensor([1, 2])

    def loss(parameters):
        return torch.func.functional_call(model, parameters, ids).square().sum()

    given = torch.func.grad(loss)(parameters)["item.inner.weight"]
    loss(parameters).backward()
    assert_close(given, model.item.inner.weight.grad)
    traced = torch.jit.trace(model, ids)
    assert_close(traced(ids), model(ids))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_reads_the_weight():
    model, ids = made(), torch.tensor([1, 2])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(ids), model(ids))
    total = torch.compile(lambda weight: (weight * 2).sum(), backend="eager")
    assert_close(total(model.item.weight), (model.item.weight * 2).sum())
