"""Results from records made by hand: differences, verdicts, times, files, and tables as text."""

import dataclasses
import json
import math

import pytest
from capabilities import needs_package
from report_kinds import RESULTS

from rarebit.errors import StudyError
from rarebit.study.results import (
    Ceiling,
    CellResult,
    StudyResult,
    Trial,
    VariantResult,
    comparison_table,
    decile_table,
    read_result,
    variant_table,
    verdict_lines,
    write_runs,
)
from rarebit.study.statistics import PairedAUC

ROWS = PairedAUC(
    auc_a=0.752,
    auc_b=0.75,
    difference=0.002,
    standard_error=0.001,
    low=0.00004,
    high=0.00396,
    confidence=0.95,
)


def variant(name, runs, *, control=None, trials=(), epochs=10, **values):
    settings = {"training": {"epochs": epochs}}
    return VariantResult(
        name=name, control=control, settings=settings, trials=trials, runs=tuple(runs), **values
    )


@pytest.fixture
def result(record):
    """A baseline, a control without its last seed, and two methods, one of them without a run."""
    baseline = [record(seed, microseconds_a_row=2.0 + seed) for seed in range(3)]
    control = [record(seed, auc=0.750 + seed / 1000) for seed in range(2)]
    ours = [
        record(
            seed,
            auc=0.752 + 2 * seed / 1000,
            rarest_auc=0.645,
            microseconds_a_row=(3.0, 6.0, 8.0)[seed],
            table_bytes=2500,
        )
        for seed in range(3)
    ]
    cell = CellResult(
        model="fm",
        data="clicks",
        checksum="abc",
        variants=(
            variant("baseline", baseline),
            variant("narrow:dim=2", control),
            variant("low-rank:rank=1", ours, control="narrow:dim=2"),
            variant("hashing:buckets=9", [], control="baseline"),
        ),
        ceiling=Ceiling(auc=0.9, rarest_auc=None),
        rows={"low-rank:rank=1": ROWS},
        missing=("narrow:dim=2, seed 2: not run yet",),
    )
    return StudyResult(plan={"minimum_effect": 0.0005}, cells=(cell,))


def test_differences_are_of_the_seeds_that_both_have(result):
    [cell] = result.cells
    ours = cell.variant("low-rank:rank=1")
    assert cell.differences(ours, "auc") == pytest.approx([0.002, 0.003])
    assert cell.mean_difference(ours, "auc") == pytest.approx(0.0025)
    assert cell.mean_difference(ours, "rarest_auc") == pytest.approx(0.02)
    assert cell.mean_difference(cell.variant("hashing:buckets=9"), "auc") is None
    assert [variant.name for variant in cell.methods] == ["low-rank:rank=1", "hashing:buckets=9"]


def test_differences_by_tenths_are_of_seeds_and_rows_that_both_have(record):
    theirs = [record(seed, decile_aucs=(0.5, None, *[0.6] * 8)) for seed in (0, 1)]
    ours = [
        record(1, decile_aucs=(0.52, 0.7, *[0.61] * 8)),
        record(0, decile_aucs=(0.54, 0.7, *[0.61] * 7, None)),
        record(2, decile_aucs=(0.9,) * 10),
    ]
    cell = CellResult(
        model="fm",
        data="clicks",
        checksum=None,
        variants=(variant("baseline", theirs), variant("shrinkage", ours, control="baseline")),
        ceiling=None,
        rows={},
        missing=(),
    )
    [method] = cell.methods
    expected = [0.03, None, *[0.01] * 8]
    assert cell.decile_differences(method) == [pytest.approx(value) for value in expected]
    [row] = decile_table(cell).rows
    assert row == ("shrinkage", "+300", "-", *["+100"] * 8)


def test_older_records_have_no_tenths(result):
    [cell] = result.cells
    assert {row[1:] for row in decile_table(cell).rows} == {("-",) * 10}


def test_figures_are_by_seed_whatever_the_order_of_runs(result, record):
    [cell] = result.cells
    ours = cell.variant("low-rank:rank=1")
    mixed = dataclasses.replace(ours, runs=ours.runs[::-1])
    assert cell.differences(mixed, "auc") == cell.differences(ours, "auc")
    unknown = dataclasses.replace(ours, runs=(record(0, rarest_auc=None), *ours.runs[1:]))
    assert cell.differences(unknown, "rarest_auc") == pytest.approx([0.02])


def test_a_verdict_is_of_the_whole_family(result):
    found = result.cells[0].compare(0.0005)
    ours = found["low-rank:rank=1"]
    # t(1 - 0.02 / 2, 1) = 31.8205 for the first of two methods, the half width is that times
    # spread / sqrt(2) = 0.0005
    assert (ours.n, ours.wins) == (2, 2)
    assert (ours.low, ours.high) == pytest.approx((0.0025 - 0.015910, 0.0025 + 0.015910), abs=1e-6)
    assert ours.verdict == "too few seeds"
    assert found["hashing:buckets=9"].n == 0


