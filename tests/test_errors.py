"""Optional packages: one that is not installed, and one that is but cannot be imported."""

import pytest

from rarebit.errors import MissingExtraError, import_extra


def test_a_package_that_is_not_installed_is_named_with_its_extra():
    message = r"reading logs needs the package 'nowhere', which is not installed; install it with: \S+ -m pip install 'rarebit\[data\]'$"
    with pytest.raises(MissingExtraError, match=message):
        import_extra("nowhere.at_all", "data", "reading logs")


@pytest.mark.parametrize(
    "code", ["raise ImportError('built for\\nanother numpy')", "import nowhere_else"]
)
def test_a_package_that_cannot_be_imported_says_why(code, tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    why = r"\((built for another numpy|No module named 'nowhere_else')\)"
    message = rf"needs the package 'broken_package', which cannot be imported {why}; repair it with: \S+ -m pip install --upgrade broken_package$"
    with pytest.raises(MissingExtraError, match=message):
        import_extra("broken_package", "data", "reading logs")
