"""Optimizers that touch only what a step looked up: tables by rows, the rest by torch's own.

    parameter's gradient    what happens
    sparse, from lookups    the rows in it are updated, by the compiled kernel where there is one
    dense                   torch's fused optimizer, as ever

One `torch.optim.Optimizer` does both, with its groups, schedulers and `state_dict`. A row's state waits
while the row is not looked up: Adam is then "lazy". Where every row is looked up in every step, lazy
Adam is Adam.

Optimizers with a group of their own for the tables.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.errors import OptimizerError, SettingsError
from rarebit.settings import require, suggest
from rarebit.tables.find import table_parameters
from rarebit.tables.rows import lookups_of, set_row_gradients
from rarebit.training import row_updates
from rarebit.training.row_kernel import row_kernel, suits

__all__ = [
    "Kind",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "RowwiseOptimizer",
    "RowwiseSGD",
    "TableMode",
    "optimizer",
]

OWN_OPTIONS = ("lr", "betas", "eps", "momentum", "weight_decay", "decoupled")


class Touched(NamedTuple):
    """A table with the lookups of a step, ids `(T,)` and the gradient of each, values `(T, D)`."""

    weight: nn.Parameter
    ids: Tensor
    values: Tensor
    state: dict[str, Tensor]
    group: dict[str, Any]

    def options(self, *names: str) -> dict[str, Any]:
        """Return some options of the table's group."""
        return {name: self.group[name] for name in names}

    def fastest(self, *states: Tensor) -> Any:
        """Return the fastest form of the updates for these tensors: a kernel's, or plain torch."""
        tensors = (self.values, self.weight, *states)
        if isinstance(self.group["lr"], Tensor):  # which only torch can use without looking at it
            return row_updates
        if self.weight.is_cuda:
            from rarebit.training import row_triton  # not before: Triton takes a while to import

            return row_triton if row_triton.suits(*tensors) else row_updates
        kernel = row_kernel() if suits(*tensors) else None
        return row_updates if kernel is None else kernel


class RowwiseOptimizer(Optimizer):
    """Tables by rows, the rest by torch's fused optimizer of the same kind."""

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], defaults: dict[str, Any]
    ) -> None:
        unknown = set(defaults) - {"fused", "capturable", *OWN_OPTIONS}
        require(not unknown, f"{type(self).__name__} has no option {', '.join(sorted(unknown))}")
        _check_range(defaults)
        # torch's options are in the groups, too, so that its own optimizer can load our state
        torchs = self.dense_kind([torch.zeros(1)]).defaults  # type: ignore[call-arg]  # a concrete one
        super().__init__(params, {**torchs, "fused": None, "capturable": False, **defaults})

    dense_kind: type[Optimizer]
    """Torch's own optimizer for what is no table."""

    @abstractmethod
    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return what is kept of a table beside its count of steps."""

    def first_state(self, weight: Tensor, key: str) -> Tensor:
        """Return a part of a table's state before its first step."""
        del key
        return torch.zeros_like(weight)

    @abstractmethod
    def update_rows(self, table: Touched) -> None:
        """Update the rows that were looked up, and their state."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state; options that torch's own optimizer does not have start at their defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for parameter in (p for p in held if p.grad.is_sparse):
                self._step_rows(parameter, group)
            self._step_dense([p for p in held if not p.grad.is_sparse], group)
        return loss

    def _step_rows(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        # torch's own may have begun it, on a gradient for all rows, or without momentum
        if state.get("step") is None:
            state["step"] = self._zero_steps(parameter, group)
        for key in self.state_keys(group):
            if state.get(key) is None:
                state[key] = self.first_state(parameter, key)
        self._refuse_dense_state(parameter)
        state["step"] += 1
        self.update_rows(Touched(parameter, *lookups_of(gradient), state, group))

    def _step_dense(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        options = {key: value for key, value in group.items() if key != "decoupled"}
        if self.dense_kind is torch.optim.Adagrad and parameters[0].is_cuda:
            options["fused"] = False  # which torch does not have there in all versions
        if group["decoupled"] and group["weight_decay"]:
            torch._foreach_mul_([*parameters], 1.0 - group["lr"] * group["weight_decay"])
            options["weight_decay"] = 0.0
        dense = self._torch_optimizer(parameters)
        for parameter in parameters:
            self._refuse_row_state(parameter)
            if parameter not in self.state:
                self.state[parameter] = _first_dense_state(self.dense_kind, parameter, options)
        # Our groups and our state are lent for the step, so whatever a scheduler, a checkpoint or an
        # exchange of parameters did to them holds.
        dense.param_groups = [{**dense.defaults, **options, "params": parameters}]
        dense.state = self.state
        dense.step()

    def _torch_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return torch's optimizer, made on first use: a copy of this one has to make its own."""
        made: Optimizer | None = self.__dict__.get("_made")
        if made is None:
            made = self._made = self.dense_kind(parameters)  # type: ignore[call-arg]  # a concrete one
        return made

    def _refuse_row_state(self, parameter: nn.Parameter) -> None:
        total = self.state.get(parameter, {}).get("sum")
        if total is not None and total.shape != parameter.shape:
            raise OptimizerError(
                f"a table of {len(parameter):,} rows was trained by rows and now got a gradient for all "
                "of them, as from a penalty on its whole weight; use tables='dense' for that"
            )

    def _refuse_dense_state(self, parameter: nn.Parameter) -> None:
        total = self.state[parameter].get("sum")
        if total is not None and total.dim() != 1:
            raise OptimizerError(
                f"the state of a table of {len(parameter):,} rows is that of dense Adagrad, which keeps "
                "a number for every weight; go on with tables='dense', or start anew"
            )

    def _zero_steps(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        device = parameter.device if group["capturable"] else torch.device("cpu")
        return torch.zeros((), dtype=torch.float32, device=device)


class RowwiseAdam(RowwiseOptimizer):
    """Adam for dense parameters, lazy Adam for the rows of tables."""

    dense_kind = torch.optim.Adam

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        **options: Any,
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps}
        super().__init__(
            params, {**own, "weight_decay": weight_decay, "decoupled": decoupled, **options}
        )

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return both moments, for every number of the table."""
        del group
        return "exp_avg", "exp_avg_sq"

    def update_rows(self, table: Touched) -> None:
        """Take Adam's step on the rows that were looked up."""
        moments = table.state["exp_avg"], table.state["exp_avg_sq"]
        steps = table.state["step"]
        table.fastest(*moments).adam(
            *(table.ids, table.values, table.weight, *moments),
            **table.options("lr", "betas", "eps", "weight_decay", "decoupled"),
            step=steps if steps.is_cuda else int(steps),
        )


