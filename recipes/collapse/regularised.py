"""Evidence III: DCN-V2 kept from collapse by a penalty overfits (Guo et al., 2024, figure 5).

    python recipes/collapse/regularised.py
    python recipes/collapse/regularised.py --data prepared/criteo --widths 10,20,40,100 --device cuda

The projection W_ij of field i for field j is pushed towards a multiple of a rotation, which keeps the information
abundance of what it projects. There are two forms, both summed over all layers:

    paper       ||W_ij^T W_ij - l_ij I||^2      l_ij is learned
    released    ||W_ij W_ij^T - I||^2           the layer uses n_ij W_ij, n_ij is learned from 1

    l_ij, n_ij     one number a layer and pair of fields

The released code weighs the sum by 1e-5; the paper does not say, nor where l_ij starts: here where the penalty is
least, at the mean squared singular value of W_ij. The paper sees a higher IA, a lower training loss, and no better AUC.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from _common import (
    BLUE,
    GREEN,
    ORANGE,
    Report,
    abundances,
    arguments,
    blocks_of,
    by_variant,
    log_of,
    mean,
    new_figure,
    numbers,
    print_table,
    quieten,
    start,
    start_model,
    summary,
    train,
    weighted_mean,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize

import rarebit as rb
from rarebit.interactions.cross import CrossNetwork

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ScaledBlocks", "distance_to_rotations", "main", "regularise_"]

KINDS = {"plain": BLUE, "paper": ORANGE, "released": GREEN}

Run = dict[str, Any]


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Train all kinds at all widths, print AUC and abundance, and write the figure."""
    options = parse(given)
    splits = log_of(options)
    report = Report("regularised", options, splits)
    runs = [
        train_kind(kind, width, splits, options, seed)
        for width in options.widths
        for kind in KINDS
        for seed in range(options.seeds)
    ]
    print_table(
        [
            row_of(width, kind, found)
            for width in options.widths
            for kind in KINDS
            if (found := chosen(runs, width, kind))
        ]
    )
    return report.write(
        {"variants": by_variant(runs, "kind", "width"), "runs": runs},
        lambda: draw(runs, options.widths),
    )


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    # all epochs are made, to see what the penalty does after the best one
    parser = arguments(__doc__, epochs=8)
    parser.add_argument("--widths", type=numbers, default=[10, 20, 40], help="such as 10,20,40")
    parser.add_argument("--weight", type=float, default=1e-5, help="of the penalty in the loss")
    return parser.parse_args(given)


def train_kind(
    kind: str, width: int, splits: rb.data.Splits, options: argparse.Namespace, seed: int
) -> Run:
    """Train one model and return its figures."""
    model = start_model("dcn_v2@me", splits, seed, dim=width)
    cross, num_fields = model.backbone.interaction, len(splits.train.schema.fields)
    distance = None if kind == "plain" else regularise_(cross, num_fields, kind)
    penalty = None if distance is None else (lambda: options.weight * distance())
    trained = train(model, splits, options, seed=seed, patience=None, penalty=penalty)
    own = abundances(model)
    found = rb.diagnose(model).sub_embeddings[0]
    with torch.no_grad():
        blocks = blocks_of(cross.weight, num_fields)
        level = mean_square(blocks)
        # of blocks brought to the same size, so that both penalties and none can be compared
        evenness = distance_to_rotations(blocks / level.sqrt()[..., None, None])
    return {
        "kind": kind,
        "width": width,
        "seed": seed,
        "auc": trained.auc,
        "best_epoch": trained.best_epoch,
        "abundance": own,
        "mean_abundance": mean(list(own.values())),
        "weighted_abundance": weighted_mean(own, splits),
        "mean_sub_abundance": mean([value for row in found.abundance for value in row]),
        "distance_to_rotations": float(evenness) / level.numel(),
        "last_loss": trained.epochs[-1].train_loss,
        "last_valid_auc": trained.epochs[-1].valid.auc,
        **trained.curves(),
    }


def regularise_(cross: CrossNetwork, num_fields: int, kind: str) -> Callable[[], Tensor]:
    """Give a cross network the learned numbers of a penalty; return the penalty as a function."""
    if kind == "paper":
        cross.level = nn.Parameter(mean_square(blocks_of(cross.weight.detach(), num_fields)))
        return lambda: distance_to_rotations(blocks_of(cross.weight, num_fields), cross.level)
    scaled = ScaledBlocks(cross.weight.shape[0], num_fields)
    parametrize.register_parametrization(cross, "weight", scaled)
    # the original is looked up anew each time: a move to a device may replace it
    return lambda: distance_to_rotations(
        blocks_of(cross.parametrizations.weight.original, num_fields)
    )


