"""Plots of what pruning kept, as PNG images: during training, by frequency, by table, and between fields."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rarebit.diagnosis.plots import QUIET, _as_png, _new_figure, _or_nan, _quieten, _shortened
from rarebit.pruning._insight import (
    FieldInteractions,
    FrequencyGroup,
    Matrix,
    PruningInsight,
    TableWidths,
    TicketInsight,
    Widths,
)
from rarebit.tables.table import field_of
from rarebit.text import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 6
"""Heat maps in one image, the largest tickets first."""
MOST_TABLES = 48
"""Tables in one image, the largest first."""
MOST_LARGE_LABELS = 16
"""Fields of a matrix with labels in large print."""
NEVER_SEEN, EMPTY = "#9a9a9a", "#dddddd"


def draw_insight(insight: PruningInsight) -> dict[str, bytes]:
    """Return the plots as PNG images by file name; those without data are left out."""
    if not insight.groups:  # tables without rows
        return {}
    figures: dict[str, Figure] = {}
    if insight.scans:
        figures["kept_by_frequency.png"] = _draw_scans(insight)
    if insight.tickets:
        figures["rows_by_frequency.png"] = _draw_heat_maps(insight)
    for number, ticket in enumerate(insight.tickets):
        name = "widths.png" if len(insight.tickets) == 1 else f"widths_{number}.png"
        figures[name] = _draw_widths(ticket)
    if insight.interactions is not None and len(insight.interactions.tables) > 1:
        figures["interactions.png"] = _draw_interactions(insight.interactions)
    return {name: _as_png(figure) for name, figure in figures.items()}


def _draw_scans(insight: PruningInsight) -> "Figure":
    figure = _new_figure(8.6, 4.6)
    axes = figure.subplots()
    scans = sorted(insight.scans, key=lambda scan: scan.step)
    steps = [scan.step for scan in scans]
    never = sum(not group.most for group in insight.groups)
    colors = [NEVER_SEEN] * never + _shades(len(insight.groups) - never)
    for number, group in reversed(list(enumerate(insight.groups))):
        axes.plot(
            steps,
            [scan.by_frequency[number] for scan in scans],
            color=colors[number],
            linestyle="-" if group.most else "--",
            linewidth=1.6,
            marker="o" if len(scans) == 1 else None,
            label=_times_seen(group),
        )
    axes.set_ylim(-0.02, 1.04)
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    for ticket in insight.tickets:
        step = ticket.facts.get("step")
        if isinstance(step, int) and steps[0] <= step <= steps[-1]:
            axes.axvline(step, color=QUIET, linewidth=0.8, linestyle=":")
            label = f"{ticket.kept:,} entries  "
            axes.text(step, 1.03, label, rotation=90, va="top", ha="right", fontsize=7, color=QUIET)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("share of the entries kept", fontsize=9)
    axes.set_title("Share of entries left, by how often training saw the row", fontsize=12)
    axes.tick_params(labelsize=8)
    _quieten(axes)
    figure.legend(
        loc="outside right center", title="times seen", fontsize=8, title_fontsize=8, frameon=False
    )
    return figure


def _draw_heat_maps(insight: PruningInsight) -> "Figure":
    tickets = insight.tickets[:MOST_PANELS]
    columns = min(len(tickets), 3)
    lines = math.ceil(len(tickets) / columns)
    figure = _new_figure(max(3.4 * columns + 1.8, 6.5), 3.6 * lines + 0.8)
    from matplotlib.colors import PowerNorm  # after `_new_figure`, which reports that it is missing

    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for axes, ticket in zip(panels, tickets, strict=False):
        found = ticket.heat_map
        cells = [list(line) for line in zip(*found.shares, strict=True)]  # (bins, groups)
        norm = PowerNorm(0.5, vmin=0, vmax=1)  # shows shares of a few percent
        image = axes.imshow(cells, aspect="auto", origin="lower", cmap="Blues", norm=norm)
        axes.set_title(f"{ticket.kept:,} entries, {_kept_share(ticket)}", fontsize=9)
        axes.set_xticks(range(len(insight.groups)), [_times_seen(g) for g in insight.groups])
        axes.tick_params(axis="x", rotation=90, labelsize=7)
        axes.set_yticks(range(len(found.bins)), [_range(*edges) for edges in found.bins])
        axes.tick_params(axis="y", labelsize=7)
    for axes in panels[len(tickets) :]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=panels, fraction=0.03, pad=0.02)
    bar.set_label("share of the rows of the group", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.supylabel("entries kept per row", fontsize=9)
    figure.supxlabel(
        "times seen in training: never, then a tenth of all other rows each", fontsize=9
    )
    title = "Entries kept per row, by how often training saw the row"
    if len(insight.tickets) > len(tickets):
        title += f": the {len(tickets)} largest of {len(insight.tickets)} tickets"
    figure.suptitle(title, fontsize=12)
    return figure


def _draw_widths(ticket: TicketInsight) -> "Figure":
    """Draw one bar per table, divided by how many entries its rows keep; the largest table first."""
    tables = sorted(ticket.tables, key=lambda table: -table.rows)[:MOST_TABLES]
    figure = _new_figure(10.0, 0.3 * len(tables) + 1.8)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, title, found in (
        (left, "of its rows", [table.by_row for table in tables]),
        (right, "of what training looked up", [table.by_lookup for table in tables]),
    ):
        _draw_bars(axes, tables, found)
        axes.set_xlabel(f"share {title}", fontsize=9)
    names = _short([table.name for table in tables])
    sizes = [f"{table.rows:,} x {table.width}" for table in tables]
    labels = [f"{_shortened(name)}  {size}" for name, size in zip(names, sizes, strict=True)]
    left.set_yticks(range(len(tables)), labels, fontsize=8)
    left.invert_yaxis()
    handles, legend = left.get_legend_handles_labels()
    figure.legend(
        handles,
        legend,
        loc="outside lower center",
        ncols=len(legend),
        fontsize=8,
        frameon=False,
        title="entries kept per row",
        title_fontsize=8,
    )
    more = "" if len(tables) == len(ticket.tables) else f", the {len(tables)} largest tables"
    figure.suptitle(
        f"Learned widths: {ticket.kept:,} of {ticket.entries:,} entries, {_kept_share(ticket)}{more}",
        fontsize=12,
    )
    return figure


def _draw_bars(axes: "Axes", tables: Sequence[TableWidths], found: Sequence[Widths | None]) -> None:
    widest = max(table.width for table in tables)
    # 0, 1, 2-3, 4-7, ...: the step from 1 to 2 entries matters more than that from 31 to 32
    starts = [1 << n for n in range(max((widest - 1).bit_length(), 1))]
    edges = [(0, 0), *((least, 2 * least - 1) for least in starts[:-1]), (starts[-1], widest)]
    ends = [0.0] * len(found)
    for (least, most), color in zip(edges, [EMPTY, *_shades(len(edges) - 1)], strict=True):
        shares = [
            sum(w.histogram[least : most + 1]) / max(sum(w.histogram), 1) if w else 0.0
            for w in found
        ]
        label = _range(least, most)
        axes.barh(range(len(found)), shares, left=ends, height=0.72, color=color, label=label)
        ends = [end + share for end, share in zip(ends, shares, strict=True)]
    for place, widths in enumerate(found):
        mean = "never seen" if widths is None else f"{widths.mean:.1f}"
        axes.text(1.015, place, mean, va="center", fontsize=7, color=QUIET)
    axes.text(1.015, -0.72, "mean", va="bottom", fontsize=7, color=QUIET)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    _quieten(axes)
    axes.grid(visible=False, axis="y")


def _draw_interactions(found: FieldInteractions) -> "Figure":
    """Draw both matrices over their largest values, and their difference."""
    names = [_shortened(name) for name in _short(found.tables)]
    before, after = _between_fields(found.before), _between_fields(found.after)
    change = [
        [b - a for a, b in zip(*lines, strict=True)] for lines in zip(before, after, strict=True)
    ]
    most = max((abs(x) for line in change for x in line if not math.isnan(x)), default=0.0) or 1.0
    side = min(max(0.34 * len(names), 2.8), 6.0)
    figure = _new_figure(3 * side + 3.2, side + 1.6)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, title, cells, colors, lowest in (
        (panels[0], "before pruning", before, "Blues", 0.0),
        (panels[1], "after pruning and retraining", after, "Blues", 0.0),
        (panels[2], "after minus before", change, "RdBu_r", -most),
    ):
        axes.set_facecolor(EMPTY)
        highest = most if lowest else 1.0
        image = axes.imshow(cells, cmap=colors, vmin=lowest, vmax=highest)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(labelsize=8 if len(names) <= MOST_LARGE_LABELS else 6)
        axes.tick_params(axis="x", rotation=90)
        if axes is not panels[0]:  # the first two share a scale
            bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
            bar.ax.tick_params(labelsize=7)
    some = "" if found.exact else f"; a sample of {sum(found.rows):,} rows"
    figure.suptitle(
        "Interaction of fields: mean |inner product| of their rows, over the largest" + some,
        fontsize=11,
    )
    return figure


def _between_fields(matrix: Matrix) -> list[list[float]]:
    """Return a matrix over its largest value, without its diagonal: squared norms are much larger."""
    cells = [
        [math.nan if i == j else _or_nan(value) for j, value in enumerate(line)]
        for i, line in enumerate(matrix)
    ]
    largest = max((x for line in cells for x in line if not math.isnan(x)), default=0.0)
    return [[value / (largest or 1.0) for value in line] for line in cells]


def _shades(number: int) -> list[str]:
    """Return colors from light to dark."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis_r"]((n + 0.5) / number)) for n in range(number)]


def _times_seen(group: FrequencyGroup) -> str:
    return _range(group.least, group.most) if group.most else "never"


def _range(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,}-{most:,}"


def _kept_share(ticket: TicketInsight) -> str:
    return f"{percent(ticket.kept / ticket.entries)} kept"


def _short(names: Sequence[str]) -> list[str]:
    """Return the last part of each name, or the whole where two end alike."""
    ends = [field_of(name) for name in names]
    times = Counter(ends)
    return [end if times[end] == 1 else name for end, name in zip(ends, names, strict=True)]
