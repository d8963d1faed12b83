"""Optimizers with a group for the tables, dense or by rows.

    gradient of a parameter    what `RowwiseOptimizer` does
    sparse, from lookups       update the rows in it, in one pass
    dense                      call torch's fused optimizer

One `torch.optim.Optimizer` does both, with its groups, schedulers and `state_dict`. A row's state waits while the row is not
looked up: Adam is then "lazy". If every step looks up every row, lazy Adam is Adam.

A step gives a table T lookups: ids `(T,)` with duplicates, and values `(T, D)`, the gradient of each. For each distinct row,
w its weight and g the sum of its values in the order of the lookups:

    decoupled   w *= 1 - lr * weight_decay, before all else
    coupled     g += weight_decay * w
    adam        m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * g * g
                w -= lr / (1 - b1^step) * m / (sqrt(v) / sqrt(1 - b2^step) + eps)
    adagrad     s += mean(g * g)                       one number per row
                w -= lr * g / (sqrt(s) + eps)
    sgd         b = momentum * b + g
                w -= lr * b                            without momentum: w -= lr * g

Three implementations with the same methods: `RowKernel` (`row_kernel.cpp`, compiled on first use, see `tables/compiler.py`),
`row_triton` on a GPU, and `PlainRows` in torch, their reference, used where the others are not available. Other rows are not
touched, and on the CPU the bits do not depend on the number of threads.
"""

import ctypes
import functools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from rarebit.errors import DataError, OptimizerError, SettingsError
from rarebit.settings import require, require_number, suggest
from rarebit.storage.files import spell_tensor
from rarebit.tables.apply import table_parameters
from rarebit.tables.collection import (
    find_distinct,
    is_sharded,
    lookups_of,
    set_row_gradients,
    take_rows,
)
from rarebit.tables.compiler import is_plain, load_compiled

Kind = Literal["adam", "sgd", "adagrad"]
TableMode = Literal["dense", "rowwise"]

OWN_OPTIONS = ("lr", "betas", "eps", "momentum", "weight_decay", "decoupled")
THRESHOLDS = "thresholds"
"""The group of the parts of tables that `optimizer_groups` of their class assigns to it."""

