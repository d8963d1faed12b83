"""Memory that training will take, estimated before it starts, and a limit for models built from files.

    tables, network          the weights
    gradients                as large as the weights; by rows: the lookups of one batch, T x D
    optimizer state          Adam: twice the weights; Adagrad by rows: one number per row
    data                     training and validation data on the device of the model
    best and average         a copy of the weights each
    checkpoint               weights and state once more, while they are written

Activations are left out: they depend on what the model does between its layers.

What a file describes may be absurd, so a model from a file is built inside `AllocationLimit`. It sizes every tensor before
allocating it, and refuses it where all tensors together exceed the limit or the free memory.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam
from torch.overrides import TorchFunctionMode

from rarebit.data.dataset import Dataset
from rarebit.data.schema import Schema
from rarebit.errors import ModelFileError, NotEnoughMemoryError
from rarebit.machine import CPU, available_memory, require_memory
from rarebit.models import build_model
from rarebit.settings import size
from rarebit.tables.apply import table_bytes
from rarebit.tables.collection import row_gradients_kept, set_row_gradients
from rarebit.training.metrics import device_of
from rarebit.training.optimizers import RowwiseOptimizer
from rarebit.training.settings import Training

KINDS: dict[str, type[Optimizer]] = {"adam": Adam, "sgd": SGD, "adagrad": Adagrad}

PARTS = {
    "tables": ("tables", "a smaller dim, Hashing or LowRank make the tables smaller"),
    "network": ("network", "a smaller network helps"),
    "gradients": (
        "gradients",
        'tables="rowwise" keeps the gradients of a batch only, fewer at a smaller batch_size',
    ),
    "optimizer_state": (
        "optimizer state",
        'tables="rowwise" with optimizer="adagrad" keeps 4 bytes per row',
    ),
    "train_data": ("training data", "keep the data elsewhere and train on a part of it at a time"),
    "valid_data": ("validation data", "validate on fewer rows, or keep the data elsewhere"),
    "best_weights": (
        "copy of the best weights",
        "valid=None keeps no copy of the best weights",
    ),
    "average_weights": ("averaged weights", "ema_decay=None and ema_epochs=None keep no averages"),
    "checkpoint": (
        "copy for a checkpoint",
        "without a folder nothing is copied for checkpoints",
    ),
}
"""What each part of an estimate is called, and what helps where it is too large."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes that training takes, part by part, without activations."""

    device: torch.device
    """Where training runs."""
    tables: int = 0
    network: int = 0
    """Weights of all the rest, and buffers."""
    gradients: int = 0
    optimizer_state: int = 0
    train_data: int = 0
    valid_data: int = 0
    best_weights: int = 0
    """The copy of the best epoch's weights, kept where there is validation data."""
    average_weights: int = 0
    checkpoint: int = 0
    """The copy that a thread writes while training continues, where training is on the CPU itself."""
    there: frozenset[str] = frozenset()
    """The parts that are allocated already."""
    available: int | None = None
    """Bytes that were free when the estimate was made; None where the system does not report it."""
    unknown_optimizer: str | None = None
    """The optimizer's class, where its state cannot be guessed and is left out."""

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name, largest first, without those of 0 bytes."""
        parts = {name: int(getattr(self, name)) for name in PARTS}
        return dict(sorted(((k, v) for k, v in parts.items() if v), key=lambda part: -part[1]))

    @property
    def data(self) -> int:
        """Bytes of training and validation data."""
        return self.train_data + self.valid_data

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def to_allocate(self) -> int:
        """Bytes of the parts that are not there yet."""
        return sum(size for name, size in self.parts.items() if name not in self.there)

    @property
    def fits(self) -> bool:
        """Whether what is to be allocated is free, as far as the system reports it."""
        return self.available is None or self.to_allocate <= self.available

    def with_training_data_elsewhere(self) -> "MemoryEstimate":
        """Return the estimate for training data that is copied batch by batch."""
        return replace(self, train_data=0)

    def check(self) -> None:
        """Raise when what is to be allocated is more than what is free."""
        if self.available is None or self.fits:
            return
        part = next(name for name in self.parts if name not in self.there)
        label, advice = PARTS[part]
        if part not in ("tables", "network", "train_data", "valid_data"):
            advice += f"; {PARTS['tables'][1]} and all that goes with them"
        raise NotEnoughMemoryError(
            f"training would allocate {size(self.to_allocate)} on {self.device}, where "
            f"{size(self.available)} are free; the largest part is the {label}, "
            f"{size(self.parts[part])}: {advice}"
        )

    def line(self) -> str:
        """Return the estimate on one line."""
        head, *_ = str(self).split("\n", 1)
        parts = [f"{PARTS[name][0]} {size(part)}" for name, part in self.parts.items()]
        if self.unknown_optimizer is not None:
            parts.append(f"optimizer state of {self.unknown_optimizer} unknown")
        return f"{head} ({', '.join(parts)})"

    def __str__(self) -> str:
        free = "free memory unknown" if self.available is None else f"{size(self.available)} free"
        head = (
            f"memory on {self.device}: {size(self.total)} plus activations, "
            f"{size(self.to_allocate)} of it to allocate, {free}"
        )
        rows = [
            (PARTS[name][0], size(part), "  there already" if name in self.there else "")
            for name, part in self.parts.items()
        ]
        if self.unknown_optimizer is not None:
            rows.append(("optimizer state", "unknown", f"  of {self.unknown_optimizer}"))
        wide = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"  {name:<{wide[0]}}  {size:>{wide[1]}}{note}" for name, size, note in rows]
        return "\n".join([head, *lines])


def estimate_memory(
    model: nn.Module,
    train: Dataset,
    valid: Dataset | None = None,
    *,
    settings: Training = Training(),
    optimizer: Optimizer | None = None,
    checkpoints: bool = False,
    not_averaged: Iterable[nn.Parameter] = (),
) -> MemoryEstimate:
    """Return what `fit` with these arguments will take in memory, without taking it.

    `checkpoints` counts the copy of weights and state that is made to write one; `not_averaged` are parameters that an
    average of the weights leaves out.

    >>> model = nn.Sequential(nn.Embedding(1000, 16, device="meta"))
    >>> data = Dataset.from_columns({"user": [0, 1, 2]}, label=[0, 1, 0])
    >>> print(estimate_memory(model, data, settings=Training(tables="rowwise", optimizer="adagrad")))
    memory on meta: 68.2 kB plus activations, 68.2 kB of it to allocate, free memory unknown
      tables           64.0 kB
      optimizer state   4.0 kB
      gradients          192 B
      training data       24 B
    """
    device = device_of(model)
    rows = _trained_by_rows(model, settings, optimizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tables = table_bytes(model)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    left_out = {id(parameter) for parameter in not_averaged}
    followed = [parameter for parameter in trained if id(parameter) not in left_out]
    averages = _bytes(followed) + 4 * sum(len(p) for p in followed if id(p) in rows)
    # each slot of a batch is taken to be looked up once among the tables of each width
    lookups = min(settings.batch_size, len(train)) * train.schema.num_slots  # T
    row_bytes = sum(
        w * size for w, size in {(p.shape[1], p.itemsize) for p in trained if id(p) in rows}
    )
    state = _optimizer_state(trained, rows, settings, optimizer)
    kept = _bytes(model.state_dict().values())
    averaged = averages if settings.ema_decay or settings.ema_epochs else 0
    copied = (1 + (valid is not None)) * kept + state.num_bytes + averaged
    there = {
        "tables": device.type != "meta",
        "network": device.type != "meta",
        "optimizer_state": state.exists,
        "train_data": train.device == device,
        "valid_data": valid is not None and valid.device == device,
    }
    return MemoryEstimate(
        device=device,
        tables=tables,
        network=parameters - tables + buffers,
        gradients=_bytes(p for p in trained if id(p) not in rows) + lookups * row_bytes,
        optimizer_state=state.num_bytes,
        train_data=train.num_bytes,
        valid_data=0 if valid is None else valid.num_bytes,
        best_weights=0 if valid is None else kept,
        average_weights=averaged,
        checkpoint=copied if checkpoints and device.type == "cpu" else 0,
        there=frozenset(name for name, is_there in there.items() if is_there),
        available=available_memory(device),
        unknown_optimizer=state.unknown,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _trained_by_rows(
    model: nn.Module, settings: Training, optimizer: Optimizer | None
) -> frozenset[int]:
    """Return the identities of the parameters whose gradient comes by rows."""
    with row_gradients_kept(model):
        if optimizer is None:  # what building one does to the tables
            set_row_gradients(model, by_rows=settings.tables == "rowwise")
        return frozenset(
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        )


class _State(NamedTuple):
    num_bytes: int
    exists: bool = False
    unknown: str | None = None


def _optimizer_state(
    trained: list[nn.Parameter],
    rows: frozenset[int],
    settings: Training,
    optimizer: Optimizer | None,
) -> _State:
    """Return the bytes of an optimizer's state: as it is where there is one, else by its class."""
    if optimizer is None:
        groups = [{"params": trained, "momentum": settings.momentum}]
        return _State(_guessed_state(KINDS[settings.optimizer], groups, rows) or 0)
    if any(optimizer.state.values()):
        held = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [value for value in held if isinstance(value, Tensor)]
        size = sum((t._values() if t.is_sparse else t).nbytes for t in tensors)  # noqa: SLF001  # not coalesced
        return _State(size, exists=True)
    kind, own_rows = type(optimizer), frozenset[int]()
    if isinstance(optimizer, RowwiseOptimizer):
        kind, own_rows = optimizer.dense_kind, rows
    guessed = _guessed_state(kind, optimizer.param_groups, own_rows)
    return _State(0, unknown=kind.__name__) if guessed is None else _State(guessed)


