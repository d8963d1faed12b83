"""Transfer losses: how far the rare rows of each table are from the frequent ones.

A loss is settings (`TransferLoss`, frozen) that start something that runs (`RunningLoss`). A loss without state
is both. `RunningLoss.loss` returns one number per table; the rows get the gradient of their sum. Tables share no
space, so no loss mixes rows of two tables, nor of two embedding sets. Reductions are means over the rows of a
table, never sums over rows.

A loss sees a `TransferBatch`: the distinct rows of one group of tables (`row_gradients/lookups.py:RowGroup`),
sorted by table. A number per row names its table, so that all tables are one operation: no loop over fields, and
no size that depends on the ids. Random numbers are drawn on the device and depend on seed, step and place alone:

    bits(place) = mix(key + (step * 2^32 + place) * GOLDEN)      splitmix64, as in `data/order.py`

All processes draw the same numbers, whatever their device; a resumed run needs only the number of its step, and
a recorded step draws new numbers at every replay.

Shapes: U distinct rows, F tables, M embedding sets that lie side by side in a row (1 for most), D the width of
one set, S rows sampled from each table, P rows picked from each table. In the formulas S are the sampled
frequent rows and T the rare rows of the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rarebit.errors import SettingsError
from rarebit.settings import check_types, require
from rarebit.storage.files import load_tensors_


def _signed(bits: int) -> int:
    """Return 64 bits as the integer that torch keeps them in."""
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_STEP = _signed((_GOLDEN << 32) % (1 << 64))


class Draws:
    """Random numbers, new ones in each step."""

    def __init__(self, key: int, device: torch.device) -> None:
        self.key = _signed(key % (1 << 64))
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self._unit = torch.tensor(2.0**-53, dtype=torch.float64).to(device)
        # a tensor: compiled for a CPU, a range times so large a constant writes past its end (torch 2.13)
        self._golden = torch.tensor(_GOLDEN).to(device)
        self._known: dict[tuple[int, int], Tensor] = {}

    def advance(self) -> None:
        """Move to the numbers of the next step."""
        self.step.add_(1)

    def uniform(self, *shape: int, first: int = 0) -> Tensor:
        """Return numbers in [0, 1), float64; the places of a step begin at `first`."""
        size = torch.Size(shape)
        key = (first, size.numel())
        if key not in self._known:  # what the places add to the bits in every step
            places = torch.arange(first, first + size.numel(), device=self.step.device)
            self._known[key] = places * self._golden + self.key
        bits = torch.add(self._known[key], self.step, alpha=_STEP)
        bits = (bits ^ _shifted(bits, 30)) * _FIRST
        bits = (bits ^ _shifted(bits, 27)) * _SECOND
        bits = bits ^ _shifted(bits, 31)
        return (_shifted(bits, 11) * self._unit).reshape(size)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right with zeros; torch's own shift keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


@dataclass(frozen=True)
class Picked:
    """At most P of each table's rows that may move."""

    index: Tensor  # their places among the rows, (F, P); any place where a table has fewer
    is_there: Tensor  # which of them exist, (F, P)
    rows: Tensor  # the number of rows of each table that may move, (F,)
    dtype: torch.dtype

    @property
    def number(self) -> Tensor:
        """The number picked from each table, `(F,)`."""
        return self.rows.clamp(max=self.index.shape[1])

    @property
    def weight(self) -> Tensor:
        """The weight of each, `(F, P)`: 1 over their number, 0 where there is none."""
        return self.is_there / self.number.clamp(min=1).to(self.dtype).unsqueeze(1)


