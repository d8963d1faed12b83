"""A function of tensors that is recorded as a CUDA graph once it is known, and replayed from then on.

What a rule does to the rows of a step is many small kernels, and a GPU finishes them sooner than the host
can ask for them. In a loop that is run operation by operation this would be most of what a rule costs. Its
sizes do not depend on the ids, so it can be recorded: then it is one launch.

It is recorded after some calls that were alike: the same key, and tensors of the same shapes. Other calls
are run as they are, and so is everything while the whole step is being recorded.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Function",
    "Recorded",
    "Recorder",
    "Replay",
    "aside",
    "is_recording",
    "join",
    "record_graph",
]

Function: TypeAlias = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""Tensors to tensors, without a look at what is in them."""
Replay: TypeAlias = Callable[[], tuple[Tensor, ...]]
"""Runs a function again on the tensors it was recorded with; its results are always in the same memory."""
Recorder: TypeAlias = Callable[[Function, Sequence[Tensor]], Replay]

WARM_UP = 5
"""Calls that are alike before one is recorded: more than a recording of the whole step waits for."""


@dataclass(frozen=True)
class Recording:
    """A call that was recorded."""

    key: Hashable
    places: list[Tensor]
    """Where it reads its inputs."""
    replay: Replay

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the function makes of other inputs."""
        for place, tensor in zip(self.places, inputs, strict=True):
            place.copy_(tensor)
        # copies: the next replay writes to the same memory, and somebody may still hold these
        return tuple(result.clone() for result in self.replay())


class Recorded:
    """Calls functions, and replays one that comes again and again.

    >>> double = Recorded()
    >>> double("key", lambda inputs: (2 * inputs[0],), [torch.tensor(4.0)])
    (tensor(8.),)
    """

    def __init__(self, record: Recorder | None = None) -> None:
        self._recorder = record
        self.recording: Recording | None = None
        self._last: Hashable = None
        self._alike = 0
        self._gave_up = False

    def forget(self) -> None:
        """Give the recording up; the next calls may make another."""
        self.recording, self._last, self._alike = None, None, 0

    def __call__(
        self, key: Hashable, function: Function, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return what the function makes of the inputs.

        The key stands for all else that it depends on: functions of the same key are the same.
        """
        record = self._recorder or (record_graph if _may_record(inputs) else None)
        if record is None or self._gave_up:
            return function(inputs)
        key = (key, *((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs))
        if self.recording is None or self.recording.key != key:
            self._alike = self._alike + 1 if key == self._last else 1
            self._last = key
            if self._alike > WARM_UP:
                self._record(record, key, function, inputs)
        known = self.recording is not None and self.recording.key == key
        return self.recording(inputs) if self.recording and known else function(inputs)

    def _record(
        self, record: Recorder, key: Hashable, function: Function, inputs: Sequence[Tensor]
    ) -> None:
        self.recording = None  # gives the memory of the last one back
        try:
            places = [tensor.clone() for tensor in inputs]
            self.recording = Recording(key, places, record(function, places))
        except Exception:  # noqa: BLE001  # anything that a rule does may be what cannot be recorded
            self._gave_up = True


def record_graph(function: Function, inputs: Sequence[Tensor]) -> Replay:
    """Record a function as a CUDA graph; nothing is computed before the first replay."""
    generator = torch.cuda.default_generators[inputs[0].device.index]
    before = generator.clone_state()
    graph = torch.cuda.CUDAGraph()
    try:
        # what other threads do meanwhile, as to bring the next batch, does not matter
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = function(inputs)
    except BaseException:
        generator.graphsafe_set_state(before)  # or it goes on waiting for the end of the recording
        raise

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay


def is_recording() -> bool:
    """Return whether a CUDA graph is being recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Let a GPU do what is in the `with` block beside what follows, up to `join`.

    It begins after all that was asked for before. Elsewhere it is done at once.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def join(device: torch.device) -> None:
    """Let what follows wait for what is done aside."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for work aside: one for all, as torch keeps workspaces for each for good."""
    return torch.cuda.Stream(device)


def _may_record(inputs: Sequence[Tensor]) -> bool:
    """Return whether these are on a GPU, and no recording is under way already."""
    return inputs[0].is_cuda and not is_recording()
