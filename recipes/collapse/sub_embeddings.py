"""Evidence II: what a field of DCN-V2 keeps depends on the field it meets (Guo et al., 2024, figure 3).

    python recipes/collapse/sub_embeddings.py
    python recipes/collapse/sub_embeddings.py --data prepared/criteo --dim 100 --device cuda

The first cross layer shows field i to field j through a projection of its own:

    E_i->j = E_i W_ij^T

Fields are in the order of IA(E_i). The paper sees IA(E_i->j) rise along j, with the field that is met, though all
come from the same table. How far it rises is Spearman's correlation, beside that of the untrained model: a
random table and random projections have one along i, as small tables have a low rank from the start, and
none along j.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from _common import (
    Report,
    arguments,
    count,
    log_of,
    new_figure,
    print_table,
    start,
    start_model,
    summary,
    train,
)
from _matrix import Matrix, draw_matrix, look_at, mean_of, print_matrix, to_figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["main"]


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Train DCN-V2, print its sub-embeddings, and write the figure."""
    options = parse(given)
    splits = log_of(options)
    report = Report("sub_embeddings", options, splits)
    untrained, trained, made = [], [], []
    for seed in range(options.seeds):
        model = start_model("dcn_v2@me", splits, seed, dim=options.dim)
        untrained.append(look_at(model))
        made.append(train(model, splits, options, seed=seed))
        trained.append(look_at(model))
    figures = to_figures(untrained, trained)
    print_matrix(mean_of(trained), figures)
    figures["auc"] = [one.auc for one in made]
    figures["best_epoch"] = [one.best_epoch for one in made]
    print_table([{"": "test AUC", " ": summary(figures["auc"])}])
    return report.write(figures, lambda: draw(mean_of(trained), options.dim))


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = arguments(__doc__)
    parser.add_argument("--dim", type=count, default=20, help="width of the tables")
    return parser.parse_args(given)


def draw(matrix: Matrix, dim: int) -> "Figure":
    """Draw the sub-embeddings and their means."""
    figure = new_figure(12.5, 4.2)
    panels = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1.3, 1, 1]})
    draw_matrix(figure, panels, matrix)
    figure.suptitle(f"Sub-embeddings of DCN-V2, width {dim}: fields by IA($E_i$)", fontsize=11)
    return figure


if __name__ == "__main__":
    start(main)