def _guessed_state(
    kind: type[Optimizer], groups: Iterable[dict[str, Any]], rows: frozenset[int]
) -> int | None:
    """Return the bytes of an optimizer's state after its first step; None for an unknown class."""
    total = 0
    for group in groups:
        # numbers for each weight, the count of steps left out
        if issubclass(kind, Adam | AdamW | SparseAdam):
            copies = 3 if group.get("amsgrad") else 2
        elif issubclass(kind, SGD):
            copies = 1 if group.get("momentum") else 0
        elif issubclass(kind, Adagrad):
            copies = 1
        else:
            return None
        for parameter in group["params"]:
            if kind is Adagrad and id(parameter) in rows:
                total += len(parameter) * parameter.itemsize
            elif parameter.requires_grad:
                total += copies * parameter.nbytes
    return total


def check_building(name: str, schema: Schema, settings: Mapping[str, Any]) -> None:
    """Raise before a model is built that the memory cannot hold, and say which width it could."""

    def needed(dim: int | None = None) -> int:
        return building_bytes(name, schema, settings if dim is None else {**settings, "dim": dim})

    free, fields = available_memory(CPU), schema.table_fields
    if free is None or _is_small(schema, settings, free) or needed() <= free:
        return
    dim = settings.get("dim", 1) // 2
    while dim and needed(dim) > free:
        dim //= 2
    require_memory(
        needed(),
        f"building the model {name} for {sum(f.rows for f in fields):,} rows in {len(fields)} tables",
        (f"dim={dim} would fit" if dim else "use a smaller network")
        + ", or prepare the data with fewer values per field",
    )


