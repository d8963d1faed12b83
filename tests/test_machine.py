"""The machine: the commit of a result, what other processes use, and which cores are free."""

import re
import subprocess

import pytest
import torch

from rarebit import machine
from rarebit.machine import OtherLoad, allowed_cores, default_workers, free_cores
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


def stat_file(tmp_path, **ticks):
    names = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest"]
    numbers = " ".join(str(ticks.get(name, 0)) for name in names)
    (tmp_path / "stat").write_text(f"cpu  {numbers} 0\ncpu0 9 9 9 9\n")
    return tmp_path / "stat"


@pytest.fixture
def own_time(monkeypatch):
    """Seconds of processor that this process has used, as a list of one to be changed."""
    used = [0.0]
    monkeypatch.setattr(machine.os, "times", lambda: (used[0], 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
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


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000\n"}, 6),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_allowed_cores_are_those_of_the_process_and_its_container(
    files, cores, tmp_path, eight_cores
):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert allowed_cores(tmp_path) == cores


@pytest.mark.parametrize(("busy", "free"), [(0, 6), (25, 6), (50, 4), (95, 1), (100, 1)])
def test_free_cores_are_what_others_leave(busy, free, tmp_path, own_time, eight_cores):
    load = OtherLoad(stat_file(tmp_path))
    stat_file(tmp_path, user=busy, idle=100 - busy)
    assert free_cores(load) == min(free, allowed_cores())
    assert free_cores(OtherLoad(tmp_path / "nothing")) == allowed_cores()


def test_a_gpu_has_one_run_at_a_time_unless_processes_share_it(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(machine, "allowed_cores", lambda: 8)
    assert default_workers(torch.device("cpu"), 2) == 4
    assert default_workers(torch.device("cuda"), 2) == 1
    (tmp_path / "control").touch()
    assert default_workers(torch.device("cuda"), 2) == 4
