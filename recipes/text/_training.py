"""One training of the language model: an arm and a seed, stopped and taken up again at any step."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from _arms import Arm
from _language_model import LanguageModel, Sizes
from _recorded import RecordedSteps
from _text import Text
from torch import Tensor, nn
from torch.nn import functional as F

import rarebit as rb
from rarebit.errors import DataError, NotFiniteError

__all__ = ["LanguageTraining", "PaperSchedule", "Schedule", "perplexities"]

Cuts = list[tuple[int, int]]
"""Where the batches of an epoch begin in the columns of the text, and their lengths."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How it is trained: AWD-LSTM's settings, but for a short schedule.

    NOTE[DIFF]: AWD-LSTM takes 750 epochs of SGD at 30, averages from where validation stalls, 750 more, and
    batches of a random length; here Adam, a rate that rises and then falls to 0 as a cosine, a length of 70.
    """

    epochs: int = 8
    batch_size: int = 80
    length: int = 70
    lr: float = 2e-3
    warm_up: float = 0.05
    """The share of the steps in which the rate rises."""
    clip: float = 0.25
    weight_decay: float = 1.2e-6
    size_penalty: float = 2.0
    """The weight of the mean square of the outputs: AWD-LSTM's alpha."""
    change_penalty: float = 1.0
    """The weight of that of their change from word to word: its beta."""
    eval_batch_size: int = 80

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam, on a GPU in the form that can be recorded, with its rate on the device."""
        decay, device = self.weight_decay, next(model.parameters()).device
        if device.type != "cuda":
            return torch.optim.Adam(model.parameters(), weight_decay=decay)
        rate = torch.zeros((), device=device)
        return torch.optim.Adam(
            model.parameters(), lr=rate, weight_decay=decay, fused=True, capturable=True
        )

    def cuts(self, rows: int, seed: int) -> list[Cuts]:
        """Return how columns of so many words are cut in each epoch: all alike, what is left over is dropped."""
        del seed
        starts = range(0, rows - self.length, self.length)
        return [[(start, self.length) for start in starts]] * self.epochs

    def starts_averaging(self, valid: Sequence[float]) -> bool:
        """Return whether to average weights after epochs of these validation perplexities."""
        del valid
        return False

    def rate(self, step: int, steps: int, length: int) -> float:
        """Return the learning rate of a step, counted from 0, of so many, for a batch of this length."""
        del length
        rising = max(1, round(self.warm_up * steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


@dataclass(frozen=True, kw_only=True)
class PaperSchedule(Schedule):
    """AWD-LSTM's own: SGD, batches of a random length, and the mean of the weights once validation stalls (NT-ASGD).

    NOTE[DIFF]: AWD-LSTM takes 750 epochs and 750 more from the averaged weights, and scores test in one column.
    """

    epochs: int = 50
    lr: float = 30.0
    eval_batch_size: int = 10
    trigger: int = 5
    """Averaging starts after an epoch that is worse than the best of those before the last so many."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD, on a GPU with its rate on the device."""
        device, decay = next(model.parameters()).device, self.weight_decay
        rate = torch.zeros((), device=device) if device.type == "cuda" else self.lr
        return torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay, fused=True)

    def cuts(self, rows: int, seed: int) -> list[Cuts]:
        """Return batches of about `length` words, one in twenty of about half as many."""
        draws, epochs = np.random.default_rng(seed), []
        for _ in range(self.epochs):
            start, cuts = 0, []
            while start < rows - 2:
                mean = self.length if draws.random() < 0.95 else self.length / 2
                length = max(5, int(draws.normal(mean, 5)))
                length = min(length, rows - 1 - start)
                cuts.append((start, length))
                start += length
            epochs.append(cuts)
        return epochs

    def starts_averaging(self, valid: Sequence[float]) -> bool:
        """Return whether the last of these epochs is worse than the best of those before the last few."""
        *earlier, last = valid
        return len(earlier) > self.trigger and last > min(earlier[: -self.trigger])

    def rate(self, step: int, steps: int, length: int) -> float:
        """Return a rate that follows the length of the batch: its loss is a mean over the words."""
        del step, steps
        return self.lr * length / self.length


