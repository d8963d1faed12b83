"""Keep an optimizer in step with a model whose tables were exchanged."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.errors import OptimizerError
from rarebit.tables.collection import RowMove
from rarebit.tables.find import table_parameters

__all__ = ["Exchange", "check", "exchange_parameters"]


class Exchange(NamedTuple):
    """Old parameters, the new ones in their place, and plain rows that moved between them."""

    old: Sequence[nn.Parameter]
    new: Sequence[nn.Parameter]
    moves: Sequence[RowMove]


def check(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise when a trainable table parameter is in no group of the optimizer.

    An optimizer built before `apply_` holds the old tables: it would train nothing, silently.

    >>> model = nn.Sequential(nn.Embedding(9, 4))
    >>> check(model, torch.optim.SGD(model.parameters(), lr=0.1))
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name
        for name, parameter in table_parameters(model).items()
        if parameter.requires_grad and id(parameter) not in held
    ]
    if missing:
        raise OptimizerError(
            f"the optimizer does not hold {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more table parameters" if len(missing) > 3 else "")
            + ", so training would not change them. Build the optimizer after apply_ and merge_, "
            "or pass it to them as optimizer="
        )


def exchange_parameters(
    optimizer: Optimizer, exchanges: Iterable[Exchange], model: nn.Module
) -> None:
    """Replace old table parameters by new ones in the optimizer's groups.

    State is kept for a parameter that stayed, and for one all of whose rows came from parameters
    with state (a stack that was split); every other new parameter starts fresh.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for exchange in exchanges:
        stay = {id(p) for p in exchange.new}
        gone = [p for p in exchange.old if id(p) not in stay]
        group = _group_of(optimizer, gone or exchange.old)
        if group is None:
            continue
        held = {id(p) for g in optimizer.param_groups for p in g["params"]}
        arrived = [p for p in exchange.new if id(p) not in held]
        for parameter in arrived:
            state = _carried_state(optimizer, parameter, exchange.moves)
            state = state or _first_state(optimizer, parameter, group)
            if state:
                optimizer.state[parameter] = state
        for parameter in gone:
            optimizer.state.pop(parameter, None)
        for other in optimizer.param_groups:
            _exchange_in(other, exchange, arrived if other is group else [], names)


def _group_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Any] | None:
    wanted = {id(p) for p in parameters}
    for group in optimizer.param_groups:
        if any(id(p) in wanted for p in group["params"]):
            return group
    return None


def _exchange_in(
    group: dict[str, Any],
    exchange: Exchange,
    arrived: Sequence[nn.Parameter],
    names: Mapping[int, str],
) -> None:
    """Put the new parameters where the old ones stood, in the model's order.

    A saved state goes by position: in another order it would be read into other parameters.
    """
    old = list(group["params"])
    ours = {id(p) for p in (*exchange.old, *exchange.new)}
    here = {id(p) for p in (*old, *arrived)}
    new = [p for p in exchange.new if id(p) in here]
    others = [p for p in old if id(p) not in ours]
    place = next((index for index, p in enumerate(old) if id(p) in ours), 0)
    # in place: an optimizer may hold on to the list itself, as LBFGS does
    group["params"][:] = [*others[:place], *new, *others[place:]]
    if "param_names" in group:
        known = dict(zip(map(id, old), group["param_names"], strict=True))
        known |= {id(p): names[id(p)] for p in new}
        group["param_names"] = [known[id(p)] for p in group["params"]]


def _first_state(
    optimizer: Optimizer, parameter: nn.Parameter, group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what Adagrad knows of a new parameter: torch makes it with the optimizer, not later."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    options = {key: group[key] for key in optimizer.defaults}
    return dict(torch.optim.Adagrad([parameter], **options).state[parameter])


def _carried_state(
    optimizer: Optimizer, parameter: nn.Parameter, moves: Sequence[RowMove]
) -> dict[str, Any]:
    """Return the state of rows that moved into this parameter, empty unless it covers all of them."""
    moves = [move for move in moves if move.target is parameter]
    moves = [move for move in moves if optimizer.state.get(move.source)]
    if sum(move.target_rows.stop - move.target_rows.start for move in moves) != len(parameter):
        return {}
    state: dict[str, Any] = {}
    for key, value in optimizer.state[moves[0].source].items():
        if isinstance(value, Tensor) and value.shape[:1] == moves[0].source.shape[:1]:
            state[key] = value.new_empty(len(parameter), *value.shape[1:])
            for move in moves:
                state[key][move.target_rows] = optimizer.state[move.source][key][move.source_rows]
        else:
            state[key] = value.clone() if isinstance(value, Tensor) else value
    return state
