"""Plots of a diagnosis as PNG images: spectra, abundance, norms, speed of products, sub-embeddings.

And of sizes: AUC by the size of the tables, in a study and of compressed runs. And of time: AUC of policies in a backtest.

Needs matplotlib, which is imported in functions only and used without its global state.
"""

import io
import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rarebit.diagnosis.measure import SubEmbeddings, TableDiagnosis, short_names
from rarebit.errors import import_extra
from rarebit.settings import size as size_text
from rarebit.tables.spectrum import random_singular_values

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from rarebit.study.backtest import BacktestResult, PolicyResult
    from rarebit.study.results import CellResult, StudyResult, VariantResult

MOST_PANELS = 48
"""At most so many tables are drawn, the largest first."""
LONGEST_NAME = 22
LOWEST_POWER = -6
"""Singular values below 1e-6 of the largest are rounding, in a table of float32."""
TRAINED, SECOND, RANDOM, QUIET = "#1f5fa8", "#c8661b", "#9a9a9a", "#555555"
DPI = 130
PLOTS = "drawing plots (plots=False and --no-plots do without)"


def draw_plots(
    tables: Sequence[TableDiagnosis], matrices: Sequence[SubEmbeddings] = ()
) -> dict[str, bytes]:
    """Return the plots there are figures for, as PNG images by file name."""
    figures: dict[str, Figure] = {}
    shown = [table for table in tables if table.spectrum]
    if shown:
        figures["spectra.png"] = _draw_spectra(shown)
        figures["abundance.png"] = _draw_abundance(shown)
    counted = [table for table in tables if table.width > 1 and table.norm_by_count]
    if counted:
        figures["norms.png"] = _draw_norms(counted)
    products = [table for table in tables if table.reweighting]
    if products:
        figures["reweighting.png"] = _draw_reweighting(products)
    for number, matrix in enumerate(matrices):
        name = "sub_embeddings.png" if len(matrices) == 1 else f"sub_embeddings_{number}.png"
        figures[name] = _draw_matrix(matrix, tables)
    return {name: _as_png(figure) for name, figure in figures.items()}


def draw_study(result: "StudyResult") -> bytes:
    """Return the AUC of a study's variants by the size of their tables, as a PNG image."""
    return _as_png(_draw_sizes(result))


