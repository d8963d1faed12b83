"""The commit of a result, from git."""

import re
import subprocess

import pytest

from rarebit.machine import commit as commit_of


def git(folder, *arguments):
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.delenv("RAREBIT_COMMIT", raising=False)


def test_the_commit_is_that_of_our_own_repository_only(tmp_path):
    ours, theirs = tmp_path / "src/rarebit", tmp_path / "site-packages/rarebit"
    ours.mkdir(parents=True)
    theirs.mkdir(parents=True)
    assert commit_of(ours) is None  # no repository
    git(tmp_path, "init")
    assert commit_of(ours) is None  # no commit
    (ours / "x.py").write_text("x = 1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "Begin")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag does not stand for the commit")
    found = commit_of(ours)
    assert re.fullmatch("[0-9a-f]{40}", found)
    assert commit_of(theirs) is None
    (ours / "x.py").write_text("x = 2")
    assert commit_of(ours) == f"{found}-dirty"


def test_no_git_means_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) is None


def test_what_is_told_of_the_commit_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("RAREBIT_COMMIT", "0" * 40)
    assert commit_of(tmp_path) == commit_of() == "0" * 40
