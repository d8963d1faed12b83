"""Optimizers with a group of their own for the tables."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from rarebit.errors import OptimizerError, SettingsError
from rarebit.settings import require, suggest
from rarebit.tables.find import table_parameters
from rarebit.tables.sparse import set_row_gradients
from rarebit.training.rowwise import RowwiseAdagrad, RowwiseAdam, RowwiseSGD

__all__ = ["Kind", "TableMode", "optimizer"]

Kind = Literal["adam", "sgd", "adagrad"]
TableMode = Literal["dense", "rowwise"]

DENSE: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
ROWWISE: dict[str, Callable[..., Optimizer]] = {
    "adam": RowwiseAdam,
    "sgd": RowwiseSGD,
    "adagrad": RowwiseAdagrad,
}


THRESHOLDS = "thresholds"
"""The group of the parts of tables that `optimizer_groups` of their class assigns to it."""


def optimizer(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    tables: TableMode = "dense",
    kind: Kind = "adam",
    table_lr: float | None = None,
    weight_decay: float = 0.0,
    table_weight_decay: float | None = None,
    threshold_weight_decay: float = 1e-5,
    decoupled: bool = False,
    momentum: float = 0.0,
    change_groups: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
) -> Optimizer:
    """Return an optimizer over the groups "network" and "tables". Build it after `apply_`.

    tables     "dense": torch's own, every row in every step. "rowwise": only the rows a step looked up,
               so that a step costs what its batch costs; Adam is then lazy, Adagrad keeps one number
               a row, and the model's plain tables are switched to `sparse=True`
    table_*    the tables' own values; the network's where not given
    threshold_weight_decay
               of the group "thresholds", which a model with `PEP` has besides; it drives them up,
               towards zero from below, and with decoupled=True hardly at all
    decoupled  weight decay shrinks weights directly, as AdamW does, in place of adding to gradients;
               by rows it reaches the rows of the step only

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    >>> [group["name"] for group in optimizer(model, lr=1e-3, table_lr=1e-2).param_groups]
    ['network', 'tables']
    >>> type(optimizer(model, lr=1e-3, tables="rowwise")).__name__
    'RowwiseAdam'
    """
    _check(kind, tables, decoupled=decoupled)
    numbers = {
        "lr": lr,
        "table_lr": table_lr,
        "weight_decay": weight_decay,
        "threshold_weight_decay": threshold_weight_decay,
    }
    for name, value in numbers.items():
        require(value is None or value >= 0, f"{name} must be 0 or more, got {name}={value}")
    groups = _groups(model, lr, lr if table_lr is None else table_lr)
    groups[0]["weight_decay"] = weight_decay
    groups[1]["weight_decay"] = weight_decay if table_weight_decay is None else table_weight_decay
    groups[2]["weight_decay"] = threshold_weight_decay
    groups = [group for group in groups if group["params"]]
    if change_groups is not None:
        groups = change_groups(groups)
    if not groups:
        raise OptimizerError("the model has no trainable parameter, so there is nothing to train")
    set_row_gradients(model, by_rows=tables == "rowwise")
    options = _options(kind, [p for group in groups for p in group["params"]])
    if kind == "sgd":
        options["momentum"] = momentum
    if tables == "rowwise":
        return ROWWISE[kind](groups, decoupled=decoupled, **options)
    return torch.optim.AdamW(groups, **options) if decoupled else DENSE[kind](groups, **options)


def _check(kind: str, tables: str, *, decoupled: bool) -> None:
    if kind not in DENSE:
        raise SettingsError(f"unknown optimizer {kind!r}{suggest(kind, list(DENSE))}")
    require(
        tables in ("dense", "rowwise"),
        f"tables must be 'dense' or 'rowwise', got tables={tables!r}",
    )
    require(
        not decoupled or kind == "adam" or tables == "rowwise",
        f"torch has no {kind} with decoupled weight decay for dense tables; "
        "use kind='adam' or tables='rowwise'",
    )


def _groups(model: nn.Module, lr: float, table_lr: float) -> list[dict[str, Any]]:
    tables = {id(parameter) for parameter in table_parameters(model).values()}
    levels = {
        id(parameter)
        for module in model.modules()
        for part, group in getattr(module, "optimizer_groups", {}).items()
        if group == THRESHOLDS
        for parameter in getattr(module, part).parameters()
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    network = [p for p in trainable if id(p) not in tables]
    held = [p for p in trainable if id(p) in tables - levels]
    thresholds = [p for p in trainable if id(p) in levels]
    return [
        {"name": "network", "params": network, "lr": lr},
        {"name": "tables", "params": held, "lr": table_lr},
        {"name": THRESHOLDS, "params": thresholds, "lr": table_lr},
    ]


def _options(kind: str, parameters: list[nn.Parameter]) -> dict[str, Any]:
    devices = {parameter.device.type for parameter in parameters}
    options: dict[str, Any] = {"fused": _can_fuse(kind, parameters)}
    if kind == "adam" and devices == {"cuda"}:
        options["capturable"] = (
            True  # its count of steps stays on the GPU, as a CUDA graph needs it
        )
    return options


def _can_fuse(kind: str, parameters: list[nn.Parameter]) -> bool:
    """One pass over weights and state instead of several: on CPUs less than half the time."""
    devices = {parameter.device.type for parameter in parameters}
    if not all(parameter.is_floating_point() for parameter in parameters):
        return False
    # torch has no fused Adagrad on CUDA in all the versions we support
    return devices <= {"cpu"} or (kind != "adagrad" and devices <= {"cpu", "cuda"})
