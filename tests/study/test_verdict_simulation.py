"""A small version of the simulated studies: few false verdicts, more of them with a wrong rule."""

import dataclasses
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

STUDIES = 1000


def case(**changes):
    return verdicts.Case(**({"noise": "normal", "methods": 8, "seeds": 5} | changes))


def without_correction(drawn):
    """Judge every method alone."""
    return np.stack([verdicts.t_alone(one[:, None])[:, 0] for one in drawn.swapaxes(0, 1)], axis=1)


@pytest.mark.parametrize("methods", [1, 2, 6])
@pytest.mark.parametrize("seeds", [2, 5])
def test_the_rule_for_many_studies_is_the_rule_of_a_study(methods, seeds):
    for noise in ("normal", "mirrored-exponential"):
        chosen = case(
            noise=noise, methods=methods, seeds=seeds, spread=0.0005, spreads="unequal methods"
        )
        drawn = verdicts.draw(dataclasses.replace(chosen, effect=0.001, with_effect=1), 60)
        found = verdicts.verdicts_of(drawn)
        for study, expected in zip(drawn.tolist(), found, strict=True):
            judged = judge({f"{i}": values for i, values in enumerate(study)})
            assert [one.verdict for one in judged.values()] == expected.tolist()
        assert len(set(found.ravel())) > 1


@pytest.mark.parametrize("control", verdicts.CONTROLS)
@pytest.mark.parametrize("methods", [1, 2, 8])
@pytest.mark.parametrize("noise", verdicts.HELD)
def test_few_studies_see_an_effect_where_there_is_none(noise, methods, control):
    found = verdicts.wrong_shares(case(noise=noise, methods=methods, control=control), STUDIES)
    assert found["false_either"] <= verdicts.allowed(STUDIES)
    assert max(found["false_helps"], found["false_hurts"]) <= found["false_either"]


@pytest.mark.parametrize("noise", verdicts.NOISES)
def test_with_many_methods_no_noise_makes_many_false_verdicts(noise):
    found = verdicts.wrong_shares(case(noise=noise, methods=20), STUDIES)
    assert found["false_either"] <= verdicts.LEVEL
    is_lopsided = noise.startswith("mirrored")
    assert (found["false_helps_of_t_alone"] > 0.3) == is_lopsided


def test_without_correction_there_are_more_false_verdicts():
    corrected = verdicts.wrong_shares(case(), STUDIES)
    wrong = verdicts.wrong_shares(case(), STUDIES, without_correction)
    # 1 - 0.975^8 = 18 % and 1 - 0.95^8 = 34 %, give or take five standard errors
    assert wrong["false_helps"] == pytest.approx(0.18, abs=0.07)
    assert wrong["false_either"] == pytest.approx(0.34, abs=0.08)
    assert wrong["false_helps"] > verdicts.allowed(STUDIES) > corrected["false_helps"]


def test_the_simulation_shows_where_the_rule_does_not_hold():
    found = verdicts.wrong_shares(case(noise="mirrored-mixture", methods=1, seeds=10), STUDIES)
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

    assert power(effect=0.0) < 0.02 < power(effect=0.0005) < power() < power(effect=0.002)
    assert power(seeds=3) < power() < power(seeds=10)
    assert power(methods=20) < power() < power(methods=5)
    pooled = verdicts.found_shares(
        case(control="shared", spread=0.0005, with_effect=1, effect=0.0015), STUDIES
    )
    assert pooled["helps"] > pooled["helps_by_t_alone"] - 0.02  # what pooling costs


def test_the_noise_is_what_it_is_called():
    def spreads(axis, **changes):
        return verdicts.draw(case(seeds=10, spread=1.0, **changes), 2000).std(axis=axis)

    for control in verdicts.CONTROLS:
        assert spreads(None, control=control) == pytest.approx(1, abs=0.02)
    heavy = verdicts.draw(case(noise="heavy-tailed", spread=1.0), 20_000)
    assert heavy.std() == pytest.approx(1, abs=0.1)
    assert (abs(heavy) > 4).mean() > 50 * 6.3e-5  # what is normal beyond four spreads
    # e^-1; P(Z > 0.5); 0.9 P(Z > 1) + 0.1
    for noise, above in (("exponential", 0.368), ("lognormal", 0.309), ("mixture", 0.243)):
        for name, sign in ((noise, 1), (f"mirrored-{noise}", -1)):
            lopsided = verdicts.draw(case(noise=name, spread=1.0), 20_000)
            assert (lopsided.mean(), lopsided.std()) == pytest.approx((0, 1), abs=0.03)
            assert (sign * lopsided > 0).mean() == pytest.approx(above, abs=0.01)
    for kind, axis in (("unequal methods", 2), ("unequal seeds", 1)):
        usual, unequal = spreads(axis), spreads(axis, spreads=kind)
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
    assert {result["noise"] for result in report["wrong"]} == set(verdicts.NOISES)
    assert set(report["worst"]) == set(verdicts.NOISES)
    assert {result["effect"] for result in report["found"]} == set(verdicts.EFFECTS)
    printed = capsys.readouterr().out
    assert printed.count("\n| normal | equal | shared | 20 | 10 | 0.0005 | 0.002 |") == 2
    assert 'of studies have a false "helps"' in printed
