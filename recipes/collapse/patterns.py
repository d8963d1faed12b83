"""Interaction patterns: which pairs of fields each embedding set attends to (Guo et al., 2024, figure 8).

    python recipes/collapse/patterns.py
    python recipes/collapse/patterns.py --data prepared/criteo --sets 10 --device cuda

The pattern of a set is how long its projections are, ||W_i->j^(m)||, a number for each pair of fields, in the first
cross layer. DCN-V2 with M sets of width K stands beside one of a single set of width M K, whose projections of set m
to itself, W^(m,m), are what would be the sets if it were several (appendix of the paper).

    variance      over sets, of ||W_i->j^(m)||^2; mean over layers and pairs: what the released ablation holds down
    relative      the same of each pair over its squared mean, as longer projections vary by more
    likeness      correlation of the first layer's patterns of two sets, mean over pairs of sets

All three are told of the untrained models too, since random projections differ from the start.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from _common import (
    Report,
    abundances,
    arguments,
    blocks_of,
    by_variant,
    count,
    log_of,
    mean,
    new_figure,
    print_table,
    set_abundances,
    start,
    start_model,
    summary,
    train,
)
from torch import Tensor

import rarebit as rb
from rarebit.interactions.cross import CrossNetwork
from rarebit.models._base import RankingModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["likeness", "main", "patterns_of", "variance", "variation"]

SIDES = {"multi": "M sets", "single": "one set"}

Run = dict[str, Any]


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Train both models, print how their patterns differ, and write the figure."""
    options = parse(given)
    splits = log_of(options)
    report = Report("patterns", options, splits)
    runs = [
        train_side(side, splits, options, seed) for side in SIDES for seed in range(options.seeds)
    ]
    print_table([row_of(side, [run for run in runs if run["side"] == side]) for side in SIDES])
    show_sets(runs)
    names = [field.name for field in splits.train.schema.table_fields]
    names += [field.name for field in splits.train.schema.numeric_fields]
    first = {side: next(run for run in runs if run["side"] == side) for side in SIDES}
    return report.write(
        {"variants": by_variant(runs, "side"), "fields": names, "runs": runs},
        lambda: draw(first, names, options),
    )


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = arguments(__doc__)
    parser.add_argument("--sets", type=count, default=4, help="embedding sets, M: at least 2")
    parser.add_argument("--dim", type=count, default=10, help="width of a set, K")
    options = parser.parse_args(given)
    if options.sets < 2:
        parser.error("--sets must be at least 2: one set has nothing to differ from")
    return options


def train_side(side: str, splits: rb.data.Splits, options: argparse.Namespace, seed: int) -> Run:
    """Train one model and return its figures."""
    settings = (
        {"dim": options.dim, "num_sets": options.sets}
        if side == "multi"
        else {"dim": options.dim * options.sets}
    )
    model = start_model("dcn_v2@me", splits, seed, **settings)
    untrained = patterns_of(model, options.sets)
    trained = train(model, splits, options, seed=seed)
    norms = patterns_of(model, options.sets)
    own = abundances(model)
    return {
        "side": side,
        "seed": seed,
        "auc": trained.auc,
        "best_epoch": trained.best_epoch,
        "patterns": norms[:, 0].tolist(),
        **{f"untrained_{name}": value for name, value in measures(untrained).items()},
        **measures(norms),
        "mean_abundance": mean(list(own.values())),
        "abundance": own,
        "abundance_by_set": set_abundances(model),
    }


def patterns_of(model: RankingModel, num_sets: int) -> Tensor:
    """Return ||W_i->j^(m)|| of every set and layer, `(M, L, F, F)`, first i, then j."""
    (cross,) = (part for part in model.modules() if isinstance(part, CrossNetwork))
    weight = cross.weight.detach().double()
    num_fields = len(model.schema.fields)
    if cross.num_sets is not None:
        return torch.linalg.matrix_norm(blocks_of(weight, num_fields)).mT
    blocks = blocks_of(blocks_of(weight, num_fields), num_sets)  # (L, F, F, M, M, K, K)
    norms = torch.linalg.matrix_norm(blocks).diagonal(dim1=-2, dim2=-1)  # (L, F, F, M)
    return norms.movedim(-1, 0).mT


