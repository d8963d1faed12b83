"""The matrix IA(E_i->j) of a model, and whether it rises along i and along j: evidence I and II.

The paper sums over j and over i. Here are means: a number has no table and no row, so a field with a table that
does not meet itself is met by fewer fields than a number is.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from _common import BLUE, mean, print_table, quieten, summary
from torch import nn

import rarebit as rb
from rarebit.diagnosis.rows import spearman

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Matrix", "draw_matrix", "look_at", "mean_of", "print_matrix", "to_figures"]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Information abundance of tables and of their sub-embeddings, the poorest field first."""

    fields: list[str]
    """The fields i, which have tables, by IA(E_i)."""
    others: list[str]
    """The fields j, by IA(E_j); a number has one vector for all its values, so its abundance is 1."""
    own: list[float]
    """IA(E_i)."""
    met: list[float]
    """IA(E_j)."""
    abundance: list[list[float | None]]
    """IA(E_i->j), a row for each i; None where a field would meet itself and does not."""

    @property
    def field_means(self) -> list[float]:
        """For each field i, the mean over the j it meets."""
        return [mean(_known(row)) for row in self.abundance]

    @property
    def other_means(self) -> list[float]:
        """For each field j, the mean over the i that meet it."""
        return [mean(_known(column)) for column in zip(*self.abundance, strict=True)]

    def rise_along_others(self) -> float:
        """Return Spearman's correlation of IA(E_i->j) and IA(E_j) over j, the mean over i."""
        return _mean_rise(self.abundance, self.met)

    def rise_along_fields(self) -> float:
        """Return Spearman's correlation of IA(E_i->j) and IA(E_i) over i, the mean over j."""
        return _mean_rise(list(zip(*self.abundance, strict=True)), self.own)


def look_at(model: nn.Module) -> Matrix:
    """Return the matrix of a model with sub-embeddings, of its only embedding set."""
    found = rb.diagnose(model)
    (parts,) = found.sub_embeddings
    own = {
        table.field: table.information_abundance
        for table in found.tables
        if table.name.startswith("backbone.tables.")
    }
    of_field, of_other = (
        {name: own.get(name, 1.0) for name in names} for names in (parts.fields, parts.others)
    )
    rows, columns = sorted(of_field, key=of_field.get), sorted(of_other, key=of_other.get)
    place = {name: at for at, name in enumerate(parts.others)}
    row_place = {name: at for at, name in enumerate(parts.fields)}
    return Matrix(
        fields=rows,
        others=columns,
        own=[of_field[name] for name in rows],
        met=[of_other[name] for name in columns],
        abundance=[[parts.abundance[row_place[i]][place[j]] for j in columns] for i in rows],
    )


def mean_of(matrices: Sequence[Matrix]) -> Matrix:
    """Return the mean over seeds, in the order of the mean abundances."""
    own = {i: mean([m.own[m.fields.index(i)] for m in matrices]) for i in matrices[0].fields}
    met = {j: mean([m.met[m.others.index(j)] for m in matrices]) for j in matrices[0].others}
    rows, columns = sorted(own, key=own.get), sorted(met, key=met.get)

    def cell(i: str, j: str) -> float | None:
        values = _known([m.abundance[m.fields.index(i)][m.others.index(j)] for m in matrices])
        return mean(values) if values else None

    return Matrix(
        fields=rows,
        others=columns,
        own=[own[i] for i in rows],
        met=[met[j] for j in columns],
        abundance=[[cell(i, j) for j in columns] for i in rows],
    )


def to_figures(untrained: Sequence[Matrix], trained: Sequence[Matrix]) -> dict[str, Any]:
    """Return what the plot and the table show, as plain values; matrices are means over seeds."""
    middle = mean_of(trained)
    return {
        "matrix": asdict(middle),
        "field_means": middle.field_means,
        "other_means": middle.other_means,
        "rise_along_fields": [matrix.rise_along_fields() for matrix in trained],
        "rise_along_others": [matrix.rise_along_others() for matrix in trained],
        "untrained_rise_along_fields": [matrix.rise_along_fields() for matrix in untrained],
        "untrained_rise_along_others": [matrix.rise_along_others() for matrix in untrained],
    }


def print_matrix(matrix: Matrix, figures: dict[str, Any]) -> None:
    """Print the matrix with its means, and how it rises."""
    short = [name[:8] for name in matrix.others]
    print_table(
        [
            {"IA(E_i->j), i": name, "IA(E_i)": f"{own:.1f}"}
            | {
                name: "" if value is None else f"{value:.1f}"
                for name, value in zip(short, row, strict=True)
            }
            | {"mean": f"{total:.1f}"}
            for name, own, row, total in zip(
                matrix.fields, matrix.own, matrix.abundance, matrix.field_means, strict=True
            )
        ]
        + [
            {"": "mean over i", " ": ""}
            | {name: f"{total:.1f}" for name, total in zip(short, matrix.other_means, strict=True)}
            | {"mean": ""}
        ]
    )
    rises = [
        ("with IA(E_i), along i", "rise_along_fields"),
        ("with IA(E_j), along j", "rise_along_others"),
    ]
    print_table(
        [
            {
                "Spearman of IA(E_i->j)": words,
                "trained": summary(figures[name], 2),
                "untrained": summary(figures[f"untrained_{name}"], 2),
            }
            for words, name in rises
        ]
    )


def draw_matrix(figure: "Figure", panels: "Sequence[Axes]", matrix: Matrix) -> None:
    """Draw the matrix and its two means in three panels."""
    axes, beside, below = panels
    values = [
        [float("nan") if value is None else value for value in row] for row in matrix.abundance
    ]
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(matrix.others)), matrix.others, rotation=90)
    axes.set_yticks(range(len(matrix.fields)), matrix.fields)
    axes.set_xlabel("j: the field that is met", fontsize=9)
    axes.set_ylabel("i: the field of the table", fontsize=9)
    axes.set_title(r"IA($E_i^{\to j}$)", fontsize=10)
    axes.tick_params(labelsize=8)
    figure.colorbar(image, ax=axes).ax.tick_params(labelsize=7)
    for bars, names, means, words in (
        (
            beside,
            matrix.fields,
            matrix.field_means,
            ("mean over j", "field i", "What field i keeps"),
        ),
        (
            below,
            matrix.others,
            matrix.other_means,
            ("mean over i", "field j", "What field j leaves to others"),
        ),
    ):
        bars.bar(range(len(names)), means, color=BLUE)
        bars.set_xticks(range(len(names)), names, rotation=90)
        quieten(bars, words[1], words[0], words[2])
        bars.grid(visible=False, axis="x")
        bars.set_ylim(bottom=1)  # the least there is: all rows on one line


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean_rise(lines: Sequence[Sequence[float | None]], along: Sequence[float]) -> float:
    found = []
    for line in lines:
        pairs = [(x, y) for x, y in zip(along, line, strict=True) if y is not None]
        x, y = torch.tensor(pairs, dtype=torch.float64).T
        rise = spearman(x, y)
        if rise is not None:
            found.append(rise)
    return statistics.fmean(found) if found else float("nan")
