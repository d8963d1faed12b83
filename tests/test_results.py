"""The figures in the README are those of the stored results."""

import json
import math
import re
from pathlib import Path

import pytest

from rarebit.models import model_names
from rarebit.study.results import comparison_table, read_result, side_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def stored(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text("utf-8"))


CEILING, BENCH, ROWS = stored("ceiling"), stored("bench-train"), stored("bench-rows")
GPU, LARGE = stored("gpu"), stored("large-table")
PEERS, AUC = stored("peers"), stored("peers-auc")
KILLS, CHECKPOINT = stored("kills"), stored("bench-checkpoint")


@pytest.mark.parametrize("result", CEILING["results"], ids=lambda result: result["model"])
def test_the_table_of_models_is_that_of_the_result(result):
    row = re.search(rf"^\| `{result['model']}` \|.*$", README, flags=re.MULTILINE)[0]
    expected = [
        f"{result['auc']:.4f} ± {result['auc_spread']:.4f}",
        f"{result['gap']:.4f}",
        f"{result['rarest_auc']:.4f}",
        f"{result['rarest_gap']:.4f}",
    ]
    assert [cell.strip() for cell in row.split("|")][-5:-1] == expected


def cells_after(words):
    """Return the numbers in the row of a table that starts with these words."""
    row = re.search(rf"^\| {re.escape(words)} \|.*$", README, flags=re.MULTILINE)[0]
    return [cell.strip() for cell in row.split("|")][2:-1]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("the same model written by hand", "ratio"),
        ("the same with its batches sliced and its Adam fused", "ratio_tuned"),
        ("with dense Adam on our side, too: by hand", "ratio_dense"),
        ("with dense Adam on our side, too: sliced and fused", "ratio_tuned_dense"),
    ],
)
def test_the_ratios_of_a_step_are_those_of_the_result(words, key):
    assert cells_after(words) == [f"{BENCH[key]:.1f}", f"{BENCH[f'{key}_4096']:.1f}"]


def test_the_figures_of_large_tables_are_those_of_the_results():
    assert f"in {LARGE['peak_bytes'] / 2**30:.1f} GiB" in README
    rows, large = ROWS["ratio_of"], f"{ROWS['ratio']:.1f} times as long"
    assert "5,000,000" in rows
    assert large in README


def test_the_figures_beside_other_libraries_are_those_of_the_result():
    ours = PEERS["samples_per_second"]["ours, bfloat16 rowwise compiled"]
    assert f"{round(ours, -3):,.0f} samples a second" in README
    assert f"{PEERS['ratio_fuxictr']:.1f} times FuxiCTR's own" in README
    assert f"{PEERS['ratio_deepctr']:.1f} times DeepCTR-Torch's" in README
    difference = AUC["differences"]["ours, float32 dense"]["mean"]
    assert f"differs by {abs(difference):.4f} from" in README
    assert "lazy Adam" in README[README.index("Through `fit`") : README.index("FuxiCTR's own")]


def test_the_figures_of_a_gpu_are_those_of_the_result():
    first = GPU["results"][0]
    assert (first["model"], first["batch_size"], first["optimizer"]) == (
        "dcn_v2",
        8192,
        "dense Adam",
    )
    assert f"{first['samples_per_second'] / 1e6:.1f} million samples a second" in README


def test_the_figures_of_checkpoints_are_those_of_the_results():
    words = " ".join(README.split())
    assert f"{KILLS['kills']} kills of a run" in words
    assert f"{KILLS['inside_a_write']} of them inside the writing" in words
    assert KILLS["different"] == 0
    assert "left no different end" in words
    assert f"a minute of training {CHECKPOINT['ratio']:.3f} times as long" in words


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.stem
)
def test_a_result_names_its_commit_and_machine(path):
    result = stored(path.stem)
    facts = result.get("machine", result)
    assert re.fullmatch(r"[0-9a-f]{40}", facts["commit"])
    assert facts["torch"]
    assert facts["device"]


PREPARE, DATA = stored("prepare"), stored("bench-data")
MODELS_PAGE = (ROOT / "docs/models.md").read_text("utf-8")
LOGS = ("ml-1m-ids", "book-crossing", "frappe", "criteo-80k", "synthetic")


