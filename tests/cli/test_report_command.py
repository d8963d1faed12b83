"""`rarebit report`, and the commands that write a page by themselves."""

import stat
from pathlib import Path

from rarebit.report.report import page_of

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "study-mlet-confirm.json"
SMALL = ["--model", "fm", "--set", "model.dim=4", "--set", "data.rows=2000", "--epochs", "1"]


def test_a_page_is_written_opened_and_named(call, tmp_path, monkeypatch):
    code, out, err = call("report", RESULT, "--out", "pages/study.html")
    assert (code, out, err) == (0, "Page: pages/study.html\n", "")
    assert Path("pages/study.html").read_text("utf-8") == page_of(RESULT)

    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    code, out, err = call("report", RESULT, "--open")
    assert (code, out, err) == (0, "Page: study-mlet-confirm.html\n", "")
    page = (tmp_path / "study-mlet-confirm.html").absolute()
    assert (tmp_path / "opened").read_text().strip() == page.as_uri()

    code, _, err = call("report", "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "'nowhere' does not exist; a page is made from a folder or file with one of" in err


def test_commands_write_their_page(call):
    code, out, err = call("train", *SMALL, "--out", "run", "--device", "cpu")
    assert code == 0, err
    assert "Page: run/report.html" in out
    assert "What each field costs in memory" in Path("run/report.html").read_text("utf-8")
    code, out, err = call("diagnose", "run", "--out", "found", "--no-plots")
    assert code == 0, err
    assert "Page: found/report.html" in out
    assert "Spectra by field" in Path("found/report.html").read_text("utf-8")
    code, out, err = call("compress", "run", "--size", "1/8", "--out", "small", "--device", "cpu")
    assert code == 0, err
    assert "Page: small/report.html" in out
    assert "Before and after" in Path("small/report.html").read_text("utf-8")
    study = ["--methods", "baseline", "--seeds", "1", "--workers", "1", "--device", "cpu"]
    code, out, err = call("compare", *SMALL, *study, "--out", "study")
    assert code == 0, err
    assert "Page: study/report.html" in out
    assert Path("study/report.html").read_text("utf-8") == page_of("study")