class ScaledBlocks(nn.Module):
    """Multiplies each block W_ij of the layers' weights `(L, F D, F D)` by a number of its own."""

    def __init__(self, num_layers: int, num_fields: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_layers, num_fields, num_fields))  # n

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weights of the layers as they are used."""
        num_fields = self.scale.shape[-1]
        blocks = blocks_of(weight, num_fields) * self.scale[..., None, None]  # (L, F, F, D, D)
        return blocks.transpose(2, 3).flatten(3).flatten(1, 2)


def mean_square(blocks: Tensor) -> Tensor:
    """Return the mean squared singular value of each block `(L, F, F)`: the best l_ij."""
    return blocks.square().sum((-2, -1)) / blocks.shape[-1]


def distance_to_rotations(blocks: Tensor, level: Tensor | None = None) -> Tensor:
    """Return the sum over all blocks of ||W^T W - l I||^2, which ||W W^T - l I||^2 equals; l is 1 if not given."""
    gram = blocks.mT @ blocks
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    wanted = identity if level is None else level[..., None, None] * identity
    return (gram - wanted).square().sum()


def chosen(runs: Sequence[Run], width: int, kind: str) -> list[Run]:
    """Return the runs of one width and kind, one a seed."""
    return [run for run in runs if (run["width"], run["kind"]) == (width, kind)]


def row_of(width: int, kind: str, runs: Sequence[Run]) -> dict[str, str]:
    """Return a line of the table."""

    def of(name: str, digits: int) -> str:
        return summary([run[name] for run in runs], digits)

    return {
        "width": f"{width}",
        "penalty": kind,
        "test AUC": of("auc", 4),
        "mean IA": of("mean_abundance", 2),
        "IA by rows": of("weighted_abundance", 2),
        "mean IA(E_i->j)": of("mean_sub_abundance", 2),
        "uneven W": of("distance_to_rotations", 2),
        "last loss": of("last_loss", 4),
        "last valid AUC": of("last_valid_auc", 4),
    }


def draw(runs: Sequence[Run], widths: Sequence[int]) -> "Figure":
    """Draw AUC and abundance by width, and how the widest models train."""
    figure = new_figure(11.0, 7.2)
    (auc, abundance), (loss, valid) = figure.subplots(2, 2)
    by_width(auc, runs, widths, "auc")
    quieten(auc, "width", "test AUC", "AUC")
    by_width(abundance, runs, widths, "mean_abundance")
    by_width(abundance, runs, widths, "mean_sub_abundance", style="--")
    title = r"Information abundance: tables, and dashed $E_i^{\to j}$"
    quieten(abundance, "width", "mean IA", title)
    for kind, color in KINDS.items():
        widest = chosen(runs, widths[-1], kind)
        for axes, name in ((loss, "train_loss"), (valid, "valid_auc")):
            middle = [mean(values) for values in zip(*(run[name] for run in widest), strict=True)]
            axes.plot(range(1, len(middle) + 1), middle, color=color, marker=".", label=kind)
    quieten(loss, "epoch", "training loss", f"Training loss, width {widths[-1]}")
    quieten(valid, "epoch", "validation AUC", f"Validation AUC, width {widths[-1]}")
    for axes in (loss, valid):
        axes.xaxis.get_major_locator().set_params(integer=True)
    lines, labels = auc.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside upper right", ncols=3, fontsize=9, frameon=False)
    figure.suptitle("DCN-V2, its projections free (plain) or pushed towards rotations", fontsize=11)
    return figure


def by_width(
    axes: "Axes", runs: Sequence[Run], widths: Sequence[int], name: str, *, style: str = "-"
) -> None:
    """Draw the mean of a figure at each width, and from the lowest seed to the highest."""
    for kind, color in KINDS.items():
        found = [[run[name] for run in chosen(runs, width, kind)] for width in widths]
        look = {"color": color, "marker": "o", "markersize": 4, "linestyle": style}
        axes.plot(widths, [*map(mean, found)], label=kind, **look)
        axes.fill_between(widths, [*map(min, found)], [*map(max, found)], color=color, alpha=0.15)
    axes.set_xticks(widths)


if __name__ == "__main__":
    start(main)
