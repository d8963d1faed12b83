"""DHE: no table at all, but a small network on hashes of the id (Kang et al., 2021).

    Learning to Embed Categorical Features without Embedding Tables, https://arxiv.org/abs/2010.10784

    e(i) = f(x_1, ..., x_k)        x_j = 2 h_j(i) / (m - 1) - 1        h_j(i) = ((a_j i + b_j) mod P) mod m

    k       `DHE.hashes`
    f       `HashNetwork.network`: `DHE.layers` hidden layers of width `DHE.hidden` with Mish, then one of the table's width
    m       1,000,000
    a, b    powers of two numbers modulo the prime P: the same in every table

The last layer starts so that every column has mean zero and the variance of the table.

Slow by nature: a lookup is a pass through a network, so a step takes many times longer than with a table. Every id moves the rows
of all others. Not for large batches on a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from rarebit.research._compressors import Compressor, StandaloneTable
from rarebit.settings import check_types, require
from rarebit.tables.table import CHUNK, AnyTable, full_table, is_trainable

__all__ = ["DHE", "HashNetwork"]

P, M = 2**31 - 1, 1_000_000
"""A prime above all ids, and the number of values of a hash."""
A, B = 16807, 48271
"""Two numbers whose powers modulo P go through all numbers below it."""


@dataclass(frozen=True, kw_only=True)
class DHE(Compressor):
    """Compute rows by a network from hashes of the id.

    >>> DHE(hidden=64, hashes=128)
    DHE(hidden=64, hashes=128, layers=2)
    """

    title: ClassVar[str] = "a network on hashes of the id in place of a table"
    paper: ClassVar[str] = (
        "Kang et al., Learning to Embed Categorical Features without Embedding Tables for Recommendation, KDD 2021"
    )
    cost: ClassVar[str] = "a pass through a network per looked-up id: many times a lookup"
    applies: ClassVar[str] = "as a control for very small tables in a study; never for a fast step"

    hidden: int
    """Width of the hidden layers."""
    hashes: int = 1024
    """Hashes of an id (k). Sized for a share, as many as the hidden layers are wide, at most 1024."""
    layers: int = 2
    """Number of hidden layers."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("hidden", "hashes", "layers"):
            number = getattr(self, name)
            require(number >= 1, f"{name} must be at least 1, got {name}={number}")

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the widest network, one size for all tables, that keeps at most this share of the weights.

        >>> DHE.for_share([(1000, 8), (50, 8)], share=0.5)
        DHE(hidden=41, hashes=41, layers=2)
        """
        most = max((rows * width for rows, width in shapes), default=1)
        return cls.largest(
            lambda size: cls(hidden=size, hashes=min(size, cls.hashes)),
            range(1, most + 1),
            shapes,
            share,
        )

    def stored(self, rows: int, width: int) -> int:
        """Return the weights of the network."""
        del rows
        between = (self.layers - 1) * (self.hidden + 1) * self.hidden
        return (self.hashes + 1) * self.hidden + between + (self.hidden + 1) * width

    def widths(self, width: int) -> list[int]:
        """Return the widths of all layers, from the hashes to the row."""
        return [self.hashes, *[self.hidden] * self.layers, width]

    @torch.no_grad()
    def wrap(self, base: AnyTable) -> "HashNetwork":
        """Return a network whose rows have the variance of `base`."""
        weight = full_table(base)
        table = HashNetwork(self, base).to(weight)
        last = table.network[-1]
        assert isinstance(last, nn.Linear)
        rows = table.rows(torch.arange(min(len(weight), CHUNK), device=weight.device))
        scale = weight.square().mean().sqrt() / rows.std(0, correction=0).clamp(min=1e-6)
        last.bias.sub_(rows.mean(0)).mul_(scale)
        last.weight.mul_(scale.unsqueeze(-1))
        return table.requires_grad_(requires_grad=is_trainable(base)).train(base.training)


class HashNetwork(StandaloneTable):
    """A network that computes rows from hashes of ids."""

    a: Tensor
    b: Tensor

    def __init__(self, method: DHE, base: AnyTable) -> None:
        super().__init__(method, base)
        # NOTE[DIFF]: the paper has batch normalisation between the layers; here a row depends on its id only, so that it merges
        linear = [nn.Linear(*pair) for pair in pairwise(method.widths(base.embedding_dim))]
        for layer in linear:
            nn.init.kaiming_normal_(layer.weight)  # else the layers hardly tell ids apart
        hidden = [module for layer in linear[:-1] for module in (layer, nn.Mish())]
        self.network = nn.Sequential(*hidden, linear[-1])  # f
        for name, number in (("a", A), ("b", B)):
            powers = [pow(number, j + 2, P) for j in range(method.hashes)]
            self.register_buffer(name, torch.tensor(powers), persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """Return f(x_1, ..., x_k)."""
        hashes = (self.a * ids.unsqueeze(-1) + self.b) % P % M  # (..., k)
        dtype = next(self.network.parameters()).dtype
        # in float64 first: float16 ends at 65,504
        rows: Tensor = self.network((hashes.double() * (2 / (M - 1)) - 1).to(dtype))
        return rows

    @property
    def num_weights(self) -> int:
        """The weights of the network."""
        return sum(parameter.numel() for parameter in self.network.parameters())