def test_the_figures_of_prepared_logs_are_those_of_the_results():
    pandas, scale = PREPARE["beside_pandas"], PREPARE["scale"]
    words = " ".join(README.split())
    assert f"{pandas['ratio']:.1f} times as fast as by a plain pandas program" in words
    assert f"in {pandas['memory_ratio']:.2f} of its memory" in words
    assert f"ten million take {scale['peak_gib']:.2f} GiB" in words
    assert f"At 300,000 rows it is {DATA['ratio']:.1f} times" in words


def points(result):
    return f"{100 * result['auc']:.2f} ± {100 * result['auc_spread']:.2f}"


def by_model(name):
    return {result["model"]: result for result in stored(f"models-{name}")["results"]}


def row_of(model, section):
    text = re.search(rf"^## {section}$(.*?)(?=^## |\Z)", MODELS_PAGE, re.MULTILINE | re.DOTALL)[1]
    [row] = re.findall(rf"^\| `{re.escape(model)}` \|.*$", text, flags=re.MULTILINE)
    return [cell.strip() for cell in row.split("|")][2:-1]


@pytest.mark.parametrize("model", list(by_model("synthetic")))
def test_the_page_of_models_has_the_results(model):
    results = [by_model(name)[model] for name in LOGS]
    assert {result["n"] for result in results} == {3}
    gap = results[-1]["ceiling"] - results[-1]["auc"]
    assert row_of(model, "How good they are") == [*map(points, results), f"{100 * gap:.2f}"]


def test_every_model_is_on_the_page():
    assert set(by_model("synthetic")) == set(model_names())


@pytest.mark.parametrize("model", ["fm@pep", "deepfm@pep", "autoint@pep"])
def test_the_models_of_a_paper_have_the_results(model):
    results = [by_model(name)[model] for name in ("ml-1m-pep", "ml-1m")]
    assert {result["n"] for result in results} == {5}
    assert row_of(model, "Beside the papers") == [points(result) for result in results]
    assert f"{100 * by_model('ml-1m-one-split')[model]['auc']:.2f}" in MODELS_PAGE


STEPS = stored("bench-models")
THEIRS = {
    result["model"]: result
    for name in ("model-peers", "model-peers-slow")
    for result in stored(name)["results"]
}


@pytest.mark.parametrize("model", model_names())
def test_the_page_of_models_has_the_speeds(model):
    step = 1.0 if model == "dnn" else STEPS[f"ratio_{model}"]
    theirs = THEIRS.get(model)
    ratios = [f"{theirs[key]:.1f}" for key in ("ratio", "ratio_dense")] if theirs else ["-", "-"]
    assert row_of(model, "How fast they are") == [f"{step:.2f}", *ratios]


STUDY = read_result(ROOT / "benchmarks/results/study-compression-ml-1m.json")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("plain tables, d = 64", "baseline"),
        ("plain tables, d = 32", "narrow:dim=32"),
        *((f"`{side.name}`", side.name) for side in STUDY.cells[0].methods),
    ],
)
def test_the_table_of_a_study_is_that_of_the_result(words, name):
    cell = STUDY.cells[0]
    [sides] = [row for row in side_table(cell).rows if row[0] == name]
    wanted = [sides[2], sides[6], "", ""]
    for row in comparison_table(cell, STUDY.minimum_effect).rows:
        if row[0] == name:
            wanted[2:] = [f"{row[2]} ({row[3]})", row[7]]
    assert cells_after(words) == wanted
    assert {side.control for side in cell.methods} == {"narrow:dim=32"}


def test_the_study_was_made_in_eight_minutes():
    machine = stored("study-compression-ml-1m")["machine"]
    assert f"19 seeds, {machine['runs_made']} runs in eight minutes on one H200" in README
    assert machine["minutes"] <= 8.1
    assert min(len(side.runs) for side in STUDY.cells[0].sides) == 19


VERDICTS = stored("verdicts")


def test_the_page_says_for_what_noise_the_rule_does_not_hold():
    page = " ".join((ROOT / "docs/studies.md").read_text("utf-8").split())
    own = [100 * case["false_helps"] for case in VERDICTS["lopsided"] if case["control"] == "own"]
    assert f"it does not: {min(own):.0f} to {max(own):.0f} % of such studies" in page


