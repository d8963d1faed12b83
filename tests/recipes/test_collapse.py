"""The recipes of recipes/collapse at small sizes: their formulas are right, and their files hold the figures."""

import dataclasses
import doctest
import importlib.util
import json
import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest
import torch
from capabilities import needs_package

import rarebit as rb
from rarebit.interactions.cross import CrossNetwork
from rarebit.models import build_model

pytestmark = needs_package("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "collapse"
NAMES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
TINY = ["--rows", "1500", "--epochs", "1", "--batch-size", "256", "--seeds", "2"]


def load(name):
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(FOLDER))  # where a script finds its neighbours
recipes = {name: load(name) for name in NAMES}
common, matrix = sys.modules.pop("_common"), sys.modules.pop("_matrix")
sys.path.remove(str(FOLDER))

toy, regularised, patterns = (recipes[name] for name in ("toy", "regularised", "patterns"))


@pytest.fixture
def ran(tmp_path, capsys):
    """Run a recipe; return its report, what it printed, and what its JSON file holds."""

    def run(name, *arguments):
        report = recipes[name].main([*arguments, "--out", str(tmp_path)])
        text = (tmp_path / f"{name}.json").read_text("utf-8")
        stored = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert stored["machine"]["torch"] == torch.__version__
        assert "commit" in stored["machine"]
        assert stored["options"]["seeds"] == report["options"]["seeds"]
        return stored, capsys.readouterr().out

    return run


def rows_of(model, field):
    """Return the rows of a field's table, without padding."""
    names = [field.name for field in model.backbone.tables.fields]
    table = model.backbone.tables.tables()[names.index(field)]
    return table.weight.detach()[0 if table.padding_idx is None else 1 :]


@pytest.fixture
def splits():
    return rb.data.generate(rb.data.SyntheticLog(rows=600))


def test_there_is_a_recipe_for_each_piece_of_evidence():
    expected = ["ffm", "patterns", "regularised", "sub_embeddings", "toy", "width"]
    assert expected == NAMES


def test_examples_of_the_helpers():
    assert doctest.testmod(common).attempted >= 2
    assert doctest.testmod(common).failed == 0


# The toy experiment


def naive_step(first, second, third, choices, labels):
    """One step of SGD at a learning rate of 1, row of data by row of data."""
    pairs = [(a, b) for a in range(len(first)) for b in range(len(second))]
    changed = first.clone()
    for a, b in pairs:
        e1, e2, e3 = first[a], second[b], third[choices[a, b]]
        h = float(e1 @ e2 + e1 @ e3 + e2 @ e3)
        slope = 1 / (1 + 2.718281828459045**-h) - float(labels[a, b])
        changed[a] -= slope * (e2 + e3) / len(pairs)
    return changed


def test_a_step_of_the_toy_is_sgd_on_all_rows_of_a_factorization_machine():
    first, second, third = (torch.randn(n, 4, dtype=torch.float64) for n in (5, 5, 3))
    choices, labels = torch.randint(3, (5, 5)), torch.randint(2, (5, 5)).double()
    met = third[choices]
    experiment = toy.Toy(
        first=first.clone(), met=second + met, rest=(second * met).sum(-1), label=labels
    )
    for _ in range(3):
        first = naive_step(first, second, third, choices, labels)
        experiment.step()
    torch.testing.assert_close(experiment.first, first)


def test_the_toy_draws_tables_as_the_paper_says():
    few, many = (toy.Toy.draw(size, values=100, dim=20, seed=1) for size in (3, 100))
    assert torch.equal(few.first, many.first)
    assert torch.equal(few.label, many.label)
    assert set(few.label.unique().tolist()) == {0.0, 1.0}
    assert few.first.std() == pytest.approx(1, abs=0.1)
    # e_2 + e_3 of one value of field 2: as many different vectors as field 3 has values
    assert len(few.met[:, 0].unique(dim=0)) == 3
    assert 50 < len(many.met[:, 0].unique(dim=0)) <= 100


