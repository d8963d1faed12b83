"""Several trainings as one: runs that differ in seed, rates and the like train as one stacked model.

    together        trains several courses to their ends, and makes the steps that all of them want in one
    StackedStep     one step of K models of one shape: forward and backward for all at once, by `torch.func.vmap`

    weights of the stack  (K, N, D)    one parameter for autograd
    weights of a member      (N, D)    its slice: the same memory

A small model leaves a GPU nearly idle: a step is many small kernels. A stack makes each of them once for all its members.
Everything else is that of a run by itself, because each member is one: a course (`training/fit.py`) with its own model, optimizer,
average, callbacks, order of rows, validation, early stop, checkpoints and history. Only where a course asks for steps does it wait for the
others, and its model finds new weights in its slice, and the optimizer gradients. A course that ends leaves the stack.

What cannot be stacked trains one after the other, and says why: other shapes, transfer and whatever else acts inside a step, and
operations that `vmap` does not know. Before each epoch the scores of the stack are compared with those of its members, and before the
first step gradients.

On the CPU each member draws its dropout as it would alone. On a GPU all draw from one generator.
"""

import copy
import math
import operator
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from rarebit.data.dataset import Batch, Dataset
from rarebit.data.order import batch_bounds
from rarebit.sharding.processes import ONE
from rarebit.tables.collection import GradientMemory, PlainStack, row_gradient
from rarebit.training.checkpoints import shared_requests
from rarebit.training.fit import Course, Made, TrainingLoop, Wanted, WantedScores
from rarebit.training.metrics import score
from rarebit.training.step import (
    RecordedSteps,
    Steps,
    TrainingStep,
    first_line,
    why_not_recorded,
)

T = TypeVar("T")
Say = Callable[[str], object]
SCORED = 1 << 16
"""Rows that are scored at once, counted for each member."""
CHECKED, TOLERANCE = 64, 1e-3
"""Rows whose scores are compared before each epoch, and how far they may differ, relative to the largest."""
GRADIENT_TOLERANCE = 0.1
"""The same for gradients: a unit whose input is within rounding of zero may be cut in one place and not in the other."""


class NotStackableError(Exception):
    """Why trainings cannot be stacked, for `together` alone."""


@dataclass
class Ended(Generic[T]):
    """How a course ended."""

    number: int
    """Its place among the courses."""
    result: T | None = None
    error: Exception | None = None


def together(courses: Sequence[Course[T]], say: Say = print) -> Iterator[Ended[T]]:
    """Train all courses to their ends, and yield each when it has ended, with its result or its error."""
    members = [_Member(number, course) for number, course in enumerate(courses)]
    stack = _Together(say)
    try:
        with shared_requests():
            yield from stack.run(members)
    finally:
        for member in members:
            member.course.close()