def test_the_share_of_false_verdicts_is_that_of_the_result():
    assert VERDICTS["most_false_helps"] <= 0.05
    words = f"In {VERDICTS['studies']:,} simulated studies without any effect, "
    assert f"{words}{100 * VERDICTS['most_false_helps']:.1f} % had a false" in " ".join(
        README.split()
    )


MLET_PAGE = (ROOT / "docs/studies.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("DLRM, one epoch of SGD", "study-mlet-sgd"),
        ("DeepFM, Adam", "study-mlet-adam"),
        ("DeepFM, Adam, the setting found, new seeds", "study-mlet-confirm"),
    ],
)
def test_the_page_of_studies_has_the_results_of_mlet(words, name):
    result = read_result(ROOT / f"benchmarks/results/{name}.json")
    for cell in result.cells:
        sides = {row[0]: row[2] for row in side_table(cell).rows}
        [found] = [
            row
            for row in comparison_table(cell, result.minimum_effect).rows
            if row[0].startswith("mlet")
        ]
        assert {len(side.runs) for side in cell.sides} == {5}
        figures = [sides["baseline"], sides[found[1]], sides[found[0]], f"{found[2]} ({found[3]})"]
        [mlet] = [side for side in cell.methods if side.name == found[0]]
        rare, frequent = (
            f"{cell.mean_difference(mlet, name):+.4f}"
            for name in ("rarest_pr_auc", "frequent_pr_auc")
        )
        line = " | ".join([words, cell.data, *figures, found[7], rare, frequent])
        assert f"| {line} |" in MLET_PAGE


PEP, PRUNING_PAGE = (
    read_result(ROOT / "benchmarks/results/study-pep-ml-1m.json"),
    (ROOT / "docs/pruning.md").read_text("utf-8"),
)
PRUNED = {
    "baseline": "unpruned, 264,256 entries",
    "pruned:keep=30000:by=magnitude": "30,000, cut at once by magnitude",
    "pruned:keep=30000:epochs=15": "30,000, a threshold on a schedule",
    "pep:init=-8.0+pruned:keep=30000:epochs=20": "30,000, learned thresholds",
    "pruned:keep=10000:by=magnitude": "10,000, cut at once by magnitude",
    "pruned:keep=10000:epochs=15": "10,000, a threshold on a schedule",
    "pep:init=-8.0+pruned:keep=10000:epochs=20": "10,000, learned thresholds",
}


def behind_unpruned(name):
    sides = {side.name: {run.seed: run.auc for run in side.runs} for side in PEP.cells[0].sides}
    baseline = sides["baseline"]
    return sum(auc - baseline[seed] for seed, auc in sides[name].items()) / len(baseline)


@pytest.mark.parametrize("name", PRUNED)
def test_the_page_of_pruning_has_the_results_of_the_study(name):
    [cell] = PEP.cells
    shown = {row[0]: row for row in side_table(cell).rows}[name]
    judged = {row[0]: row for row in comparison_table(cell, PEP.minimum_effect).rows}.get(name)
    behind = "" if name == "baseline" else f"{behind_unpruned(name):+.4f} "
    against = f"{judged[2]} ({judged[3]}) | {judged[7]} |" if judged else "| |"
    assert f"| {PRUNED[name]} | {shown[6]} | {shown[2]} | {behind}| {against}" in PRUNING_PAGE
    assert {len(side.runs) for side in cell.sides} == {5}


def test_the_figures_of_pruning_in_the_readme_are_those_of_the_study():
    at_once, scheduled, learned = (name for name in PRUNED if "10000" in name)
    size = {row[0]: row[6] for row in side_table(PEP.cells[0]).rows}
    assert (
        f"loses {-behind_unpruned(learned):.4f} of its AUC at 10,000 entries in {size[learned]} with learned "
        f"thresholds, {-behind_unpruned(scheduled):.4f} with a threshold on a schedule, and "
        f"{-behind_unpruned(at_once):.4f} where the smallest entries are cut at once (five seeds"
    ) in " ".join(README.split())


PROTOCOL, GPU_PEP = stored("pep-protocol"), stored("gpu-pep")


@pytest.mark.parametrize("row", PROTOCOL["results"], ids=lambda row: row["side"])
def test_the_page_of_pruning_has_both_protocols(row):
    name = row["side"] if row["side"] == "unpruned" else f"{int(row['side']):,}"
    paper, ours = (
        f"{row[f'{way}_auc']:.4f} ± {row[f'{way}_spread']:.4f}" for way in ("paper", "ours")
    )
    assert f"| {name} | {paper} | {ours} |" in PRUNING_PAGE


