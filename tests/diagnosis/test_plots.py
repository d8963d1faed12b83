"""The plots are images, there is one for each kind of figure, and they show what was found."""

import dataclasses
import sys

import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.diagnosis import plots
from rarebit.diagnosis.diagnose import diagnose
from rarebit.errors import MissingExtraError
from rarebit.models.dcn_v2 import DCNv2
from rarebit.study.results import CellResult, StudyResult, VariantResult
from rarebit.study.runs import RunRecord

pytest.importorskip("matplotlib", reason="capability: package matplotlib: it is not installed")

SCHEMA = rb.data.Schema(
    (
        rb.data.Field(name="user", rows=90),
        rb.data.Field(name="item", rows=40),
        rb.data.Field(name="price", kind="numeric"),
    )
)
COUNTS = {"user": torch.arange(90), "item": torch.ones(40, dtype=torch.int64)}


def test_every_kind_of_figure_has_an_image(tmp_path):
    found = diagnose(DCNv2(SCHEMA, dim=4, hidden=(4,)), counts=COUNTS)
    files = found.save(tmp_path)
    names = ["diagnosis.json", "spectra.png", "abundance.png", "norms.png", "sub_embeddings.png"]
    assert [file.name for file in files] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for file in files[1:]:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_what_is_not_known_is_not_drawn():
    found = diagnose(nn.ModuleDict({"user": nn.Embedding(90, 4)}))
    assert set(plots.draw_plots(found.tables)) == {"spectra.png", "abundance.png"}
    single = diagnose(nn.ModuleDict({"user": nn.Embedding(90, 1)}), counts={"user": COUNTS["user"]})
    assert plots.draw_plots(single.tables) == {}


def test_each_embedding_set_has_an_image_of_its_own():
    found = diagnose(DCNv2(SCHEMA, dim=4, hidden=(4,), num_sets=2))
    drawn = plots.draw_plots(found.tables, found.sub_embeddings)
    assert {"sub_embeddings_0.png", "sub_embeddings_1.png"} < set(drawn)


@pytest.mark.parametrize(
    "weight", [torch.zeros(9, 3), torch.ones(9, 3), torch.randn(1, 3), torch.full((9, 3), 1e-30)]
)
def test_odd_tables_can_be_drawn(weight):
    model = nn.ModuleDict({"x": nn.Embedding.from_pretrained(weight)})
    found = diagnose(model, counts={"x": torch.zeros(len(weight), dtype=torch.int64)})
    assert set(plots.draw_plots(found.tables)) == {"spectra.png", "abundance.png", "norms.png"}


def test_a_table_that_is_not_finite_is_left_out_of_the_sub_embeddings():
    model = DCNv2(SCHEMA, dim=4, hidden=(4,))
    with torch.no_grad():
        model.backbone.tables.tables()[0].weight[0, 0] = float("nan")
    found = diagnose(model)
    assert "sub_embeddings.png" in plots.draw_plots(found.tables, found.sub_embeddings)


def test_the_lines_of_a_product_are_the_squares_of_its_singular_values():
    model = nn.ModuleDict({"user": nn.Embedding(90, 4), "item": nn.Embedding(40, 4)})
    rb.apply_(model, rb.MLET(inner_dim=8), where=lambda t: t.name == "user", verbose=False)
    found = diagnose(model)
    assert "reweighting.png" in plots.draw_plots(found.tables)
    [axes] = plots._draw_reweighting(found.tables[:1]).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    product = model["user"]
    for label, factor in (
        ("projection", product.projection),
        ("wide factor", product.inner.weight),
    ):
        squares = torch.linalg.svdvals(factor.detach().double()).square()
        assert drawn[label] == pytest.approx(squares.tolist())
        assert axes.get_ylim()[1] > squares.max()


def test_a_product_of_zeros_can_be_drawn():
    model = nn.ModuleDict({"user": nn.Embedding(9, 4)})
    rb.apply_(model, rb.MLET(inner_dim=8), verbose=False)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert "reweighting.png" in plots.draw_plots(diagnose(model).tables)


def panels_of(num_tables):
    names = [f"field{i}" for i in range(num_tables)]
    tables = diagnose(
        nn.ModuleDict({name: nn.Embedding(9 + len(name), 2) for name in names})
    ).tables
    return plots._draw_spectra(tables)


def test_the_lines_of_a_panel_are_the_spectrum_and_a_random_one():
    found = diagnose(nn.ModuleDict({"user": nn.Embedding(90, 4)})).tables
    [axes] = plots._draw_spectra(found).axes
    random, own = (list(line.get_ydata()) for line in axes.get_lines())
    assert own == pytest.approx([value / found[0].spectrum[0] for value in found[0].spectrum])
    assert random[0] == 1
    assert sum(random) == pytest.approx(found[0].random_abundance)
    assert axes.get_title() == f"user\n90 x 4, IA {found[0].information_abundance:.1f}"


def test_the_largest_tables_are_drawn_where_there_are_too_many():
    figure = panels_of(60)
    assert len(figure.axes) == plots.MOST_PANELS
    assert figure.get_suptitle() == (
        "Singular values over the largest one: the 48 largest of 60 tables"
    )
    assert figure.axes[0].get_title().startswith("field10\n16 x 2")


