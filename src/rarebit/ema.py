"""The average of the weights over the steps of training, exact, at the cost of the batch.

    average_t = (1 - d) · sum_{i=1..t} d^(t-i) · w_i / (1 - d^t)

It is unbiased: its weights sum to one, and the initial weights w_0 have none. A row that was brought up to step s and has
the weight w ever since needs one formula:

    average_t = average_s + share · (w - average_s)        share = (1 - d^(t-s)) / (1 - d^t)

For d = 1 it is the plain mean of the weights after each step, and share = (t - s) / t.

So each row of a table keeps the step its average was last brought up to. It is brought up to date
with its old weight just before the optimizer changes it, and all rows once before they are used.

`restart` lets the average of a parameter begin anew at a step r: then t and s count from r, and the weights before have no
share. The averages of other parameters continue.

Batch normalisation keeps the mean and variance of what it normalises, and averaged weights bring it something else than those of the last
step did. So averages are used with statistics of their own, estimated from a few batches (Izmailov et al., https://arxiv.org/abs/1803.05407).
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from rarebit.errors import OptimizerError, TrainingError
from rarebit.settings import require
from rarebit.storage.files import check_tensors, spell_tensor
from rarebit.tables.collection import lookups_of

Batch = TypeVar("Batch")

CHUNK = 1 << 18
"""Rows handled at once where all of them are: bounds the memory that takes."""


class EMA:
    """The unbiased exponential moving average of every trained parameter, for evaluating and saving.

    With `decay=1` it is their plain mean. Parameters that are left out stay as the last step left them. It follows the optimizer by hooks, so the loop stays as it is. Tables with sparse gradients cost what their batch
    costs. Only the optimizer's steps may change weights; `bring_up_to_date` before any other change. Buffers are not averaged; a model with batch normalisation
    needs `batches` where averages are used. The memory is one copy of the weights, and 4 bytes per row of each table with sparse gradients.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> _ = nn.init.constant_(model.weight, 8.0)
    >>> ema = EMA(model, optimizer, decay=0.75)
    >>> model(torch.tensor([[7.0]])).sum().backward()
    >>> for _ in range(2):  # to 1.0, then to -6.0
    ...     optimizer.step()
    >>> with ema.applied():  # (0.75 * 1.0 - 6.0) / 1.75
    ...     print(f"{model.weight.item():.4f}")
    -3.0000
    >>> model.weight.item()
    -6.0
    """

    keeps_shapes = True
    """Tables that grow cannot be averaged on: `grow_` refuses an optimizer that it follows."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        decay: float = 0.999,
        *,
        leave_out: Iterable[nn.Parameter] = (),
        leave_out_rows: Iterable[tuple[nn.Parameter, Tensor]] = (),
    ) -> None:
        """`leave_out_rows` has parameters with indices of rows that stay as the last step left them."""
        require(0.0 <= decay <= 1.0, f"decay must lie in [0, 1], got decay={decay}")
        self.model, self.decay = model, decay
        # the powers of the smallest number vanish as those of 0 do
        self._rate = math.log(max(decay, sys.float_info.min))
        parameters = _trained_parameters(model, optimizer, {id(p) for p in leave_out})
        # one count per device, so that a step never waits for another one
        self._counts = {
            device: torch.zeros((), dtype=torch.int32, device=device)
            for device in {parameter.device for parameter in parameters.values()}
        }
        # the steps at which averages began, side by side: all shares of a step are one operation
        self._starts = {
            device: torch.zeros(
                sum(p.device == device for p in parameters.values()),
                dtype=torch.int32,
                device=device,
            )
            for device in self._counts
        }
        places = {device: itertools.count() for device in self._counts}
        self._averages = {
            name: _Average(
                p,
                self._counts[p.device],
                self._starts[p.device],
                next(places[p.device]),
                self._rate,
            )
            for name, p in parameters.items()
        }
        for parameter, rows in leave_out_rows:
            for average in self._averages.values():
                if average.weight is parameter:
                    average.left_out = rows.to(parameter.device)
        self._is_applied = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def num_steps(self) -> int:
        """Steps that the averages cover."""
        return int(next(iter(self._counts.values())))

    @contextmanager
    def applied(
        self,
        batches: Iterable[Batch] | None = None,
        call: Callable[[nn.Module, Batch], object] | None = None,
        *,
        to_gradients: bool = False,
    ) -> Iterator[None]:
        """Put the averages into the model for the time of a `with` block, then the weights again.

        From `batches` of training data the statistics of batch normalisation are estimated for that time; `call(model, batch)` runs the
        model on one, by default `model(batch)`. Some 16,000 rows are enough. A model without such statistics does not read them.

        With `to_gradients`, between backward and step, of tables only the rows that have a gradient: what the batch
        looks up. It costs what the batch costs.
        """
        self._refuse_when_applied()
        self._refuse_exchanged()
        rows = {
            name: average.rows_of_gradient() if to_gradients else None
            for name, average in self._averages.items()
        }
        norms = [] if batches is None else _norms(self.model)
        held = [
            (buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)
        ]
        self._exchange(rows)
        try:
            if batches is not None:
                estimate_statistics_(self.model, batches, call)
            yield
        finally:
            self._exchange(rows)
            for buffer, value in held:
                buffer.copy_(value)

    def bring_up_to_date(self) -> None:
        """Let the averages cover all steps so far: call it before anything but a step changes weights."""
        self._refuse_when_applied()
        self._refuse_exchanged()
        for average in self._averages.values():
            average.bring_up_to_date()
            average.follow_left_out()

    @torch.no_grad()
    def restart(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Begin the averages of these parameters anew with the next step; None: of all of them.

        Until that step they are the weights. Call it after a change of weights that the average shall not remember.
        """
        self._refuse_when_applied()
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        for average in self._averages.values():
            if chosen is None or id(average.weight) in chosen:
                average.restart()

    @torch.no_grad()
    def copy_to(
        self,
        model: nn.Module,
        batches: Iterable[Batch] | None = None,
        call: Callable[[nn.Module, Batch], object] | None = None,
    ) -> None:
        """Overwrite the weights of a model, this one or one like it, by the averages; with batches also its statistics, as `applied` does."""
        self.bring_up_to_date()
        targets = dict(model.named_parameters())
        self._check_same(targets)
        for name, average in self._averages.items():
            targets[name].copy_(average.value)
        if batches is not None:
            estimate_statistics_(model, batches, call)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name, up to date. As in torch, training keeps changing them."""
        self.bring_up_to_date()
        return {name: average.value for name, average in self._averages.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Continue from averages that `state_dict` returned after `num_steps`."""
        self._refuse_when_applied()
        require(num_steps >= 0, f"num_steps must be 0 or more, got num_steps={num_steps}")
        self._check_same(state)
        for count in self._counts.values():
            count.fill_(num_steps)
        for name, average in self._averages.items():
            average.value.copy_(state[name])
            average.start.zero_()
            if average.behind is not None:
                average.behind.copy_(average.count)

    def training_state(self) -> dict[str, Any]:
        """Return all that the coming steps depend on, without bringing anything up to date.

        Bringing rows up to date would round them once more than a run without a checkpoint does. The tensors are not
        copies; `behind` lacks the averages that follow every step, of which there are so many `following`, and
        counts steps by row in so many `by_rows`.
        """
        self._refuse_when_applied()
        self._refuse_exchanged()
        averages = self._averages.items()
        return {
            "num_steps": next(iter(self._counts.values())),
            "values": {name: average.value for name, average in averages},
            "starts": {name: average.start for name, average in averages},
            "behind": {n: a.behind for n, a in averages if a.behind is not None},
            "following": sum(average.behind is None for average in self._averages.values()),
            "by_rows": sum(a.behind is not None and a.behind.dim() > 0 for _, a in averages),
        }

    @torch.no_grad()
    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Continue to the last bit from what `training_state` returned for a model like this one."""
        self._refuse_when_applied()
        if "num_steps" not in state:
            raise TrainingError(
                "its averages give weight to the initial weights, as an older version of rarebit "
                "did; train again from the start"
            )
        values, behind = state["values"], state.get("behind", {})
        begun = {name: average.start for name, average in self._averages.items()}
        starts = state.get("starts") or {n: torch.zeros_like(start) for n, start in begun.items()}
        self._check_same(values)
        for name in (*values, *behind, *starts):
            if name not in self._averages:
                raise TrainingError(
                    f"there is an average of {name!r}, which is not trained here; use the same "
                    "model on both sides"
                )
        following = len(self._averages) - len(behind)
        if state.get("following", following) != following:
            raise TrainingError(
                f"{following} averages do not say how far they are behind the steps"
            )
        given, count = state["num_steps"], next(iter(self._counts.values()))
        check_tensors({"num_steps": count}, {"num_steps": given}, "the averages")
        check_tensors(begun, starts, "the averages")
        for name, average in self._averages.items():
            average.check_raw(name, values[name], behind.get(name), int(starts[name]), int(given))
        by_rows = sum(step.dim() > 0 for step in behind.values())
        if state.get("by_rows", by_rows) != by_rows:
            raise TrainingError(f"{by_rows} averages say by row how far they are behind the steps")
        for count in self._counts.values():
            count.copy_(given)
        for name, average in self._averages.items():
            average.value.copy_(values[name])
            average.start.copy_(starts[name])
            step = behind.get(name)
            average.behind = None if step is None else step.to(average.count, copy=True)

    def close(self) -> None:
        """Stop following the optimizer. The averages stay as they are now and can still be used."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.bring_up_to_date()
        for average in self._averages.values():
            average.behind = None  # for good: no step moves them any more

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._refuse_when_applied()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._before_move(optimizer)
            return None

        # what will move is known once the closure has computed the gradients, inside the step
        def followed() -> Any:
            loss = closure()
            self._before_move(optimizer)
            return loss

        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        return (args[0], followed, *args[2:]), rest

    @torch.no_grad()
    def _before_move(self, optimizer: Optimizer) -> None:
        # torch's SGD with momentum keeps moving rows of earlier sparse gradients
        momentum = any(group.get("momentum") for group in optimizer.param_groups)
        can_be_lazy = not (isinstance(optimizer, SGD) and momentum)
        for average in self._averages.values():
            gradient = average.weight.grad
            if gradient is None:
                average.pause()
            elif can_be_lazy and gradient.is_sparse:
                # not coalesced, which would sort: equal rows get equal values here
                average.bring_rows_up_to_date(lookups_of(gradient)[0])
            else:
                average.resume()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        for count in self._counts.values():
            count.add_(1)
        moving = [average for average in self._averages.values() if average.behind is None]
        if moving:
            values, weights = [a.value for a in moving], [a.weight.detach() for a in moving]
            torch._foreach_lerp_(values, weights, self._shares_of_last_step(moving))

    def _shares_of_last_step(self, moving: list["_Average"]) -> list[Tensor]:
        """Return the share of the newest weight in each of these averages."""
        shares: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}
        for device, dtype in {(a.value.device, a.value.dtype) for a in moving}:
            steps = self._counts[device] - self._starts[device]
            shares[device, dtype] = _share(steps, steps - 1, self._rate).to(dtype).unbind()
        return [shares[a.value.device, a.value.dtype][a.place] for a in moving]

    def _check_same(self, given: Mapping[str, Tensor]) -> None:
        for name, average in self._averages.items():
            if name not in given or given[name].shape != average.value.shape:
                came = f"of the shape {tuple(given[name].shape)}" if name in given else "missing"
                raise TrainingError(
                    f"the average of {name!r} has the shape {tuple(average.value.shape)}, the one given is "
                    f"{came}; use the same model on both sides"
                )

    def _refuse_exchanged(self) -> None:
        current = dict(self.model.named_parameters())
        for name, average in self._averages.items():
            if current.get(name) is not average.weight:
                raise TrainingError(
                    f"{name!r} is no longer the parameter that was averaged; make a new EMA after "
                    "apply_, merge_ and whatever else exchanges parameters"
                )

    @torch.no_grad()
    def _exchange(self, rows: Mapping[str, Tensor | None]) -> None:
        for name, average in self._averages.items():
            own = rows[name]
            if not self._is_applied and own is None:
                average.bring_up_to_date()
            elif not self._is_applied and own is not None:
                average.bring_rows_up_to_date(own)
            if not self._is_applied:
                average.follow_left_out()
            average.exchange(own)
        self._is_applied = not self._is_applied

    def _refuse_when_applied(self) -> None:
        if self._is_applied:
            raise TrainingError(
                "the model holds its averages now; train, save and load them after the block of "
                "applied()"
            )


@torch.no_grad()
def estimate_statistics_(
    model: nn.Module,
    batches: Iterable[Batch],
    call: Callable[[nn.Module, Batch], object] | None = None,
) -> None:
    """Set the statistics of batch normalisation to the mean over batches of what the present weights bring to it.

    As at inference time, nothing is dropped. Nothing else changes, and no random number is drawn.

    >>> model = nn.BatchNorm1d(1)
    >>> estimate_statistics_(model, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [9.0]])])
    >>> model.running_mean.item(), model.running_var.item()  # means 2 and 7, variances 2 and 8
    (4.5, 5.0)
    """
    norms, number = _norms(model), 0
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    for norm in norms:
        norm.train()
    try:
        for number, batch in enumerate(batches, 1):
            for norm in norms:
                norm.momentum = 1 / number  # the mean over all batches so far
            # a compiled model would be compiled for each of these numbers
            with torch.compiler.set_stance("force_eager"):
                if call is None:
                    model(batch)
                else:
                    call(model, batch)
    finally:
        model.eval()
        for module in was_training:  # one by one: a frozen part stays in evaluation mode
            module.training = True
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    if not number:
        raise TrainingError(
            "there are no batches to estimate the statistics of batch normalisation from; an iterator can be used only once"
        )


def _norms(model: nn.Module) -> list[_NormBase]:
    """Return the modules that keep statistics of what they normalise."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    ]


