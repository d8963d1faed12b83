"""A page is one file that shows the figures of its JSON, escapes every name, and holds no row of the log."""

import html
import json
import re
from html.parser import HTMLParser

import pytest
from capabilities import slow_after
from report_kinds import HOSTILE, KINDS, QUICK, STORED

import rarebit as rb
from rarebit.errors import ReportError
from rarebit.report.page import Scale, signed, toml
from rarebit.report.report import page_of, report
from rarebit.report.texts import recipe
from rarebit.study.plan import StudyPlan
from rarebit.study.results import read_result

VOID = {"meta", "link", "wbr"}


class Text(HTMLParser):
    """The text of a page, and its tags that are not closed in order."""

    def __init__(self):
        super().__init__()
        self.parts, self.open, self.wrong = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.parts.append(data)


def read(page):
    parser = Text()
    parser.feed(page)
    assert parser.wrong == []
    assert parser.open == []
    return "".join(parser.parts)


@pytest.mark.parametrize("kind", slow_after(KINDS, quick=QUICK), indirect=True)
def test_a_page_is_one_small_file_without_references(kind):
    page = page_of(kind)
    read(page)
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert re.findall(r"https?:|url\(|@import|innerHTML|fetch\(", page) == []
    assert "{{" not in page
    assert len(page.encode()) < 300_000
    assert page.isascii() or "charset" in page


def test_a_study_shows_the_figures_of_its_file():
    text = read(page_of(STORED["study"]))
    result = read_result(STORED["study"])
    for cell in result.cells:
        found = cell.compare(result.minimum_effect)
        for method in cell.methods:
            one = found[method.name]
            figures = [signed(value) for value in (one.mean, one.low, one.high)]
            assert "{} ({} to {})".format(*figures) in text
            assert one.why in text
        for variant in cell.variants:
            for run in variant.runs:
                assert f"{run.auc:.5f}" in text
                assert f"{run.valid_auc:.5f}" in text
            for trial in variant.trials:
                assert f"{trial.valid_auc:.5f}" in text


def test_the_verdict_comes_before_any_chart(made):
    for page in (page_of(STORED["study"]), page_of(made / "run"), page_of(STORED["backtest"])):
        assert 0 < page.index('class="verdict') < page.index("<figure")
    stored = json.loads(STORED["backtest"].read_text("utf-8"))["backtest"]
    grow = next(one for one in stored["policies"] if one["name"] == "grow")
    words = next(one for one in grow["against"] if one["control"] == stored["control"])["auc"][
        "words"
    ]
    assert f"grow, against {stored['control']}: {words}." in read(page_of(STORED["backtest"]))


def test_a_run_shows_its_figures_and_what_fields_cost(made):
    text = read(page_of(made / "run"))
    stored = json.loads((made / "run" / "run.json").read_text("utf-8"))
    assert f"Test AUC {stored['test']['overall']['auc']:.4f}" in text
    for epoch in stored["history"]["epochs"]:
        assert f"{epoch['valid']['auc']:.5f}" in text
    user = [one for one in stored["tables"] if one["name"].endswith(".user")]
    assert len(user) == 2  # rows, and first-order weights
    assert f"{sum(one['num_bytes'] for one in user):,}" in text
    assert sum(one["num_bytes"] for one in stored["tables"]) == stored["table_bytes"]
    diagnosed = json.loads((made / "run" / "diagnosis.json").read_text("utf-8"))
    for one in diagnosed["findings"]:
        assert one["problem"] in text
    assert text.count("What each field costs in memory") == 1  # also in its diagnosis


def test_a_compressed_run_shows_what_it_lost(made):
    text = read(page_of(made / "compressed"))
    stored = json.loads((made / "compressed" / "run.json").read_text("utf-8"))["compressed"]
    for figures in (stored["before"], stored["after"]):
        assert f"{figures['test_auc']:.4f}" in text
    points = json.loads((made / "compressed" / "frontier.json").read_text("utf-8"))["points"]
    assert all(one["compressor"] in text for one in points)


def test_learning_curves_are_the_means_over_seeds(made):
    page = html.unescape(page_of(made / "fresh study"))
    [cell] = read_result(made / "fresh study").cells
    baseline = cell.variant("baseline")
    assert all(len(run.valid_aucs) == run.epochs for run in baseline.runs)
    for epoch in range(3):
        mean = sum(run.valid_aucs[epoch] for run in baseline.runs) / 2
        assert f"baseline, epoch {epoch + 1}: {mean:.4f}" in page
    for run in baseline.runs:
        assert run.valid_aucs[run.best_epoch - 1] == pytest.approx(run.valid_auc, abs=1e-5)


def test_the_plan_on_a_page_is_the_plan(made):
    import tomllib

    plan = read_result(made / "fresh study").plan
    again = StudyPlan.from_mapping(tomllib.loads(toml(plan)))
    assert again.to_mapping() == plan
    assert html.escape(toml(plan)) in page_of(made / "fresh study")


