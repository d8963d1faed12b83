"""One training step of DeepFM, against the same model as people write it by hand.

    reference   one `nn.Embedding` per field, `DataLoader`, `torch.optim.Adam`
    tuned       the same model with what an expert would change: batches by slicing, fused Adam
    ours        one stacked table, batches by slicing, `optimizer` and `TrainingStep` as in `fit`, with
                lazy Adam: only the rows in the batch (`tables="rowwise"`)
    dense       the same with dense Adam: every row in every step, as in the models by hand
    mlp         forward, backward and fused Adam of the network alone: the ceiling

`ratio` is the reference's time over ours, `ratio_dense` over that of dense Adam, `ratio_tables` the
first one without the network's part, `mlp`, on both sides.

All variants are float32, on the same log of Criteo's shape and from the same weights. A measured unit is one
step, including getting its batch.

A ratio is reliable on a quiet machine only. If another process takes turns with one of the threads, the model
by hand waits for it once per table, so under other load its ratio is far too high: see `other_load_1024` and
`other_load_4096`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from rarebit.bench._frame import BenchResult, Say, compare
from rarebit.bench.steps import DIM, HIDDEN, LR, NextStep, criteo_log, sliced
from rarebit.data.dataset import Dataset
from rarebit.models._base import MLP
from rarebit.models.deepfm import DeepFM
from rarebit.tables.collection import TableCollection

BATCH_SIZES = {"": 1024, "_4096": 4096}
"""By the end of their keys: the first is the main one."""
BUDGET = 20.0
"""Seconds for each batch size."""


def train(say: Say) -> BenchResult:
    """Measure a step at each batch size."""
    data = criteo_log()
    torch.manual_seed(0)
    models = [DeepFM(data.schema, dim=DIM, hidden=HIDDEN) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    rows = [field.rows for field in data.schema.table_fields]
    by_hand = [copy_weights(models[0], DeepFMByHand(rows, DIM, HIDDEN)) for _ in range(2)]
    result: BenchResult = {
        "ratio": None,
        "ratio_of": "time of a step by hand with dense Adam / time of ours with lazy Adam",
    }
    for end, batch_size in BATCH_SIZES.items():
        say(f"train: batch size {batch_size}, {BUDGET:.0f} s")
        slices = ((batch.ids, batch.label) for batch in sliced(data, batch_size))
        variants: dict[str, Callable[[], None]] = {
            "reference": _by_hand(by_hand[0], _loaded(data, batch_size)),
            "tuned": _by_hand(by_hand[1], slices, fused=True),
            "ours": NextStep(models[0], data, batch_size),
            "dense": NextStep(models[1], data, batch_size, "dense"),
            "mlp": _mlp(len(data.schema.fields) * DIM, batch_size),
        }
        times, figures = compare(variants, budget=BUDGET, load=str(batch_size), suffix=end)
        reference, tuned, ours, dense = (times[name] for name in list(variants)[:4])
        network = times["mlp"].median
        result |= {
            f"ratio{end}": reference / ours,
            f"ratio_dense{end}": reference / dense,
            f"ratio_tuned{end}": tuned / ours,
            f"ratio_tuned_dense{end}": tuned / dense,
            f"ratio_tables{end}": (reference.median - network) / (ours.median - network),
            f"reference_samples_per_second{end}": round(batch_size / reference.median),
            f"ours_samples_per_second{end}": round(batch_size / ours.median),
            **figures,
        }
    return result


class DeepFMByHand(nn.Module):
    """DeepFM as people write it: one table per field, ids `(B, F)` to logits `(B,)`."""

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
        """Return one logit per row."""
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


def _by_hand(
    model: DeepFMByHand, batches: Iterator[tuple[Tensor, Tensor]], *, fused: bool | None = None
) -> Callable[[], None]:
    adam = torch.optim.Adam(model.parameters(), lr=LR, fused=fused)

    def step() -> None:
        ids, label = next(batches)
        adam.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(ids), label)
        loss.backward()
        adam.step()

    return step


def _mlp(width: int, batch_size: int) -> Callable[[], None]:
    mlp = MLP(width, HIDDEN)
    adam = torch.optim.Adam(mlp.parameters(), lr=LR, fused=True)
    # in a model, the tables need the gradient of the network's input
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
    """Yield ids and labels as torch's own loader does, epoch after epoch."""
    rows = TensorDataset(data.ids.long(), data.label)
    loader = DataLoader(rows, batch_size=batch_size, shuffle=True)
    while True:
        yield from loader