@pytest.mark.slow
def test_a_table_beside_three_values_collapses_and_beside_many_does_not(ran):
    sizes = ["--values", "50", "--dim", "10", "--iterations", "2000", "--seeds", "4"]
    stored, printed = ran("toy", *sizes, "--sizes", "3,50")
    few, many = (stored["abundance"][size] for size in ("3", "50"))
    assert few[0] == many[0]
    assert stored["iterations"][0] == 0
    assert stored["iterations"][-1] == 2000
    assert statistics.fmean(few[-1]) < 0.85 * statistics.fmean(many[-1])
    assert "IA(E1), D3 = 3" in printed


# Evidence I and II


def test_a_matrix_rises_with_what_it_is_made_of():
    own, met = [1.0, 2.0, 4.0], [1.0, 3.0, 5.0, 9.0]
    abundance = [[i * j for j in met] for i in own]
    abundance[1][2] = None
    rising = matrix.Matrix(
        fields=["a", "b", "c"], others=["n", "a", "b", "c"], own=own, met=met, abundance=abundance
    )
    assert rising.rise_along_fields() == pytest.approx(1)
    assert rising.rise_along_others() == pytest.approx(1)
    assert rising.field_means == pytest.approx([4.5, 2 * 13 / 3, 18])
    assert rising.other_means == pytest.approx([7 / 3, 7, 12.5, 21])
    falling = dataclasses.replace(rising, met=[-value for value in met])
    assert falling.rise_along_others() == pytest.approx(-1)
    assert falling.rise_along_fields() == pytest.approx(1)
    falling = dataclasses.replace(rising, own=[-value for value in own])
    assert falling.rise_along_others() == pytest.approx(1)
    assert falling.rise_along_fields() == pytest.approx(-1)


def test_the_mean_of_matrices_goes_by_name():
    first = matrix.Matrix(
        fields=["a", "b"],
        others=["a", "b"],
        own=[1, 2],
        met=[1, 2],
        abundance=[[None, 5], [7, None]],
    )
    second = matrix.Matrix(
        fields=["b", "a"],
        others=["b", "a"],
        own=[4, 9],
        met=[4, 9],
        abundance=[[None, 9], [15, None]],
    )
    middle = matrix.mean_of([first, second])
    assert (middle.fields, middle.own) == (["b", "a"], [3, 5])
    assert (middle.others, middle.met) == (["b", "a"], [3, 5])
    assert middle.abundance == [[None, 8], [10, None]]


@pytest.mark.parametrize("name", ["ffm", "dcn_v2"])
def test_the_matrix_is_that_of_the_sub_embeddings(name, splits):
    model = build_model(name, splits.train.schema, {"dim": 4})
    found = matrix.look_at(model)
    names = [field.name for field in splits.train.schema.table_fields]
    others = [*names, *(field.name for field in splits.train.schema.numeric_fields)]
    assert found.own == sorted(found.own)
    assert found.met[:2] == [1, 1]
    assert set(found.others[:2]) == {"price", "age"}
    i, j = "tags", "user"
    weight = rows_of(model, i)
    if name == "ffm":
        part = weight.unflatten(1, (len(others), 4))[:, others.index(j)]
    else:
        at_i, at_j = 4 * others.index(i), 4 * others.index(j)
        part = weight @ model.backbone.interaction.weight[0, at_j : at_j + 4, at_i : at_i + 4].T
    value = found.abundance[found.fields.index(i)][found.others.index(j)]
    assert value == pytest.approx(rb.information_abundance(part.detach()))


def test_ffm_runs(ran):
    stored, printed = ran("ffm", *TINY, "--dim", "3")
    fields = stored["matrix"]["fields"]
    assert set(stored["fm_abundance"]) == set(fields)
    assert len(stored["matrix"]["abundance"]) == len(fields) == 8
    assert all(1 <= value <= 3 for value in stored["fm_abundance"].values())
    assert len(stored["rise_along_others"]) == len(stored["auc"]) == len(stored["fm_auc"]) == 2
    assert stored["best_epoch"] == stored["fm_best_epoch"] == [1, 1]
    assert "FM" in printed


def test_sub_embeddings_run(ran):
    stored, printed = ran("sub_embeddings", *TINY, "--dim", "4")
    assert len(stored["matrix"]["others"]) == len(stored["other_means"]) == 10
    values = [value for row in stored["matrix"]["abundance"] for value in row]
    assert all(1 <= value <= 4 for value in values)
    assert stored["best_epoch"] == [1, 1]
    assert "untrained" in printed