@dataclass(frozen=True)
class TransferBatch:
    """The distinct rows of a step, and sampled rows to move to."""

    ids: Tensor
    """The number of each row in the group, `(U,)`."""
    table: Tensor
    """The table of each row, ascending except in slots without a row, `(U,)`."""
    rows: Tensor
    """The values of the rows, `(U, M, D)`."""
    moves: Tensor
    """Which rows the loss may move, `(U,)`: the rare ones that were selected."""
    others: Tensor
    """Rows to move to, `(F, S, M, D)`: a sample of the frequent ones, detached."""
    turn: Tensor
    """A random number in [0, 1) for each table, `(F,)`."""
    draws: Draws
    """More random numbers of the step."""
    look_up: Callable[[Tensor], Tensor]
    """Ids `(n, F)` of each table to rows `(n, F, M, D)`, detached."""
    flipped: bool = False
    """Whether frequent rows move, to a sample of the rare ones."""
    rare: Tensor | None = None
    """A sample of all rare rows, `(F, S, M, D)`, detached, for a loss that `learns_apart`."""

    @property
    def num_tables(self) -> int:
        """F."""
        return len(self.others)

    @cached_property
    def member(self) -> Tensor:
        """Whether each row that may move belongs to each table, as 0 or 1, `(F, U)`."""
        tables = torch.arange(self.num_tables, device=self.table.device)
        # numbers at once: a tensor of this size is written twice, not four times
        shape = (self.num_tables, len(self.table))
        member = torch.eq(tables.unsqueeze(1), self.table, out=self.rows.new_empty(shape))
        return member.mul_(self.moves)

    @cached_property
    def number(self) -> Tensor:
        """The number of rows of each table that may move, `(F,)`."""
        return self.member.sum(dim=1)

    @cached_property
    def divisor(self) -> Tensor:
        """The divisor for means over the rows of each table, `(F,)`: their number, or 1."""
        return self.number.clamp(min=1.0)

    @cached_property
    def share(self) -> Tensor:
        """The weight of each row in the mean of its table, `(U,)`."""
        return self.divisor.reciprocal().index_select(0, self.table)

    @cached_property
    def present(self) -> Tensor:
        """Whether each table has rows to move, as 0 or 1, `(F,)`."""
        return self.number.clamp(max=1.0)

    def with_totals(self) -> "TransferBatch":
        """Return the batch with its totals computed: a compiler cannot follow properties that cache."""
        _ = self.divisor, self.present
        return self

    def total(self, values: Tensor) -> Tensor:
        """Return the sums `(F, ...)` over those rows `(U, ...)` of each table that may move.

        By a matrix product: a GPU adds in any order otherwise, and all processes must get the same bits.
        """
        flat = values.reshape(len(values), -1)
        return (self.member @ flat).reshape(self.num_tables, *values.shape[1:])

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the values `(F, ...)` of each row's table, `(U, ...)`."""
        flat = values.reshape(self.num_tables, -1)
        return F.embedding(self.table, flat).reshape(len(self.table), *values.shape[1:])

    def pick(self, most: int) -> Picked:
        """Return at most `most` rows of each table that may move, each with the same chance."""
        number = self.number.long().unsqueeze(1)  # (F, 1)
        # The rows that may move have ranks from 1 on, table after table. Of each table's ranks, take `most`
        # neighbours in a ring from a random start: no size varies.
        rank = self.moves.cumsum(0)
        before = number.cumsum(0) - number + 1
        shift = (self.turn.unsqueeze(1) * number).long() + before
        places = torch.arange(most, device=rank.device)
        wanted = (places - shift) % number.clamp(min=1) + before  # (F, P)
        index = torch.searchsorted(rank, wanted).clamp(max=len(rank) - 1)
        return Picked(index, places < number, number.squeeze(1), self.rows.dtype)

    def rows_at(self, index: Tensor) -> Tensor:
        """Return the rows at places of any shape, `(..., M, D)`."""
        return self.rows.index_select(0, index.reshape(-1)).reshape(
            *index.shape, *self.rows.shape[1:]
        )


@dataclass(frozen=True)
class LossTables:
    """The tables of one group."""

    names: tuple[str, ...]
    """Their F names."""
    num_sets: int
    """Embedding sets side by side in a row: M."""
    width: int
    """The width of one set: D."""
    device: torch.device
    dtype: torch.dtype
    relatives: tuple[Tensor, Tensor] | None = None
    """Ids and weights of the frequent relatives of each row of the group, `(N, R)` both."""


