"""Write a training loop down every few minutes and after every longer epoch, and take it up again.

    at-000003-0000000400/    the loop before batch 400 of epoch 3
    best-000002/             the weights of the best epoch, which the states after it refer to

What is to be written is copied between two steps; the files are written while training goes on. The two
newest states are kept, so that one damaged by the disk leaves another.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from rarebit.errors import CheckpointError, RarebitError, TrainingInterrupted
from rarebit.training.checkpoint_file import CheckpointFolder, Found
from rarebit.training.identity import describe_environment, differences, environment_warnings
from rarebit.training.loop import TrainingLoop
from rarebit.training.not_finite import raise_if_weights_are_not_finite
from rarebit.training.step import first_line
from rarebit.training.stopping import StopRequests

__all__ = ["Checkpoints"]

STATE, BEST = "at-", "best-"
KEEP = 2
"""States that are kept."""
SHORT = 1 / 60
"""An epoch that ends within this part of the time between two checkpoints after the last one is not written:
where epochs take a second, writing them would take longer than they do."""


class Checkpoints:
    """The checkpoints of one run, in a folder of its own."""

    def __init__(
        self,
        folder: CheckpointFolder,
        run: Mapping[str, Any],
        stop: StopRequests,
        *,
        minutes: float,
        say: Callable[[str], object],
    ) -> None:
        self.folder, self.run, self.stop, self.say = folder, run, stop, say
        self.seconds = 60.0 * minutes
        self.due = time.monotonic() + self.seconds
        self.written_at = -float("inf")
        """When the last one was begun."""
        self.best_epoch: int | None = None
        """The best epoch whose weights are written."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def after_step(self, loop: TrainingLoop) -> None:
        """Write the loop down when it is time, or when it is to stop."""
        if self.stop.requested:
            self._stop(loop)
        if time.monotonic() >= self.due:
            self.save(loop)

    def after_epoch(self, loop: TrainingLoop) -> None:
        """Write the loop down after a longer epoch; the last one's is on the disk when training ends."""
        if loop.is_finished or time.monotonic() - self.written_at >= SHORT * self.seconds:
            self.save(loop)
        if loop.is_finished:
            self.wait()
        elif self.stop.requested:
            self._stop(loop)

    def save(self, loop: TrainingLoop) -> None:
        """Copy the loop's state and begin to write it."""
        loop.step.raise_if_not_finite()
        raise_if_weights_are_not_finite(loop.step.model)
        self.wait()  # for the last one: two copies at once would be one too many
        name = f"{STATE}{loop.epoch:06d}-{loop.batch:010d}"
        best = None
        if loop.best.epoch not in (None, self.best_epoch):
            best, self.best_epoch = _copied(loop.best.weights), loop.best.epoch
        state = _copied(loop.state()) | {
            "run": dict(self.run),
            "environment": describe_environment(),
        }
        self._written = self._writer.submit(self._write, name, state, best)
        self.written_at = time.monotonic()
        self.due = self.written_at + self.seconds

    def wait(self) -> None:
        """Wait until what was begun is written; raise what went wrong with it."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """Finish writing."""
        self._writer.shutdown(wait=True)

    def resume(self, loop: TrainingLoop) -> bool:
        """Take the newest good state up, if there is one; return whether there was."""
        found = self.folder.newest(STATE)
        if found is None:
            return False
        try:
            self._take_up(found, loop)
        except RarebitError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{found.name!r} in {str(self.folder.folder)!r} does not hold the state of this "
                f"training: {first_line(error)}; choose another folder"
            ) from None
        return True

    def _take_up(self, found: Found, loop: TrainingLoop) -> None:
        changed = differences(found.state["run"], self.run)
        if changed:
            raise CheckpointError(
                f"{str(self.folder.folder)!r} holds the checkpoints of another run: "
                f"{'; '.join(changed[:3])}; choose another folder, or the same settings and data"
            )
        for line in environment_warnings(found.state["environment"], describe_environment()):
            self.say(line)
        epoch = found.state["best"]["epoch"]
        weights = None if epoch is None else self.folder.read(f"{BEST}{epoch:06d}")["weights"]
        loop.load(found.state, weights)
        self.best_epoch = epoch
        for name, reason in found.damaged:
            self.say(f"the checkpoint {name} is passed over: {reason}")
        damaged = {name for name, _ in found.damaged}  # their names are needed again
        self.folder.prune([name for name in self.folder.names() if name not in damaged])
        self.say(f"resumed from {found.name}: epoch {loop.epoch}, batch {loop.batch}")

    def _stop(self, loop: TrainingLoop) -> None:
        self.save(loop)
        self.wait()
        assert self.stop.signal is not None
        raise TrainingInterrupted(
            f"stopped after batch {loop.batch} of epoch {loop.epoch}, which is written to "
            f"{str(self.folder.folder)!r}; train again with resume to go on",
            signal=self.stop.signal,
        )

    def _write(self, name: str, state: dict[str, Any], best: dict[str, Tensor] | None) -> None:
        names = self.folder.names()
        if best is not None:
            weights = f"{BEST}{self.best_epoch:06d}"
            if weights not in names:
                self.folder.write(weights, {"weights": best})
        if name not in names:
            self.folder.write(name, state)
        names = self.folder.names()
        # the two newest states were written after the two newest best weights, and refer to no others
        self.folder.prune(
            [name for kind in (STATE, BEST) for name in _of_kind(names, kind)[-KEEP:]]
        )


def _of_kind(names: list[str], kind: str) -> list[str]:
    return [name for name in names if name.startswith(kind)]


def _copied(tree: Any) -> Any:
    """Return a copy of nested values with its tensors on the CPU."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        copies = [_copied(value) for value in tree]
        return copies if isinstance(tree, list) else tuple(copies)
    return tree
