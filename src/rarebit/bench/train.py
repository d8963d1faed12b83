"""One training step of DeepFM, against the same model as people write it by hand.

    reference   one `nn.Embedding` a field, `DataLoader`, `torch.optim.Adam`
    tuned       the same model with what an expert would change: batches by slicing, fused Adam
    ours        one stacked table, batches by slicing, `optimizer` and `TrainingStep` as in `fit`, with
                lazy Adam: the rows a step looked up (`tables="rowwise"`)
    dense       the same with dense Adam: every row in every step, as on the sides by hand
    mlp         forward, backward and fused Adam of the network alone: the ceiling

`ratio` is the reference's time over ours, `ratio_dense` over that of dense Adam, `ratio_tables` the
first one on what is left of a step when the network's part, `mlp`, is taken off both.

All sides are float32, on the same data of Criteo's shape (39 fields, 967,795 values) and from the
same weights. A measured unit is one step, getting its batch included.

A ratio is worth something on a quiet machine only. Where another process takes turns with one of
the threads, the model by hand waits for it once a table, so beside other work its ratio is far too
high: see `other_load_1024` and `other_load_4096`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from rarebit.bench._frame import BenchResult, OtherLoad, Say, measure, timing_figures
from rarebit.data.dataset import Batch, Dataset
from rarebit.data.order import shuffled_order
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.models._base import MLP
from rarebit.models.deepfm import DeepFM
from rarebit.tables.collection import TableCollection
from rarebit.training.optimizers import TableMode, optimizer
from rarebit.training.step import TrainingStep

__all__ = ["DeepFMByHand", "copy_weights", "run", "sliced"]

ROWS = 204_800
DIM, HIDDEN, LR = 16, (400, 400), 1e-3
BATCH_SIZES = {"": 1024, "_4096": 4096}
"""By the end of their keys: the first is the one that counts."""
BUDGET = 20.0
"""Seconds for each batch size."""


def run(say: Say) -> BenchResult:
    """Measure a step at each batch size."""
    data = generate(SyntheticLog(preset="criteo", rows=ROWS)).train
    torch.manual_seed(0)
    models = [DeepFM(data.schema, dim=DIM, hidden=HIDDEN) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    by_hand = [copy_weights(models[0], DeepFMByHand(_rows(data), DIM, HIDDEN)) for _ in range(2)]
    figures: BenchResult = {
        "ratio": None,
        "ratio_of": "time of a step by hand with dense Adam / time of ours with lazy Adam",
    }
    for end, batch_size in BATCH_SIZES.items():
        say(f"train: batches of {batch_size}, {BUDGET:.0f} s")
        sides = {
            "reference": _reference(by_hand[0], data, batch_size),
            "tuned": _tuned(by_hand[1], data, batch_size),
            "ours": _ours(models[0], data, batch_size, "rowwise"),
            "dense": _ours(models[1], data, batch_size, "dense"),
            "mlp": _mlp(len(data.schema.fields) * DIM, batch_size),
        }
        load = OtherLoad()
        times = measure(sides, budget=BUDGET)
        figures[f"other_load_{batch_size}"] = load.share()
        figures[f"ratio{end}"] = times["reference"].median / times["ours"].median
        figures[f"ratio_dense{end}"] = times["reference"].median / times["dense"].median
        figures[f"ratio_tuned{end}"] = times["tuned"].median / times["ours"].median
        figures[f"ratio_tuned_dense{end}"] = times["tuned"].median / times["dense"].median
        network = times["mlp"].median
        tables = {side: timing.median - network for side, timing in times.items()}
        figures[f"ratio_tables{end}"] = tables["reference"] / tables["ours"]
        for side in ("reference", "ours"):
            speed = batch_size / times[side].median
            figures[f"{side}_samples_per_second{end}"] = round(speed)
        figures |= timing_figures(times, end)
    return figures


class DeepFMByHand(nn.Module):
    """DeepFM as people write it: one table a field, ids `(B, F)` to logits `(B,)`."""

    def __init__(self, rows: Sequence[int], dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, dim) for n in rows)
        self.weights = nn.ModuleList(nn.Embedding(n, 1) for n in rows)
        self.bias = nn.Parameter(torch.zeros(()))
        layers: list[nn.Module] = []
        for width, units in itertools.pairwise([len(rows) * dim, *hidden]):
            layers += [nn.Linear(width, units), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Return one logit a row."""
        columns = ids.unbind(dim=1)
        pairs = zip(self.embeddings, columns, strict=True)
        fields = torch.stack([table(column) for table, column in pairs], dim=1)  # (B, F, D)
        singles = zip(self.weights, columns, strict=True)
        first = torch.cat([table(column) for table, column in singles], dim=1).sum(dim=1)
        second = 0.5 * (fields.sum(dim=1).square() - fields.square().sum(dim=1)).sum(dim=1)
        deep: Tensor = self.mlp(fields.flatten(1)).squeeze(1)
        return self.bias + first + second + deep


