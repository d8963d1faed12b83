"""The plots of an insight are images, one for each kind of figure, and they show what was found."""

import math
import sys

import pytest
import torch
from capabilities import slow_after
from torch import nn

from rarebit.errors import MissingExtraError
from rarebit.pruning import _plots as plots
from rarebit.pruning._insight import pruning_insight, write_insight
from rarebit.pruning.masked import Ticket

pytest.importorskip("matplotlib", reason="capability: package matplotlib: it is not installed")

COUNTS = {"user": torch.arange(40), "item": torch.arange(9) * 2}
GROUPS = 11


def ticket_of(share, **facts):
    kept = {name: torch.rand(len(count), 8) < share for name, count in COUNTS.items()}
    return Ticket(kept, facts=facts)


def insight_of(*shares, scans=2, models=True):
    before, after = (
        nn.ModuleDict({name: nn.Embedding(len(count), 8) for name, count in COUNTS.items()})
        for _ in range(2)
    )
    return pruning_insight(
        [ticket_of(share, step=5) for share in shares],
        COUNTS,
        scans=[
            {"step": 5 * n, "kept": 9, "by_frequency": torch.rand(GROUPS).tolist()}
            for n in reversed(range(scans))
        ],
        before=before if models else None,
        after=after if models else None,
    )


@pytest.mark.slow
def test_every_kind_of_figure_has_an_image(tmp_path):
    files = write_insight(insight_of(0.5, 0.1), tmp_path)
    names = [
        "insight.json",
        "kept_by_frequency.png",
        "rows_by_frequency.png",
        "widths_0.png",
        "widths_1.png",
        "interactions.png",
    ]
    assert [file.name for file in files] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for file in files[1:]:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_what_is_not_known_is_not_drawn():
    drawn = plots.draw_insight(insight_of(0.5, scans=0, models=False))
    assert set(drawn) == {"rows_by_frequency.png", "widths.png"}
    without_rows = Ticket({"x": torch.zeros(0, 3).bool()})
    empty = pruning_insight([without_rows], {"x": torch.zeros(0).long()})
    assert plots.draw_insight(empty) == {}


def test_the_lines_are_the_scans_in_the_order_of_steps():
    insight = insight_of(0.5, scans=3)
    [axes] = plots._draw_scans(insight).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["never"].get_xdata()) == [0, 5, 10]
    for number, group in enumerate(insight.groups):
        label = plots._times_seen(group)
        drawn = list(lines[label].get_ydata())
        assert drawn == [scan.by_frequency[number] for scan in reversed(insight.scans)]
    [ticket] = insight.tickets
    [words] = axes.texts
    assert words.get_text().strip() == f"{ticket.kept:,} entries"
    assert words.get_position()[0] == 5


def test_the_cells_are_the_shares_of_rows():
    insight = insight_of(0.5, 0.1)
    panels = [axes for axes in plots._draw_heat_maps(insight).axes if axes.images]
    for axes, ticket in zip(panels, insight.tickets, strict=True):
        shown = torch.tensor(axes.images[0].get_array())  # (bins, groups)
        assert shown.T.tolist() == [list(line) for line in ticket.heat_map.shares]
        assert axes.get_title().startswith(f"{ticket.kept:,} entries")
    labels = [label.get_text() for label in panels[0].get_xticklabels()]
    assert labels[0] == "never"
    assert len(labels) == GROUPS


def test_of_many_tickets_the_largest_are_drawn():
    figure = plots._draw_heat_maps(insight_of(*[n / 10 for n in range(1, 9)]))
    assert sum(bool(axes.images) for axes in figure.axes) == 6
    assert figure.get_suptitle().endswith("the 6 largest of 8 tickets")


def test_the_bars_of_a_table_are_the_shares_of_its_rows():
    [ticket] = insight_of(0.3).tickets
    left, right = plots._draw_widths(ticket).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["user  40 x 8", "item  9 x 8"]
    edges = {"0": (0, 1), "1": (1, 2), "2-3": (2, 4), "4-8": (4, 9)}
    for axes, kind in ((left, "by_row"), (right, "by_lookup")):
        bars = {bar.get_label(): bar for bar in axes.containers}
        assert set(bars) == set(edges)
        for place, table in enumerate(ticket.tables):
            histogram = getattr(table, kind).histogram
            for label, (start, stop) in edges.items():
                share = sum(histogram[start:stop]) / sum(histogram)
                assert bars[label][place].get_width() == pytest.approx(share)


def test_matrices_are_over_their_largest_value_between_two_fields():
    found = insight_of(0.5).interactions
    before, after, change = (
        axes.images[0].get_array().data
        for axes in plots._draw_interactions(found).axes
        if axes.images
    )
    # two fields meet in one way only, so it is the largest
    assert before[0][1] == before[1][0] == after[0][1] == 1
    assert change[0][1] == 0
    assert math.isnan(before[0][0])
    matrix = ((9.0, 1.0, 4.0), (1.0, 9.0, None), (4.0, None, 9.0))
    cells = plots._between_fields(matrix)
    assert cells[0][1:] == [0.25, 1.0]
    assert math.isnan(cells[1][2])


@pytest.mark.parametrize("width", slow_after([1, 5, 2, 3, 4, 64], quick=2))
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_odd_tickets_can_be_drawn(width, share):
    kept = {name: torch.rand(len(count), width) < share for name, count in COUNTS.items()}
    kept = {f"{part}.{name}": mask for name, mask in kept.items() for part in ("wide", "deep")}
    never = {name: torch.zeros_like(count) for name, count in COUNTS.items()}
    for counts in (COUNTS, never):
        insight = pruning_insight([Ticket(kept)], counts)
        assert set(plots.draw_insight(insight)) == {"rows_by_frequency.png", "widths.png"}
    left, _ = plots._draw_widths(insight.tickets[0]).axes
    assert left.get_yticklabels()[0].get_text().startswith("wide.user")
    ends = [sum(bar[n].get_width() for bar in left.containers) for n in range(len(kept))]
    assert ends == pytest.approx([1.0] * len(kept))


def test_a_single_scan_and_tables_of_zeros_can_be_drawn():
    zeros = nn.ModuleDict(
        {n: nn.Embedding.from_pretrained(torch.zeros(len(c), 8)) for n, c in COUNTS.items()}
    )
    scan = {"step": 0, "kept": 0, "by_frequency": [0.0] * GROUPS}
    insight = pruning_insight([ticket_of(0.0)], COUNTS, scans=[scan], before=zeros, after=zeros)
    assert len(plots.draw_insight(insight)) == 4


def test_without_matplotlib_it_is_said_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    insight = insight_of(0.5)
    with pytest.raises(MissingExtraError, match=r"pip install 'rarebit\[plots\]'"):
        write_insight(insight, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [file.name for file in write_insight(insight, tmp_path, plots=False)] == ["insight.json"]