class LanguageTraining:
    """A model, its optimizer and its transfer, between two steps."""

    def __init__(
        self,
        text: Text,
        arm: Arm,
        *,
        sizes: Sizes,
        schedule: Schedule,
        scale: float = 1.0,
        selection: rb.data.Selection | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(seed)
        self.schedule = schedule
        words = len(text.counts)
        self.model = LanguageModel(words, sizes).to(device)
        self.model.random = torch.Generator(device).manual_seed(seed)
        self.optimizer = schedule.optimizer(self.model)
        self.average: rb.EMA | None = None
        """The mean of the weights since averaging started."""
        self.transfer = self._transfer(text, arm, scale * arm.scale_for(words), selection, seed)
        self.train_columns = columns(text.train, schedule.batch_size).to(device)
        evaluated = (text.valid, text.test)
        self.valid, self.test = (columns(p, schedule.eval_batch_size).to(device) for p in evaluated)
        self.is_head = text.is_head.to(device)
        epochs = schedule.cuts(len(self.train_columns), seed)
        self.cuts = list(chain.from_iterable(epochs))
        self.ends = list(accumulate(map(len, epochs)))
        """How many batches there are up to the end of each epoch."""
        if not self.cuts:
            raise DataError(
                f"a batch is {schedule.batch_size} x {schedule.length} words, the training text has "
                f"{len(text.train)}; lower --batch-size"
            )
        self.tokens = self.train_columns[: max(length for _, length in self.cuts)].clone()
        self.targets = self.tokens.clone()
        self.hidden = [(h, h.clone()) for h, _ in self.model.start(schedule.batch_size)]
        self.loss_sum = torch.zeros((), device=device)
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] = {}
        self._update = RecordedSteps(self._train_on_batch, self.model.random)
        _wait(device)

    @property
    def steps(self) -> int:
        """How many steps there are in all."""
        return len(self.cuts)

    @property
    def is_recorded(self) -> bool | str:
        """Whether steps are replayed from a recording on a GPU, or why they are not."""
        return self._update.why_not or bool(self._update.graphs)

    def train_step(self, said: Callable[[str], None]) -> bool:
        """Make one step, and at the end of an epoch look how well it went; return whether it was the last."""
        start, length = self.cuts[self.step]
        with torch.cuda.stream(self._update.stream):
            if start == 0:
                for state in self.hidden:
                    torch._foreach_zero_(state)  # in place: a recording reads these
            self._set_rate(self.schedule.rate(self.step, self.steps, length))
            tokens, targets = batch_at(self.train_columns, start, length)
            self.tokens[:length].copy_(tokens)
            self.targets[:length].copy_(targets)
            self._update(length)
            self.step += 1
            if self.step in self.ends:
                self._end_epoch(said)
        return self.step == self.steps

    def result(self) -> dict[str, Any]:
        """Return what training gave, by the weights of the best epoch on validation; ends the transfer."""
        _wait(self.loss_sum.device)
        if self.transfer is not None:
            self.transfer.close()
        self.model.load_state_dict(self.best)
        best = min(range(len(self.history)), key=lambda epoch: self.history[epoch]["valid"]["all"])
        return {
            "best_epoch": best + 1,
            "valid": self.history[best]["valid"],
            "test": perplexities(self.model, self.test, self.is_head, self.schedule.length),
            "history": self.history,
            "ledger": None if self.transfer is None else self.transfer.ledger.read(),
        }

    def state(self) -> dict[str, Any]:
        """Return all that the coming steps depend on."""
        assert self.model.random is not None
        _wait(self.loss_sum.device)
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "transfer": None if self.transfer is None else self.transfer.state_dict(),
            "average": None if self.average is None else self.average.training_state(),
            "random": self.model.random.get_state(),
            "step": self.step,
            "hidden": self.hidden,
            "loss_sum": self.loss_sum,
            "history": self.history,
            "best": self.best,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned, before the first step."""
        assert self.model.random is not None
        device = self.loss_sum.device
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(_moved(state["optimizer"], device))
        if self.transfer is not None:
            self.transfer.load_state_dict(_moved(state["transfer"], device))
        if state.get("average") is not None:
            self._start_averaging().load_training_state(_moved(state["average"], device))
        self.model.random.set_state(state["random"])
        self.hidden, self.loss_sum = _moved((state["hidden"], state["loss_sum"]), device)
        self.step, self.history, self.best = state["step"], state["history"], state["best"]
        _wait(device)

    def _transfer(
        self, text: Text, arm: Arm, scale: float, selection: rb.data.Selection | None, seed: int
    ) -> rb.transfer.RunningTransfer | None:
        if arm.loss is None:
            return None
        select = selection if arm.select else None
        counts = None if select else text.counts
        settings = rb.HarmlessTransfer(loss=arm.loss, rule=arm.rule, scale=scale)
        return settings.start(self.model, counts=counts, select=select, seed=seed)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a recording reads it
            else:
                group["lr"] = rate

    def _start_averaging(self) -> rb.EMA:
        self._update.forget()
        self.average = rb.EMA(self.model, self.optimizer, decay=1.0)
        return self.average

    def _train_on_batch(self, length: int) -> None:
        """Train on the batch of this length that lies in `tokens` and `targets`."""
        schedule = self.schedule
        self.optimizer.zero_grad()  # first: a recording that failed may have left gradients
        found = self.model(self.tokens[:length], self.hidden)
        targets = self.targets[:length].reshape(-1)
        loss = F.cross_entropy(found.logits.flatten(0, 1).float(), targets)
        penalty = schedule.size_penalty * found.size + schedule.change_penalty * found.change
        if self.transfer is None:
            (loss + penalty).backward()
        else:
            self.transfer.backward(loss + penalty)
        nn.utils.clip_grad_norm_(self.model.parameters(), schedule.clip)
        self.optimizer.step()
        for old, new in zip(self.hidden, found.hidden, strict=True):
            torch._foreach_copy_(old, [part.detach() for part in new])  # in place, see above
        self.loss_sum += loss.detach()

    def _end_epoch(self, said: Callable[[str], None]) -> None:
        epoch = len(self.history) + 1
        train = float(self.loss_sum) / (self.step - (0, *self.ends)[epoch - 1])
        self.loss_sum.zero_()
        if not math.isfinite(train):
            raise NotFiniteError(
                f"the training loss must be finite, got {train} in epoch {epoch}; lower --lr"
            )
        with nullcontext() if self.average is None else self.average.applied():
            valid = perplexities(self.model, self.valid, self.is_head, self.schedule.length)
            if all(valid["all"] < earlier["valid"]["all"] for earlier in self.history):
                self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        averaged = {} if self.average is None else {"averaged": True}
        self.history.append({"train": math.exp(min(train, 700.0)), "valid": valid, **averaged})
        if self.average is None and self.schedule.starts_averaging(
            [earlier["valid"]["all"] for earlier in self.history]
        ):
            self._start_averaging()
        said(
            f"epoch {epoch}: training perplexity {self.history[-1]['train']:.1f}, validation "
            f"{valid['all']:.2f} (head {valid['head']:.2f}, tail {valid['tail']:.1f})"
        )


@torch.no_grad()
def perplexities(
    model: LanguageModel, tokens: Tensor, is_head: Tensor, length: int
) -> dict[str, float]:
    """Return the perplexity of columns of tokens `(L, B)`: of all words, of the frequent and of the rare ones.

    A word's own perplexity is taken as that of the place where it stands, whatever stands before it.
    """
    was_training = model.training
    model.eval()
    hidden = model.start(tokens.shape[1])
    sums = torch.zeros(2, 2, dtype=torch.float64, device=tokens.device)  # head, tail: losses, words
    for start in range(0, len(tokens) - 1, length):
        inputs, targets = batch_at(tokens, start, length)
        found = model(inputs, hidden)
        hidden = found.hidden
        losses = F.cross_entropy(
            found.logits.flatten(0, 1), targets.reshape(-1), reduction="none"
        ).double()
        head = is_head[targets.reshape(-1)]
        for side, mask in enumerate((head, ~head)):
            sums[side] += torch.stack([(losses * mask).sum(), mask.sum().double()])
    model.train(was_training)
    (head_loss, heads), (tail_loss, tails) = sums.tolist()
    means = {
        "all": (head_loss + tail_loss) / (heads + tails),
        "head": head_loss / max(heads, 1.0),
        "tail": tail_loss / max(tails, 1.0),
    }
    return {name: math.exp(min(mean, 700.0)) for name, mean in means.items()}


def columns(tokens: Tensor, number: int) -> Tensor:
    """Return so many pieces of a text side by side, `(L, B)`; what is left over is dropped.

    >>> columns(torch.arange(7), 2).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    length = len(tokens) // number
    return tokens[: length * number].reshape(number, length).T.contiguous()


def batch_at(tokens: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the words from a place on, and those that follow them, `(length or less, B)` both."""
    stop = min(start + length, len(tokens) - 1)
    return tokens[start:stop], tokens[start + 1 : stop + 1]


def _moved(value: Any, device: torch.device) -> Any:
    """Return a state with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(inner, device) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(inner, device) for inner in value)
    return value


def _wait(device: torch.device | str) -> None:
    """Wait for a GPU: the streams that fill tensors and those that read them are not the same."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