def _is_small(schema: Schema, settings: Mapping[str, Any], free: int) -> bool:
    """Return whether a model is far from filling the memory, by a bound: to size it, torch imports for seconds."""
    dim, rows = int(settings.get("dim", DIM)), sum(field.rows for field in schema.table_fields)
    given = [
        v
        for value in settings.values()
        for v in (value if isinstance(value, list | tuple) else [value])
    ]
    widest = max([len(schema.fields) * dim, *(v for v in given if isinstance(v, int))])
    return 2 * COPIES * 4 * (rows * dim + 4 * widest**2) < free


def building_bytes(name: str, schema: Schema, settings: Mapping[str, Any]) -> int:
    """Return the most bytes that a model takes while it is built: its tables twice, until they are joined."""
    try:
        with torch.device("meta"):
            model = build_model(name, schema, settings)
    except (OverflowError, RuntimeError, TypeError):  # sizes beyond those of any tensor
        return sys.maxsize
    return _bytes(model.parameters()) + table_bytes(model)


OBJECT_BYTES = 4096
"""What a small tensor takes with the module around it, so that millions of them are seen."""
DIM = 64
"""The width of a model that does not say it, or more."""
COPIES = 2
"""How often a table is in memory while a model is built: by itself, and joined to others."""
UNKNOWN = 1 << 40
"""Bytes where the system does not say: enough for all that is real, and no sum of sizes overflows."""
FACTORIES = (
    *(torch.arange, torch.empty, torch.full),
    *(torch.ones, torch.rand, torch.randn, torch.zeros),
)
"""Functions that models make their weights by."""


class AllocationLimit(TorchFunctionMode):
    """Refuses tensors beyond `limit` bytes in all, and beyond the memory there is."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.limit, self.asked = limit, 0
        available = available_memory(torch.device("cpu"))
        self.available = UNKNOWN if available is None else available

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = dict(kwargs or {})
        if func in FACTORIES:
            size = int(func(*args, **given | {"device": "meta"}).nbytes)
            self.ask(max(size, OBJECT_BYTES))
        return func(*args, **given)

    def ask(self, num_bytes: int) -> None:
        """Raise where so many more bytes exceed the limit or the free memory."""
        self.asked += num_bytes
        if self.limit is not None and self.asked > self.limit:
            raise ModelFileError(
                "it asks for larger weights than the folder holds; take an older copy of it"
            )
        self.require(self.asked)

    def require(self, num_bytes: int) -> None:
        """Raise where the free memory is less than this."""
        if COPIES * num_bytes > self.available:
            raise ModelFileError(
                "it asks for more memory than there is; load it on a larger machine, or take an "
                "older copy where its sizes are wrong"
            )