SOURCE = Path(__file__).with_name("row_kernel.cpp")
OUT_OF_MEMORY = -2
LOOKUPS = (c_void_p, c_int64, c_void_p, c_int64, c_int)
"""ids, their number, values, width, threads"""
TABLE = (c_int64, c_void_p, c_float, c_float)
"""rows, weight, decoupled decay, coupled decay"""
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "rarebit_merge": (*LOOKUPS, c_void_p, c_void_p),
    "rarebit_adam": (*LOOKUPS, *TABLE, c_void_p, c_void_p, *[c_float] * 7),
    "rarebit_adagrad": (*LOOKUPS, *TABLE, c_void_p, c_float, c_float),
    "rarebit_sgd": (*LOOKUPS, *TABLE, c_void_p, c_float, c_float),
}


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

    tables     "dense": torch's own, every row in every step. "rowwise": only the rows a step looked up, so that a
               step costs what its batch costs; Adam is then lazy, Adagrad keeps one number per row, and the
               model's plain tables are switched to `sparse=True`
    table_*    values for the tables; the same as the network's if not given
    threshold_weight_decay
               of the third group, "thresholds", of a model with `PEP` that has no decay of its own; it drives
               them up, towards zero from below, and with decoupled=True hardly at all
    decoupled  weight decay shrinks weights directly, as AdamW does, in place of adding to gradients; with
               tables="rowwise" it reaches the rows of the step only

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    >>> [group["name"] for group in optimizer(model, lr=1e-3, table_lr=1e-2).param_groups]
    ['network', 'tables']
    >>> type(optimizer(model, lr=1e-3, tables="rowwise")).__name__
    'RowwiseAdam'
    """
    if not isinstance(model, nn.Module):
        raise OptimizerError(
            f"optimizer takes the model, as in optimizer(model, lr=1e-3), got a {type(model).__name__}"
        )
    if str(kind) not in DENSE:
        raise SettingsError(f"unknown optimizer {kind!r}{suggest(str(kind), list(DENSE))}")
    require(
        tables in ("dense", "rowwise"),
        f"tables must be 'dense' or 'rowwise', got tables={tables!r}",
    )
    require(
        not decoupled or kind == "adam" or tables == "rowwise",
        f"torch has no {kind} with decoupled weight decay for dense tables; "
        "use kind='adam' or tables='rowwise'",
    )
    is_bool = isinstance(decoupled, bool)
    require(is_bool, f"decoupled must be true or false, got decoupled={decoupled!r}")
    require(
        change_groups is None or callable(change_groups),
        f"change_groups must be a function of the groups, got change_groups={change_groups!r}",
    )
    table_lr = lr if table_lr is None else table_lr
    table_weight_decay = weight_decay if table_weight_decay is None else table_weight_decay
    numbers = {
        "lr": lr,
        "table_lr": table_lr,
        "weight_decay": weight_decay,
        "table_weight_decay": table_weight_decay,
        "threshold_weight_decay": threshold_weight_decay,
        "momentum": momentum,
    }
    for name, value in numbers.items():
        require_number(name, value, least=0.0)
    for name, parameter in table_parameters(model).items() if tables == "rowwise" else ():
        if is_sharded(parameter):
            raise OptimizerError(
                f"tables='rowwise' updates whole rows, but each process holds only a part of {name!r} (FSDP2); "
                "use tables='dense', or keep its module out of fully_shard"
            )
    groups = _groups(model, lr, table_lr)
    groups[0]["weight_decay"] = weight_decay
    groups[1]["weight_decay"] = table_weight_decay
    decays = (getattr(module, "threshold_weight_decay", None) for module in model.modules())
    own: set[float] = {decay for decay in decays if decay is not None}
    require(
        len(own) <= 1,
        f"thresholds have one weight decay, got {', '.join(map(str, sorted(own)))}; give every PEP the same decay",
    )
    groups[2]["weight_decay"] = own.pop() if own else threshold_weight_decay
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


def _groups(model: nn.Module, lr: float, table_lr: float) -> list[dict[str, Any]]:
    """Return the groups of the network, the tables and the thresholds; each may be empty."""
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
    """Return torch's options: one pass over weights and state where it can, less than half the time on CPUs."""
    devices = {parameter.device.type for parameter in parameters}
    # torch has no fused Adagrad on CUDA in all the versions we support
    can_fuse = devices <= {"cpu"} or (kind != "adagrad" and devices <= {"cpu", "cuda"})
    # on a CPU, torch's fused SGD leaves weights in half precision as they are, without an error
    stuck = kind == "sgd" and any(p.device.type == "cpu" and p.itemsize < 4 for p in parameters)
    floats = all(p.is_floating_point() for p in parameters)
    options: dict[str, Any] = {"fused": can_fuse and floats and not stuck}
    if kind == "adam" and devices == {"cuda"}:
        options["capturable"] = (
            True  # the count of steps stays on the GPU, as a CUDA graph needs it
        )
    return options


