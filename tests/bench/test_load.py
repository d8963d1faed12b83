"""The load of others, from a file of ticks."""

import pytest

from rarebit.bench import _frame as _load
from rarebit.bench._frame import OtherLoad


def stat_file(tmp_path, **ticks):
    names = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest"]
    numbers = " ".join(str(ticks.get(name, 0)) for name in names)
    (tmp_path / "stat").write_text(f"cpu  {numbers} 0\ncpu0 9 9 9 9\n")
    return tmp_path / "stat"


@pytest.fixture
def own_time(monkeypatch):
    """Seconds of processor that this process has used, as a list of one to be changed."""
    used = [0.0]
    monkeypatch.setattr(_load.os, "times", lambda: (used[0], 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(_load.os, "sysconf", lambda name: 100)
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
