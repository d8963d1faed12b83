"""How the steps of an epoch are run: one by one, or recorded once and replayed on a GPU.

A step of a ranking model is dozens of small kernels, and a GPU finishes them sooner than the host can
ask for them. Recorded as a CUDA graph, the whole step is one launch: pick the batch out of the data
on the device, forward, backward, update. It is recorded after a few ordinary steps, and again when
the learning rate changes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rarebit.data.dataset import Dataset
from rarebit.training.evaluate import device_of
from rarebit.training.rowwise import RowwiseAdagrad, RowwiseSGD
from rarebit.training.step import TrainingStep, first_line

__all__ = ["RecordedSteps", "Steps", "recording", "why_not_recorded"]

WARM_UP = 3
"""Ordinary steps before one is recorded: they make the optimizer's state and choose kernels."""

INDEPENDENT_OF_STEPS = (torch.optim.SGD, torch.optim.Adagrad, RowwiseSGD, RowwiseAdagrad)
"""Optimizers whose step does not depend on how many came before."""


class Steps:
    """The steps of an epoch, one by one."""

    def __init__(self, step: TrainingStep, train: Dataset) -> None:
        self.step, self.train = step, train
        self.device = device_of(step.model)
        self.order = torch.empty(0, dtype=torch.int64)

    def start_epoch(self, order: Tensor) -> None:
        """Take the order of the rows."""
        self.order = order

    def __call__(self, start: int, stop: int) -> None:
        """Train on the rows at these places of the order."""
        batch = self.train[self.order[start:stop]]
        self.step(batch if self.train.device == self.device else batch.to(self.device))


class RecordedSteps(Steps):
    """The steps of an epoch on a GPU, replayed from a recording; odd batches are run one by one."""

    def __init__(
        self, step: TrainingStep, train: Dataset, batch_size: int, say: Callable[[str], object]
    ) -> None:
        super().__init__(step, train)
        self.batch_size, self.say = batch_size, say
        self.order = torch.zeros(len(train), dtype=torch.int64, device=train.device)
        self.places = torch.arange(batch_size, device=train.device)
        self.position = 0
        """Where the recording thinks the next batch starts."""
        self.start = torch.zeros((), dtype=torch.int64, device=train.device)
        """The same, on the device: every replay moves it on."""
        self.stream = _stream(train.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.options: list[dict[str, Any]] = []
        self.warm, self.gave_up = 0, False

    def start_epoch(self, order: Tensor) -> None:
        """Take the order of the rows, into the memory that the recording reads."""
        self.order.copy_(order)

    def __call__(self, start: int, stop: int) -> None:
        """Train on the rows at these places of the order."""
        if self.gave_up or stop - start != self.batch_size or self.warm < WARM_UP:
            self._run(start, stop)
            return
        if self.graph is None or self.options != _options(self.step.optimizer):
            self._record()
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
        """Record a step; where that fails, say why once and go on one by one."""
        self.options = _options(self.step.optimizer)
        graph = torch.cuda.CUDAGraph()
        self.graph = None  # gives the memory of the last recording back
        try:
            with recording(graph, self.stream):
                rows = self.order.index_select(0, self.places + self.start)
                self.step(self.train[rows])
                self.start += self.batch_size
        except Exception as error:  # noqa: BLE001  # anything a model does may be what cannot be recorded
            self.gave_up = True
            self.step.optimizer.zero_grad(set_to_none=True)
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
        generator.graphsafe_set_state(before)  # or it goes on waiting for the end of the recording
        raise


def why_not_recorded(optimizer: Optimizer) -> str | None:
    """Say why a step with this optimizer would not mean the same when replayed, or None."""
    groups = optimizer.param_groups
    if isinstance(optimizer, INDEPENDENT_OF_STEPS) and not any(g.get("lr_decay") for g in groups):
        return None
    if all(group.get("capturable") for group in groups):
        return None
    return (
        f"{type(optimizer).__name__} counts its steps on the host; "
        "make it with capturable=True, or with rarebit's optimizer()"
    )


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what a recording has fixed: learning rates and the like."""
    return [
        {key: value for key, value in group.items() if isinstance(value, float | tuple)}
        for group in optimizer.param_groups
    ]
