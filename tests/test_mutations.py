"""The breaks of `tools/mutations.py` still fit the code, and a small tree shows that the tool tells them apart."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutations = load(ROOT / "tools/mutations.py")


@pytest.mark.parametrize("one", mutations.BREAKS, ids=lambda one: one.name)
def test_a_break_fits_the_code_and_names_its_tests(one):
    assert (ROOT / mutations.SOURCE / one.file).read_text("utf-8").count(one.old) == 1
    assert one.old != one.new
    assert one.tests
    for test in one.tests:
        path, _, name = test.partition("::")
        text = (ROOT / "tests" / path).read_text("utf-8")
        assert not name or f"\ndef {name.partition('[')[0]}(" in text, test


def test_names_are_distinct():
    names = [one.name for one in mutations.BREAKS]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_a_break_that_tests_miss_survives_and_the_code_is_restored(tmp_path, capsys):
    code = tmp_path / mutations.SOURCE / "code.py"
    code.parent.mkdir(parents=True)
    (code.parent / "__init__.py").touch()
    code.write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "tests").mkdir()
    for name, value in (("noticing", 3), ("missing", 2)):
        (tmp_path / "tests" / f"test_{name}.py").write_text(
            f"from rarebit.code import twice\n\ndef test_it():\n    assert twice({value}) == {2 * value}\n"
        )
    tests = ("test_noticing.py", "test_missing.py")
    mutations.require_passing(tmp_path, tests)
    for test, is_missed in zip(tests, (False, True), strict=True):
        one = mutations.Break("power", "code.py", "2 * x", "x**2", (test,))
        expected = None if is_missed else "test_noticing.py::test_it"
        assert mutations.noticed_by(one, tmp_path) == expected
        assert code.read_text().endswith("2 * x\n")
    assert "noticed power" in (out := capsys.readouterr().out)
    assert "SURVIVED power" in out
    wrong = mutations.Break("power", "code.py", "3 * x", "x**2", tests)
    with pytest.raises(SystemExit, match=r"power: code\.py has 0 times '3 \* x'"):
        wrong.apply(tmp_path)