def test_times_are_over_those_of_the_first_variant_seed_by_seed(result):
    [cell] = result.cells
    # 3 / 2, 6 / 3, 8 / 4: the median
    assert cell.time_ratio(cell.variant("low-rank:rank=1")) == 2.0
    assert cell.time_ratio(cell.variant("baseline")) == 1.0
    # 2 / 2 and 2 / 3
    assert cell.time_ratio(cell.variant("narrow:dim=2")) == pytest.approx(5 / 6)
    assert cell.time_ratio(cell.variant("hashing:buckets=9")) is None


def test_times_on_other_devices_are_not_compared(result, record):
    [cell] = result.cells
    runs = [record(0, microseconds_a_row=6.0), record(1, microseconds_a_row=0.1, device="a GPU")]
    assert cell.time_ratio(variant("mixed", runs)) == 3.0
    assert cell.time_ratio(variant("other", runs[1:])) is None


def test_a_study_with_missing_runs_is_not_complete(result):
    assert not result.is_complete
    whole = dataclasses.replace(result.cells[0], missing=())
    assert dataclasses.replace(result, cells=(whole,)).is_complete


def test_the_table_of_variants(result):
    table = variant_table(result.cells[0])
    assert table.title == "fm on clicks"
    assert table.header == (
        "variant", "n", "AUC", "rarest fifth", "logloss", "weights", "tables", "time",
    )  # fmt: skip
    spread = "± 0.0000"
    assert table.rows == [
        ("baseline", "3", f"0.7500 {spread}", f"0.6250 {spread}", f"0.5000 {spread}", "1,234",
         "4.0 kB", "x 1.00"),
        ("narrow:dim=2", "2", "0.7505 ± 0.0007", f"0.6250 {spread}", f"0.5000 {spread}", "1,234",
         "4.0 kB", "x 0.83"),
        ("low-rank:rank=1", "3", "0.7540 ± 0.0020", f"0.6450 {spread}", f"0.5000 {spread}",
         "1,234", "2.5 kB", "x 2.00"),
        ("hashing:buckets=9", "0", "-", "-", "-", "-", "-", "-"),
        ("best possible", "", "0.9000", "-", "", "", "", ""),
    ]  # fmt: skip


def test_the_table_of_differences(result):
    table = comparison_table(result.cells[0], 0.0005)
    assert table.rows == [
        ("low-rank:rank=1", "narrow:dim=2", "+0.0025", "-0.0134 to +0.0184",
         "too few seeds", "+0.0200", "+0.0000 to +0.0040", "2 of 2"),
        ("hashing:buckets=9", "baseline", "-", "-", "too few seeds", "-", "-", "0 of 0"),
    ]  # fmt: skip


def test_grouped_auc_is_in_the_tables_of_logs_with_groups(result):
    assert "grouped AUC" not in str(result)
    [cell] = result.cells
    runs = [
        tuple(dataclasses.replace(run, grouped_auc=0.6 + number / 100) for run in one.runs)
        for number, one in enumerate(cell.variants)
    ]
    pairs = zip(cell.variants, runs, strict=True)
    cell = dataclasses.replace(
        cell, variants=tuple(dataclasses.replace(one, runs=some) for one, some in pairs)
    )
    assert "0.6000" in variant_table(cell).rows[0][4]
    assert "+0.0100" in comparison_table(cell, 0.001).rows[0]


def test_one_seed_has_no_interval(result):
    [cell] = result.cells
    variants = tuple(
        dataclasses.replace(variant, runs=variant.runs[:1]) for variant in cell.variants
    )
    one = dataclasses.replace(cell, variants=variants)
    assert [row[3] for row in comparison_table(one, 0.0005).rows] == ["-", "-"]
    assert variant_table(one).rows[0][2] == "0.7500"


def test_verdicts_in_words(result):
    ours, other, reading = verdict_lines(result.cells[0], 0.0005)
    assert ours.startswith("low-rank:rank=1: too few seeds: about ")
    assert other == "hashing:buckets=9: too few seeds: at least 2 are needed."
    assert "interval: over seeds, at 98 % or more, corrected for 2 methods" in reading
    assert 'at most 5 % of studies report a false "helps"' in reading


def test_a_control_alone_has_no_verdicts(result):
    alone = dataclasses.replace(result.cells[0], variants=result.cells[0].variants[:2])
    assert verdict_lines(alone, 0.0005) == []