def test_names_are_text(made, tmp_path):
    stored = (made / "run" / "run.json").read_text("utf-8")
    values = json.loads(stored.replace("backbone.tables.user", "backbone.tables.xx"))
    for one in values["tables"]:
        one["name"] = one["name"].replace("xx", HOSTILE)
    values["settings"]["data"] = {"folder": HOSTILE}
    (tmp_path / "run.json").write_text(json.dumps(values))
    page = page_of(tmp_path)
    assert "<script>alert" not in page
    assert html.escape("<script>alert(1)</script>") in page.replace("<wbr>", "")
    assert "\u202e" not in page
    assert "\x1b" not in page
    read(page)


def test_no_row_value_of_the_log_is_on_a_page(tmp_path):
    users = [f"secret-{number % 40}" for number in range(400)]
    lines = [f"{user},{number % 2}" for number, user in enumerate(users)]
    (tmp_path / "log.csv").write_text("\n".join(["user,click", *lines]))
    rb.prepare(tmp_path / "log.csv", tmp_path / "log", label="click")
    settings = rb.RunSettings.from_mapping(
        {
            "model": {"name": "fm", "dim": 2},
            "data": {"folder": str(tmp_path / "log")},
            "training": {"epochs": 1},
        }
    )
    found = rb.run(settings, folder=tmp_path / "run", progress=False, say=lambda line: None)
    rb.diagnose(found.model, rb.Dataset.open(tmp_path / "log")).save(tmp_path / "run", plots=False)
    page = page_of(tmp_path / "run")
    assert "user" in page
    assert "secret-" not in page
    assert str(tmp_path) not in page  # nor where the log is


def test_what_makes_no_page_is_refused(tmp_path, made):
    with pytest.raises(
        ReportError, match=r"'.*nowhere' does not exist; a page is made from a folder"
    ):
        page_of(tmp_path / "nowhere")
    with pytest.raises(ReportError, match="holds no finished result"):
        page_of(tmp_path)
    (tmp_path / "run.json").write_text('{"settings": {}}')  # of a run that goes on
    with pytest.raises(ReportError, match="holds no finished result"):
        page_of(tmp_path)
    (tmp_path / "results.json").write_text('{"study": {"format": 99}}')
    with pytest.raises(ReportError, match=r"results.json' is damaged: its format is 99"):
        page_of(tmp_path)
    (tmp_path / "results.json").write_text("nonsense")
    with pytest.raises(ReportError, match="is damaged"):
        page_of(tmp_path / "results.json")
    (tmp_path / "other.json").write_text('{"cake": 1}')
    with pytest.raises(
        ReportError, match="holds cake, which is no result that a page shows: improvement, study"
    ):
        page_of(tmp_path / "other.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot write"):
        report(made / "run", tmp_path / "file" / "page.html")


def test_a_study_of_several_logs_leads_with_what_helps_and_what_hurts():
    result = read_result(STORED["study"])
    found = [one for cell in result.cells for one in cell.compare(result.minimum_effect).values()]
    page = page_of(STORED["study"])
    lead = page[: page.index("<h2>")]
    for number, verdict in ((7, "helps"), (7, "hurts"), (4, "too few seeds")):
        assert sum(one.verdict == verdict for one in found) == number
        assert lead.count(f">{verdict}</span>") == number
    assert "Of 18 comparisons, 7 help, 7 hurt, 4 open." in lead
    for end, by in (
        ("best", max(one.mean for one in found)),
        ("worst", min(one.mean for one in found)),
    ):
        assert f"by {abs(by):.4f}" in lead[lead.index(f"The {end}: ") :].split("</p>")[0]


def test_a_text_recipe_leads_with_its_verdict_and_shows_the_figures_of_its_file():
    stored = json.loads(STORED["text recipe"].read_text("utf-8"))
    found = read(page_of(STORED["text recipe"]))
    assert found.index("No comparison has a verdict.") < found.index("All arms")
    run = stored["results"]["baseline"]["0"]
    for part in ("all", *stored["metric"]["parts"]):
        assert f"{run['test'][part]:.2f}" in found
    assert all(point["compressor"] in found for point in run["compressed"])
    assert stored["command"] in found
    few = {"verdict": "helps", "mean": 1.5, "low": 0.5, "high": 2.5}
    one = {"arm": "tail", "control": "baseline", **few}
    lead = "".join(recipe(stored | {"verdicts": [one]}))
    assert "tail, compared with baseline: +1.50, helps." in lead
    assert "verdict good" in lead


def test_scales_have_round_ticks_inside():
    assert Scale.around([0.0, 100.0]).ticks == (0.0, 20.0, 40.0, 60.0, 80.0, 100.0)
    assert Scale.around([5.0]).ticks  # one value is a scale, too
    for scale in (
        Scale.around([-0.003, 0.0012]),
        Scale.of_bytes([884_608, 19_303_168]),
        Scale.counting(37),
    ):
        assert 2 <= len(scale.ticks) <= 13
        assert all(0 <= scale.place(tick) <= 1 for tick in scale.ticks)
        assert len({scale.show(tick) for tick in scale.ticks}) == len(scale.ticks)