def test_the_matrix_is_in_the_order_of_the_tables_abundance():
    model = DCNv2(SCHEMA, dim=4, hidden=(4,))
    with torch.no_grad():
        model.backbone.tables.tables()[0].weight[:] = torch.randn(90, 1) * torch.randn(4)
    found = diagnose(model)
    [matrix] = found.sub_embeddings
    axes = next(a for a in plots._draw_matrix(matrix, found.tables).axes if a.images)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["user", "item"]
    shown = axes.images[0].get_array()
    columns = [label.get_text() for label in axes.get_xticklabels()]
    place = columns.index("price")
    assert shown[1][place] == pytest.approx(matrix.abundance[1][2])
    assert columns.index("item") == 2


def test_a_long_name_keeps_its_end():
    assert plots._shortened("a" * 30 + "_7") == "…" + "a" * 19 + "_7"
    assert plots._shortened("user") == "user"


def test_without_matplotlib_it_is_said_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = diagnose(nn.ModuleDict({"user": nn.Embedding(90, 4)}))
    with pytest.raises(MissingExtraError, match=r"pip install 'rarebit\[plots\]'"):
        found.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [file.name for file in found.save(tmp_path, plots=False)] == ["diagnosis.json"]


# A study: AUC by the size of the tables


def variant(name, num_bytes, *aucs, control=None, **more):
    rest = {"logloss": 0.5, "rarest_auc": None, "valid_auc": 0.5, "parameters": 1, "best_epoch": 1}
    rest |= {"epochs": 1, "microseconds_a_row": 1.0, "device": "cpu", "torch": "", "commit": None}
    runs = [
        RunRecord(key=f"{seed}", seed=seed, auc=auc, table_bytes=num_bytes, **rest)
        for seed, auc in enumerate(aucs)
    ]
    given = {"name": name, "control": control, "settings": {}, "trials": (), "runs": tuple(runs)}
    return VariantResult(**(given | more))


def a_study(*cells):
    given = {"checksum": None, "ceiling": None, "rows": {}, "missing": ()}
    return StudyResult(
        plan={"minimum_effect": 0.0005},
        cells=tuple(CellResult(model=m, data=d, variants=v, **given) for m, d, v in cells),
    )


SCALING = (
    variant("baseline", 100, 0.80, 0.82),
    variant("wide:dim=100", 1000, 0.83, 0.83),
    variant("wide:dim=20", 200, 0.81, 0.83),
    variant("multi-embedding:num_sets=10", 1000, 0.9, 0.7, control="wide:dim=100"),
    variant("multi-embedding:num_sets=2", 200, 0.85, 0.86, control="wide:dim=20"),
    variant("pruned:keep=5:by=magnitude", 50, 0.75),
    variant("pruned:keep=5", 50, control="pruned:keep=5:by=magnitude"),  # no run yet
)


def test_a_study_is_drawn_by_size_with_a_line_for_each_kind_of_variant():
    figure = plots._draw_sizes(a_study(("fm", "clicks", SCALING), ("dnn", "clicks", SCALING[:2])))
    first, second = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["fm on clicks", "dnn on clicks"]
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in first.get_lines()]
    drawn = [(sizes, pytest.approx(means)) for sizes, means in lines]
    assert ([1, 2, 10], [0.81, 0.82, 0.83]) in drawn
    assert ([1, 2, 10], [0.81, 0.855, 0.8]) in drawn
    assert ([0.5, 1], [0.75, 0.81]) in drawn
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["wide", "multi-embedding", "pruned:by=magnitude"]
    styles = [line.get_linestyle() for line in legend.get_lines()]
    assert styles == ["--", "-", "--"]  # controls are dashed
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["0.5", "1", "2", "10"]
    # bars from the lowest seed to the highest: those of ten sets
    bars = [path.vertices for bar in first.collections for path in bar.get_paths()]
    assert [[10, 0.7], [10, 0.9]] in [[pytest.approx(end) for end in bar.tolist()] for bar in bars]
    assert list(second.get_lines()[0].get_xdata()) == [1, 10]


def test_a_study_without_runs_or_with_fewer_models_on_a_log_can_be_drawn():
    assert plots.draw_study(a_study(("fm", "clicks", ()))).startswith(b"\x89PNG")
    waiting = (variant("baseline", 100), *SCALING[1:])
    [axes] = plots._draw_sizes(a_study(("fm", "clicks", waiting))).axes
    assert not axes.get_lines()
    uneven = a_study(("fm", "a", SCALING), ("dnn", "a", SCALING[:1]), ("fm", "b", SCALING))
    assert [axes.get_title() for axes in plots._draw_sizes(uneven).axes] == [
        "fm on a",
        "dnn on a",
        "fm on b",
    ]


def test_what_was_cut_off_or_at_an_edge_is_hollow():
    cut = {"settings": {"training": {"epochs": 2}}}
    last = tuple(dataclasses.replace(run, best_epoch=2, epochs=2) for run in SCALING[1].runs)
    variants = (
        SCALING[0],
        variant("wide:dim=100", 1000, runs=last, **cut),
        variant("wide:dim=20", 200, 0.81, 0.83, **cut),  # best in its first epoch of two
        variant("wide:dim=40", 400, 0.8, 0.8, edge=("lr",)),
    )
    [axes] = plots._draw_sizes(a_study(("fm", "clicks", variants))).axes
    hollow = [line for line in axes.get_lines() if line.get_markerfacecolor() == "white"]
    drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in hollow]
    assert drawn == [([4, 10], pytest.approx([0.8, 0.83]))]