# Evidence III


def naive_penalty(weight, num_fields, level):
    total, dim = 0.0, weight.shape[-1] // num_fields
    for layer in range(len(weight)):
        for j in range(num_fields):
            for i in range(num_fields):
                block = weight[layer, j * dim : (j + 1) * dim, i * dim : (i + 1) * dim]
                wanted = level[layer, j, i] * torch.eye(dim, dtype=weight.dtype)
                total += float((block.T @ block - wanted).square().sum())
    return total


def test_the_penalty_equals_the_loop_over_layers_and_pairs():
    cross = CrossNetwork(num_fields=3, dim=4, num_layers=2).double()
    weight, level = cross.weight.detach(), torch.rand(2, 3, 3, dtype=torch.float64)
    found = regularised.distance_to_rotations(common.blocks_of(weight, 3), level)
    assert float(found) == pytest.approx(naive_penalty(weight, 3, level))


def test_the_paper_penalty_starts_where_it_is_least():
    cross = CrossNetwork(num_fields=3, dim=4, num_layers=2)
    penalty = regularised.regularise_(cross, 3, "paper")
    penalty().backward()
    torch.testing.assert_close(cross.level.grad, torch.zeros(2, 3, 3), atol=1e-5, rtol=0)
    assert cross.weight.grad.abs().max() > 0
    assert "level" in dict(cross.named_parameters())
    with torch.no_grad():
        before = float(penalty())
        cross.level[1, 2, 0] += 0.5
        assert float(penalty()) == pytest.approx(before + 4 * 0.25)


def test_multiples_of_rotations_cost_nothing():
    rotations = [torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q for _ in range(4)]
    weight = torch.cat([torch.cat(rotations[:2], 1), torch.cat(rotations[2:], 1)]).unsqueeze(0)
    blocks = common.blocks_of(3 * weight, 2)
    best = regularised.mean_square(blocks)
    torch.testing.assert_close(best, torch.full((1, 2, 2), 9.0, dtype=torch.float64))
    assert float(regularised.distance_to_rotations(blocks, best)) == pytest.approx(0, abs=1e-20)
    assert float(regularised.distance_to_rotations(blocks)) > 1000