class _Member(Generic[T]):
    """A course, with its own random numbers."""

    def __init__(self, number: int, course: Course[T]) -> None:
        self.number, self.course = number, course
        self.random = torch.Generator()
        self.wanted: Wanted | WantedScores | None = None

    def advance(self, made: Made | Tensor | None) -> Ended[T] | None:
        """Let the course act until it wants the next steps; return how it ended, if it did."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.random.get_state())
        try:
            self.wanted = self.course.send(made)
        except StopIteration as end:
            return Ended(self.number, result=end.value)
        except Exception as error:  # noqa: BLE001  # the others go on
            return Ended(self.number, error=error)
        finally:
            self.random.set_state(torch.get_rng_state())
            torch.set_rng_state(outside)
        return None

    @property
    def place(self) -> float:
        """How far it is in its epoch: the first row that it wants; scores come after the last."""
        return self.wanted.bounds[0][0] if isinstance(self.wanted, Wanted) else math.inf

    @property
    def loop(self) -> TrainingLoop:
        """The loop that wants steps."""
        assert self.wanted is not None
        return self.wanted.loop


class _Together:
    """Makes the steps that courses want."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.steps: Steps | None = None
        self.step: StackedStep | None = None
        self.epochs: list[int] = []

    def run(self, members: Sequence[_Member[T]]) -> Iterator[Ended[T]]:
        """Yield the courses as they end."""
        active = yield from self._advance(members, [None] * len(members))
        while len(active) > 1:
            places = [member.place for member in active]
            behind = [m for m, place in zip(active, places, strict=True) if place == min(places)]
            if len(behind) < len(active):  # after a resume
                going = yield from self._advance(behind, [None] * len(behind))
                active = [member for member in active if member in going or member not in behind]
                continue
            try:
                made = self._make(active)
            except (NotStackableError, torch.OutOfMemoryError) as reason:
                self.say(f"{len(active)} runs train one after the other: {first_line(reason)}")
                break
            active = yield from self._advance(active, made)
        self._release()
        for member in active:
            going = [member]
            while going:
                going = yield from self._advance(going, [None])

    def _advance(
        self, members: Sequence[_Member[T]], made: Sequence[Made | Tensor | None]
    ) -> Generator[Ended[T], None, list[_Member[T]]]:
        going = []
        for member, own in zip(members, made, strict=True):
            ended = member.advance(own)
            if ended is None:
                going.append(member)
            else:
                yield ended
        return going

    def _make(self, members: Sequence[_Member[Any]]) -> Sequence[Made | Tensor | None]:
        """Return what each wants: steps on the same places of their orders, or scores of the same rows."""
        wanted = [member.wanted for member in members]
        bounds = [one.bounds for one in wanted if isinstance(one, Wanted)]
        if bounds:
            return [self._train(members, min(bounds, key=len))] * len(members)
        data = [one.data for one in wanted if isinstance(one, WantedScores)]
        if self.step is None or not self.step.holds([member.loop.step for member in members]):
            return [None] * len(members)
        if any(one.ids.data_ptr() != data[0].ids.data_ptr() for one in data):
            return [None] * len(members)
        return self.step.predict(data[0]).unbind()

    def _train(self, members: Sequence[_Member[Any]], bounds: Sequence[tuple[int, int]]) -> Made:
        loops = [member.loop for member in members]
        epochs = [loop.epoch for loop in loops]
        if epochs != self.epochs and self.step is not None and not self.step.holds_weights():
            self._release()
        if self.step is None or not self.step.holds([loop.step for loop in loops]):
            self._release()
            refuse(loops)
            self.step = StackedStep(
                [loop.step for loop in loops], [member.random for member in members]
            )
            self.steps, self.epochs = _steps_of(self.step, loops[0], self.say), []
        assert self.steps is not None
        if epochs != self.epochs:
            self.steps.start_epoch(torch.stack([loop.steps.order for loop in loops]))
            some = loops[0].steps.train[: min(CHECKED, len(loops[0].steps.train))]
            self.step.check_scores(some)
            if not self.epochs:
                self.step.check_gradients(some)
            self.epochs = epochs
        begin = time.perf_counter()
        for start, stop in bounds:
            self.steps(start, stop)
        is_end = bounds[-1] == loops[0].bounds[-1]
        if is_end and self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)  # the time is that of the steps
        return Made(len(bounds), (time.perf_counter() - begin) / len(members))

    def _release(self) -> None:
        if self.step is not None:
            self.step.release()
        self.step = self.steps = None


def refuse(loops: Sequence[TrainingLoop]) -> None:
    """Raise where trainings cannot be stacked."""
    steps, first = [loop.step for loop in loops], loops[0].step
    for loop in loops:
        step = loop.step
        acting = [
            what
            for what, is_so in {
                "something acts between steps": loop.callbacks.acts_after_steps,
                "something else turns losses into gradients": step.backward is not Tensor.backward,
                "each batch is scored before it is learned": step.before_update is not None,
                "the model is called in a way of its own": step.forward is not None,
                "the tables are spread over processes": step.processes is not ONE,
            }.items()
            if is_so
        ]
        if acting:
            raise NotStackableError(acting[0])
        if loop.bounds != loops[0].bounds or not _is_same_log(loop, loops[0]):
            raise NotStackableError("they have other batches")
        alike = (step.loss, step.half, step.compiled_size)
        if alike != (first.loss, first.half, first.compiled_size):
            raise NotStackableError("they compute in other ways")
        why = _why_alone(step.model)
        if why is not None:
            raise NotStackableError(why)
    if len({_shape(step.model) for step in steps}) > 1:
        raise NotStackableError("their models have other shapes")


def _is_same_log(one: TrainingLoop, other: TrainingLoop) -> bool:
    ours, theirs = one.steps.train, other.steps.train
    return ours.ids.data_ptr() == theirs.ids.data_ptr() and len(ours) == len(theirs)


