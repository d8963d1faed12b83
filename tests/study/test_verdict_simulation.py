"""A small version of the simulated studies: few false verdicts, more of them with a wrong rule."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rarebit.study.statistics import judge

ROOT = Path(__file__).resolve().parents[2]


def load(path):
    name = f"benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


verdicts = load(ROOT / "benchmarks/verdicts.py")

STUDIES = 400


def case(**changes):
    values = {"noise": "normal", "control": "own", "methods": 8, "seeds": 5, "spread": 0.005}
    return verdicts.Case(**(values | changes))


def without_correction(study):
    return {name: judge({name: values})[name] for name, values in study.items()}


@pytest.mark.parametrize("control", verdicts.CONTROLS)
@pytest.mark.parametrize("noise", verdicts.NOISES)
def test_few_studies_see_an_effect_where_there_is_none(noise, control):
    found = verdicts.wrong_shares(case(noise=noise, control=control), STUDIES)
    assert found["false_either"] <= verdicts.allowed(STUDIES)
    assert max(found["false_helps"], found["false_hurts"]) <= found["false_either"]


def test_without_correction_there_are_more_false_verdicts():
    corrected = verdicts.wrong_shares(case(), STUDIES)
    wrong = verdicts.wrong_shares(case(), STUDIES, without_correction)
    # 1 - 0.975^8 = 18 % and 1 - 0.95^8 = 34 %, give or take five standard errors
    assert wrong["false_helps"] == pytest.approx(0.18, abs=0.1)
    assert wrong["false_either"] == pytest.approx(0.34, abs=0.12)
    assert wrong["false_helps"] > verdicts.allowed(STUDIES) > corrected["false_helps"]


def test_the_simulation_shows_where_the_rule_does_not_hold():
    found = verdicts.wrong_shares(case(noise="lopsided"), STUDIES)
    assert found["false_helps"] > 2 * verdicts.allowed(STUDIES)


def test_huge_effects_of_others_do_not_make_false_ones():
    found = verdicts.wrong_shares(case(effect=5.0, with_effect=4), STUDIES)
    assert found["false_either"] <= verdicts.allowed(STUDIES)
    # the others are found, so the correction counts four methods, not eight
    shares = verdicts.found_shares(case(effect=5.0, with_effect=4), STUDIES)
    assert shares["helps"] == 1


def test_power_grows_with_effect_and_seeds_and_falls_with_methods():
    def power(**changes):
        values = {"control": "shared", "spread": 0.0005, "with_effect": 1, "effect": 0.001}
        return verdicts.found_shares(case(**(values | changes)), STUDIES)["helps"]

    assert power(effect=0.0) < 0.05 < power(effect=0.0005) < power() < power(effect=0.002)
    assert power(seeds=3) < power() < power(seeds=10)
    assert power() < power(methods=3) < power(methods=1)


def test_the_noise_is_what_it_is_called():
    def spreads(axis, **changes):
        return verdicts.draw(case(seeds=10, spread=1.0, **changes), 2000).std(axis=axis)

    for control in verdicts.CONTROLS:
        assert spreads(None, control=control) == pytest.approx(1, abs=0.02)
    heavy = verdicts.draw(case(noise="heavy-tailed", spread=1.0), 20_000)
    assert heavy.std() == pytest.approx(1, abs=0.1)
    assert (abs(heavy) > 4).mean() > 50 * 6.3e-5  # what is normal beyond four spreads
    lopsided = verdicts.draw(case(noise="lopsided", spread=1.0), 20_000)
    assert (lopsided.mean(), lopsided.std()) == pytest.approx((0, 1), abs=0.02)
    assert (lopsided**3).mean() == pytest.approx(-2, abs=0.2)
    for noise, axis in (("unequal methods", 2), ("unequal seeds", 1)):
        usual, unequal = spreads(axis), spreads(axis, noise=noise)
        assert np.log(unequal).std() > 2 * np.log(usual).std()


def test_a_shared_control_makes_differences_alike():
    for control, expected in (("own", 0.0), ("shared", 0.5)):
        first, second = verdicts.draw(case(control=control, methods=2), 5000).swapaxes(0, 1)
        assert np.corrcoef(first.ravel(), second.ravel())[0, 1] == pytest.approx(expected, abs=0.03)


def test_the_effect_is_that_of_the_first_methods():
    drawn = verdicts.draw(case(methods=3, effect=5.0, with_effect=2), 100)
    assert drawn.mean(axis=(0, 2)) == pytest.approx([5.0, 5.0, 0.0], abs=0.01)


def test_the_report_is_written_and_the_same_twice(monkeypatch, tmp_path, capsys):
    def run():
        out = tmp_path / "new" / "verdicts.json"
        monkeypatch.setattr(sys, "argv", ["verdicts.py", "--studies", "4", "--out", str(out)])
        verdicts.main()
        report = json.loads(out.read_text())
        assert report.pop("seconds") >= 0
        assert "commit" in report.pop("machine")
        return report

    report = run()
    assert report == run()
    assert report["command"] == "python benchmarks/verdicts.py --studies 4"
    assert len(report["wrong"]) == 4 * 2 * 9 + 4 * 2 * 3
    assert {result["noise"] for result in report["wrong"]} == set(verdicts.NOISES)
    assert {result["noise"] for result in report["lopsided"]} == {"lopsided"}
    assert {result["effect"] for result in report["found"]} == set(verdicts.EFFECTS)
    assert report["most_false_helps"] == max(x["false_helps"] for x in report["wrong"])
    printed = capsys.readouterr().out
    assert printed.count("\n| normal | shared | 8 | 10 | 0.0005 | 0.002 |") == 2
    assert 'of studies have a false "helps"' in printed