def copy_weights(model: DeepFM, by_hand: DeepFMByHand) -> DeepFMByHand:
    """Give the model by hand the weights of ours, field by field, and return it."""
    stacked = [module for module in model.modules() if isinstance(module, TableCollection)]
    tables = [table for collection in stacked for table in collection.tables()]
    network = {
        name.removeprefix("head.mlp.layers."): weight
        for name, weight in model.state_dict().items()
        if name.startswith("head.mlp.layers.")
    }
    by_hand.mlp.load_state_dict(network)
    with torch.no_grad():
        by_hand.bias.copy_(model.state_dict()["wide.bias"])
        copies = [*by_hand.embeddings, *by_hand.weights]
        for copy, table in zip(copies, tables, strict=True):
            copy.load_state_dict({"weight": table.weight})
    return by_hand


def _reference(model: DeepFMByHand, data: Dataset, batch_size: int) -> Callable[[], None]:
    adam, loss_function = torch.optim.Adam(model.parameters(), lr=LR), nn.BCEWithLogitsLoss()
    batches = _loaded(data, batch_size)

    def step() -> None:
        ids, label = next(batches)
        adam.zero_grad()
        loss = loss_function(model(ids), label)
        loss.backward()
        adam.step()

    return step


def _tuned(model: DeepFMByHand, data: Dataset, batch_size: int) -> Callable[[], None]:
    adam = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    batches = sliced(data, batch_size)

    def step() -> None:
        batch = next(batches)
        adam.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(batch.ids), batch.label)
        loss.backward()
        adam.step()

    return step


def _ours(model: DeepFM, data: Dataset, batch_size: int, tables: TableMode) -> Callable[[], None]:
    step = TrainingStep(model, optimizer(model, lr=LR, tables=tables))
    batches = sliced(data, batch_size)
    return lambda: step(next(batches))


def _mlp(width: int, batch_size: int) -> Callable[[], None]:
    mlp = MLP(width, HIDDEN)
    adam = torch.optim.Adam(mlp.parameters(), lr=LR, fused=True)
    # In a model the tables need the gradient of the network's input.
    features = torch.randn(batch_size, width, requires_grad=True)
    label = torch.rand(batch_size).round()

    def step() -> None:
        loss = F.binary_cross_entropy_with_logits(mlp(features), label)
        loss.backward()
        adam.step()
        adam.zero_grad()
        features.grad = None

    return step


def _loaded(data: Dataset, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and labels as torch's own loader gives them, epoch after epoch."""
    rows = TensorDataset(data.ids.long(), data.label)
    loader = DataLoader(rows, batch_size=batch_size, shuffle=True)
    while True:
        yield from loader


def sliced(data: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yield batches as `fit` does, epoch after epoch."""
    for epoch in itertools.count(1):
        yield from data.batches(batch_size, shuffled_order(len(data), seed=0, epoch=epoch))


def _rows(data: Dataset) -> list[int]:
    return [field.rows for field in data.schema.table_fields]