class RunningLoss(ABC):
    """A transfer loss at work on one group of tables."""

    @abstractmethod
    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the loss of each table, `(F,)`; 0 for a table without rows to move."""

    @torch.enable_grad()
    def loss_and_gradient(self, batch: TransferBatch) -> tuple[Tensor, Tensor]:
        """Return the loss of each table, `(F,)`, and the gradient of their sum for the rows, `(U, M, D)`."""
        losses = self.loss(batch)
        [gradient] = torch.autograd.grad(losses.sum(), batch.rows)
        return losses.detach(), gradient

    def learn(self, batch: TransferBatch) -> Tensor | None:
        """Take one step of the loss's own training, on detached rows.

        Returns the share of rows that a discriminator classified correctly, `(F,)`, where there is one.
        """
        del batch
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        del state


class TransferLoss(ABC):
    """The settings of a transfer loss: a frozen dataclass."""

    every_row: ClassVar[bool] = False
    """Whether it moves frequent rows as well as rare ones."""
    learns_apart: ClassVar[bool] = False
    """Whether it learns from samples of all frequent and all rare rows, whatever the batch holds. The last of each
    sample (`num_held_out`) are then of rows that never come first: to judge what it has learned."""

    @abstractmethod
    def start(self, tables: LossTables) -> RunningLoss:
        """Return the running loss of a group of tables."""


class StatelessLoss(TransferLoss, RunningLoss):
    """A loss without state."""

    def start(self, tables: LossTables) -> RunningLoss:
        """Return the loss itself."""
        del tables
        return self


HELD_OUT = 5
"""One row in so many is held out of the samples that a loss learns from."""


def num_held_out(samples: int) -> int:
    """Return how many rows at the end of a sample are held out."""
    return samples // HELD_OUT


BOUND = 0.1
"""Weights of a discriminator start between -BOUND and BOUND."""


@dataclass(frozen=True, kw_only=True)
class Adversarial(TransferLoss):
    """Move rare rows to where a discriminator takes them for frequent ones (Gong et al., 2018, FRAGE).

        D(e)  = sigmoid(<w, e> + b)                          how frequent a row looks
        l_D   = (mean over S of -log D + mean over T of -log(1 - D)) / 2
        l     = mean over T of log(1 - D)                    minus the discriminator's own loss on rare rows

    Each table and embedding set has its own w and b, `Discriminators.weight` and `.bias`, which take one step of
    SGD per batch, before the rows get their gradient. Both classes count the same, however many rows they have;
    a table without rare rows in the batch takes no step. Not for tables where the zeros of pruned entries give
    rare rows away: no gradient can remove those.

    >>> Adversarial(lr=0.01)
    Adversarial(lr=0.01, weight_decay=0.0, seed=0)
    """

    # NOTE[DIFF]: FRAGE has one output per class, and 0.02 for language models, 0.01 for translation; with a
    # single output, whose weight is the difference of the two, the same step is twice the rate.
    lr: float = 0.02
    """The learning rate of the discriminators."""
    weight_decay: float = 0.0
    """Their weight decay."""
    seed: int = 0
    """The seed of their weights."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.lr > 0, f"lr must be above 0, got lr={self.lr}")
        require(
            self.weight_decay >= 0,
            f"weight_decay must be at least 0, got weight_decay={self.weight_decay}",
        )

    def start(self, tables: LossTables) -> "Discriminators":
        """Return a discriminator for each table and set."""
        return Discriminators(self, tables)