def _why_alone(model: nn.Module) -> str | None:
    """Return why a model cannot be part of a stack: something would still look at its own memory, or miss its gradients."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, module in model.named_modules():
        if any(getattr(module, kind) for kind in hooks):
            return f"{name or 'the model'} has hooks"
    held = _holders(torch.empty(1))
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # noqa: SLF001  # they have no other names
            return f"{name} has hooks"
        if _holders(parameter) > held:
            return f"something else holds the memory of {name}"
    return None


def _holders(tensor: Tensor) -> int:
    """Return how many tensors share the memory of one, itself and this call included."""
    count: Any = torch._C._storage_Use_Count  # noqa: SLF001  # it has no other name
    return int(count(tensor.untyped_storage()._cdata))  # noqa: SLF001  # it has no other name


def _shape(model: nn.Module) -> tuple[object, ...]:
    """Return what models must have in common."""
    parameters = [
        (n, p.shape, p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()
    ]
    buffers = [(n, b.shape, b.dtype) for n, b in model.named_buffers()]
    modules = [(n, type(m), getattr(m, "sparse", None)) for n, m in model.named_modules()]
    return (*parameters, *buffers, *modules)


def _steps_of(step: "StackedStep", loop: TrainingLoop, say: Say) -> Steps:
    """Return how to run the steps of a stack: as those of its members would run."""
    train = loop.steps.train
    if not isinstance(loop.steps, RecordedSteps) or any(
        why_not_recorded(member.optimizer) for member in step.members
    ):
        return Steps(step, train)
    return RecordedSteps(step, train, loop.settings.batch_size, say, orders=(len(step.members),))


class StackedStep(TrainingStep):
    """One step of several models of one shape. It takes the batches of all members, one after the other."""

    def __init__(self, members: Sequence[TrainingStep], random: Sequence[torch.Generator]) -> None:
        first = members[0]
        self.members, self.random = list(members), list(random)
        self.loss, self.half, self.device = first.loss, first.half, first.device
        self.processes, self.say = ONE, first.say
        self.compiled_size = first.compiled_size
        self.compiled_logits = self._logits
        if self.compiled_size is not None:
            torch.compiler.reset()
            self.compiled_logits = torch.compile(self._logits, dynamic=False)
        self.model = self._skeleton(first.model)
        parameters = [dict(member.model.named_parameters()) for member in members]
        self.weights = {
            name: nn.Parameter(
                _joined([each[name] for each in parameters]),
                requires_grad=parameters[0][name].requires_grad,
            )
            for name in parameters[0]
        }
        buffers = [dict(member.model.named_buffers()) for member in members]
        self.buffers = {
            name: _joined([each[name] for each in buffers])
            for name in buffers[0]
            if name in self._moving
            or any(not torch.equal(each[name], buffers[0][name]) for each in buffers)
        }
        self.held = parameters
        self.others = [[each[name] for name in self.buffers] for each in buffers]
        for member, others in zip(members, self.others, strict=True):
            others += [member.steps, member.loss_sum, member.bad_step]
        self.steps, self.loss_sum, self.bad_step = (
            _joined([others[place] for others in self.others]) for place in (-3, -2, -1)
        )
        self.is_tried = False

    def _skeleton(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model without weights, whose dropout is that of the members."""
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        for module in model.modules():
            if isinstance(module, PlainStack):
                memo[id(module.gradient_memory)] = GradientMemory()
        skeleton = copy.deepcopy(model, memo).train()
        self._moving = {
            f"{name}.{buffer}"
            for name, module in skeleton.named_modules()
            if isinstance(module, _BatchNorm)
            for buffer, _ in module.named_buffers(recurse=False)
        }
        self.memories = {
            f"{name}.embedding.weight": module.gradient_memory
            for name, module in skeleton.named_modules()
            if isinstance(module, PlainStack)
        }
        for name, module in list(skeleton.named_modules()):
            if isinstance(module, nn.Dropout) and self.device.type == "cpu":
                skeleton.set_submodule(name, _Dropout(module.p, self.random))
        return skeleton

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of all members."""
        return [member.optimizer for member in self.members]

    def holds(self, members: Sequence[TrainingStep]) -> bool:
        """Return whether these are the members."""
        return len(members) == len(self.members) and all(map(operator.is_, members, self.members))

    def holds_weights(self) -> bool:
        """Return whether the members' weights still lie here; what acts between epochs may exchange them."""
        return all(
            parameters.keys() == held.keys()
            and all(p is held[n] and self._holds(n, k) for n, p in parameters.items())
            for k, (member, held) in enumerate(zip(self.members, self.held, strict=True))
            for parameters in [dict(member.model.named_parameters())]
        )

    def _holds(self, name: str, k: int) -> bool:
        return self.held[k][name].data_ptr() == self.weights[name][k].data_ptr()

    def release(self) -> None:
        """Give the members memory of their own."""
        for k, (held, others) in enumerate(zip(self.held, self.others, strict=True)):
            for name, parameter in held.items():
                if self._holds(name, k):
                    parameter.data = parameter.data.clone()
            for tensor in others:
                tensor.data = tensor.data.clone()

    @torch.no_grad()
    def check_scores(self, batch: Batch) -> None:
        """Raise where the scores of the stack are not those of its members."""
        own = []
        for member in self.members:
            member.model.eval()
            own.append(score(member.model, batch, None).float())
            member.model.train()
        try:
            found = self._scores(batch).float()
        except Exception as error:
            raise NotStackableError(first_line(error)) from error
        expected = torch.stack(own)
        worst = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
        if not worst <= TOLERANCE:
            raise NotStackableError(f"stacked, their scores differ by {worst:.1e}")

    def check_gradients(self, batch: Batch) -> None:
        """Raise where the gradients of the stack are not those of its first and its last member."""
        label = batch.label
        wanted = [name for name, weight in self.weights.items() if weight.requires_grad]
        try:
            logits = self._scores(batch)
            loss = vmap(self.loss)(logits, label.to(logits.dtype).expand_as(logits)).sum()
            weights = [self.weights[name] for name in wanted]
            found: Sequence[Tensor | None] = torch.autograd.grad(loss, weights, allow_unused=True)
        except Exception as error:
            raise NotStackableError(first_line(error)) from error
        for k in (0, len(self.members) - 1):
            member = self.members[k]
            member.model.eval()
            loss = self.loss(score(member.model, batch, None), label.to(logits.dtype))
            own: Sequence[Tensor | None] = torch.autograd.grad(
                loss, [self.held[k][n] for n in wanted], allow_unused=True
            )
            member.model.train()
            for name, theirs, ours in zip(wanted, own, found, strict=True):
                if theirs is None or ours is None:
                    continue
                gradient = (ours.to_dense() if ours.is_sparse else ours)[k]
                expected = theirs.to_dense() if theirs.is_sparse else theirs
                worst = (gradient - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
                if not float(worst) <= GRADIENT_TOLERANCE:
                    raise NotStackableError(
                        f"stacked, the gradient of {name} differs by {float(worst):.1e}"
                    )

    @torch.no_grad()
    def predict(self, data: Dataset) -> Tensor:
        """Return the logits of all members for the rows of a data set, `(K, n)`."""
        size = max(SCORED // len(self.members), 1)
        found = [self._scores(data[slice(*bounds)]) for bounds in batch_bounds(len(data), size)]
        return torch.cat(found, dim=1)

    def _scores(self, batch: Batch) -> Tensor:
        parts = [part.expand(len(self.members), *part.shape) for part in _tensors(batch)]
        self.model.eval()
        try:
            with _quiet():
                return self._logits(batch, parts)
        finally:
            self.model.train()

    def __call__(self, batch: Batch, **_: Any) -> None:
        """Train every member on its part of the rows."""
        for weight in self.weights.values():
            weight.grad = None  # of a step that failed
        parts = [part.unflatten(0, (len(self.members), -1)) for part in _tensors(batch)]
        losses = self._first(batch, parts) if not self.is_tried else self._backward(batch, parts)
        self._hand_out()
        for member in self.members:
            member.update()
            member.optimizer.zero_grad(set_to_none=True)
        for name, weight in self.weights.items():
            gradient, weight.grad = weight.grad, None
            if name in self.memories and gradient is not None:
                self.memories[name].take_back(gradient)
        self._remember(losses.detach(), parts[0].shape[1])

    def _backward(self, batch: Batch, parts: list[Tensor]) -> Tensor:
        """Return the losses, with gradients of them."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half), _quiet():
            logits = self._stacked(batch, parts)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses: Tensor = vmap(self.loss)(logits, *(part.to(logits.dtype) for part in parts[2:]))
        losses.sum().backward()
        return losses

    def _first(self, batch: Batch, parts: list[Tensor]) -> Tensor:
        """Return the losses as `_backward` does; where that fails, leave everything as it was."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        random = [generator.get_state() for generator in self.random]
        try:
            losses = self._backward(batch, parts)
        except Exception as error:
            for name, buffer in buffers.items():
                self.buffers[name].copy_(buffer)
            for generator, state in zip(self.random, random, strict=True):
                generator.set_state(state)
            raise NotStackableError(first_line(error)) from error
        self.is_tried = True
        return losses

    def _stacked(self, batch: Batch, parts: list[Tensor]) -> Tensor:
        if parts[0].shape[1] == self.compiled_size:
            try:
                return self.compiled_logits(batch, parts)
            except Exception as error:  # noqa: BLE001  # a fault of the model's own comes again below
                self.compiled_size = None
                self.say(f"the models are not compiled: {first_line(error)}")
        return self._logits(batch, parts)

    def _logits(self, batch: Batch, parts: list[Tensor]) -> Tensor:
        """Return the logits of all members, `(K, B)`."""

        def one(
            tensors: dict[str, Tensor], ids: Tensor, numeric: Tensor, label: Tensor, *_: Tensor
        ) -> Tensor:
            own = replace(batch, ids=ids, numeric=numeric, label=label, weight=None)
            found: Tensor = functional_call(self.model, tensors, (own,))
            return found.reshape(label.shape)

        # on a GPU dropout draws for all at once; on the CPU, whatever else draws is refused
        drawn = "different" if self.device.type == "cuda" else "error"
        logits: Tensor = vmap(one, randomness=drawn)({**self.weights, **self.buffers}, *parts)
        return logits

    def _hand_out(self) -> None:
        """Give each member its part of the gradients."""
        count = len(self.members)
        for name, weight in self.weights.items():
            gradient = weight.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                places, values = gradient._indices(), gradient._values()  # noqa: SLF001  # not coalesced
                ids = places[1].view(count, -1)
                values = values.view(count, -1, values.shape[-1])
            for k, held in enumerate(self.held):
                parameter = held[name]
                parameter.grad = (
                    row_gradient(parameter.shape, ids[k], values[k])
                    if gradient.is_sparse
                    else gradient[k]
                )


class _Dropout(nn.Module):
    """Dropout that draws for each member what it would draw alone."""

    def __init__(self, p: float, random: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.p, self.random = p, random

    def forward(self, features: Tensor) -> Tensor:
        """Set entries to zero at random in training."""
        if not self.training or not self.p:
            return features
        kept: Tensor = _Kept.apply(features, self.p, self.random)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return features * kept


class _Kept(torch.autograd.Function):
    """What to multiply features by: zero, or 1 / (1 - p)."""

    @staticmethod
    def forward(features: Tensor, p: float, random: Sequence[torch.Generator]) -> Tensor:
        drawn = [
            torch.empty_like(part).bernoulli_(1.0 - p, generator=g)
            for part, g in zip(features, random, strict=True)
        ]
        return torch.stack(drawn).div_(1.0 - p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del inputs
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None, None]:
        del ctx
        return None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], features: Tensor, p: float, random: Any
    ) -> tuple[Tensor, int]:
        del info
        return _Kept.apply(features.movedim(in_dims[0], 0), p, random), 0  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape side by side; from now on they are parts of it."""
    whole = torch.stack([tensor.detach() for tensor in tensors])
    for tensor, part in zip(tensors, whole, strict=True):
        tensor.data = part
    return whole


def _tensors(batch: Batch) -> list[Tensor]:
    """Return ids, numbers and labels of a batch, and weights where it has them."""
    parts = [batch.ids, batch.numeric, batch.label]
    return parts if batch.weight is None else [*parts, batch.weight]


@contextmanager
def _quiet() -> Iterator[None]:
    """Let vmap loop over the members where it has nothing better, without a word."""
    functorch: Any = torch._C._functorch  # noqa: SLF001  # it has no other name
    switch = functorch._set_vmap_fallback_warning_enabled  # noqa: SLF001  # it has no other name
    switch(False)
    try:
        yield
    finally:
        switch(True)