def test_the_released_penalty_is_on_the_weights_before_their_scale():
    cross = CrossNetwork(num_fields=3, dim=4, num_layers=2)
    plain = cross.weight.detach().clone()
    rows = torch.randn(5, 3, 4)
    before = cross(rows)
    penalty = regularised.regularise_(cross, 3, "released")
    torch.testing.assert_close(cross(rows), before)
    expected = naive_penalty(plain, 3, torch.ones(2, 3, 3))
    assert float(penalty().detach()) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        cross.parametrizations.weight[0].scale[1, 2, 0] = 5.0
    scaled = plain.clone()
    scaled[1, 8:12, 0:4] *= 5
    torch.testing.assert_close(cross.weight.detach(), scaled)
    assert float(penalty().detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_strong_penalty_makes_rotations_and_stays_out_of_the_loss(ran):
    stored, _ = ran(
        "regularised", *TINY, "--widths", "4", "--weight", "0.1", "--epochs", "4", "--lr", "0.01"
    )
    uneven, losses = (
        {
            kind: [run[name] for run in stored["runs"] if run["kind"] == kind]
            for kind in regularised.KINDS
        }
        for name in ("distance_to_rotations", "train_loss")
    )
    assert max(uneven["paper"]) < 0.8 * min(uneven["plain"])
    assert max(uneven["released"]) < 0.8 * min(uneven["plain"])
    # the penalty is of several hundred blocks, the loss of a coin flip is 0.69
    assert max(loss for of_kind in losses.values() for run in of_kind for loss in run) < 1.5


# Evidence IV and patterns


@pytest.mark.slow
def test_width_runs(ran):
    stored, printed = ran("width", *TINY, "--widths", "2,4")
    assert [(run["model"], run["width"], run["seed"]) for run in stored["runs"]] == [
        (model, width, seed) for width in (2, 4) for model in ("dnn", "dcn_v2") for seed in (0, 1)
    ]
    for run in stored["runs"]:
        own = run["abundance"].values()
        assert run["mean_abundance"] == pytest.approx(sum(own) / len(own), rel=1e-5)
        assert max(own) <= run["width"]
    first, second = (run["auc"] for run in stored["runs"][-2:])
    assert stored["variants"]["dcn_v2-4"]["auc"] == [first, second]
    assert stored["variants"]["dcn_v2-2"]["gain"] == [0, 0]
    assert "over width 2" in printed


def test_gains_are_pairs_of_a_seed():
    runs = [
        {"model": "dnn", "width": width, "seed": seed, "auc": auc}
        for (width, seed), auc in {(2, 0): 0.5, (2, 1): 0.6, (4, 0): 0.7, (4, 1): 0.9}.items()
    ]
    assert recipes["width"].gains(runs, "dnn", 4, 2) == pytest.approx([0.2, 0.3])


def test_abundances_are_of_tables_and_of_sets(splits):
    model = build_model("dcn_v2", splits.train.schema, {"dim": 4, "num_sets": 3, "hidden": [8]})
    whole, by_set = common.abundances(model), common.set_abundances(model)
    assert list(whole) == [field.name for field in splits.train.schema.table_fields]
    for field in ("user", "tags"):  # without padding, and with it
        weight = rows_of(model, field)
        assert whole[field] == pytest.approx(rb.information_abundance(weight))
        expected = [rb.information_abundance(weight[:, at : at + 4]) for at in (0, 4, 8)]
        assert by_set[field] == pytest.approx(expected)
    single = build_model(
        "fm", splits.train.schema, {"dim": 4}
    )  # its first-order part has tables, too
    own = common.abundances(single)
    assert list(own) == list(whole)
    assert [value for (value,) in common.set_abundances(single).values()] == pytest.approx(
        list(own.values())
    )


def test_a_weighted_mean_counts_rows(splits):
    rows = {field.name: field.rows for field in splits.train.schema.table_fields}
    given = {"user": 2.0, "device": 8.0}
    expected = (2 * rows["user"] + 8 * rows["device"]) / (rows["user"] + rows["device"])
    assert common.weighted_mean(given, splits) == pytest.approx(expected)


@pytest.mark.parametrize("num_sets", [None, 3])
def test_patterns_equal_the_loop_over_sets_and_pairs(num_sets, splits):
    settings = {"num_sets": 3, "dim": 2} if num_sets else {"dim": 6}
    schema = splits.train.schema
    model = build_model("dcn_v2", schema, {**settings, "num_layers": 2, "hidden": [8]})
    (cross,) = (part for part in model.modules() if isinstance(part, CrossNetwork))
    found = patterns.patterns_of(model, 3)
    assert found.shape == (3, 2, 10, 10)
    for m, layer, i, j in ((0, 0, 0, 1), (2, 1, 7, 3), (1, 0, 4, 4), (1, 1, 9, 0)):
        if num_sets:
            block = cross.weight.detach()[m, layer, 2 * j : 2 * j + 2, 2 * i : 2 * i + 2]
        else:
            at_j, at_i = 6 * j + 2 * m, 6 * i + 2 * m
            block = cross.weight.detach()[layer, at_j : at_j + 2, at_i : at_i + 2]
        expected = sum(float(value) ** 2 for value in block.flatten()) ** 0.5
        assert float(found[m, layer, i, j]) == pytest.approx(expected)


def test_how_patterns_differ():
    norms = torch.rand(3, 2, 4, 4, dtype=torch.float64) + 0.5
    pairs = [
        norms[:, layer, i, j].square().tolist()
        for layer in range(2)
        for i in range(4)
        for j in range(4)
    ]
    spreads = [statistics.variance(pair) for pair in pairs]
    relative = [
        spread / statistics.fmean(pair) ** 2 for spread, pair in zip(spreads, pairs, strict=True)
    ]
    assert patterns.variance(norms) == pytest.approx(statistics.fmean(spreads))
    assert patterns.variation(norms) == pytest.approx(statistics.fmean(relative))
    assert patterns.variation(7 * norms) == pytest.approx(patterns.variation(norms))
    lines = norms[:, 0].flatten(1).tolist()
    expected = [statistics.correlation(lines[a], lines[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    assert patterns.likeness(norms[:, 0]) == pytest.approx(statistics.fmean(expected))
    same = norms[:1].expand(3, -1, -1, -1)
    assert patterns.variance(same) == pytest.approx(0)
    assert patterns.likeness(same[:, 0]) == pytest.approx(1)


@pytest.mark.slow
def test_patterns_run(ran):
    stored, printed = ran("patterns", *TINY, "--sets", "2", "--dim", "2")
    assert [(run["side"], run["seed"]) for run in stored["runs"]] == [
        (side, seed) for side in ("multi", "single") for seed in (0, 1)
    ]
    assert len(stored["fields"]) == 10
    for run in stored["runs"]:
        assert torch.tensor(run["patterns"]).shape == (2, 10, 10)
        for name in ("variance", "relative_variance", "likeness"):
            assert run[name] != run[f"untrained_{name}"]
    likeness = [run["likeness"] for run in stored["runs"] if run["side"] == "single"]
    assert stored["variants"]["single"]["likeness"] == likeness
    multi, single = stored["runs"][0], stored["runs"][-1]
    assert {len(values) for values in multi["abundance_by_set"].values()} == {2}
    assert {len(values) for values in single["abundance_by_set"].values()} == {1}
    assert "likeness" in printed


# Files


def test_the_numbers_are_written_without_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    small = ["--values", "5", "--dim", "4", "--iterations", "2", "--seeds", "1"]
    report = toy.main([*small, "--out", str(tmp_path)])
    text = (tmp_path / "toy.json").read_text("utf-8")
    stored = json.loads(text)
    assert stored["iterations"] == [0, 1, 2]
    assert stored["abundance"]["3"] == [
        [float(f"{value:.6g}") for value in one] for one in report["abundance"][3]
    ]
    assert '"iterations": [ 0, 1, 2 ]' in text
    assert [path.name for path in tmp_path.iterdir()] == ["toy.json"]
    assert "no plot: drawing plots needs the package 'matplotlib" in capsys.readouterr().out


# Options


@needs_package("polars")
def test_a_prepared_log_is_read(ran, tmp_path):
    rows = "".join(f"{n % 7},{n % 5},{n * n % 3 % 2}\n" for n in range(400))
    (tmp_path / "log.csv").write_text("user,item,click\n" + rows)
    schema = rb.data.LogSchema(
        label="click", columns=(rb.data.Column(name="user"), rb.data.Column(name="item"))
    )
    rb.prepare(tmp_path / "log.csv", tmp_path / "log", schema=schema)
    stored, _ = ran("ffm", *TINY, "--dim", "2", "--data", str(tmp_path / "log"))
    assert sum(stored["log"]["rows"]) == 400
    assert stored["options"]["data"] == "log"
    assert set(stored["matrix"]["others"]) == {"user", "item"}
    assert stored["rise_along_others"] == [None, None]  # each field meets a single one


def test_a_wrong_folder_is_one_sentence(tmp_path):
    missing = tmp_path / "nothing"
    with pytest.raises(SystemExit, match=r"error: .*nothing"):
        common.start(lambda: recipes["width"].main(["--data", str(missing)]))


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        ("width", ["--seeds", "0"], "must be at least 1"),
        ("width", ["--widths", "10,0"], "must be at least 1"),
        ("patterns", ["--sets", "1"], "at least 2"),
    ],
)
def test_impossible_options_are_refused(name, words, problem, capsys):
    with pytest.raises(SystemExit):
        recipes[name].parse(words)
    assert problem in capsys.readouterr().err


PAGES = {"docs/collapse.md": (ROOT / "docs" / "collapse.md").read_text("utf-8")}
PAGES |= {name: recipe.__doc__ for name, recipe in recipes.items()}


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_understood(page):
    commands = re.findall(r"^\s*python recipes/collapse/(\w+)\.py(.*)$", PAGES[page], re.MULTILINE)
    named = {name for name, _ in commands}
    assert named == ({page} if page in recipes else set(NAMES))
    for name, words in commands:
        recipes[name].parse(shlex.split(words, comments=True))