class Discriminators(RunningLoss):
    """A linear discriminator for each table and embedding set, and their optimizer."""

    def __init__(self, settings: Adversarial, tables: LossTables) -> None:
        # drawn on the CPU: the same in all processes, whatever their device
        generator = torch.Generator().manual_seed(settings.seed)
        shape = (len(tables.names), tables.num_sets, tables.width)
        start = torch.rand(shape, generator=generator, dtype=tables.dtype) * 2 - 1
        self.weight = (start * BOUND).to(tables.device)  # (F, M, D)
        self.bias = torch.zeros(shape[:2], dtype=tables.dtype, device=tables.device)
        self.lr, self.weight_decay = settings.lr, settings.weight_decay

    def loss(self, batch: TransferBatch) -> Tensor:
        losses = F.softplus(_mistake(batch, self._logits(batch, batch.rows)))  # (U, M)
        return -batch.total(losses.sum(dim=1)) / batch.divisor

    @torch.no_grad()
    def loss_and_gradient(self, batch: TransferBatch) -> tuple[Tensor, Tensor]:
        # the same loss, and its gradient written out: minus sigmoid(logit) w / n
        rows = batch.rows.detach()
        mistakes = _mistake(batch, self._logits(batch, rows))  # (U, M)
        minus = -batch.divisor
        losses = batch.total(F.softplus(mistakes).sum(dim=1)) / minus
        steps = _mistake(batch, self.weight.flatten(1)) / minus.unsqueeze(1)
        of_rows = (batch.member.T @ steps).reshape(rows.shape)  # zero for rows that do not move
        return losses, of_rows * torch.sigmoid(mistakes).unsqueeze(-1)

    @torch.no_grad()
    def learn(self, batch: TransferBatch) -> Tensor:
        rows = batch.rows.detach()
        moved = self._logits(batch, rows)  # (U, M)
        # the gradient of l_D, written out: autograd would sum rows one by one
        looks = torch.sigmoid(moved).unsqueeze(-1)  # (U, M, 1)
        ours = batch.total(torch.cat([looks * rows, looks, (moved < 0).unsqueeze(-1)], dim=-1))
        share = batch.present * (-0.5 / batch.others.shape[1])
        theirs = self._sum_others(batch.others) * share.reshape(-1, 1, 1)
        both = torch.addcdiv(theirs, ours, batch.divisor.reshape(-1, 1, 1), value=0.5)
        for own, gradient in ((self.weight, both[..., :-2]), (self.bias, both[..., -2])):
            decayed = gradient + self.weight_decay * own if self.weight_decay else gradient
            own.sub_(decayed, alpha=self.lr)
        # correct rare rows minus wrong frequent ones: from -1/2 to 1/2
        return both[..., -1].mean(dim=1) + 0.5

    def _sum_others(self, others: Tensor) -> Tensor:
        """Return sums over the sampled rows `(F, S, M, D)` of each discriminator, `(F, M, D + 2)`.

        They are of the rows, weighted by how rare each looks; of these weights; and of wrong classifications.
        """
        flat = others.transpose(1, 2).flatten(0, 1)  # (F M, S, D)
        weight, bias = self.weight.reshape(-1, flat.shape[2], 1), self.bias.reshape(-1, 1, 1)
        minus = torch.baddbmm(bias, flat, weight, beta=-1, alpha=-1)  # (F M, S, 1)
        looks = torch.sigmoid(minus)
        rows = torch.bmm(looks.transpose(1, 2), flat).squeeze(1)  # (F M, D)
        counts = torch.cat([looks, minus >= 0], dim=2).sum(dim=1)  # (F M, 2)
        return torch.cat([rows, counts], dim=1).reshape(*self.bias.shape, -1)

    def _logits(self, batch: TransferBatch, rows: Tensor) -> Tensor:
        """Return how frequent each row looks to the discriminators of its table, `(U, M)`."""
        # against those of all tables, which is one product: (M, U, F)
        weight, bias = self.weight.permute(1, 2, 0), self.bias.T.unsqueeze(1)
        logits = torch.baddbmm(bias, rows.transpose(0, 1), weight)
        table = batch.table.reshape(1, -1, 1).expand(len(logits), -1, 1)
        return logits.gather(2, table).squeeze(2).T

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "bias": self.bias}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_tensors_(self.state_dict(), state, "the discriminators")