class _Average:
    """The average of one parameter, and how far it is behind the steps."""

    keeps_shapes = True

    def __init__(
        self, weight: nn.Parameter, count: Tensor, starts: Tensor, place: int, rate: float
    ) -> None:
        self.weight, self.count, self.rate = weight, count, rate
        self.start, self.place = starts[place], place
        """The step it began at: a view of those of all averages."""
        self.value = torch.zeros_like(weight, requires_grad=False)
        self.behind: Tensor | None = torch.zeros_like(count)
        """The step it was brought up to, one for all or one per row; None: it follows every step."""
        self.left_out: Tensor | None = None
        """Rows that are not averaged."""

    def check_raw(
        self, name: str, value: Tensor, behind: Tensor | None, start: int, count: int
    ) -> None:
        """Raise where these cannot be the average from `start` to `count` steps and how far it is behind."""
        check_tensors({name: self.value}, {name: value}, "the averages")
        if not bool(torch.isfinite(value.sum(dtype=torch.float64))):
            raise TrainingError(f"the average of {name!r} is not finite; use an older state")
        if not 0 <= start <= count:
            raise TrainingError(f"the average of {name!r} cannot begin at step {start} of {count}")
        if behind is None:
            return
        shapes = {spell_tensor(self.count), spell_tensor(self.count.expand(len(self)))}
        fits = spell_tensor(behind) in shapes
        if not fits or bool(((behind < start) | (behind > count)).any()):
            raise TrainingError(
                f"the average of {name!r} has {len(self)} rows and was brought up to one of {count} steps, the "
                f"one given has the steps {spell_tensor(behind)}; use the same model on both sides"
            )

    def pause(self) -> None:
        """Wait from here on: the parameter does not move in the coming step."""
        if self.behind is None:
            self._refuse_in_recording()
            self.behind = self.count.clone()

    def resume(self) -> None:
        """Follow every step from here on: all of the parameter may move in the coming one."""
        if self.behind is not None:
            self._refuse_in_recording()
            self.bring_up_to_date()
            self.behind = None

    def restart(self) -> None:
        """Begin anew with the next step; until then it is the weight."""
        self.start.copy_(self.count)
        self.value.copy_(self.weight)
        if self.behind is not None:
            self.behind.copy_(self.count)

    @torch.no_grad()
    def bring_up_to_date(self) -> None:
        """Bring the whole parameter up to the steps so far."""
        if self.behind is None:
            return
        behind = self.behind.expand(len(self)).split(CHUNK)
        for value, weight, step in zip(*self._chunks(), behind, strict=True):
            value.lerp_(weight, self._share(step, value))
        self.behind.copy_(self.count)

    def bring_rows_up_to_date(self, rows: Tensor) -> None:
        """Bring these rows up to the steps so far; some may come twice and get the same value."""
        if self.behind is None or self.behind.dim() == 0:
            self._refuse_in_recording()
            step = self.count if self.behind is None else self.behind
            self.behind = step.repeat(len(self))
        value, weight = self.value.index_select(0, rows), self.weight.index_select(0, rows)
        share = self._share(self.behind.index_select(0, rows), value)
        self.value.index_copy_(0, rows, value.lerp_(weight, share))
        self.behind.index_copy_(0, rows, self.count.expand(rows.shape))

    @torch.no_grad()
    def follow_left_out(self) -> None:
        """Take rows that are not averaged as they are."""
        if self.left_out is not None:
            self.value[self.left_out] = self.weight[self.left_out]

    def rows_of_gradient(self) -> Tensor | None:
        """Return the rows that a sparse gradient moves; None for all of the parameter."""
        gradient = self.weight.grad
        lazy = self.behind is not None and gradient is not None and gradient.is_sparse
        return lookups_of(gradient)[0].unique() if lazy and gradient is not None else None

    def exchange(self, rows: Tensor | None = None) -> None:
        """Swap weights and averages, of some rows or all, in place: whoever holds the memory of a weight sees it."""
        if rows is not None:
            weight, value = self.weight.detach(), self.value
            held = weight.index_select(0, rows)
            weight.index_copy_(0, rows, value.index_select(0, rows))
            value.index_copy_(0, rows, held)
            return
        for value, weight in zip(*self._chunks(), strict=True):
            held = weight.clone()
            weight.copy_(value)
            value.copy_(held)

    def _refuse_in_recording(self) -> None:
        # every replay would make the change again
        if self.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise TrainingError(
                "the averages cannot be started inside a CUDA graph; run a step with the same "
                "gradients before recording"
            )

    def _share(self, step: Tensor, like: Tensor) -> Tensor:
        """Return the weight's share as a column next to the rows."""
        share = _share(self.count - self.start, step - self.start, self.rate)
        return share.to(like.dtype).view(-1, *[1] * (like.dim() - 1))

    def _chunks(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        pair = torch.atleast_1d(self.value), torch.atleast_1d(self.weight.detach())
        return pair[0].split(CHUNK), pair[1].split(CHUNK)

    def __len__(self) -> int:
        return self.weight.shape[0] if self.weight.dim() else 1


def _share(count: Tensor, step: Tensor, rate: float) -> Tensor:
    """Return the share of a weight that came after `step`, (1 - d^(count - step)) / (1 - d^count), for d = exp(rate)."""
    since, steps = (count - step).double(), count.double()
    share = torch.expm1(since * rate) / torch.expm1(steps * rate) if rate else since / steps
    return share.masked_fill_(step == 0, 1.0)  # also before the first step, where it is 0 / 0


def _trained_parameters(
    model: nn.Module, optimizer: Optimizer, left_out: set[int]
) -> dict[str, nn.Parameter]:
    """Return the parameters that this optimizer moves; another optimizer needs its own EMA."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} - left_out
    found = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) in held
    }
    if not found:
        raise OptimizerError(
            "the optimizer holds no trainable parameter of the model, so there is nothing to "
            "average; build it from the model as it is now"
        )
    for name, parameter in found.items():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise TrainingError(
                f"{name!r} is stored in {parameter.dtype}, too coarse for the small steps of an "
                "average; keep weights in float32 and use autocast for speed"
            )
    return found
