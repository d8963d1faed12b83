"""Steps that are recorded as CUDA graphs after a few ordinary ones, on a stream of their own.

A step of the language model is some thousand small kernels, one after the other, that leave most of a GPU
idle. Recorded, a step is one launch, and the steps of several runs are done side by side.
"""

from collections import Counter
from collections.abc import Callable

import torch

__all__ = ["RecordedSteps"]

WARM_UP = 3
"""Ordinary steps before one is recorded: they make the optimizer's state and choose kernels."""
AHEAD = 16
"""Every so many steps the host waits for those before: at most twice as many are asked for in advance."""


class RecordedSteps:
    """Something to do again and again with the same tensors, one recording per size; on a CPU it is simply done."""

    def __init__(self, step: Callable[[int], None], random: torch.Generator) -> None:
        self.step, self.random = step, random
        is_cuda = random.device.type == "cuda"
        self.stream = torch.cuda.Stream(random.device) if is_cuda else None
        self.mark = torch.cuda.Event() if is_cuda else None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.done: Counter[int] = Counter()
        self.why_not: str | None = None

    def __call__(self, size: int) -> None:
        """Do it; call it on `stream`."""
        if self.stream is not None and self.done[size] == WARM_UP:
            self._record(size, self.stream)
        self.done[size] += 1
        if size in self.graphs:
            self.graphs[size].replay()
        else:
            self.step(size)
        if self.mark is not None and self.done.total() % AHEAD == 0:
            self.mark.synchronize()
            self.mark.record(self.stream)

    def forget(self) -> None:
        """Record anew: the step has become another one."""
        self.graphs, self.done = {}, Counter()

    def _record(self, size: int, stream: torch.cuda.Stream) -> None:
        """Record it; where that fails, keep the reason and go on without."""
        # All share their memory: nothing that a step leaves there is read by another.
        pool = next((graph.pool() for graph in self.graphs.values()), None)
        graph, before = torch.cuda.CUDAGraph(), self.random.clone_state()
        graph.register_generator_state(self.random)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.step(size)
        except Exception as error:  # noqa: BLE001  # anything in a step may be what cannot be recorded
            self.random.graphsafe_set_state(before)  # or it goes on waiting for the recording's end
            self.why_not = str(error).split("\n", 1)[0]
        else:
            self.graphs[size] = graph
