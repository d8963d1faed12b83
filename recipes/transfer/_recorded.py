"""A step that is recorded as a CUDA graph after a few ordinary ones, on a stream of its own.

A step of the language model is some thousand small kernels, one after the other, that leave most of a GPU
idle. Recorded, a step is one launch, and the steps of several runs are done side by side.
"""

from collections.abc import Callable

import torch

__all__ = ["RecordedStep"]

WARM_UP = 3
"""Ordinary steps before one is recorded: they make the optimizer's state and choose kernels."""
AHEAD = 16
"""Every so many steps the host waits for those before: at most twice as many are asked for in advance."""


class RecordedStep:
    """Something to do again and again, always with the same tensors; on a CPU it is simply done."""

    def __init__(self, step: Callable[[], None], random: torch.Generator) -> None:
        self.step, self.random = step, random
        is_cuda = random.device.type == "cuda"
        self.stream = torch.cuda.Stream(random.device) if is_cuda else None
        self.mark = torch.cuda.Event() if is_cuda else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        self.why_not: str | None = None

    def __call__(self) -> None:
        """Do it; call it on `stream`."""
        if self.stream is not None and self.done == WARM_UP:
            self._record(self.stream)
        self.done += 1
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()
        if self.mark is not None and self.done % AHEAD == 0:
            self.mark.synchronize()
            self.mark.record(self.stream)

    def _record(self, stream: torch.cuda.Stream) -> None:
        """Record it; where that fails, keep the reason and go on without."""
        graph, before = torch.cuda.CUDAGraph(), self.random.clone_state()
        graph.register_generator_state(self.random)
        try:
            with torch.cuda.graph(graph, stream=stream):
                self.step()
        except Exception as error:  # noqa: BLE001  # anything in a step may be what cannot be recorded
            self.random.graphsafe_set_state(before)  # or it goes on waiting for the recording's end
            self.why_not = str(error).split("\n", 1)[0]
        else:
            self.graph = graph
