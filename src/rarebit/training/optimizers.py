"""Optimizers with a group of their own for the tables."""

from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from rarebit.errors import OptimizerError, SettingsError
from rarebit.settings import suggest
from rarebit.tables.find import table_parameters

__all__ = ["Kind", "optimizer"]

Kind = Literal["adam", "sgd", "adagrad"]


def optimizer(
    model: nn.Module,
    *,
    kind: Kind = "adam",
    lr: float = 1e-3,
    table_lr: float | None = None,
    weight_decay: float = 0.0,
    table_weight_decay: float | None = None,
    momentum: float = 0.0,
) -> Optimizer:
    """Return torch's own optimizer over two groups, "network" and "tables", fused where it can be.

    Without values of their own, the tables take the network's. Build it after `apply_`.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    >>> [group["name"] for group in optimizer(model, lr=1e-3, table_lr=1e-2).param_groups]
    ['network', 'tables']
    """
    _refuse_sparse(model)
    tables = {id(parameter) for parameter in table_parameters(model).values()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "name": "network",
            "params": [p for p in trainable if id(p) not in tables],
            "lr": lr,
            "weight_decay": weight_decay,
        },
        {
            "name": "tables",
            "params": [p for p in trainable if id(p) in tables],
            "lr": lr if table_lr is None else table_lr,
            "weight_decay": weight_decay if table_weight_decay is None else table_weight_decay,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise OptimizerError("the model has no trainable parameter, so there is nothing to train")
    return _build(kind, groups, momentum, fused=_can_fuse(kind, trainable))


def _build(kind: str, groups: list[dict[str, Any]], momentum: float, *, fused: bool) -> Optimizer:
    if kind == "adam":
        return torch.optim.Adam(groups, fused=fused)
    if kind == "sgd":
        return torch.optim.SGD(groups, momentum=momentum, fused=fused)
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, fused=fused)
    raise SettingsError(f"unknown optimizer {kind!r}{suggest(kind, ['adam', 'sgd', 'adagrad'])}")


def _can_fuse(kind: str, parameters: list[nn.Parameter]) -> bool:
    """One pass over weights and state instead of several: on CPUs less than half the time."""
    devices = {parameter.device.type for parameter in parameters}
    if not all(parameter.is_floating_point() for parameter in parameters):
        return False
    # torch has no fused Adagrad on CUDA in all the versions we support
    return devices <= {"cpu"} or (kind != "adagrad" and devices <= {"cpu", "cuda"})


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise OptimizerError(
                f"{name!r} was made with sparse=True, whose gradients these optimizers cannot take; "
                "make it with sparse=False, or bring an optimizer of your own such as SparseAdam"
            )
