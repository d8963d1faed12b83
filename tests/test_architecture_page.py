"""The walk through the files in docs/architecture.md names files and names that are there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
REFERENCES = sorted(set(re.findall(r"`(\w+/\w+)\.py:(\w+)`", PAGE)))
FOLDERS = {"raw": "data.raw"}
"""Folders that the page names without the one above them."""


def test_the_walk_names_the_files_of_a_batch():
    assert len(REFERENCES) >= 15


@pytest.mark.parametrize(("file", "name"), REFERENCES)
def test_every_name_is_where_the_page_says(file, name):
    folder, _, name_of_file = file.partition("/")
    if folder == "raw":
        pytest.importorskip("polars", reason="capability: package polars: it is not installed")
    module = importlib.import_module(f"rarebit.{FOLDERS.get(folder, folder)}.{name_of_file}")
    assert module.__name__ == getattr(module, name).__module__


def test_the_tree_lists_every_folder():
    folders = {path.parent.name for path in (ROOT / "src" / "rarebit").glob("*/__init__.py")}
    listed = set(re.findall(r"^  (\w+)/ ", PAGE, flags=re.MULTILINE))
    assert listed == folders