def test_the_page_of_pruning_says_how_long_learned_thresholds_take():
    epochs = {
        name: {math.ceil(seed[name]) for seed in PROTOCOL["learned_epochs"]}
        for name in ("30000", "10000")
    }
    assert epochs == {"30000": {13}, "10000": {15}}
    assert "30,000 entries in the 13th epoch of pruning and 10,000 in the 15th" in PRUNING_PAGE


def test_the_page_of_pruning_has_the_time_of_a_step_on_a_gpu():
    words = " ".join(PRUNING_PAGE.split())
    found = GPU_PEP["results"]
    assert f"given threshold takes {found['scheduled']['ratio']:.2f} times" in words
    assert f"for each entry {found['learned']['ratio']:.2f} times" in words


SETS = {
    "baseline": "one set of width 10",
    "wide:dim=40": "one set of width 40",
    "shared-sets": "four sets, one interaction",
    "aligned-sets": "four sets, interactions held alike",
    "ensemble:x=4": "an ensemble of four models",
    "multi-embedding": "**four sets, an interaction each**",
}


@pytest.mark.parametrize("name", SETS)
def test_the_page_of_studies_has_the_results_of_multi_embedding(name):
    end = "-ensemble" if name == "ensemble:x=4" else ""
    result = read_result(ROOT / f"benchmarks/results/study-multi-embedding{end}.json")
    for number, cell in enumerate(result.cells):
        shown = {row[0]: row for row in side_table(cell).rows}[name]
        against = "| |"
        if name != "multi-embedding":
            other = comparison_table(result.against(name).cells[number], result.minimum_effect)
            judged = {row[0]: row for row in other.rows}["multi-embedding"]
            against = f" {judged[2]} ({judged[3]}) | {judged[7]} |"
        line = " | ".join([cell.data, SETS[name], shown[5], shown[2], shown[8]])
        assert f"| {line} |{against}" in MLET_PAGE.replace("| | |", "|| |")
        assert {len(side.runs) for side in cell.sides} == {5}


def test_the_page_of_studies_has_multi_embedding_on_generated_logs():
    result = read_result(ROOT / "benchmarks/results/study-multi-embedding-generator.json")
    one, four = (
        {row[0]: row for row in comparison_table(cell, result.minimum_effect).rows}[
            "multi-embedding"
        ]
        for cell in result.cells
    )
    words = f"width by {one[2]} ({one[3]}) and by {four[2]} ({four[3]}): more"
    assert words in " ".join(MLET_PAGE.split())


def test_the_page_of_studies_has_the_time_of_embedding_sets():
    cpu, gpu = stored("bench-multi-embedding"), stored("gpu-multi-embedding")["results"]
    plain, compiled = gpu["recorded"], gpu["recorded and compiled"]
    page = " ".join(MLET_PAGE.split())
    assert f"takes {cpu['ratio']:.2f} of the time of one set of width 100" in page
    speeds = [round(side["multi_samples_per_second"], -3) for side in (plain, compiled)]
    assert f"and {plain['ratio']:.2f} of it on an H200, {speeds[0]:,.0f} samples a second" in page
    assert f"both are faster, {compiled['ratio']:.2f} and {speeds[1]:,.0f}" in page


def test_the_page_of_pruning_has_the_figures_of_packed_tables_and_of_a_step():
    packed, pep = stored("bench-packed"), stored("bench-pep")
    page = " ".join(PRUNING_PAGE.split())
    sizes = [f"{packed[f'bytes_{name}'] / 1e6:.1f} MB" for name in ("90", "99", "99_9")]
    dense = f"{packed['dense_bytes'] / 1e6:.0f} MB"
    assert f"is a file of {sizes[0]} where {dense} were, with 99 % one of {sizes[1]}" in page
    assert f"99.9 % one of {sizes[2]}" in page
    assert f"takes {packed['ratio_90']:.2f} times as long as `F.embedding` at 90 %" in page
    assert max(packed[f"ratio_{name}"] for name in ("97", "99", "99_9")) < packed["ratio_90"]
    assert f"{pep['ratio']:.2f} and {pep['ratio_learned']:.2f} times (`rarebit bench pep`)" in page