@dataclass(frozen=True, kw_only=True)
class AdversarialMLP(TransferLoss):
    """`Adversarial` with a discriminator that sees more than a line does: it has a hidden layer.

        D(e)  = sigmoid(<v, relu(W e / s + b)> + c)        s the root mean square of the sampled entries
        l_D, l                                             as those of `Adversarial`

    It learns by Adam, from `samples` frequent and as many rare rows of each table in every step: all of them where the
    table has fewer. Its accuracy is that on rows held out, one in five: a hidden layer tells the others apart
    by heart, however their labels are drawn. Its cost grows with the number of tables: for few of them.

    >>> AdversarialMLP(hidden=32)
    AdversarialMLP(hidden=32, lr=0.001, weight_decay=0.05, seed=0)
    """

    learns_apart: ClassVar[bool] = True

    hidden: int = 64
    """The width of the hidden layer."""
    lr: float = 1e-3
    """The learning rate of the discriminators."""
    weight_decay: float = 0.05
    """Their L2 penalty, which keeps them from learning rows by heart."""
    seed: int = 0
    """The seed of their weights."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.hidden >= 1, f"hidden must be at least 1, got hidden={self.hidden}")
        require(self.lr > 0, f"lr must be above 0, got lr={self.lr}")
        require(
            self.weight_decay >= 0,
            f"weight_decay must be at least 0, got weight_decay={self.weight_decay}",
        )

    def start(self, tables: LossTables) -> "HiddenDiscriminators":
        """Return a discriminator for each table and set."""
        return HiddenDiscriminators(self, tables)


class HiddenDiscriminators(RunningLoss):
    """A discriminator with a hidden layer for each table and embedding set, and their Adam."""

    def __init__(self, settings: AdversarialMLP, tables: LossTables) -> None:
        self.settings = settings
        width, hidden = tables.width, settings.hidden
        self.sizes = (width * hidden, hidden, hidden, 1)  # of W, b, v and c
        shape = (len(tables.names), tables.num_sets, sum(self.sizes))
        # drawn on the CPU, as those of `Discriminators`
        generator = torch.Generator().manual_seed(settings.seed)
        start = torch.rand(shape, generator=generator, dtype=tables.dtype) * 2 - 1
        for part, bound in zip(
            start.split(self.sizes, dim=-1), (width**-0.5, 0.0, hidden**-0.5, 0.0), strict=True
        ):
            part.mul_(bound)
        self.weights = start.to(tables.device)  # (F, M, K)
        self.mean, self.square = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.steps = self.weights.new_zeros(shape[0], 1, 1)
        self.size = self.weights.new_ones(*shape[:2], 1, 1)  # s
        # frequent rows look rare, rare rows look frequent: the mistakes
        self.signs = torch.tensor([[-1.0], [1.0]]).to(self.weights)

    def loss(self, batch: TransferBatch) -> Tensor:
        looks = self._logits(batch.rows.transpose(0, 1), self.weights)  # (F, M, U)
        losses = F.softplus(_mistake(batch, looks)).sum(dim=1)
        return -(losses * batch.member).sum(dim=1) / batch.divisor

    @torch.enable_grad()
    def learn(self, batch: TransferBatch) -> Tensor:
        assert batch.rare is not None, "the loss learns apart"
        rows = torch.cat([batch.others, batch.rare], dim=1).transpose(1, 2)  # (F, M, 2 S, D)
        size = rows.square().mean(dim=(2, 3), keepdim=True).sqrt()
        self.size.copy_(torch.where(size > 0, size, 1.0))
        weights = self.weights.detach().requires_grad_()
        samples = batch.others.shape[1]
        looks = self._logits(rows, weights)
        mistakes = looks.reshape(*looks.shape[:2], 2, samples) * self.signs
        learned = samples - num_held_out(samples)
        loss = F.softplus(mistakes[..., :learned]).mean(dim=(2, 3)).sum()
        [gradient] = torch.autograd.grad(loss, weights)
        self._step(gradient + self.settings.weight_decay * weights.detach(), batch.present)
        judged = mistakes.detach()[..., learned if learned < samples else 0 :]
        return (judged < 0).to(loss.dtype).mean(dim=(1, 2, 3))

    @torch.no_grad()
    def _step(self, gradient: Tensor, present: Tensor) -> None:
        """Take a step of Adam for the tables that have rare rows in the batch, `(F,)`."""
        is_there = present.reshape(-1, 1, 1)
        self.steps.add_(is_there)
        self.mean.lerp_(gradient, 0.1 * is_there)
        self.square.lerp_(gradient.square(), 0.001 * is_there)
        steps = self.steps.clamp(min=1.0)
        length = (self.square / (1 - 0.999**steps)).sqrt() + 1e-8
        self.weights.sub_(self.settings.lr * is_there * self.mean / (1 - 0.9**steps) / length)

    def _logits(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return how frequent rows `(M, n, D)` or `(F, M, n, D)` look to each discriminator, `(F, M, n)`."""
        first, bias, last, shift = weights.split(self.sizes, dim=-1)
        first = first.reshape(*bias.shape[:2], -1, self.settings.hidden)  # (F, M, D, H)
        hidden = torch.relu(rows / self.size @ first + bias.unsqueeze(-2))
        looks: Tensor = (hidden @ last.unsqueeze(-1)).squeeze(-1) + shift
        return looks

    def state_dict(self) -> dict[str, Any]:
        names = ("weights", "mean", "square", "steps")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_tensors_(self.state_dict(), state, "the discriminators")


