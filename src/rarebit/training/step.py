"""One training step, and what is remembered of it on the device."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from rarebit.data.dataset import Batch
from rarebit.errors import NotFiniteError, RarebitError
from rarebit.tables.stack import PlainStack
from rarebit.training.clipping import clip_grad_norm_
from rarebit.training.evaluate import Forward, device_of, score
from rarebit.training.settings import Precision

__all__ = ["Backward", "Loss", "TrainingStep", "first_line"]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Scores `(B,)` and labels `(B,)` to one number, the mean over the rows."""
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
        self.device = device_of(model)
        self.stacks = [module for module in model.modules() if isinstance(module, PlainStack)]
        self.steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.bad_step = torch.full((), -1, device=self.device)
        optimizer.zero_grad(set_to_none=True)  # what the caller left would be in the first step

    def __call__(self, batch: Batch) -> None:
        """Train on one batch."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            logits = self._score(batch)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = self.loss(logits, batch.label.to(logits.dtype))
        self.backward(loss)
        if self.inspect is not None:
            self.inspect(loss.detach())
        if self.clip_norm is not None:
            clip_grad_norm_(self.model, self.clip_norm)
        self.optimizer.step()
        for stack in self.stacks:
            stack.gradient_memory.keep(stack.embedding.weight)
        self.optimizer.zero_grad(set_to_none=True)
        self._remember(loss.detach(), len(batch))

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
        # all in place: a recorded step goes on writing to the same memory
        self.steps += 1
        self.loss_sum += loss.double() * rows
        first_bad = (self.bad_step < 0) & ~torch.isfinite(loss)
        self.bad_step.copy_(torch.where(first_bad, self.steps, self.bad_step))

    def raise_if_not_finite(self) -> None:
        """Raise with the number of the first step whose loss was not finite."""
        step = int(self.bad_step)
        if step >= 0:
            raise NotFiniteError(
                f"the loss was not finite at step {step}; lower the learning rate, "
                "or look for extreme numbers in the data"
            )

    def state(self) -> dict[str, Tensor]:
        """Return what is remembered."""
        return {"steps": self.steps, "loss_sum": self.loss_sum, "bad_step": self.bad_step}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        for name, value in self.state().items():
            value.copy_(state[name])

    def release(self) -> None:
        """Give back what is kept between two steps, after the last one."""
        for stack in self.stacks:
            stack.gradient_memory.release()

    def take_mean_loss(self, rows: int) -> float:
        """Return the mean loss since the last call."""
        mean = float(self.loss_sum) / rows
        self.loss_sum.zero_()
        return mean


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or what kind of error it is."""
    return str(error).split("\n", 1)[0] or type(error).__name__