def test_all_of_it_as_text(result):
    text = str(result)
    for line in (
        "fm on clicks",
        "Difference to the control",
        "missing: narrow:dim=2, seed 2: not run yet",
        "hashing:buckets=9: too few seeds: at least 2 are needed.",
    ):
        assert line in text.splitlines()
    lines = text.splitlines()
    end = lines[1].index("AUC") + len("AUC")
    assert lines[2][:end].endswith("0.7500 ± 0.0000")
    assert lines[4][:end].endswith("0.7540 ± 0.0020")
    assert not any(line.endswith(" ") for line in lines)


def test_a_file_is_read_back(result, tmp_path):
    trial = Trial(settings={"lr": 0.5, "methods": ""}, valid_auc=0.7)
    [cell] = result.cells
    tuned = dataclasses.replace(cell.variants[0], trials=(trial, trial))
    cell = dataclasses.replace(cell, variants=(tuned, *cell.variants[1:]))
    result = dataclasses.replace(result, cells=(cell,))
    text = json.dumps({"machine": {}, "study": result.to_mapping()}, allow_nan=False)
    (tmp_path / "results.json").write_text(text)
    assert read_result(tmp_path) == read_result(tmp_path / "results.json") == result


def test_verdicts_are_written_for_readers(result):
    [cell] = result.to_mapping()["cells"]
    found = cell["verdicts"]["low-rank:rank=1"]
    assert (found["n"], found["verdict"]) == (2, "too few seeds")
    assert found["words"].startswith("too few seeds: about ")
    none = cell["verdicts"]["hashing:buckets=9"]
    assert (none["mean"], none["low"], none["high"]) == (None, None, None)
    assert math.isclose(found["mean"], 0.0025)


def damage(values):
    """Return texts that are no result, each with what is told of it."""
    study = values["study"]
    [cell] = study["cells"]
    yield "", "Expecting value"
    yield "[]", ""
    yield '{"result": {}}', "'study'"
    yield json.dumps({"study": study | {"format": 2}}), "its format is 2, this version reads 1"
    yield json.dumps({"study": study | {"plan": {}}}), "minimum_effect"
    yield json.dumps({"study": study | {"plan": {"minimum_effect": -1}}}), ""
    yield json.dumps({"study": study | {"cells": [cell | {"sides": 3}]}}), ""
    yield json.dumps({"study": study | {"cells": [cell | {"sides": cell["sides"][2:]}]}}), "narrow"
    broken = cell["sides"][0] | {"runs": [{"auc": 1}]}
    yield json.dumps({"study": study | {"cells": [cell | {"sides": [broken]}]}}), "RunRecord needs"