def _mistake(batch: TransferBatch, logits: Tensor) -> Tensor:
    """Return how wrongly the logits classify the rows that move; below zero is right."""
    return -logits if batch.flipped else logits


@dataclass(frozen=True, kw_only=True)
class CosReg(StatelessLoss):
    """Move rows apart until their cosines cancel out (Gao et al., 2019), in linear time.

        l = 1/N sum_i sum_{j != i} cos(e_i, e_j) = (||sum_i e_i / ||e_i|| ||^2 - N) / N

    N are the rows of a table in the batch, frequent and rare ones, without rows of zeros. Its target is a
    uniform distribution over the sphere, so it takes no frequent rows. A batch of pairs would be N x N; the
    sum of unit vectors is the same number.

    >>> CosReg()
    CosReg()
    """

    every_row: ClassVar[bool] = True

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the mean over the rows of their cosines with all others, `(F,)`."""
        square = batch.rows.square().sum(dim=-1, keepdim=True)  # (U, M, 1)
        counts = (square > 0) & batch.moves.reshape(-1, 1, 1)
        unit = torch.where(counts, batch.rows, 0.0) * torch.where(counts, square, 1.0).rsqrt()
        number = batch.total(counts.squeeze(-1).to(unit.dtype))  # (F, M)
        total = batch.total(unit).square().sum(dim=-1)
        return ((total - number) / number.clamp(min=1.0)).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class MMD(StatelessLoss):
    """Move rare rows until their sample looks like one of frequent rows, by kernels (Gretton et al., 2012).

        l = mean k(x, x') - 2 mean k(x, y) + mean k(y, y')
        k(a, b) = mean over widths w of exp(-||a - b||^2 / (w * v))

    x and y are at most `sample` rare rows of the batch, and as many sampled frequent ones; v is the mean of
    ||x - y||^2, a plain number: the kernels grow and shrink with the table.

    >>> MMD(sample=32).widths
    (0.25, 0.5, 1.0, 2.0, 4.0)
    """

    widths: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Widths of the kernels, in mean squared distances of a rare and a frequent row."""
    sample: int = 64
    """Rare and frequent rows of each table that are compared; the cost is its square."""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            bool(self.widths) and min(self.widths) > 0, f"widths must be above 0, got {self.widths}"
        )
        require(self.sample >= 1, f"sample must be at least 1, got sample={self.sample}")

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the squared distance of the two samples of each table, `(F,)`."""
        picked = batch.pick(self.sample)
        rare = batch.rows_at(picked.index).transpose(1, 2)  # (F, M, P, D)
        frequent = batch.others[:, : self.sample].transpose(1, 2)  # (F, M, S, D)
        weight = picked.weight.unsqueeze(1)  # (F, 1, P)
        even = torch.full_like(frequent[..., 0], 1 / frequent.shape[2])  # (F, M, S)
        apart = _squares(rare, frequent)
        scale = _mean(apart.detach(), weight, even)
        scale = torch.where(scale > 0, scale, 1.0)  # (F, M)
        within = _mean(self._kernel(_squares(rare, rare), scale), weight, weight)
        across = _mean(self._kernel(apart, scale), weight, even)
        theirs = _mean(self._kernel(_squares(frequent, frequent), scale), even, even)
        return (within - 2 * across + theirs).sum(dim=1) * batch.present

    def _kernel(self, squares: Tensor, scale: Tensor) -> Tensor:
        widths = [(squares / (scale[..., None, None] * width)).neg().exp() for width in self.widths]
        return sum(widths[1:], start=widths[0]) / len(widths)


def _squares(first: Tensor, second: Tensor) -> Tensor:
    """Return the squared distances `(..., P, S)` of rows `(..., P, D)` and `(..., S, D)`."""
    lengths = first.square().sum(-1).unsqueeze(-1) + second.square().sum(-1).unsqueeze(-2)
    return (lengths - 2 * first @ second.transpose(-1, -2)).clamp(min=0.0)


def _mean(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the mean of `(..., P, S)` with weights `(..., P)` and `(..., S)`."""
    return ((values @ second.unsqueeze(-1)).squeeze(-1) * first).sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Moments(StatelessLoss):
    """Move rare rows until their moments are those of frequent rows, column by column.

        l = mean over columns of sum_k ( mean over T of z^k - mean over S of z^k )^2        z = (e - m) / s

    m is the mean of S in each column, s the root mean square distance of rows of S and T from m, a plain number,
    and k goes from 1 to `moments`. In units of s the loss does not depend on the size of a table's rows, and
    powers of z stay small.

    >>> Moments(moments=4)
    Moments(moments=4)
    """

    moments: int = 2
    """The number of moments: the mean, the spread, then those of skewness and kurtosis."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.moments >= 1, f"moments must be at least 1, got moments={self.moments}")

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the squared distances of the moments of each table, `(F,)`."""
        mean = batch.others.mean(dim=1)  # (F, M, D)
        theirs = batch.others - mean.unsqueeze(1)  # (F, S, M, D)
        own = batch.rows - batch.of_rows(mean)  # (U, M, D)
        share = batch.share.reshape(-1, 1, 1)
        far = 0.5 * (theirs.square().mean(dim=1) + batch.total(share * own.detach().square()))
        spread = torch.where(far > 0, far, 1.0).sqrt()
        own, theirs = own / batch.of_rows(spread), theirs / spread.unsqueeze(1)
        apart = [
            (batch.total(share * own**k) - (theirs**k).mean(dim=1)).square().mean(dim=-1)
            for k in range(1, self.moments + 1)
        ]
        return torch.stack(apart).sum(dim=(0, 2)) * batch.present