@dataclass(frozen=True)
class FrontierPanel:
    """AUC by bytes of the tables, of one log."""

    title: str
    plain: tuple[float, float]
    """Bytes and AUC of plain tables."""
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Bytes and AUC of each compressor at its sizes."""


def draw_frontier(panels: Sequence[FrontierPanel], *, ours: Sequence[str]) -> dict[str, bytes]:
    """Return the AUC of compressors by the bytes of the tables, as PNG and SVG images by file name."""
    what = "drawing a frontier (without it there is only frontier.json)"
    columns = min(math.ceil(math.sqrt(len(panels))), 3)
    lines = math.ceil(len(panels) / columns)
    figure = _new_figure(max(4.2 * columns, 6.6), 3.2 * lines + 0.9, what=what)
    names = dict.fromkeys([*ours, *(name for panel in panels for name in panel.lines)])
    kinds: dict[str, Artist] = {}
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, panel in itertools.zip_longest(places, panels):
        if panel is None:
            axes.remove()
            continue
        _draw_frontier(axes, panel, list(names), ours, kinds)
        axes.set_ylabel("test AUC", fontsize=8)
        axes.set_xlabel("tables, as a part of the plain ones and in bytes", fontsize=8)
    figure.legend(
        list(kinds.values()),
        list(kinds),
        loc="outside lower center",
        ncols=min(len(kinds), 4),
        fontsize=8,
        frameon=False,
    )
    return {"frontier.png": _as_png(figure), "frontier.svg": _as_svg(figure)}


def draw_backtest(result: "BacktestResult") -> dict[str, bytes]:
    """Return the AUC of policies in each period, on all rows and on those with young ids, as PNG and SVG by file name.

    The lower panels have the difference to the control, whose AUC moves as much from period to period as all others.
    """
    figure = _new_figure(11.0, 6.4, what="drawing a backtest (without it there are the tables)")
    panels = figure.subplots(2, 2, sharex=True, squeeze=False)
    titles = {"period_aucs": "all rows", "period_young_aucs": "rows with young ids"}
    control = result.policy(result.control)
    places = range(len(result.periods))
    drawn: dict[str, Line2D] = {}
    for (upper, lower), (name, title) in zip(panels.T, titles.items(), strict=True):
        theirs = _period_means(control, name)
        for number, policy in enumerate(result.policies):
            means = _period_means(policy, name)
            is_control = policy is control
            style: dict[str, Any] = {
                "color": QUIET if is_control else f"C{number}",
                "linewidth": 1.8 if is_control else 1.2,
                "linestyle": "--" if is_control else "-",
            }
            [drawn[policy.name]] = upper.plot(places, means, **style)
            gains = [a - b for a, b in zip(means, theirs, strict=True)]
            lower.plot(places, gains, **style)
        upper.set_title(title, fontsize=10)
        upper.set_ylabel("AUC", fontsize=8)
        lower.set_ylabel(f"AUC minus that of {result.control}", fontsize=8)
        step = max(len(result.periods) // 6, 1)
        marks = list(places)[::step]
        lower.set_xticks(marks, [result.periods[mark].start.split()[0] for mark in marks])
        for axes in (upper, lower):
            axes.tick_params(labelsize=7)
            _quieten(axes)
    figure.suptitle("Each period is scored before training on it; mean over seeds", fontsize=11)
    figure.legend(
        list(drawn.values()),
        list(drawn),
        loc="outside lower center",
        ncols=min(len(drawn), 5),
        fontsize=8,
        frameon=False,
    )
    return {"backtest.png": _as_png(figure), "backtest.svg": _as_svg(figure)}


def _period_means(policy: "PolicyResult", name: str) -> list[float]:
    """Return a figure of each period, the mean over seeds; NaN where it is not defined."""
    seeds = [[_or_nan(value) for value in getattr(run, name)] for run in policy.runs]
    return [statistics.fmean(values) for values in zip(*seeds, strict=True)]


def _draw_frontier(
    axes: "Axes",
    panel: FrontierPanel,
    names: Sequence[str],
    ours: Sequence[str],
    kinds: "dict[str, Artist]",
) -> None:
    whole, auc = panel.plain
    kinds["plain tables, 32 bits"] = axes.axhline(auc, color=QUIET, linewidth=1.0, linestyle=":")
    best = [y for name in ours for _, y in panel.lines.get(name, ())]
    # what is far below ours would make the rest flat
    depth = max(1.6 * (auc - min([*best, auc])), 0.004)
    floor, highest = auc - depth, max([auc, *best])
    for number, name in enumerate(names):
        sizes, aucs = zip(*sorted(panel.lines.get(name) or [(math.nan, math.nan)]), strict=True)
        is_ours, is_point = name in ours, len(sizes) == 1
        [drawn] = axes.plot(
            sizes,
            aucs,
            "D" if is_point else "o-" if is_ours else "s--",
            color=f"C{number}",
            fillstyle="none" if is_point else "full",
            linewidth=2.2 if is_ours else 1.1,
            markersize=7 if is_point else 5 if is_ours else 4,
            zorder=4 if is_point else 3 if is_ours else 2,
        )
        kinds.setdefault(name, drawn)
        highest = max([highest, *(value for value in aucs if value > highest)])
        below = [size for size, value in zip(sizes, aucs, strict=True) if value < floor]
        if below:
            marks = axes.plot(below, [floor] * len(below), "v", color=f"C{number}", markersize=5)
            marks[0].set_clip_on(False)
    [kinds["below the axis"]] = axes.plot([], [], "v", color=QUIET, markersize=5)
    axes.set_ylim(floor, highest + 0.1 * depth)
    axes.set_xscale("log")
    least = min((size for points in panel.lines.values() for size, _ in points), default=whole)
    halvings = range(2, max(round(math.log2(whole / least)), 2) + 1)
    labels = [f"1/{2**n}\n{size_text(whole / 2**n)}" for n in halvings]
    axes.set_xticks([whole / 2**n for n in halvings], labels)
    axes.minorticks_off()
    axes.set_title(panel.title, fontsize=9)
    axes.tick_params(labelsize=7)
    _quieten(axes)


def _draw_sizes(result: "StudyResult") -> "Figure":
    """Draw a panel per model and log, and a line per kind of variant: controls are dashed."""
    logs = [list(cells) for _, cells in itertools.groupby(result.cells, key=lambda cell: cell.data)]
    columns = max(map(len, logs))
    what = "drawing a study (without --plot it is only printed)"
    figure = _new_figure(max(2.7 * columns, 5.5), 2.4 * len(logs) + 1.0, what=what)
    kinds: dict[str, Line2D] = {}
    for cells, line in zip(logs, figure.subplots(len(logs), columns, squeeze=False), strict=True):
        for axes, cell in itertools.zip_longest(line, cells):
            if cell is None:
                axes.remove()
                continue
            for kind, points in _by_size(cell).items():
                is_control = not any(_kind(method.name) == kind for method in cell.methods)
                sizes, variants = zip(*points, strict=True)
                aucs = [[run.auc for run in variant.runs] for variant in variants]
                means = [*map(statistics.fmean, aucs)]
                below = [mean - min(one) for mean, one in zip(means, aucs, strict=True)]
                above = [max(one) - mean for mean, one in zip(means, aucs, strict=True)]
                drawn, *_ = axes.errorbar(
                    sizes,
                    means,
                    [below, above],
                    fmt="o--" if is_control else "o-",
                    color=kinds[kind].get_color() if kind in kinds else f"C{len(kinds)}",
                    markersize=4,
                    elinewidth=0.8,
                    capsize=2,
                )
                kinds.setdefault(kind, drawn)
                unfair = [
                    at
                    for at, one in enumerate(variants)
                    if one.edge or 2 * one.cut_off > len(one.runs)
                ]
                axes.plot(
                    [sizes[at] for at in unfair],
                    [means[at] for at in unfair],
                    "o",
                    color=drawn.get_color(),
                    markerfacecolor="white",
                    markersize=4,
                    zorder=3,
                )
            _label_sizes(axes, [size for one in _by_size(cell).values() for size, _ in one])
            axes.set_title(f"{cell.model} on {_shortened(cell.data)}", fontsize=9)
            axes.tick_params(labelsize=7)
            _quieten(axes)
    figure.suptitle("Test AUC by bytes of the tables (1: the baseline's)", fontsize=11)
    figure.legend(
        list(kinds.values()),
        list(kinds),
        title="mean over seeds, bars from the lowest to the highest; hollow: cut off or at the edge of a grid",
        loc="outside lower center",
        ncols=min(len(kinds), 5) or 1,
        fontsize=8,
        title_fontsize=8,
        frameon=False,
    )
    return figure


def _by_size(cell: "CellResult") -> dict[str, list[tuple[float, "VariantResult"]]]:
    """Return the variants with runs and the sizes of their tables, by kind; each kind starts at the baseline."""
    found: dict[str, list[tuple[float, VariantResult]]] = {}
    for variant in cell.variants[1:]:
        baseline = cell.variants[0]
        if variant.runs and baseline.runs:
            size = variant.runs[0].table_bytes / baseline.runs[0].table_bytes
            found.setdefault(_kind(variant.name), [(1.0, baseline)]).append((size, variant))
    return {kind: sorted(points, key=lambda point: point[0]) for kind, points in found.items()}


def _kind(name: str) -> str:
    """Return the name of a variant without its numbers: multi-embedding for multi-embedding:num_sets=2."""
    return re.sub(r":\w+=[-+.\de]+(?=[:+]|$)", "", name)


def _label_sizes(axes: "Axes", sizes: Sequence[float]) -> None:
    """Make the axis of sizes logarithmic, and label those that are far enough apart."""
    axes.set_xscale("log")
    labelled: list[float] = []
    for size in sorted(sizes):
        if not labelled or size / labelled[-1] > max(1.2, (max(sizes) / min(sizes)) ** 0.1):
            labelled.append(size)
    axes.set_xticks(labelled, [f"{size:.2g}" for size in labelled])
    axes.minorticks_off()


def _new_figure(
    width: float, height: float, *, arrange: bool = True, what: str = PLOTS
) -> "Figure":
    """Return an empty figure, its size in inches. Arranging many panels takes seconds."""
    agg = import_extra("matplotlib.backends.backend_agg", "plots", what)
    layout = "constrained" if arrange else None
    figure: Figure = import_extra("matplotlib.figure", "plots", what).Figure(
        figsize=(width, height), dpi=DPI, layout=layout
    )
    agg.FigureCanvasAgg(figure)
    return figure


def _as_png(figure: "Figure") -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _as_svg(figure: "Figure") -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    return image.getvalue()


def _draw_spectra(tables: Sequence[TableDiagnosis]) -> "Figure":
    least = min(min(_normalised(table.spectrum or ())[1], default=1.0) for table in tables)
    lowest = 10.0 ** max(math.floor(math.log10(least)), LOWEST_POWER)

    def panel(axes: "Axes", table: TableDiagnosis) -> str:
        assert table.spectrum is not None
        chance = random_singular_values(table.rows, table.width).tolist()
        axes.plot(*_normalised(chance), ".-", color=RANDOM, label="random table")
        axes.plot(*_normalised(table.spectrum), ".-", color=TRAINED, label="table")
        axes.set_yscale("log")
        axes.yaxis.minorticks_off()
        axes.set_ylim(min(lowest, 0.1), 1.6)
        axes.set_xlim(0.5, table.width + 0.5)
        return f"IA {table.information_abundance:.1f}"

    return _draw_panels(
        tables,
        panel,
        title="Singular values over the largest one",
        x_label="singular value, from the largest",
        y_label="share of the largest",
    )


def _draw_norms(tables: Sequence[TableDiagnosis]) -> "Figure":
    most = max(table.norm_by_count[-1].most for table in tables)

    def panel(axes: "Axes", table: TableDiagnosis) -> str:
        seen = [norm for norm in table.norm_by_count if norm.least]
        places = [math.sqrt(norm.least * norm.most) for norm in seen]
        norms = [norm.mean_norm for norm in seen]
        axes.plot(places, norms, ".-", color=TRAINED, label="seen in training")
        if table.norm_by_count[0].least == 0:
            never = table.norm_by_count[0].mean_norm
            axes.axhline(never, color=RANDOM, linestyle="--", label="never seen")
        axes.set_xscale("log", base=2)
        axes.set_xlim(0.7, 1.4 * max(most, 2))
        axes.set_ylim(0, 1.1 * max(norm.mean_norm for norm in table.norm_by_count) or 1.0)
        correlation = table.norm_correlation
        return "" if correlation is None else f"correlation {round(correlation, 2) + 0.0:+.2f}"

    return _draw_panels(
        tables,
        panel,
        title="Mean norm of rows by training count",
        x_label="times seen, in bins of powers of two",
        y_label="mean norm",
    )


def _draw_reweighting(tables: Sequence[TableDiagnosis]) -> "Figure":
    def panel(axes: "Axes", table: TableDiagnosis) -> str:
        found = table.reweighting
        assert found is not None
        both = {
            "projection": (found.projection_values, TRAINED),
            "wide factor": (found.wide_values, SECOND),
        }
        for label, (values, color) in both.items():
            places, squares = range(1, len(values) + 1), [value**2 for value in values]
            axes.plot(places, squares, ".-", color=color, label=label)
        # the factor of each direction of a plain table
        axes.axhline(1.0, color=RANDOM, linestyle="--", label="plain table")
        longest = max(1.0, *found.projection_values, *found.wide_values)
        axes.set_ylim(0, 1.1 * longest**2)
        return f"mean {found.mean_factor:.2g}"

    return _draw_panels(
        tables,
        panel,
        title="Speedup of a direction: the sum of one point of each solid line",
        x_label="singular value, from the largest",
        y_label="square of the singular value",
    )


def _draw_panels(
    tables: Sequence[TableDiagnosis],
    panel: "Callable[[Axes, TableDiagnosis], str]",
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> "Figure":
    """Draw one small panel per table, the largest table first; `panel` draws it and returns a caption."""
    chosen = sorted(tables, key=lambda table: -table.rows)[:MOST_PANELS]
    if len(tables) > len(chosen):
        title += f": the {len(chosen)} largest of {len(tables)} tables"
    columns = min(len(chosen), 4 if len(chosen) <= 12 else 6)
    lines = math.ceil(len(chosen) / columns)
    width, height = max(2.3 * columns, 7.0) + 0.8, 2.0 * lines + 1.2
    figure = _new_figure(width, height, arrange=False)
    figure.subplots_adjust(
        left=0.8 / width,
        right=1 - 0.2 / width,
        bottom=0.75 / height,
        top=1 - 0.95 / height,
        wspace=0.32,
        hspace=0.55,
    )
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, table, name in zip(panels, chosen, short_names(chosen), strict=False):
        caption = ", ".join(filter(None, [f"{table.rows:,} x {table.width}", panel(axes, table)]))
        axes.set_title(f"{_shortened(name)}\n{caption}", fontsize=8)
        for line in axes.get_lines():
            line.set_markersize(4)
        axes.tick_params(labelsize=7)
        _quieten(axes)
    for axes in panels[len(chosen) :]:
        axes.remove()
    figure.suptitle(title, fontsize=12, y=1 - 0.15 / height, va="top")
    figure.supxlabel(x_label, fontsize=9, y=0.12 / height)
    figure.supylabel(y_label, fontsize=9, x=0.1 / width)
    drawn = {
        str(line.get_label()): line for axes in panels[: len(chosen)] for line in axes.get_lines()
    }
    figure.legend(
        list(drawn.values()),
        list(drawn),
        loc="upper right",
        bbox_to_anchor=(1 - 0.1 / width, 1 - 0.35 / height),
        ncols=len(drawn),
        fontsize=8,
        frameon=False,
    )
    return figure


def _draw_abundance(tables: Sequence[TableDiagnosis]) -> "Figure":
    ordered = sorted(tables, key=lambda table: table.information_abundance or 0.0)
    figure = _new_figure(8.0, 0.24 * len(ordered) + 1.5)
    axes = figure.subplots()
    places = range(len(ordered))
    own = [table.information_abundance or 0.0 for table in ordered]
    chance = [table.random_abundance or 0.0 for table in ordered]
    axes.barh(places, own, height=0.65, color=TRAINED, label="table")
    axes.plot(
        chance, places, "|", color="black", markersize=9, label="random table of the same size"
    )
    longest = max(*own, *chance)
    for place, (value, other) in enumerate(zip(own, chance, strict=True)):
        # beside the bar, unless the mark of the random table is in the way
        free = abs(other - value) > 0.06 * longest
        start = value if free else max(value, other)
        axes.text(start, place, f"  {value:.1f}", va="center", fontsize=7, color=QUIET)
    axes.set_yticks(places, [_shortened(name) for name in short_names(ordered)], fontsize=8)
    axes.set_ylim(-0.7, len(ordered) - 0.3)
    axes.set_xlim(0, 1.08 * longest)
    axes.set_xlabel("information abundance: sum of singular values over the largest", fontsize=9)
    axes.set_title("Information abundance of each table", fontsize=12)
    axes.tick_params(axis="x", labelsize=8)
    _quieten(axes)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower right", fontsize=8, frameon=False, ncols=2)
    return figure


def _draw_matrix(matrix: SubEmbeddings, tables: Sequence[TableDiagnosis]) -> "Figure":
    """Draw the matrix with its sums; fields are in the order of their tables' abundance."""
    prefix = matrix.name.partition("backbone.")[0]
    known = {table.name: table.information_abundance or 0.0 for table in tables}
    own = {name: known.get(f"{prefix}backbone.tables.{name}", 0.0) for name in matrix.fields}
    # a field without a table comes first: its single vector has an abundance of 1
    rows = sorted(range(len(matrix.fields)), key=lambda i: own[matrix.fields[i]])
    columns = sorted(range(len(matrix.others)), key=lambda j: own.get(matrix.others[j], 1.0))
    values = [[_or_nan(matrix.abundance[i][j]) for j in columns] for i in rows]
    height, width = max(0.26 * len(rows), 2.0), max(0.26 * len(columns), 3.0)  # of the matrix
    figure = _new_figure(width + 3.7, height + 3.3)
    ratios = {"width_ratios": [width, 1.2], "height_ratios": [1.0, height]}
    grid = figure.subplots(2, 2, gridspec_kw=ratios, squeeze=False)
    axes, above, beside = grid[1][0], grid[0][0], grid[1][1]
    grid[0][1].set_visible(False)
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(columns)), [_shortened(matrix.others[j]) for j in columns])
    axes.set_yticks(range(len(rows)), [_shortened(matrix.fields[i]) for i in rows])
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel("j: the field that is met", fontsize=9)
    axes.set_ylabel("i: the field of the table", fontsize=9)
    above.bar(range(len(columns)), [matrix.other_sums[j] for j in columns], color=TRAINED)
    above.set_ylabel("sum over i", fontsize=8)
    above.set_xlim(axes.get_xlim())
    above.set_xticks([])
    beside.barh(range(len(rows)), [matrix.field_sums[i] for i in rows], color=TRAINED)
    beside.set_xlabel("sum over j", fontsize=8)
    beside.set_ylim(axes.get_ylim())
    beside.set_yticks([])
    for bars in (above, beside):
        bars.tick_params(labelsize=7)
        _quieten(bars)
    bar = figure.colorbar(image, ax=beside, fraction=0.12, pad=0.12)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("IA", fontsize=8)
    number = "" if matrix.embedding_set is None else f", embedding set {matrix.embedding_set}"
    figure.suptitle(
        f"Information abundance of sub-embeddings E_i→j, {matrix.kind}{number}\n"
        "fields in the order of their tables' abundance",
        fontsize=11,
    )
    return figure


def _normalised(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return places from 1 and values divided by the largest; a log scale has no zeros."""
    shares = [value / values[0] for value in values if values[0] and value > 0]
    return list(range(1, len(shares) + 1)), shares


def _shortened(name: str) -> str:
    """Return the end of a long name, which tells fields apart better than its beginning."""
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _quieten(axes: "Axes") -> None:
    """Remove from a plot what is not needed to read it."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