@pytest.mark.parametrize("number", range(9))
def test_a_wrong_file_is_told(result, tmp_path, number):
    text, message = list(damage({"study": result.to_mapping()}))[number]
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(StudyError, match=f"is not the result of a study: .*{message}") as told:
        read_result(tmp_path)
    assert "\n" not in str(told.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(StudyError, match="there is no result of a study at"):
        read_result(tmp_path)
    with pytest.raises(StudyError, match="there is no result of a study at"):
        read_result(tmp_path / "none.json")


def test_a_run_that_is_no_number_is_told(result, tmp_path):
    values = result.to_mapping()
    broken = dict(dataclasses.asdict(result.cells[0].variants[0].runs[0]), auc=float("nan"))
    values["cells"][0]["sides"][0]["runs"] = [broken]
    (tmp_path / "results.json").write_text(json.dumps({"study": values}))
    with pytest.raises(
        StudyError,
        match=r"results.json' is not the result of a study: variants: runs: auc must be finite",
    ):
        read_result(tmp_path)


def compared(record, *, ours=None, theirs=None, best_epochs=((2,) * 4, (2,) * 4)):
    """Return a method that is clearly better than its control, with what is given of either."""
    runs = [
        [record(seed, auc=auc + seed / 10_000, best_epoch=epoch) for seed, epoch in enumerate(best)]
        for auc, best in zip((0.80, 0.75), best_epochs, strict=True)
    ]
    method = variant("mlet", runs[0], control="baseline", **(ours or {}))
    control = variant("baseline", runs[1], **(theirs or {}))
    return CellResult(
        model="fm",
        data="clicks",
        checksum=None,
        variants=(control, method),
        ceiling=None,
        rows={},
        missing=(),
    )


def verdict(cell):
    found = cell.compare(0.0005)["mlet"]
    return found.verdict, found.summary


def trials(number):
    return tuple(Trial(settings={"lr": 1.0}, valid_auc=0.7) for _ in range(number))


def test_a_fair_comparison_has_a_verdict(record):
    fair = {"start": 0.01, "trials": trials(3)}
    assert verdict(compared(record, ours=fair, theirs=fair))[0] == "helps"


@pytest.mark.parametrize("side", [0, 1])
def test_a_side_that_was_cut_off_has_no_verdict(record, side):
    best = [(2, 2, 2, 2), (2, 2, 2, 2)]
    best[side] = (10, 10, 2, 10)
    name = ("mlet", "baseline")[side]
    found, summary = verdict(compared(record, best_epochs=best))
    assert found == "cut off"
    assert summary == (
        f"no verdict, cut off: {name} is best in its last epoch, or still rises, in 3 of 4 runs; "
        "allow more epochs (--epochs 30), or more patience (--set training.patience=10)"
    )
    best[side] = (10, 10, 2, 2)  # not in most of them
    assert verdict(compared(record, best_epochs=best))[0] == "helps"


def test_runs_that_were_stopped_while_they_rose_have_no_verdict(record):
    cell = compared(record)
    runs = {True: 3, False: 2}
    for rising, number in runs.items():
        changed = [
            dataclasses.replace(run, still_rising=place < number)
            for place, run in enumerate(cell.variants[0].runs)
        ]
        first = dataclasses.replace(cell.variants[0], runs=tuple(changed))
        found = dataclasses.replace(cell, variants=(first, *cell.variants[1:]))
        assert (verdict(found)[0] == "cut off") is rising


def test_one_epoch_is_a_protocol(record):
    once = {"epochs": 1}
    cell = compared(record, ours=once, theirs=once, best_epochs=((1,) * 4, (1,) * 4))
    assert verdict(cell)[0] == "helps"


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_the_edge_of_the_grid_has_no_verdict(record, side):
    edge = {"trials": trials(3), "edge": ("learning rate", "std")}
    name = {"ours": "mlet", "theirs": "baseline"}[side]
    kind, summary = verdict(compared(record, **{side: edge}))
    assert kind == "edge of the grid"
    assert f"{name} is best at the last learning rate and std tried; allow more" in summary


@pytest.mark.parametrize(("ours", "verdict_there"), [(0.25, "unequal start"), (0.015, "helps")])
def test_an_unequal_start_has_no_verdict(record, ours, verdict_there):
    cell = compared(record, ours={"start": ours}, theirs={"start": 0.01})
    found = cell.compare(0.0005)["mlet"]
    assert found.verdict == verdict_there
    if verdict_there == "unequal start":
        assert "the tables of mlet start 25 times as large as those of baseline" in found.summary


def test_a_control_that_tried_the_start_is_fair(record):
    theirs = {"start": 0.01, "axes": ("start",), "trials": trials(3)}
    cell = compared(record, ours={"start": 0.25}, theirs=theirs)
    assert verdict(cell)[0] == "helps"


def test_unequal_trials_are_in_the_table(record):
    cell = compared(record, ours={"trials": trials(2)}, theirs={"trials": trials(12)})
    header, *rows = [line.split() for line in str(variant_table(cell)).splitlines()[1:]]
    assert header[:2] == ["variant", "trials"]
    assert [row[:2] for row in rows if row[0] in ("baseline", "mlet")] == [
        ["baseline", "12"],
        ["mlet", "2"],
    ]
    lines = verdict_lines(cell, 0.0005)
    assert "mlet: 2 settings tried, and 12 of its control baseline." in lines
    equal = compared(record, ours={"trials": trials(2)}, theirs={"trials": trials(2)})
    assert not any("settings tried" in line for line in verdict_lines(equal, 0.0005))


def test_doubts_are_stored_and_read_back(record, tmp_path):
    cell = compared(record, ours={"edge": ("std",), "start": 0.5, "axes": ("std",)})
    result = StudyResult(plan={"minimum_effect": 0.0005}, cells=(cell,))
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"study": result.to_mapping()}))
    [found] = read_result(path).cells
    assert found == cell
    assert json.loads(path.read_text())["study"]["cells"][0]["verdicts"]["mlet"]["why"]


@needs_package("pyarrow")
def test_all_runs_are_one_parquet_file(tmp_path):
    from pyarrow import parquet

    result = read_result(RESULTS / "study-tail-method.json")
    rows = parquet.read_table(write_runs(result, tmp_path / "new" / "runs.parquet")).to_pylist()
    runs = [run for cell in result.cells for variant in cell.variants for run in variant.runs]
    assert [row["auc"] for row in rows] == [run.auc for run in runs]
    assert [row["log"] for row in rows[:1]] == [result.cells[0].data]
    assert {row["log"] for row in rows} == {cell.data for cell in result.cells}
    first = rows[0]
    assert (first["variant"], first["control"], first["seed"]) == ("baseline", None, 0)
    assert first["decile_aucs"] == list(runs[0].decile_aucs)
    assert json.loads(first["settings"])["training"]["epochs"] == 60