@dataclass(frozen=True, kw_only=True)
class Relatives(TransferLoss):
    """Draw each rare row to the weighted mean of its frequent relatives.

        l = mean over T of 1/2 || e_i - sum_r w_ir e_r ||^2        sum_r w_ir = 1

    r are the frequent relatives of item i, those that meet the same items as it does, and w_ir how much it is like
    each. The other losses move rare rows to where frequent ones lie as a crowd; this one chooses which of them. It
    needs a selection by co-occurrence, which finds relatives. Rows without any do not move.

    >>> Relatives(sample=64)
    Relatives(sample=64)
    """

    sample: int = 256
    """Rare rows of each table that move in a step."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.sample >= 1, f"sample must be at least 1, got sample={self.sample}")

    def start(self, tables: LossTables) -> "RunningRelatives":
        """Return the loss with the relatives of the tables' rows."""
        if tables.relatives is None:
            raise SettingsError(
                f"Relatives needs to know the relatives of {', '.join(tables.names)}; pass select= with a "
                "selection by CoOccurrence, which finds them"
            )
        ids, weights = tables.relatives
        weights = weights.to(tables.device, tables.dtype)
        return RunningRelatives(self.sample, ids.to(tables.device), weights)


class RunningRelatives(RunningLoss):
    """The relatives of each row of a group, and their weights."""

    def __init__(self, sample: int, ids: Tensor, weights: Tensor) -> None:
        total = weights.sum(dim=1, keepdim=True)
        self.sample = sample
        self.ids = ids  # r, (N, R): in the row's own table
        self.weights = weights / torch.where(total > 0, total, 1.0)  # w, (N, R)

    def loss(self, batch: TransferBatch) -> Tensor:
        picked = batch.pick(self.sample)
        numbers = batch.ids.index_select(0, picked.index.reshape(-1)).clamp(min=0)  # (F P,)
        weights = self.weights.index_select(0, numbers)  # (F P, R)
        has_relatives = weights.sum(dim=1) > 0
        # the weighted means of their relatives
        tables, relatives = batch.num_tables, weights.shape[1]
        ids = self.ids.index_select(0, numbers).reshape(tables, -1)  # (F, P R)
        rows = batch.look_up(ids.T).transpose(0, 1).to(weights.dtype)  # (F, P R, M, D)
        rows = rows.reshape(tables, -1, relatives, *rows.shape[2:])
        means = torch.einsum("fprmd,fpr->fpmd", rows, weights.reshape(tables, -1, relatives))
        own = batch.rows_at(picked.index)  # (F, P, M, D)
        squares = 0.5 * (own - means.reshape(own.shape)).square().sum(dim=(2, 3))
        share = picked.weight * has_relatives.reshape(picked.weight.shape)
        return (share * squares).sum(dim=1)


