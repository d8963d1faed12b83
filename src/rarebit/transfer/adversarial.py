"""Adversarial: rare rows that a discriminator cannot tell from frequent ones (Gong et al., 2018, FRAGE).

    D(e)  = sigmoid(<w, e> + b)                          how frequent a row looks
    l_D   = (mean over S of -log D + mean over T of -log(1 - D)) / 2
    l     = mean over T of log(1 - D)                    minus the discriminator's own loss on rare rows

    w, b    `Discriminators.weight` and `.bias`, of each table and embedding set its own
    S, T    the sampled frequent rows; the rare rows of the batch

The discriminator takes one step of its own SGD a batch, before the rows are asked for their gradient. Both
classes count the same, however many rows they have; a table without rare rows in the batch takes no step.

Not for tables where the zeros of pruned entries give rare rows away: no gradient can remove those.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.errors import TrainingError
from rarebit.settings import check_types, require
from rarebit.transfer.batch import TransferBatch
from rarebit.transfer.transfer_loss import LossTables, RunningLoss, TransferLoss

__all__ = ["Adversarial", "Discriminators"]

BOUND = 0.1
"""Weights of a discriminator start between minus this and this."""


@dataclass(frozen=True, kw_only=True)
class Adversarial(TransferLoss):
    """Move rare rows to where a discriminator takes them for frequent ones.

    >>> Adversarial(lr=0.01)
    Adversarial(lr=0.01, weight_decay=0.0, seed=0)
    """

    # NOTE[DIFF]: FRAGE has an output a class, 0.02 for language models and 0.01 for translation; of one
    # output, whose weight is the difference of the two, the same step is twice the rate.
    lr: float = 0.02
    """The learning rate of the discriminators."""
    weight_decay: float = 0.0
    """Their weight decay."""
    seed: int = 0
    """What their weights start from."""

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
        self.weight = nn.Parameter((start * BOUND).to(tables.device))  # (F, M, D)
        self.bias = nn.Parameter(torch.zeros(shape[:2], dtype=tables.dtype, device=tables.device))
        self.optimizer = torch.optim.SGD(
            [self.weight, self.bias], lr=settings.lr, weight_decay=settings.weight_decay
        )

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return minus the discriminators' loss on the rows that move, `(F,)`."""
        losses = F.softplus(_mistake(batch, self._logits(batch, batch.rows)))  # (U, M)
        return -batch.total(losses.sum(dim=1)) / batch.divisor

    @torch.no_grad()
    def loss_and_gradient(self, batch: TransferBatch) -> tuple[Tensor, Tensor]:
        """Return the same loss, and its gradient, written out: minus sigmoid(logit) w / n."""
        rows = batch.rows.detach()
        mistakes = _mistake(batch, self._logits(batch, rows))  # (U, M)
        minus = -batch.divisor
        losses = batch.total(F.softplus(mistakes).sum(dim=1)) / minus
        steps = _mistake(batch, self.weight.detach().flatten(1)) / minus.unsqueeze(1)
        of_rows = (batch.member.T @ steps).reshape(rows.shape)  # zero for rows that do not move
        return losses, of_rows * torch.sigmoid(mistakes).unsqueeze(-1)

    @torch.no_grad()
    def learn(self, batch: TransferBatch) -> Tensor:
        """Take one step; return the share of rows told right before it, both classes alike."""
        rows = batch.rows.detach()
        moved = self._logits(batch, rows)  # (U, M)
        # the gradient of l_D, written out: autograd would add rows up one by one
        looks = torch.sigmoid(moved).unsqueeze(-1)  # (U, M, 1)
        ours = batch.total(torch.cat([looks * rows, looks, (moved < 0).unsqueeze(-1)], dim=-1))
        share = batch.present * (-0.5 / batch.others.shape[1])
        theirs = self._sum_others(batch.others) * share.reshape(-1, 1, 1)
        both = torch.addcdiv(theirs, ours, batch.divisor.reshape(-1, 1, 1), value=0.5)
        self._descend(both[..., :-1])
        # of rare rows those told right, less the frequent ones told wrong: from -1/2 to 1/2
        return both[..., -1].mean(dim=1) + 0.5

    def _sum_others(self, others: Tensor) -> Tensor:
        """Return sums over the sampled rows `(F, S, M, D)` of each discriminator, `(F, M, D + 2)`.

        They are of the rows, each as often as it looks rare; of how rare it looks; and of those told wrong.
        """
        flat = others.transpose(1, 2).flatten(0, 1)  # (F M, S, D)
        weight, bias = self.weight.detach().reshape(-1, flat.shape[2], 1), self.bias.detach()
        minus = torch.baddbmm(
            bias.reshape(-1, 1, 1), flat, weight, beta=-1, alpha=-1
        )  # (F M, S, 1)
        looks = torch.sigmoid(minus)
        rows = torch.bmm(looks.transpose(1, 2), flat).squeeze(1)  # (F M, D)
        counts = torch.cat([looks, minus >= 0], dim=2).sum(dim=1)  # (F M, 2)
        return torch.cat([rows, counts], dim=1).reshape(*self.bias.shape, -1)

    def _logits(self, batch: TransferBatch, rows: Tensor) -> Tensor:
        """Return how frequent each row looks to the discriminators of its table, `(U, M)`."""
        weight, bias = self.weight.detach(), self.bias.detach()
        # against those of all tables, which is one product, and a row of each: (M, U, F)
        logits = torch.baddbmm(bias.T.unsqueeze(1), rows.transpose(0, 1), weight.permute(1, 2, 0))
        table = batch.table.reshape(1, -1, 1).expand(len(logits), -1, 1)
        return logits.gather(2, table).squeeze(2).T

    def _descend(self, gradient: Tensor) -> None:
        """Take the step of gradient descent that the optimizer's settings say."""
        # by hand: on a GPU, a call of the optimizer takes as long as several of these
        settings = self.optimizer.param_groups[0]
        gradients = gradient[..., :-1], gradient[..., -1]
        for parameter, own in zip((self.weight, self.bias), gradients, strict=True):
            if settings["weight_decay"]:
                own = own + settings["weight_decay"] * parameter  # noqa: PLW2901  # the same gradient
            parameter.sub_(own, alpha=settings["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return weights and optimizer."""
        return {
            "weight": self.weight.detach(),
            "bias": self.bias.detach(),
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from weights and optimizer of the same tables."""
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            if state[name].shape != parameter.shape:
                raise TrainingError(
                    f"the discriminators have a {name} of the shape {tuple(parameter.shape)}, the one "
                    f"given is of the shape {tuple(state[name].shape)}; use the same model"
                )
            parameter.copy_(state[name])
        self.optimizer.load_state_dict(dict(state["optimizer"]))


def _mistake(batch: TransferBatch, logits: Tensor) -> Tensor:
    """Return how wrong it is to take rare rows for so frequent; below zero is right."""
    return -logits if batch.flipped else logits
