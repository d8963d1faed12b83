"""Evidence IV: DNN collapses less than DCN-V2 as it grows, and does not gain (Guo et al., 2024, figure 6).

    python recipes/collapse/width.py
    python recipes/collapse/width.py --data prepared/criteo --widths 10,20,30,40,100 --device cuda

Both models are trained at each width of their tables. DNN has no products of fields, so by the interaction-collapse
law its tables should keep more directions; the paper sees that, and sees its AUC fall with the width while that of
DCN-V2 holds. What counts is how each goes with the width, not which model is the better one.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from _common import (
    BLUE,
    ORANGE,
    Report,
    abundances,
    arguments,
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

import rarebit as rb

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["main"]

MODELS = {"dnn": ("DNN", ORANGE), "dcn_v2": ("DCN-V2", BLUE)}

Run = dict[str, Any]


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Train both models at all widths, print AUC and abundance, and write the figure."""
    options = parse(given)
    splits = log_of(options)
    report = Report("width", options, splits)
    runs = [
        train_width(name, width, splits, options, seed)
        for width in options.widths
        for name in MODELS
        for seed in range(options.seeds)
    ]
    print_table(
        [
            row_of(name, width, options.widths[0], runs)
            for name in MODELS
            for width in options.widths
        ]
    )
    variants = by_variant(runs, "model", "width")
    for name in MODELS:
        for width in options.widths:
            variants[f"{name}-{width}"]["gain"] = gains(runs, name, width, options.widths[0])
    return report.write({"variants": variants, "runs": runs}, lambda: draw(runs, options.widths))


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = arguments(__doc__)
    parser.add_argument("--widths", type=numbers, default=[10, 20, 40], help="such as 10,20,40")
    return parser.parse_args(given)


def train_width(
    name: str, width: int, splits: rb.data.Splits, options: argparse.Namespace, seed: int
) -> Run:
    """Train one model and return its figures."""
    model = start_model(f"{name}@me", splits, seed, dim=width)
    trained = train(model, splits, options, seed=seed)
    own = abundances(model)
    return {
        "model": name,
        "width": width,
        "seed": seed,
        "auc": trained.auc,
        "best_epoch": trained.best_epoch,
        "abundance": own,
        "mean_abundance": mean(list(own.values())),
        "weighted_abundance": weighted_mean(own, splits),
        **trained.curves(),
    }


def values_of(runs: Sequence[Run], model: str, width: int, name: str) -> list[Any]:
    """Return a figure of each seed."""
    return [run[name] for run in runs if (run["model"], run["width"]) == (model, width)]


def gains(runs: Sequence[Run], model: str, width: int, narrowest: int) -> list[float]:
    """Return what a width gains over the narrowest one, seed by seed."""
    both = (values_of(runs, model, chosen, "auc") for chosen in (width, narrowest))
    return [wide - narrow for wide, narrow in zip(*both, strict=True)]


def row_of(model: str, width: int, narrowest: int, runs: Sequence[Run]) -> dict[str, str]:
    """Return a line of the table."""
    return {
        "model": MODELS[model][0],
        "width": f"{width}",
        "test AUC": summary(values_of(runs, model, width, "auc")),
        f"over width {narrowest}": ""
        if width == narrowest
        else summary(gains(runs, model, width, narrowest)),
        "mean IA": summary(values_of(runs, model, width, "mean_abundance"), 2),
        "IA by rows": summary(values_of(runs, model, width, "weighted_abundance"), 2),
    }


def draw(runs: Sequence[Run], widths: Sequence[int]) -> "Figure":
    """Draw AUC and abundance by width, and the abundance of each field at the largest."""
    figure = new_figure(13.0, 4.2)
    left, middle, right = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1, 1, 1.3]})
    for model, (label, color) in MODELS.items():
        gained = [gains(runs, model, width, widths[0]) for width in widths]
        found = [values_of(runs, model, width, "mean_abundance") for width in widths]
        for axes, values in ((left, gained), (middle, found)):
            axes.plot(
                widths, [*map(mean, values)], color=color, marker="o", markersize=4, label=label
            )
            axes.fill_between(
                widths, [*map(min, values)], [*map(max, values)], color=color, alpha=0.15
            )
            axes.set_xticks(widths)
    left.axhline(0, color="black", linewidth=0.8)
    quieten(left, "width", f"test AUC over that of width {widths[0]}", "What width gains")
    quieten(middle, "width", "mean IA of the tables", "Information abundance")
    left.legend(fontsize=8, frameon=False)
    draw_fields(right, runs, widths[-1])
    return figure


def draw_fields(axes: Any, runs: Sequence[Run], width: int) -> None:
    """Draw the abundance of each field's table, in the order of DCN-V2's."""
    found = {
        model: {
            field: mean([own[field] for own in values_of(runs, model, width, "abundance")])
            for field in values_of(runs, model, width, "abundance")[0]
        }
        for model in MODELS
    }
    order = sorted(found["dcn_v2"], key=found["dcn_v2"].get)
    for shift, (model, (label, color)) in zip((-0.2, 0.2), MODELS.items(), strict=True):
        heights = [found[model][field] for field in order]
        places = [at + shift for at in range(len(order))]
        axes.bar(places, heights, width=0.4, color=color, label=label)
    axes.set_xticks(range(len(order)), order, rotation=90)
    quieten(axes, "field", "IA", f"Each field's table, width {width}")
    axes.grid(visible=False, axis="x")


if __name__ == "__main__":
    start(main)