DIRECTIONS = 1 << 31
"""The first place of the random numbers for directions."""


@dataclass(frozen=True, kw_only=True)
class SlicedWasserstein(StatelessLoss):
    """Move rare rows until they are spread as frequent ones in every direction (Rabin et al., 2011).

        l = mean over directions of mean over r of ( x_(r) - y(q_r) )^2        q_r = (r + 1/2) / n

    x_(r) are the projections of the n rare rows in ascending order, at most `sample` of the batch, and y(q) is the
    q-th quantile of the projections of the sampled frequent rows: with n of them, both are paired in their order.
    Directions are new in each step.

    >>> SlicedWasserstein(directions=16)
    SlicedWasserstein(directions=16, sample=256)
    """

    directions: int = 32
    """Random directions per step."""
    sample: int = 256
    """Rare rows of each table that are compared."""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.directions >= 1, f"directions must be at least 1, got directions={self.directions}"
        )
        require(self.sample >= 1, f"sample must be at least 1, got sample={self.sample}")

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the mean squared distance along the directions, `(F,)`."""
        picked, directions = batch.pick(self.sample), self._directions(batch)
        is_there = (picked.weight > 0)[..., None, None]  # (F, P, 1, 1)
        own = batch.rows_at(picked.index) @ directions  # (F, P, M, L)
        own = torch.where(is_there, own, torch.inf).sort(dim=1).values
        theirs = (batch.others @ directions).sort(dim=1).values  # (F, S, M, L)
        pairs = theirs.gather(1, self._quantiles(picked.number, theirs).expand_as(own))
        squares = torch.where(is_there, own - pairs, 0.0).square()
        weight = picked.weight[..., None, None]
        return (weight * squares).sum(dim=1).mean(dim=-1).sum(dim=-1)

    def _quantiles(self, number: Tensor, theirs: Tensor) -> Tensor:
        """Return the rank of the frequent row that each rare one is paired with, `(F, P, 1, 1)`."""
        ranks = torch.arange(self.sample, device=number.device)
        size = theirs.shape[1]
        # in whole numbers: floor of (r + 1/2) * size / n
        place = (2 * ranks + 1) * size // (2 * number.clamp(min=1).unsqueeze(1))
        return place.clamp(max=size - 1)[..., None, None]

    def _directions(self, batch: TransferBatch) -> Tensor:
        """Return random unit vectors `(D, L)`."""
        shape = (batch.rows.shape[-1], self.directions)
        uniform = batch.draws.uniform(*shape, first=DIRECTIONS)
        normal = torch.special.ndtri(uniform.clamp(min=2.0**-54))
        unit: Tensor = normal / normal.norm(dim=0, keepdim=True)
        return unit.to(batch.rows.dtype)