class RowwiseAdagrad(RowwiseOptimizer):
    """Adagrad for dense parameters, row-wise Adagrad for tables: one number of state a row."""

    dense_kind = torch.optim.Adagrad

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        **options: Any,
    ) -> None:
        own = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, {**own, **options})

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the sum of squares."""
        del group
        return ("sum",)

    def first_state(self, weight: Tensor, key: str) -> Tensor:
        """Return one number a row."""
        del key
        return weight.new_zeros(len(weight))

    def update_rows(self, table: Touched) -> None:
        """Take Adagrad's step on the rows that were looked up."""
        total = table.state["sum"]
        table.fastest(total).adagrad(
            *(table.ids, table.values, table.weight, total),
            **table.options("lr", "eps", "weight_decay", "decoupled"),
        )


class RowwiseSGD(RowwiseOptimizer):
    """SGD with momentum, for tables on the rows that were looked up."""

    dense_kind = torch.optim.SGD

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        **options: Any,
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**own, "decoupled": decoupled, **options})

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the momentum, where there is one."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def update_rows(self, table: Touched) -> None:
        """Take SGD's step on the rows that were looked up."""
        buffer = table.state.get("momentum_buffer")
        table.fastest(*() if buffer is None else (buffer,)).sgd(
            *(table.ids, table.values, table.weight, buffer),
            **table.options("lr", "momentum", "weight_decay", "decoupled"),
        )


def _check_range(options: dict[str, Any]) -> None:
    for name in ("lr", "eps", "momentum", "weight_decay"):
        value = options.get(name, 0.0)
        require(bool(value >= 0), f"{name} must be 0 or more, got {name}={value}")
    for beta in options.get("betas", ()):
        require(bool(0.0 <= beta < 1.0), f"betas must lie in [0, 1), got {options['betas']}")


def _first_dense_state(
    kind: type[Optimizer], parameter: nn.Parameter, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the state torch makes with its optimizer and not in the first step, as Adagrad's."""
    if kind is not torch.optim.Adagrad:
        return {}
    return dict(torch.optim.Adagrad([parameter], fused=options["fused"]).state[parameter])


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
