"""`rarebit backtest` as a user calls it: mistakes end it with one clear line."""

import pytest

pytest.importorskip("polars", reason="capability: package polars: it is not installed")

WORDS = ("backtest", "log.csv", "--label", "click", "--time", "time", "--device", "cpu")


@pytest.fixture
def log(tmp_path):
    rows = [f"{60 * n},u{n % 7},{n % 2}" for n in range(300)]
    (tmp_path / "log.csv").write_text("\n".join(["time,user,click", *rows]))


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--label", "clik"), "has no column 'clik'; did you mean 'click'?"),
        (("--time", "tme"), "has no column 'tme'; did you mean 'time'?"),
        (("--by", "week"), "needs a period with both labels after the warm-up"),
        (("--by", "fortnight"), "--by must be day, week, month or a number of parts"),
        (("--by", "3", "--warm-up", "3"), "use shorter periods"),
        (("--by", "3", "--warm-up", "0"), "warm_up must be at least 1"),
        (("--policies", "grow,fixd"), "unknown policy 'fixd'; did you mean 'fixed'?"),
        (("--control", "fixd"), "the control 'fixd' is no policy here; did you mean 'fixed'?"),
        (("--methods", "tial"), "unknown method 'tial'"),
        (
            ("--by", "3", "--policies", "grow:like=user/kind"),
            "'kind' is no field with one id per row",
        ),
        (("--set", "traning.lr=1"), "unknown section 'traning'; did you mean 'training'?"),
        (
            ("--set", "growth.drop_after=3"),
            "growth.drop_after gives ids to other values, which fixed",
        ),
        (("--seeds", "0"), "seeds must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(call, words, message):
    code, _, err = call(*WORDS, *words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.usefixtures("log")
def test_label_and_time_must_be_named(call):
    code, _, err = call("backtest", "log.csv", "--label", "click")
    assert (code, err.strip()) == (
        2,
        "rarebit: which column is the time? Name it (--time timestamp)",
    )
    code, _, err = call("backtest", "log.csv", "--time", "time")
    assert code == 2
    assert "which column is the label?" in err


def test_rows_without_a_time_are_reported(call, tmp_path):
    (tmp_path / "log.csv").write_text("time,user,click\n60,a,1\nsoon,b,0\n,c,1\n")
    code, _, err = call(*WORDS)
    assert code == 2
    assert "2 rows have no time in 'time', row 2 the first ('soon')" in err


@pytest.mark.usefixtures("log")
def test_a_backtest_shows_tables_and_pictures(call, tmp_path):
    words = (
        "--by",
        "3",
        "--seeds",
        "2",
        "--model",
        "fm",
        "--workers",
        "1",
        "--policies",
        "grow,fixed",
    )
    code, out, err = call(*WORDS, *words)
    assert code == 0, err
    assert "Progressive AUC" in out
    assert "Difference to grow" in out
    assert "backtest.png" in out
    assert (tmp_path / "backtests" / "log" / "results.json").exists()
    code, again, err = call(*WORDS, *words)
    assert "4 runs, 4 already finished" in err
    assert again == out
