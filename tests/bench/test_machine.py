"""What a measurement ran on: the load of others from a file of ticks, the commit from git."""

import re
import subprocess

import pytest

from rarebit.bench import _machine
from rarebit.bench._machine import OtherLoad


def stat_file(tmp_path, **ticks):
    names = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest"]
    numbers = " ".join(str(ticks.get(name, 0)) for name in names)
    (tmp_path / "stat").write_text(f"cpu  {numbers} 0\ncpu0 9 9 9 9\n")
    return tmp_path / "stat"


@pytest.fixture
def own_time(monkeypatch):
    """Seconds of processor that this process has used, as a list of one to be changed."""
    used = [0.0]
    monkeypatch.setattr(_machine.os, "times", lambda: (used[0], 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(_machine.os, "sysconf", lambda name: 100)
    return used


def test_other_load_is_what_is_busy_beyond_ourselves(tmp_path, own_time):
    load = OtherLoad(stat_file(tmp_path))
    stat_file(tmp_path, user=500, system=100, idle=350, iowait=50)
    own_time[0] = 4.0
    assert load.share() == pytest.approx(0.2)  # 6 of 10 seconds are busy, 4 of them are ours


def test_guests_are_not_counted_twice(tmp_path, own_time):
    load = OtherLoad(stat_file(tmp_path))
    stat_file(tmp_path, user=500, idle=500, guest=500)
    assert load.share() == pytest.approx(0.5)


def test_time_stolen_by_another_machine_is_load(tmp_path, own_time):
    load = OtherLoad(stat_file(tmp_path))
    stat_file(tmp_path, steal=250, idle=750)
    assert load.share() == pytest.approx(0.25)


def test_other_load_is_never_below_zero(tmp_path, own_time):
    load = OtherLoad(stat_file(tmp_path))
    stat_file(tmp_path, user=100, idle=900)
    own_time[0] = 1.01  # two clocks of different grain
    assert load.share() == 0.0


def test_other_load_is_unknown_where_the_system_does_not_say(tmp_path, own_time):
    assert OtherLoad(tmp_path / "nothing").share() is None
    assert OtherLoad(stat_file(tmp_path)).share() is None  # a file that stands still


def git(folder, *arguments):
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_commit_is_that_of_our_own_repository_only(tmp_path):
    ours, theirs = tmp_path / "src/rarebit/bench", tmp_path / "site-packages/rarebit/bench"
    ours.mkdir(parents=True)
    theirs.mkdir(parents=True)
    assert _machine._commit(ours) is None  # no repository
    git(tmp_path, "init")
    assert _machine._commit(ours) is None  # no commit
    (ours / "x.py").write_text("x = 1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "Begin")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag does not stand for the commit")
    commit = _machine._commit(ours)
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert _machine._commit(theirs) is None
    (ours / "x.py").write_text("x = 2")
    assert _machine._commit(ours) == f"{commit}-dirty"


def test_no_git_means_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _machine._commit(tmp_path) is None