class RowwiseOptimizer(Optimizer):
    """Tables by rows, the rest by torch's fused optimizer of the same kind."""

    dense_kind: type[Optimizer]
    """Torch's optimizer for dense gradients."""
    update: ClassVar[str]
    """The method of `PlainRows` and the kernels that updates rows."""
    own: ClassVar[dict[str, Any]]
    """The options of its kind, with their defaults."""
    state_names: ClassVar[tuple[str, ...]]
    """The state of a table besides its count of steps."""

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], **options: Any
    ) -> None:
        unknown = set(options) - {"fused", "capturable", *OWN_OPTIONS}
        require(not unknown, f"{type(self).__name__} has no option {', '.join(sorted(unknown))}")
        defaults = {**self.own, "weight_decay": 0.0, "decoupled": False, **options}
        for name in ("lr", "eps", "momentum", "weight_decay"):
            require_number(name, defaults.get(name, 0.0), least=0.0)
        betas = defaults.get("betas", (0.0, 0.0))
        is_pair = isinstance(betas, Sequence) and len(betas) == 2
        require(is_pair, f"betas must be two numbers, got betas={betas!r}")
        for beta in betas:
            require_number("betas", beta)
            require(bool(0.0 <= beta < 1.0), f"betas must lie in [0, 1), got {betas}")
        # torch's options are in the groups, too, so that its own optimizer can load our state
        torchs = self.dense_kind([torch.zeros(1)]).defaults  # type: ignore[call-arg]  # a concrete one
        super().__init__(params, {**torchs, "fused": None, "capturable": False, **defaults})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state; options that torch's own optimizer does not have start at their defaults."""
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
        assert parameter.grad is not None
        ids, values = lookups_of(parameter.grad)
        state = self.state[parameter]
        # torch's own may have begun it, on a gradient for all rows, or without momentum
        if state.get("step") is None:
            device = parameter.device if group["capturable"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for name in self.state_names:
            if state.get(name) is None and (name != "momentum_buffer" or group["momentum"]):
                shape = parameter.shape[:1] if name == "sum" else parameter.shape
                state[name] = parameter.new_zeros(shape)
        total = state.get("sum")
        if total is not None and total.dim() != 1:
            raise OptimizerError(
                f"the state of a table of {len(parameter):,} rows is that of dense Adagrad, which keeps "
                "a number for every weight; continue with tables='dense', or start anew"
            )
        state["step"] += 1
        options = {name: group[name] for name in (*self.own, "weight_decay", "decoupled")}
        if self.update == "adam":
            options["step"] = state["step"] if state["step"].is_cuda else int(state["step"])
        states = [state.get(name) for name in self.state_names]
        tensors = [t for t in (values, parameter, *states) if t is not None]
        update = getattr(_fastest_rows(group["lr"], tensors), self.update)
        update(ids, values, parameter, *states, **options)

    def _step_dense(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        options = {key: value for key, value in group.items() if key != "decoupled"}
        if self.dense_kind is torch.optim.Adagrad and parameters[0].is_cuda:
            options["fused"] = False  # which torch does not have there in all versions
        if group["decoupled"] and group["weight_decay"]:
            torch._foreach_mul_([*parameters], 1.0 - group["lr"] * group["weight_decay"])
            options["weight_decay"] = 0.0
        # made on first use: a copy of this optimizer has to make its own
        dense: Optimizer | None = self.__dict__.get("_dense")
        if dense is None:
            dense = self._dense = self.dense_kind(parameters)  # type: ignore[call-arg]  # a concrete one
        for parameter in parameters:
            total = self.state.get(parameter, {}).get("sum")
            if total is not None and total.shape != parameter.shape:
                raise OptimizerError(
                    f"a table of {len(parameter):,} rows was trained by rows and now got a gradient for all "
                    "of them, as from a penalty on its whole weight; use tables='dense' for that"
                )
            if parameter not in self.state and self.dense_kind is torch.optim.Adagrad:
                # torch makes this state with its optimizer, not in the first step
                made = torch.optim.Adagrad([parameter], fused=options["fused"])
                self.state[parameter] = dict(made.state[parameter])
        # Our groups and our state are lent for the step, so whatever a scheduler, a checkpoint or an
        # exchange of parameters did to them holds.
        dense.param_groups = [{**dense.defaults, **options, "params": parameters}]
        dense.state = self.state
        dense.step()


class RowwiseAdam(RowwiseOptimizer):
    """Adam for dense parameters, lazy Adam for the rows of tables."""

    dense_kind, update = torch.optim.Adam, "adam"
    own: ClassVar = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    state_names = ("exp_avg", "exp_avg_sq")


class RowwiseAdagrad(RowwiseOptimizer):
    """Adagrad for dense parameters, row-wise Adagrad for tables: one number of state per row."""

    dense_kind, update = torch.optim.Adagrad, "adagrad"
    own: ClassVar = {"lr": 1e-2, "eps": 1e-10}
    state_names = ("sum",)


class RowwiseSGD(RowwiseOptimizer):
    """SGD with momentum, for tables on the rows that were looked up."""

    dense_kind, update = torch.optim.SGD, "sgd"
    own: ClassVar = {"lr": 1e-3, "momentum": 0.0}
    state_names = ("momentum_buffer",)


SIZES = (2, 3, 5, 7, 11, 13)
"""The sizes of a tiny parameter: from the shape of a state one sees which axes it has."""
OF_DEVICE = {"fused", "foreach", "capturable"}
"""Options that depend on the device, which may be another one than that of a saved state."""


def fitting_state(
    optimizer: Optimizer, saved: Mapping[str, Any], stateless: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return a saved state for `load_state_dict`; raise unless it is one of this optimizer.

    Torch checks neither shapes nor types, and its fused optimizers read beyond a state that is too short. `stateless` are
    the numbers of the parameters that had no state; None where that is not known.
    """
    now = optimizer.state_dict()
    if now.keys() != {"state", "param_groups"}:
        return dict(saved)  # its own form, which it checks itself
    groups, states = saved["param_groups"], dict(saved["state"])
    if len(groups) != len(now["param_groups"]):
        raise OptimizerError(f"the state has {len(groups)} groups of parameters")
    merged = []
    for there, here in zip(groups, now["param_groups"], strict=True):
        both = {key: there[key] for key in here if key in there and key not in OF_DEVICE}
        merged.append({**here, **both})
        for key, value in both.items():
            if not _is_option(value, here[key]):
                raise OptimizerError(f"the state has {key}={value!r}, and here it is {here[key]!r}")
    named = {
        number: (parameter, group)
        for group, here in zip(optimizer.param_groups, now["param_groups"], strict=True)
        for number, parameter in zip(here["params"], group["params"], strict=True)
    }
    absent = sorted(named.keys() - states)
    if not states.keys() <= named.keys() or absent != sorted(
        absent if stateless is None else stateless
    ):
        raise OptimizerError("the state is not that of the parameters of this optimizer")
    for number, state in states.items():
        parameter, group = named[number]
        kinds = _kinds_of_state(optimizer, parameter, group)
        if kinds and not any(_is_state(state, kind) for kind in kinds):
            came = ", ".join(f"{key}: {spell_tensor(value)}" for key, value in state.items())
            raise OptimizerError(
                f"the state of parameter {number}, {spell_tensor(parameter)}, is {came or 'empty'}"
            )
    return {"state": states, "param_groups": merged}


def _is_option(value: object, here: object) -> bool:
    """Return whether a stored option may stand for the one here: numbers may change, the rest may not."""
    if isinstance(here, Tensor):
        return spell_tensor(value) == spell_tensor(here)
    if isinstance(here, tuple | list) and isinstance(value, tuple | list) and here != value:
        return len(value) == len(here) and all(map(_is_option, value, here))
    if type(here) is float or type(value) is float:
        return all(type(one) in (int, float) and math.isfinite(one) for one in (here, value))  # type: ignore[arg-type]  # numbers
    return type(value) is type(here) and value == here


def _kinds_of_state(
    optimizer: Optimizer, parameter: nn.Parameter, group: Mapping[str, Any]
) -> list[dict[str, object]]:
    """Return the states that an optimizer keeps for a parameter, found by a step on a tiny one.

    There is one for dense and one for sparse gradients; none for an optimizer that does not take such steps.
    """
    if optimizer.state.get(parameter):
        return [{key: _spelled(value) for key, value in optimizer.state[parameter].items()}]
    sizes, found = SIZES[: parameter.dim()], []
    back = dict(zip(sizes, parameter.shape, strict=False))
    for is_sparse in (False, True):
        tiny = nn.Parameter(parameter.detach().new_zeros(sizes))
        twin = object.__new__(type(optimizer))
        with suppress(Exception):  # whatever a foreign optimizer needs for a step
            one = {**group, "params": [tiny], "lr": 0.0}
            parts = {"defaults": optimizer.defaults, "state": defaultdict(dict)}
            twin.__setstate__({**parts, "param_groups": [one]})
            tiny.grad = torch.zeros_like(tiny)
            tiny.grad = tiny.grad.to_sparse(1) if is_sparse else tiny.grad
            twin.step()
            found.append({key: _spelled(value, back) for key, value in twin.state[tiny].items()})
    return found


def _spelled(value: object, sizes: Mapping[int, int] | None = None) -> object:
    """Return the type and shape of a tensor of a state, of sizes that stand for others; else its type."""
    if not isinstance(value, Tensor):
        return type(value)
    return value.dtype, tuple((sizes or {}).get(size, size) for size in value.shape)


def _is_state(state: Any, kind: Mapping[str, object]) -> bool:
    """Return whether a stored state of a parameter is of a kind, and its count of steps a count."""
    if not isinstance(state, Mapping) or state.keys() != kind.keys():
        return False
    if not all(_spelled(state[key]) == kind[key] for key in kind):
        return False
    count = float(state.get("step", 0))
    return count.is_integer() and count >= 0


def _fastest_rows(lr: float | Tensor, tensors: Sequence[Tensor]) -> Any:
    """Return the fastest implementation of row updates for these tensors."""
    if isinstance(lr, Tensor):  # which only torch can use without looking at it
        return PlainRows
    if tensors[0].is_cuda:
        from rarebit.training import row_triton  # not before: Triton takes a while to import

        return row_triton if row_triton.suits(*tensors) else PlainRows
    kernel = row_kernel() if suits(*tensors) else None
    return PlainRows if kernel is None else kernel


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


class PlainRows:
    """Row updates in plain torch: learning rate and count of steps may be tensors on the GPU."""

    @staticmethod
    def adam(
        ids: Tensor,
        values: Tensor,
        weight: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        step: float | Tensor,
    ) -> None:
        """Lazy Adam: Adam's step on the rows that were looked up; `step` counts the optimizer's steps."""
        beta1, beta2 = betas

        def update(
            row: Tensor, gradient: Tensor, mean: Tensor, square: Tensor
        ) -> tuple[Tensor, ...]:
            mean = beta1 * mean + (1.0 - beta1) * gradient
            square = beta2 * square + (1.0 - beta2) * gradient.square()
            scale = square.sqrt() / (1.0 - beta2**step) ** 0.5 + eps
            return row - lr / (1.0 - beta1**step) * (mean / scale), mean, square

        decay = _plain_decay(lr, weight_decay, decoupled=decoupled)
        _update_plain(ids, values, [weight, exp_avg, exp_avg_sq], decay, update)

    @staticmethod
    def adagrad(
        ids: Tensor,
        values: Tensor,
        weight: Tensor,
        sums: Tensor,
        *,
        lr: float | Tensor,
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        """Row-wise Adagrad: one sum of mean squares per row, `sums` `(N,)`, in place of one per number."""

        def update(row: Tensor, gradient: Tensor, total: Tensor) -> tuple[Tensor, ...]:
            total = total + gradient.square().mean(dim=1)
            return row - lr * gradient / (total.sqrt() + eps).unsqueeze(1), total

        decay = _plain_decay(lr, weight_decay, decoupled=decoupled)
        _update_plain(ids, values, [weight, sums], decay, update)

    @staticmethod
    def sgd(
        ids: Tensor,
        values: Tensor,
        weight: Tensor,
        momentum_buffer: Tensor | None,
        *,
        lr: float | Tensor,
        momentum: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        """SGD on the rows that were looked up; a row's momentum waits until the row comes again."""

        def update(row: Tensor, gradient: Tensor, *buffer: Tensor) -> tuple[Tensor, ...]:
            moving = [momentum * speed + gradient for speed in buffer]
            return (row - lr * (moving[0] if moving else gradient), *moving)

        decay = _plain_decay(lr, weight_decay, decoupled=decoupled)
        state = [] if momentum_buffer is None else [momentum_buffer]
        _update_plain(ids, values, [weight, *state], decay, update)


def _merged(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return each looked-up row once with the sum of its values.

    On a GPU a row may still come several times, each time with its whole sum: that leaves every size known in advance, and
    writing the same result several times does no harm.
    """
    found = find_distinct(ids)
    sums = found.sum(values)
    if ids.is_cuda:
        return ids, take_rows(sums, found.slot_of)
    return found.ids, sums


Decay = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rows and their gradients before and after weight decay."""


def _plain_decay(lr: float | Tensor, weight_decay: float, *, decoupled: bool) -> Decay:
    """Return what weight decay does: shrink the row, or add to its gradient."""
    if not weight_decay:
        return lambda row, gradient: (row, gradient)
    if decoupled:
        return lambda row, gradient: (row * (1.0 - lr * weight_decay), gradient)
    return lambda row, gradient: (row, gradient + weight_decay * row)


def _update_plain(
    ids: Tensor,
    values: Tensor,
    stored: list[Tensor],
    decay: Decay,
    update: Callable[..., tuple[Tensor, ...]],
) -> None:
    """Read the touched rows of weight and state, change them and write them back."""
    ids, gradient = _merged(ids, values)
    # a table in half precision is changed in single precision and rounded once, at the end
    exact = torch.promote_types(stored[0].dtype, torch.float32)
    rows = [take_rows(tensor, ids).to(exact) for tensor in stored]
    row, gradient = decay(rows[0], gradient.to(exact))
    for tensor, new in zip(stored, update(row, gradient, *rows[1:]), strict=True):
        tensor.index_copy_(0, ids, new.to(tensor.dtype))


@functools.cache
def row_kernel() -> "RowKernel | None":
    """Return the kernel, compiled and loaded at the first call; None where that is not possible."""
    return load_row_kernel(os.environ)


def load_row_kernel(environment: Mapping[str, str]) -> "RowKernel | None":
    """Return a kernel from the cache or the compiler that an environment names; None without one."""

    def tried(library: ctypes.CDLL) -> RowKernel | None:
        kernel = RowKernel(library)
        return kernel if _is_right(kernel) else None

    return load_compiled(SOURCE, tried, environment)


def _is_right(kernel: "RowKernel") -> bool:
    """Return whether a step on three rows gives what it gives by hand: -1 where a row was seen."""
    cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever the defaults are
    ids, values = torch.tensor([2, 0, 2], device="cpu"), torch.tensor([[1.0], [2.0], [3.0]], **cpu)
    rows, sums = kernel.merge(ids, values)
    by_adam, by_adagrad, by_sgd, first, second = (torch.zeros(3, 1, **cpu) for _ in range(5))
    plain: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "decoupled": False}
    kernel.adam(ids, values, by_adam, first, second, betas=(0.9, 0.999), eps=0.0, step=1, **plain)
    kernel.adagrad(ids, values, by_adagrad, torch.zeros(3, **cpu), eps=0.0, **plain)
    kernel.sgd(ids, values, by_sgd, None, momentum=0.0, **plain)
    expected = torch.tensor([[-1.0], [0.0], [-1.0]], **cpu)
    return (
        rows.tolist() == [0, 2]
        and sums.tolist() == [[2.0], [4.0]]
        and torch.allclose(by_adam, expected)
        and torch.allclose(by_adagrad, expected)
        and by_sgd.tolist() == [[-2.0], [0.0], [-4.0]]
    )


def suits(*tensors: Tensor) -> bool:
    """Return whether the kernel can take these: plain float32 tensors on the CPU, contiguous."""
    return all(is_plain(tensor, torch.float32) for tensor in tensors)


class RowKernel:
    """The compiled functions. Ids are int64; all other tensors must be such as `suits` accepts."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {name: getattr(library, name) for name in FUNCTIONS}
        for name, function in self._functions.items():
            function.argtypes = FUNCTIONS[name]
            function.restype = c_int64

    def merge(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids `(U,)`, ascending, and the sum of each one's values `(U, D)`."""
        _check_lookups(ids, values)
        rows, sums = torch.empty_like(ids), torch.empty_like(values, requires_grad=False)
        found = self._call("rarebit_merge", ids, values, rows.data_ptr(), sums.data_ptr())
        return rows[:found], sums[:found]

    def adam(
        self,
        ids: Tensor,
        values: Tensor,
        weight: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        step: int,
    ) -> None:
        """Take one step of lazy Adam on the looked-up rows; `step` counts from 1."""
        _check_table(values, weight, exp_avg, exp_avg_sq)
        beta1, beta2 = betas
        self._update(
            "rarebit_adam",
            (ids, values),
            weight,
            _decay(lr, weight_decay, decoupled=decoupled),
            (exp_avg, exp_avg_sq),
            lr / (1.0 - beta1**step),
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            math.sqrt(1.0 - beta2**step),
            eps,
        )

    def adagrad(
        self,
        ids: Tensor,
        values: Tensor,
        weight: Tensor,
        sums: Tensor,
        *,
        lr: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        """Take one step of row-wise Adagrad on the looked-up rows; sums `(N,)`."""
        _check_table(values, weight)
        if not suits(sums) or sums.shape != weight.shape[:1]:
            raise DataError(
                f"row-wise Adagrad keeps one number per row, {weight.shape[0]} contiguous float32 in "
                f"all; got a tensor of shape {tuple(sums.shape)} and {sums.dtype}"
            )
        decay = _decay(lr, weight_decay, decoupled=decoupled)
        self._update("rarebit_adagrad", (ids, values), weight, decay, (sums,), lr, eps)

    def sgd(
        self,
        ids: Tensor,
        values: Tensor,
        weight: Tensor,
        momentum_buffer: Tensor | None,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        """Take one step of SGD on the looked-up rows; without a buffer there is no momentum."""
        _check_table(values, weight, weight if momentum_buffer is None else momentum_buffer)
        decay = _decay(lr, weight_decay, decoupled=decoupled)
        states = (momentum_buffer,)
        self._update("rarebit_sgd", (ids, values), weight, decay, states, lr, momentum)

    def _update(
        self,
        name: str,
        lookups: tuple[Tensor, Tensor],
        weight: Tensor,
        decay: tuple[float, float],
        states: tuple[Tensor | None, ...],
        *numbers: float,
    ) -> None:
        _check_lookups(*lookups)
        pointers = [None if state is None else state.data_ptr() for state in states]
        table = (weight.shape[0], weight.data_ptr(), *decay)
        self._call(name, *lookups, *table, *pointers, *numbers)
        # torch cannot see what was written: without this, a backward through rows from before the
        # step would be wrong silently.
        for written in (weight, *states):
            if written is not None:
                increment_version(written)

    def _call(self, name: str, ids: Tensor, values: Tensor, *arguments: float | None) -> int:
        lookups = (ids.data_ptr(), ids.shape[0], values.data_ptr(), values.shape[1])
        found = int(self._functions[name](*lookups, torch.get_num_threads(), *arguments))
        if found == OUT_OF_MEMORY:
            raise MemoryError(f"no memory to sort {ids.shape[0]} lookups; take smaller batches")
        if found < 0:
            limit = (
                "" if name == "rarebit_merge" else f" and below {arguments[0]}, the table's rows"
            )
            raise DataError(
                f"ids must be 0 or more{limit}; got ids from {int(ids.min())} to {int(ids.max())}"
            )
        return found


def _decay(lr: float, weight_decay: float, *, decoupled: bool) -> tuple[float, float]:
    """Return the weight's factor, and its share in the gradient."""
    return (1.0 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)


def _check_lookups(ids: Tensor, values: Tensor) -> None:
    fits = ids.dtype == torch.int64 and ids.device.type == "cpu" and ids.is_contiguous()
    if not (fits and ids.dim() == 1 and suits(values) and values.dim() == 2):
        raise DataError(
            "the row kernel takes ids (T,) in int64 and values (T, D) in float32, contiguous and on "
            f"the CPU; got {tuple(ids.shape)} in {ids.dtype} and {tuple(values.shape)} in "
            f"{values.dtype}"
        )
    if ids.shape[0] != values.shape[0] or values.shape[1] == 0:
        raise DataError(
            f"each of the {ids.shape[0]} ids needs a row of values, at least one number wide; "
            f"got values of shape {tuple(values.shape)}"
        )


def _check_table(values: Tensor, weight: Tensor, *states: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in (weight, *states)}
    if not suits(weight, *states) or len(shapes) > 1 or weight.shape[1:] != values.shape[1:]:
        raise DataError(
            "the row kernel takes a weight (N, D) and states of its shape, contiguous float32 on the "
            f"CPU, as wide as the values; got {sorted(shapes)} and values {tuple(values.shape)}"
        )
