"""The toy experiment: a table that meets a table of low rank loses its own (Guo et al., 2024, figure 4).

    python recipes/collapse/toy.py

Three fields with a factorization machine: 100 values, 100 values, and D_3. Every pair (x_1, x_2) is one row of
data, with x_3 and the label drawn at random, so that there is nothing to learn but noise.

    h = <e_1, e_2> + <e_1, e_3> + <e_2, e_3>

All tables start N(0, 1); E_1 alone is trained, on all rows at once, by SGD with a learning rate of 1. With D_3 = 3
the table E_3 has rank 3 and E_1 collapses; with D_3 = 100 it does not. The paper does not give the width K, only
D_3 < K and D_3 >> K for the two cases.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from _common import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Report,
    arguments,
    count,
    new_figure,
    numbers,
    print_table,
    quieten,
    start,
    summary,
)
from torch import Tensor

from rarebit.tables.spectrum import information_abundance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Toy", "main"]


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Train E_1 beside each table E_3, print its abundance, and write the figure."""
    options = parse(given)
    report = Report("toy", options, None)
    looks = looks_of(options.iterations)
    curves = {size: abundance_curves(size, looks, options) for size in options.sizes}
    print_table(
        [
            {"iteration": look}
            | {f"IA(E1), D3 = {size}": summary(curves[size][at], 2) for size in curves}
            for at, look in enumerate(looks)
            if at % 5 == 0 or look == looks[-1]
        ]
    )
    figures = {"iterations": looks, "abundance": curves}
    return report.write(figures, lambda: draw(looks, curves))


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = arguments(__doc__, seeds=5, trains=False)
    parser.add_argument("--sizes", type=numbers, default=[3, 100], help="values of D_3")
    parser.add_argument("--values", type=count, default=100, help="values of the first two fields")
    parser.add_argument("--dim", type=count, default=20, help="width of all tables, K")
    parser.add_argument("--iterations", type=count, default=5000)
    return parser.parse_args(given)


@dataclass(frozen=True, kw_only=True)
class Toy:
    """The data and the tables of one experiment.

    E_1 meets fixed vectors only, e_2 + e_3, so that each of its rows is a logistic regression on the rows of
    data that have its value.
    """

    first: Tensor
    """E_1 `(values, K)`: the table that is trained."""
    met: Tensor
    """e_2 + e_3 of every pair `(values, values, K)`."""
    rest: Tensor
    """<e_2, e_3> of every pair `(values, values)`: no part of E_1."""
    label: Tensor
    """`(values, values)`."""

    @classmethod
    def draw(cls, size: int, values: int, dim: int, seed: int) -> "Toy":
        """Draw an experiment; E_1, E_2 and the labels do not depend on D_3."""
        random = torch.Generator().manual_seed(seed)
        first, second = (torch.randn(values, dim, generator=random) for _ in range(2))
        label = torch.randint(2, (values, values), generator=random).float()
        third = torch.randn(size, dim, generator=random)
        third = third[torch.randint(size, (values, values), generator=random)]
        return cls(first=first, met=second + third, rest=(second * third).sum(-1), label=label)

    def step(self, lr: float = 1.0) -> None:
        """Make one step of SGD on all rows of data."""
        score = (self.met @ self.first.unsqueeze(-1)).squeeze(-1) + self.rest  # (values, values)
        slope = (score.sigmoid() - self.label) / self.label.numel()
        self.first.sub_((slope.unsqueeze(1) @ self.met).squeeze(1), alpha=lr)


def looks_of(iterations: int, most: int = 25) -> list[int]:
    """Return the iterations at which the table is looked at, the first and the last among them."""
    step = max(1, iterations // most)
    return sorted({*range(0, iterations, step), iterations})


def abundance_curves(
    size: int, looks: Sequence[int], options: argparse.Namespace
) -> list[list[float]]:
    """Return IA(E_1) at each look, of each seed."""
    return [
        list(found)
        for found in zip(
            *(abundance_curve(size, looks, options, seed) for seed in range(options.seeds)),
            strict=True,
        )
    ]


def abundance_curve(
    size: int, looks: Sequence[int], options: argparse.Namespace, seed: int
) -> list[float]:
    """Return IA(E_1) at each look, of one seed."""
    drawn = Toy.draw(size, options.values, options.dim, seed)
    toy = Toy(**{name: tensor.to(options.device) for name, tensor in vars(drawn).items()})
    found, done = [], 0
    for look in looks:
        for _ in range(look - done):
            toy.step()
        found.append(information_abundance(toy.first))
        done = look
    return found


def draw(looks: Sequence[int], curves: Mapping[int, Sequence[Sequence[float]]]) -> "Figure":
    """Draw IA(E_1) along training: the mean over seeds, and from the lowest to the highest."""
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    colors = [ORANGE, BLUE, GREEN, GREY]
    for number, (size, found) in enumerate(curves.items()):
        color = colors[number % len(colors)]
        middle = [sum(seeds) / len(seeds) for seeds in found]
        axes.plot(looks, middle, color=color, label=f"$D_3$ = {size}")
        axes.fill_between(looks, [*map(min, found)], [*map(max, found)], color=color, alpha=0.15)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9, frameon=False)
    quieten(
        axes,
        "iteration",
        "IA($E_1$)",
        "Information abundance of $E_1$ beside $D_3$ values of $E_3$",
    )
    return figure


if __name__ == "__main__":
    start(main)
