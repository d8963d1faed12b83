"""One training step: clip gradients, update, and run the steps of an epoch one by one or as a CUDA graph.

A step of a ranking model is dozens of small kernels, and a GPU finishes them faster than the host can launch them. Recorded
as a CUDA graph, the whole step is one launch: pick the batch out of the data on the device, forward, backward, update. It is
recorded after a few ordinary steps, and again when the learning rate changes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from rarebit.data.dataset import Batch, Dataset
from rarebit.errors import NotFiniteError, RarebitError, TrainingError
from rarebit.settings import require, require_number
from rarebit.sharding.processes import ONE, Processes, processes_of
from rarebit.storage.files import load_tensors_
from rarebit.tables.collection import (
    PlainStack,
    TableCollection,
    find_distinct,
    lookups_of,
    row_gradient,
)
from rarebit.training.metrics import Forward, device_of, score
from rarebit.training.optimizers import RowwiseAdagrad, RowwiseSGD
from rarebit.training.settings import Precision


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, processes: Processes = ONE) -> Tensor:
    """Scale all gradients of a model so that their norm is at most `max_norm`; return the norm before.

    As `torch.nn.utils.clip_grad_norm_`, and right for tables with sparse gradients: lookups of one row are summed first.

    >>> model = nn.Embedding(9, 2, sparse=True)
    >>> model(torch.tensor([4, 4])).sum().backward()
    >>> clip_grad_norm_(model, 1.0)
    tensor(2.8284)
    >>> model.weight.grad.to_dense().norm()
    tensor(1.0000)
    """
    require_number("max_norm", max_norm)
    require(max_norm > 0, f"max_norm must be above 0, got max_norm={max_norm}")
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not parameters:
        return torch.zeros(())
    norms = [_norm(parameter) for parameter in parameters]
    exact = functools.reduce(torch.promote_types, [norm.dtype for norm in norms], torch.float32)
    joined = torch.stack([norm.to(norms[0].device, exact) for norm in norms])
    total = processes.norm(joined, parameters)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # no look at the norm: it may be on a GPU
    for parameter in parameters:
        gradient, scale = parameter.grad, factor.to(parameter.device)
        assert gradient is not None
        if gradient.is_sparse:
            # not in place: what autograd handed over may be one number seen as many
            ids, values = lookups_of(gradient)
            parameter.grad = row_gradient(gradient.shape, ids, values * scale)
        else:
            gradient.mul_(scale)
    return total


def _norm(parameter: nn.Parameter) -> Any:
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return torch.linalg.vector_norm(gradient)
    ids, values = lookups_of(gradient)
    found = find_distinct(ids)
    sums = found.sum(values)
    if len(sums) < len(ids):  # the optimizer then has nothing left to sum
        parameter.grad = row_gradient(gradient.shape, found.ids, sums)
    return torch.linalg.vector_norm(sums)


Loss: TypeAlias = Callable[..., Tensor]
"""Scores `(B,)` and labels `(B,)` to one number, the mean over the rows; with a third argument, weights `(B,)`, where
rows have them."""
Backward: TypeAlias = Callable[[Tensor], object]
"""What turns a loss into gradients: `loss.backward()`, or `rows.backward(loss)` of row gradients."""


class TrainingStep:
    """One step: forward, loss, backward, update. Nothing in it waits for the device."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss = F.binary_cross_entropy_with_logits,
        *,
        forward: Forward | None = None,
        backward: Backward | None = None,
        precision: Precision = "float32",
        clip_norm: float | None = None,
        compiled_size: int | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self.model, self.optimizer, self.loss, self.forward = model, optimizer, loss, forward
        self.backward: Backward = backward or Tensor.backward
        self.processes = processes_of(model)
        self.half = precision == "bfloat16"
        self.clip_norm = clip_norm
        self.compiled_size = compiled_size
        """The batch size the model is compiled for; another size would be compiled for again."""
        self.compiled = score
        if compiled_size is not None:
            # torch compiles a function only so many times, and many models may share ours
            torch.compiler.reset()
            self.compiled = torch.compile(score, dynamic=False)
        self.say = say
        self.inspect: Callable[[Tensor], None] | None = None
        """Called with the loss between backward and update, by whoever looks for a fault."""
        self.before_update: Callable[[Batch, Tensor], None] | None = None
        """Called with the batch and its logits in training, between backward and update."""
        self.device = device_of(model)
        self.stacks = [module for module in model.modules() if isinstance(module, PlainStack)]
        self.steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.bad_step = torch.full((), -1, device=self.device)
        optimizer.zero_grad(set_to_none=True)  # what the caller left would be in the first step

    def __call__(
        self,
        batch: Batch,
        *,
        real: int | None = None,
        total: int | None = None,
        following: Callable[[], Batch | None] = lambda: None,
    ) -> None:
        """Train on one batch, or on this process's share of one of `total` rows, of which the first `real` count.

        `following` returns the next batch, where that is known: other processes can look its rows up meanwhile.
        """
        real, total = real if real is not None else len(batch), total or len(batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            logits = self._score(batch)
        following_batch = following()
        if following_batch is not None:
            self.processes.send_early(following_batch.ids, batch.ids)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        parts = [logits, batch.label.to(logits.dtype)]
        if batch.weight is not None:
            parts.append(batch.weight.to(logits.dtype))
        loss = self.processes.loss(self.loss, parts, real, total)
        self.backward(loss)
        self.processes.average_gradients()
        if self.inspect is not None:
            self.inspect(loss.detach())
        if self.before_update is not None:
            self.before_update(batch, logits.detach())
        self.update()
        for stack in self.stacks:
            stack.gradient_memory.keep(stack.embedding.weight)
        self.optimizer.zero_grad(set_to_none=True)
        self._remember(loss.detach(), total)

    def update(self) -> None:
        """Clip the gradients, and let the optimizer change the weights."""
        if self.clip_norm is not None:
            clip_grad_norm_(self.model, self.clip_norm, self.processes)
        self.optimizer.step()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of what it trains."""
        return [self.optimizer]

    def _score(self, batch: Batch) -> Tensor:
        if len(batch) == self.compiled_size:
            try:
                return self.compiled(self.model, batch, self.forward)
            except RarebitError:
                raise
            except Exception as error:  # noqa: BLE001  # a fault of the model's own comes again below
                self.compiled_size = None
                self.say(f"the model is not compiled: {first_line(error)}")
        return score(self.model, batch, self.forward)

    def _remember(self, loss: Tensor, rows: int) -> None:
        # all in place: a recorded step keeps writing to the same memory
        self.steps += 1
        self.loss_sum += loss.double() * rows
        first_bad = (self.bad_step < 0) & ~torch.isfinite(loss)
        self.bad_step.copy_(torch.where(first_bad, self.steps, self.bad_step))

    def raise_if_not_finite(self) -> None:
        """Raise with the number of the first step whose loss was not finite."""
        step = self.processes.largest(int(self.bad_step))
        if step >= 0:
            raise NotFiniteError(
                f"the loss was not finite at step {step}; lower the learning rate, "
                "or look for extreme numbers in the data"
            )

    def state(self) -> dict[str, Tensor]:
        """Return what is remembered, the same in all processes."""
        self.loss_sum.copy_(self.processes.mean(self.loss_sum))
        return {"steps": self.steps, "loss_sum": self.loss_sum, "bad_step": self.bad_step}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        load_tensors_(self.state(), state, "the step")
        if not bool(torch.isfinite(self.loss_sum)):
            raise TrainingError("the sum of the losses so far is not finite")

    def release(self) -> None:
        """Give back what is kept between two steps, after the last one."""
        self.processes.release()
        for stack in self.stacks:
            stack.gradient_memory.release()

    def take_mean_loss(self, rows: int) -> float:
        """Return the mean loss since the last call."""
        mean = float(self.processes.mean(self.loss_sum)) / rows
        self.loss_sum.zero_()
        return mean


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or what kind of error it is."""
    return str(error).split("\n", 1)[0] or type(error).__name__


def raise_if_weights_are_not_finite(model: nn.Module) -> None:
    """Raise with the name of a weight that is not finite, and its field; waits for the device once."""
    named = dict(model.named_parameters())
    if not named:
        return
    # a sum over everything is finite unless one number is not, or they are past all use
    sums = torch.stack([p.detach().sum(dtype=torch.float64).cpu() for p in named.values()])
    if bool(torch.isfinite(sums).all()):
        return
    for name, parameter in named.items():
        place = where_not_finite(model, parameter, parameter.detach())
        if place is not None:
            raise NotFiniteError(f"the weights of {name} are not finite{place}")


def where_not_finite(model: nn.Module, parameter: nn.Parameter, values: Tensor) -> str | None:
    """Return field and row of the first number of a weight or gradient that is not finite; None if all are."""
    ids = None
    if values.is_sparse:
        ids, values = lookups_of(values)
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return None
    if values.dim() == 0:
        return ""
    row = int(bad.reshape(len(values), -1).any(dim=1).nonzero()[0])
    row = row if ids is None else int(ids[row])
    for module in model.modules():
        if not isinstance(module, TableCollection):
            continue
        for members, stack in zip(module.members, module.stacks, strict=True):
            if isinstance(stack, PlainStack) and stack.embedding.weight is parameter:
                firsts = zip([0, *accumulate(stack.sizes)], members, strict=False)
                first, member = max(pair for pair in firsts if pair[0] <= row)
                name = module.fields[member].name
                return f", in the row of id {row - first} of field {name!r}"
    return f", in row {row}"


WARM_UP = 3
"""Ordinary steps before one is recorded: they make the optimizer's state and choose kernels."""

INDEPENDENT_OF_STEPS = (torch.optim.SGD, torch.optim.Adagrad, RowwiseSGD, RowwiseAdagrad)
"""Optimizers whose step does not depend on how many came before."""


class Steps:
    """The steps of an epoch, one by one."""

    def __init__(self, step: TrainingStep, train: Dataset) -> None:
        self.step, self.train = step, train
        self.device = step.device
        self.order = torch.empty(0, dtype=torch.int64)
        self.ahead: tuple[tuple[int, int], Batch] | None = None
        """The next batch, and its places in the order."""

    def start_epoch(self, order: Tensor) -> None:
        """Take the order of the rows."""
        self.order, self.ahead = order, None

    def __call__(self, start: int, stop: int) -> None:
        """Train on the rows at these places of the order."""
        rows, real = self.step.processes.share(self.order[..., start:stop].reshape(-1))
        ahead, self.ahead = self.ahead, None
        batch = ahead[1] if ahead is not None and ahead[0] == (start, stop) else self._batch(rows)
        self.step(
            batch, real=real, total=stop - start, following=lambda: self._following(start, stop)
        )

    def batches(self, places: Sequence[Tensor]) -> Iterator[Batch]:
        """Yield training rows, this process's share of each batch, without training on them."""
        for rows in places:
            yield self._batch(self.step.processes.share(rows)[0])

    def _batch(self, rows: Tensor) -> Batch:
        batch = self.train[rows]
        return batch if self.train.device == self.device else batch.to(self.device)

    def _following(self, start: int, stop: int) -> Batch | None:
        """Return this process's share of the next batch, if several processes train."""
        places = stop, min(2 * stop - start, self.order.shape[-1])
        if self.step.processes is ONE or places[0] == places[1]:
            return None
        rows, _ = self.step.processes.share(self.order[slice(*places)])
        self.ahead = places, self._batch(rows)
        return self.ahead[1]


class RecordedSteps(Steps):
    """The steps of an epoch on a GPU, replayed from a recording; odd batches are run one by one."""

    def __init__(
        self,
        step: TrainingStep,
        train: Dataset,
        batch_size: int,
        say: Callable[[str], object],
        orders: tuple[int, ...] = (),
    ) -> None:
        """`orders` is the leading shape of the order of the rows, where a step trains several models."""
        super().__init__(step, train)
        self.batch_size, self.say = batch_size, say
        self.order = torch.zeros(*orders, len(train), dtype=torch.int64, device=train.device)
        self.places = torch.arange(batch_size, device=train.device)
        self.position = 0
        """Where the recording thinks the next batch starts."""
        self.start = torch.zeros((), dtype=torch.int64, device=train.device)
        """The same, on the device: every replay moves it on."""
        self.stream = _stream(train.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.options: list[dict[str, Any]] = []
        self.is_checked = False
        """Whether the options are known to be those of the recording; several models change theirs between epochs alone."""
        self.warm, self.gave_up = 0, False

    def start_epoch(self, order: Tensor) -> None:
        """Take the order of the rows, into the memory that the recording reads."""
        self.order.copy_(order)
        self.is_checked = False

    def __call__(self, start: int, stop: int) -> None:
        """Train on the rows at these places of the order."""
        if self.gave_up or stop - start != self.batch_size or self.warm < WARM_UP:
            self._run(start, stop)
            return
        is_known = self.is_checked or self.options == _options(self.step.optimizers)
        if self.graph is None or not is_known:
            self._record()
        self.is_checked = self.order.dim() > 1
        if self.graph is None:
            self._run(start, stop)
            return
        if self.position != start:
            self.start.fill_(start)
        self.graph.replay()
        self.position = start + self.batch_size

    def _run(self, start: int, stop: int) -> None:
        # On a stream of its own: what autograd keeps of a stream must be that of the recording.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            super().__call__(start, stop)
        torch.cuda.current_stream().wait_stream(self.stream)
        self.warm += 1

    def _record(self) -> None:
        """Record a step; if that fails, report why once and continue one by one."""
        self.options = _options(self.step.optimizers)
        graph = torch.cuda.CUDAGraph()
        self.graph = None  # gives the memory of the last recording back
        try:
            with recording(graph, self.stream):
                rows = self.order.index_select(-1, self.places + self.start)
                self.step(self.train[rows.reshape(-1)])
                self.start += self.batch_size
        except Exception as error:  # noqa: BLE001  # anything a model does may be what cannot be recorded
            self.gave_up = True
            for optimizer in self.step.optimizers:
                optimizer.zero_grad(set_to_none=True)
            self.say(f"the step is not recorded as a CUDA graph: {first_line(error)}")
        else:
            self.graph = graph


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for recordings: one for all, as torch keeps workspaces for each for good."""
    return torch.cuda.Stream(device)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record what happens in a `with` block; random numbers can be drawn afterwards even if it fails."""
    generator = torch.cuda.default_generators[stream.device.index]
    before = generator.clone_state()
    try:
        with torch.cuda.graph(graph, stream=stream):
            yield
    except BaseException:
        generator.graphsafe_set_state(before)  # or it keeps waiting for the end of the recording
        raise


def why_not_recorded(optimizer: Optimizer) -> str | None:
    """Return why a replayed step with this optimizer would differ, or None."""
    groups = optimizer.param_groups
    if isinstance(optimizer, INDEPENDENT_OF_STEPS) and not any(g.get("lr_decay") for g in groups):
        return None
    if all(group.get("capturable") for group in groups):
        return None
    return (
        f"{type(optimizer).__name__} counts its steps on the host; "
        "make it with capturable=True, or with rarebit's optimizer()"
    )


def _options(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return what a recording has fixed: learning rates and the like."""
    return [
        {key: value for key, value in group.items() if isinstance(value, float | tuple)}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
