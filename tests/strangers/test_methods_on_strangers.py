"""Every method on every kind of table that torch lets people build: it works, or it is refused by the table's name.

To work is to train (the looked-up rows move, unless they are frozen), to merge to the same scores, and to come back from a
file with the same scores. No cell may be silent about anything else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import rarebit as rb
from rarebit.errors import RarebitError
from rarebit.pruning import Masked, Pruned
from rarebit.research import (
    CAFE,
    DHE,
    DPQ,
    MGQE,
    MPE,
    QR,
    ROBE,
    AlignedSets,
    DartsEmb,
    FrequencyDecay,
    FreshTables,
    GroupStopping,
    IdDropout,
    MixedDimensions,
    ProductStart,
    RowRate,
    SharedSets,
    TTRec,
)
from rarebit.tables.bag import Bag
from rarebit.technique import Technique, technique_class, technique_names, technique_text

N, D = 12, 4
IDS = torch.tensor([[1, 5], [7, 1], [11, 2]])

TABLE_METHODS = [
    rb.Hashing(buckets=5),
    rb.LowRank(rank=1),
    rb.MLET(inner_dim=8),
    rb.MLET(inner_dim=8, init="keep"),
    rb.PEP(init=-6.0),
    rb.PEP(granularity="global", init=-6.0),
    rb.PEP(schedule="given"),
    rb.EvidenceCoding(size=0.9),
    rb.Quantize(),
    rb.Quantize(bits=4),
    rb.Shrinkage(counts=3),
    rb.Tail(counts=3),
    RowRate(counts=3),
    ProductStart(inner_dim=8),
    MixedDimensions(full=2),
    CAFE(buckets=6),
    MGQE(pieces=2, centroids=4, tail_centroids=2),
    DPQ(pieces=2, bits=2),
    MPE(bits=2.0, group=4),
    DartsEmb(width=2.0, group=4),
    DHE(hidden=3, hashes=3, layers=1),
    QR(buckets=3),
    QR(buckets=3, combine="add"),
    ROBE(size=16, block=4),
    TTRec(rank=1),
    Masked(),
    Pruned(keep=30),
]
SETS = [rb.MultiEmbedding(num_sets=2), SharedSets(num_sets=2), AlignedSets(num_sets=2)]
AROUND = [
    rb.Forgetting(),
    rb.research.AdamAR(),
    rb.HarmlessTransfer(loss="mmd", select="frequency", fields="table"),
    FreshTables(),
    FrequencyDecay(),
    GroupStopping(groups=2),
    IdDropout(),
]


def test_every_method_on_offer_is_here():
    there = {type(method) for method in (*TABLE_METHODS, *SETS, *AROUND)}
    ours = {technique_class(name) for name in technique_names()}
    assert {cls for cls in ours if cls.__module__.startswith("rarebit.")} == there


class OwnLookup(nn.Embedding):
    """A table that scales what it looks up."""

    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


class Codes(nn.Module):
    """Someone's table of bytes, which torch does not know."""

    num_embeddings, embedding_dim = N, D

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-9, 9, (N, D), dtype=torch.int8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.codes[ids] / 9


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@dataclass(frozen=True)
class Shape:
    """A kind of table, and how a model calls it."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Tensor], Tensor] = lambda table, ids: table(ids).mean(dim=1)
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-6
    frozen: bool = False
    also: str | None = None
    """What a second part of the model has as well: the table, or its weight."""


def offsets(ids: Tensor, more: int = 0) -> Tensor:
    return torch.arange(len(ids) + more) * ids.shape[1]


def bag(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(N, D, **options)


def hooked() -> nn.Module:
    table = nn.Embedding(N, D)
    table.register_forward_hook(lambda module, ids, rows: rows + 1)
    return table


def of_integers() -> nn.Module:
    codes = torch.randint(-9, 9, (N, D), dtype=torch.int8)
    return nn.Embedding.from_pretrained(codes)


def parametrized() -> nn.Module:
    table = nn.Embedding(N, D)
    parametrize.register_parametrization(table, "weight", Doubled())
    return table


def half(dtype: torch.dtype) -> Shape:
    return Shape(lambda: nn.Embedding(N, D, dtype=dtype), dtype=dtype, tolerance=0.02)


SHAPES = {
    "plain": Shape(lambda: nn.Embedding(N, D)),
    "padding": Shape(lambda: nn.Embedding(N, D, padding_idx=1)),
    "sparse": Shape(lambda: nn.Embedding(N, D, sparse=True)),
    "max_norm": Shape(lambda: nn.Embedding(N, D, max_norm=1.0)),
    "scale_grad_by_freq": Shape(lambda: nn.Embedding(N, D, scale_grad_by_freq=True)),
    "bag, mean": Shape(bag(mode="mean"), lambda table, ids: table(ids.flatten(), offsets(ids))),
    "bag, max": Shape(bag(mode="max"), lambda table, ids: table(ids)),
    "bag, weights": Shape(
        bag(mode="sum"),
        lambda table, ids: table(
            ids.flatten(), offsets(ids), per_sample_weights=torch.linspace(0.5, 1, ids.numel())
        ),
    ),
    "bag, last offset": Shape(
        bag(mode="sum", include_last_offset=True),
        lambda table, ids: table(ids.flatten(), offsets(ids, 1)),
    ),
    "bag, padding": Shape(bag(mode="sum", padding_idx=1), lambda table, ids: table(ids)),
    "frozen": Shape(lambda: nn.Embedding(N, D).requires_grad_(requires_grad=False), frozen=True),
    "float64": Shape(lambda: nn.Embedding(N, D, dtype=torch.float64), dtype=torch.float64),
    "float16": half(torch.float16),
    "bfloat16": half(torch.bfloat16),
    "integers": Shape(of_integers, lambda table, ids: table(ids).float().mean(dim=1), frozen=True),
    "one row": Shape(lambda: nn.Embedding(1, D), lambda table, ids: table(0 * ids).mean(dim=1)),
    "one column": Shape(lambda: nn.Embedding(N, 1)),
    "own lookup": Shape(lambda: OwnLookup(N, D)),
    "hooked": Shape(hooked),
    "parametrized": Shape(parametrized),
    "spectral norm": Shape(lambda: parametrizations.spectral_norm(nn.Embedding(N, D))),
    "weight norm": Shape(lambda: parametrizations.weight_norm(nn.Embedding(N, D))),
    "not torch's": Shape(Codes),
    "in two places": Shape(lambda: nn.Embedding(N, D), also="table"),
    "tied": Shape(lambda: nn.Embedding(N, D), also="weight"),
    "meta": Shape(lambda: nn.Embedding(N, D, device="meta")),
}


class Backbone(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = shape.make()
        self.layer = nn.Linear(self.table.embedding_dim, 3, dtype=shape.dtype)
        self.call = shape.call
        self.again = self.table if shape.also == "table" else None
        if shape.also == "weight":
            self.again = nn.Embedding(N, D)
            self.again.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.call(self.table, ids)
        if self.again is not None:
            rows = rows + self.call(self.again, ids)
        return torch.tanh(self.layer(rows))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(shape), nn.Linear(3, 1, dtype=shape.dtype)

    def forward(self, batch: Any) -> Tensor:
        ids = batch if isinstance(batch, Tensor) else batch["table"].unsqueeze(1)
        return self.head(self.backbone(ids))[:, 0]


def text_of_refusal(change: Callable[[], object]) -> str:
    try:
        change()
    except RarebitError as error:
        return str(error)
    return ""


def is_refused(change: Callable[[], object], name: str = "backbone.table") -> bool:
    """Return whether a change is refused; then in one sentence that names the table."""
    text = text_of_refusal(change)
    assert "\n" not in text, text
    assert not text or name in text, text
    return bool(text)


def train_(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(IDS) - 1.0).square().mean().backward()
        optimizer.step()


def check_stored_and_merged(model: Model, shape: Shape, folder: Path) -> None:
    scores = model(IDS).detach()
    again = rb.load_model(rb.save_model(model, folder), into=Model(shape))
    assert torch.equal(again(IDS).detach(), scores), "loaded, it scores otherwise"
    rb.merge_(model, verbose=False)
    left = float((model(IDS).detach() - scores).abs().max())
    assert left <= shape.tolerance, f"merged, it differs by {left}"


def quick_diagonal(methods: Sequence[Technique]) -> list[Any]:
    """Return all pairs; some of them, with every method and every shape, always run."""
    return [
        pytest.param(
            method,
            shape,
            id=f"{technique_text(method)}-{name}",
            marks=[] if (row + column) % 9 == 0 else [pytest.mark.slow],
        )
        for row, method in enumerate(methods)
        for column, (name, shape) in enumerate(SHAPES.items())
    ]


@pytest.mark.parametrize(("method", "shape"), quick_diagonal(TABLE_METHODS))
def test_a_method_works_on_a_table_or_is_refused_by_its_name(method, shape, tmp_path):
    model = Model(shape)
    if is_refused(lambda: rb.apply_(model, method, verbose=False)):
        assert not isinstance(model.backbone.table, rb.Table | Bag)  # nothing was changed
        return
    assert rb.find_tables(model)[0].methods
    assert model.backbone.again is None or model.backbone.again is model.backbone.table
    before = model.backbone.table.weight.detach().clone()
    train_(model)
    moved = (model.backbone.table.weight.detach() - before).abs().amax(dim=1)
    still = shape.frozen or method.after_training
    assert bool(moved.any()) is not still, "frozen rows moved" if still else "nothing moved"
    if model.backbone.table.padding_idx == 1:
        assert float(moved[1]) == 0.0, "padding moved"
    check_stored_and_merged(model, shape, tmp_path)
    assert type(model.backbone.table) in (nn.Embedding, nn.EmbeddingBag)


def test_methods_for_our_interactions_name_the_model_they_cannot_change():
    for method in SETS[1:]:
        with pytest.raises(RarebitError, match=r"needs a .*, got a Model"):
            rb.apply_(Model(SHAPES["plain"]), method, verbose=False)


@pytest.mark.parametrize(("method", "shape"), quick_diagonal(SETS[:1]))
def test_embedding_sets_of_any_table_train_or_are_refused(method, shape, tmp_path):
    model = Model(shape)
    if is_refused(lambda: rb.apply_(model, method, verbose=False), "table"):
        assert isinstance(model.backbone, Backbone)
        return
    tables = [each.table for each in model.backbone.sets]
    before = [table.weight.detach().clone() for table in tables]
    train_(model)
    for table, old in zip(tables, before, strict=True):
        assert not torch.equal(table.weight.detach(), old), "a set did not move"
    check_stored_and_merged(model, shape, tmp_path)


def log(rows: int = 40) -> rb.Dataset:
    ids = torch.randint(N, (rows,)) * (torch.rand(rows) < 0.7)
    return rb.Dataset.from_columns({"table": ids}, label=torch.randint(2, (rows,)))


@pytest.mark.parametrize(("method", "shape"), quick_diagonal(AROUND))
def test_a_method_around_training_works_on_a_table_or_is_refused_by_its_name(method, shape):
    model, data = Model(shape), log()
    kinds = [type(module) for module in model.modules()]
    weight = getattr(model.backbone.table, "weight", None)
    before = None if weight is None or weight.is_meta else weight.detach().clone()

    def fit() -> None:
        rb.fit(
            model, data, data, epochs=2, batch_size=8, lr=1.0, callbacks=[method], progress=False,
            optimizer="sgd",
        )  # fmt: skip

    if not is_refused(fit, "table"):
        assert before is not None
        same = torch.equal(model.backbone.table.weight.detach(), before)
        assert same is shape.frozen, "nothing moved" if same else "frozen rows moved"
    assert [type(module) for module in model.modules()] == kinds, "it left modules behind"
