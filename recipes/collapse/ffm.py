"""Evidence I: a field of FFM keeps less for a field that has little (Guo et al., 2024, figure 3).

    python recipes/collapse/ffm.py
    python recipes/collapse/ffm.py --data prepared/criteo --device cuda

FFM has another vector of a value for each field it meets, so a table falls into sub-embeddings:

    E_i = [E_i->1, ..., E_i->F]

Fields are in the order of IA(E_i). The paper sees IA(E_i->j) rise along j, with the field that is met, though the
sub-embeddings are free of each other. How far it rises is Spearman's correlation, beside that of the untrained
model. FM, with one vector of the same width for all fields that are met, stands beside it: its table has to
serve them all.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from _common import (
    BLUE,
    ORANGE,
    Report,
    Trained,
    abundances,
    arguments,
    count,
    log_of,
    mean,
    new_figure,
    print_table,
    quieten,
    start,
    start_model,
    summary,
    train,
)
from _matrix import Matrix, draw_matrix, look_at, mean_of, print_matrix, to_figures

import rarebit as rb

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["main"]


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Train FFM and FM, print their abundances, and write the figure."""
    options = parse(given)
    splits = log_of(options)
    report = Report("ffm", options, splits)
    untrained, trained, made = [], [], []
    for seed in range(options.seeds):
        model = start_model("ffm", splits, seed, dim=options.dim, init="xavier")
        untrained.append(look_at(model))
        made.append(train(model, splits, options, seed=seed))
        trained.append(look_at(model))
    matrix, figures = mean_of(trained), to_figures(untrained, trained)
    print_matrix(matrix, figures)
    plain = [train_fm(splits, options, seed) for seed in range(options.seeds)]
    kept = dict(zip(matrix.fields, matrix.field_means, strict=True))
    fm = {name: mean([found[name] for _, found in plain]) for name in matrix.fields}
    print_table(
        [
            {
                "field": name,
                "IA, FM": f"{fm[name]:.2f}",
                "mean over j of FFM's": f"{kept[name]:.2f}",
            }
            for name in matrix.fields
        ]
    )
    aucs, fm_aucs = [one.auc for one in made], [one.auc for one, _ in plain]
    print_table([{"": "test AUC", "FM": summary(fm_aucs), "FFM": summary(aucs)}])
    figures |= {"auc": aucs, "fm_auc": fm_aucs, "fm_abundance": fm}
    figures["best_epoch"] = [one.best_epoch for one in made]
    figures["fm_best_epoch"] = [one.best_epoch for one, _ in plain]
    return report.write(figures, lambda: draw(matrix, fm, kept, options.dim))


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = arguments(__doc__)
    parser.add_argument("--dim", type=count, default=8, help="width of one vector")
    return parser.parse_args(given)


def train_fm(
    splits: rb.data.Splits, options: argparse.Namespace, seed: int
) -> tuple[Trained, dict[str, float]]:
    """Return the training of FM and the information abundance of its tables."""
    model = start_model("fm", splits, seed, dim=options.dim, init="xavier")
    return train(model, splits, options, seed=seed), abundances(model)


def draw(matrix: Matrix, fm: Mapping[str, float], kept: Mapping[str, float], dim: int) -> "Figure":
    """Draw the sub-embeddings of FFM, and FM beside them."""
    figure = new_figure(11.5, 8.0)
    (first, second), (third, last) = figure.subplots(2, 2)
    draw_matrix(figure, (first, second, third), matrix)
    places = range(len(matrix.fields))
    for shift, values, color, label in (
        (-0.2, fm, ORANGE, "FM: one vector for all"),
        (0.2, kept, BLUE, "FFM: mean over j"),
    ):
        heights = [values[name] for name in matrix.fields]
        last.bar([at + shift for at in places], heights, width=0.4, color=color, label=label)
    last.set_xticks(places, matrix.fields, rotation=90)
    quieten(last, "field i", "IA", f"Vectors of width {dim}: FM and FFM")
    last.grid(visible=False, axis="x")
    last.set_ylim(bottom=1)
    last.legend(fontsize=8, frameon=False)
    figure.suptitle("Sub-embeddings of FFM: fields by IA($E_i$)", fontsize=11)
    return figure


if __name__ == "__main__":
    start(main)
