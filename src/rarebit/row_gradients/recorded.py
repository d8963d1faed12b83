"""Functions of tensors that are recorded as CUDA graphs and replayed.

A rule runs many small kernels on the rows of a step, and a GPU finishes them sooner than the host can
launch them. Its sizes do not depend on the ids, so it can be recorded: then it is one launch.

A call is recorded after several that were alike: the same key, and tensors of the same shapes. Other calls
run without a recording, and so does everything while the whole step is being recorded.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Function: TypeAlias = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""Tensors to tensors, without reading their values on the host."""
Replay: TypeAlias = Callable[[], tuple[Tensor, ...]]
"""Runs a function again on the tensors it was recorded with; its results are always in the same memory."""
Recorder: TypeAlias = Callable[[Function, Sequence[Tensor]], Replay]

WARM_UP = 5
"""Alike calls before one is recorded: more than a recording of the whole step waits for."""


@dataclass(frozen=True)
class Recording:
    """A recorded call."""

    key: Hashable
    places: list[Tensor]
    """Where it reads its inputs."""
    replay: Replay

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the function of other inputs."""
        for place, tensor in zip(self.places, inputs, strict=True):
            place.copy_(tensor)
        # copies: the next replay writes to the same memory, and somebody may still hold these
        return tuple(result.clone() for result in self.replay())


class Recorded:
    """Calls functions, and replays one that comes again and again."""

    def __init__(self, record: Recorder | None = None) -> None:
        self._recorder = record
        self.recording: Recording | None = None
        self._last: Hashable = None
        self._alike = 0
        self._gave_up = False

    def forget(self) -> None:
        """Drop the recording; the next calls may make another."""
        self.recording, self._last, self._alike = None, None, 0

    def __call__(
        self, key: Hashable, function: Function, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the function of the inputs.

        The key stands for all else that it depends on: functions of the same key are the same.
        """
        record = self._recorder
        if record is None and inputs[0].is_cuda and not is_recording():
            record = record_graph
        if record is None or self._gave_up:
            return function(inputs)
        key = (key, *((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs))
        if self.recording is None or self.recording.key != key:
            self._alike = self._alike + 1 if key == self._last else 1
            self._last = key
            if self._alike > WARM_UP:
                self.recording = None  # frees the memory of the last one
                try:
                    places = [tensor.clone() for tensor in inputs]
                    self.recording = Recording(key, places, record(function, places))
                except Exception:  # noqa: BLE001  # a rule may do anything that cannot be recorded
                    self._gave_up = True
        known = self.recording is not None and self.recording.key == key
        return self.recording(inputs) if self.recording and known else function(inputs)


def record_graph(function: Function, inputs: Sequence[Tensor]) -> Replay:
    """Record a function as a CUDA graph; nothing is computed before the first replay."""
    generator = torch.cuda.default_generators[inputs[0].device.index]
    before = generator.clone_state()
    graph = torch.cuda.CUDAGraph()
    try:
        # other threads may work meanwhile, as one that loads the next batch
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = function(inputs)
    except BaseException:
        generator.graphsafe_set_state(before)  # or it keeps waiting for the end of the recording
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
    """Let a GPU run the `with` block beside what follows, up to `join`; elsewhere it runs at once.

    It begins after all work that was launched before.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def join(device: torch.device) -> None:
    """Let what follows wait for the work aside."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for work aside: one for all, since torch keeps workspaces for each forever."""
    return torch.cuda.Stream(device)