def measures(norms: Tensor) -> dict[str, float]:
    """Return how much the patterns of sets differ."""
    return {
        "variance": variance(norms),
        "relative_variance": variation(norms),
        "likeness": likeness(norms[:, 0]),
    }


def variance(norms: Tensor) -> float:
    """Return the variance over sets of the squared norms, the mean over layers and pairs of fields."""
    return float(norms.square().var(dim=0).mean())


def variation(norms: Tensor) -> float:
    """Return the same, each pair's variance over the square of its mean."""
    squares = norms.square()
    return float((squares.var(dim=0) / squares.mean(dim=0).square()).mean())


def likeness(patterns: Tensor) -> float:
    """Return the correlation of the patterns `(M, F, F)` of two sets, the mean over pairs of sets."""
    correlation = torch.corrcoef(patterns.flatten(1))
    first, second = torch.triu_indices(len(patterns), len(patterns), offset=1)
    return float(correlation[first, second].mean())


def row_of(side: str, runs: Sequence[Run]) -> dict[str, str]:
    """Return a line of the table."""

    def both(name: str) -> str:
        before, after = ([run[f"{when}{name}"] for run in runs] for when in ("untrained_", ""))
        return f"{mean(before):.2g} -> {mean(after):.2g}"

    return {
        "untrained -> trained": SIDES[side],
        "variance": both("variance"),
        "relative": both("relative_variance"),
        "likeness": both("likeness"),
        "mean IA": summary([run["mean_abundance"] for run in runs], 2),
        "test AUC": summary([run["auc"] for run in runs]),
    }


def show_sets(runs: Sequence[Run]) -> None:
    """Print the abundance of each field in each set, and of the table of a single wide set."""
    multi, single = ([run for run in runs if run["side"] == side] for side in SIDES)
    rows = []
    for field in multi[0]["abundance"]:
        by_set = zip(*(run["abundance_by_set"][field] for run in multi), strict=True)
        rows.append(
            {"IA": field}
            | {f"set {m}": f"{mean(values):.2f}" for m, values in enumerate(by_set)}
            | {"all sets": summary([run["abundance"][field] for run in multi], 2)}
            | {"one set": summary([run["abundance"][field] for run in single], 2)}
        )
    print_table(rows)


def draw(runs: Mapping[str, Run], names: Sequence[str], options: argparse.Namespace) -> "Figure":
    """Draw the pattern of each set of the first seed, one line of panels a model."""
    figure = new_figure(2.6 * options.sets + 1.6, 6.6)
    grid = figure.subplots(2, options.sets, sharex=True, sharey=True)
    titles = {
        "multi": f"{options.sets} sets of width {options.dim}: set",
        "single": f"one of width {options.dim * options.sets}: part",
    }
    for line, (side, run) in zip(grid, runs.items(), strict=True):
        norms = torch.tensor(run["patterns"])  # (M, F, F)
        lowest, highest = map(float, norms.aminmax())
        for number, (axes, pattern) in enumerate(zip(line, run["patterns"], strict=True)):
            image = axes.imshow(pattern, vmin=lowest, vmax=highest, cmap="viridis", aspect="auto")
            axes.set_title(f"{titles[side]} {number}", fontsize=9)
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
            axes.tick_params(labelsize=7)
        figure.colorbar(image, ax=list(line)).ax.tick_params(labelsize=7)
    figure.supxlabel("j: the field that is met", fontsize=9)
    figure.supylabel("i: the field of the table", fontsize=9)
    figure.suptitle(r"Interaction patterns $\|W_{i\to j}\|$ of the first cross layer", fontsize=11)
    return figure


if __name__ == "__main__":
    start(main)
