"""Power may go at any operation of the disk: what was not synced is gone, and nothing else is lost.

Each test loses power before every operation of some work, on the simulated disk of `benchmarks/faults.py`. It fails if one
sync of a file or a folder is removed from where these are written.
"""

import importlib.util
import random
from pathlib import Path

import pytest

FAULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"
SPEC = importlib.util.spec_from_file_location("faults", FAULTS)
faults = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(faults)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("save", None),
        ("pack", None),
        *(
            pytest.param(name, most, marks=pytest.mark.slow)
            for name, most in [
                ("prepare", None),
                ("train", 60),
                ("runs of a study", 40),
                ("prune", 20),
            ]
        ),
    ],
)
def test_after_a_power_loss_anywhere_nothing_is_lost_and_work_goes_on(name, most, tmp_path):
    found = faults.lose_power(faults.WORK[name], tmp_path / "work", random.Random(0), most)  # noqa: S311  # nothing secret
    assert set(found) == {"same"}
    assert found.total() >= (most or 20)


def test_the_simulated_disk_forgets_what_was_not_synced(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "old").write_bytes(b"old")
    power = faults.Power(folder, random.Random(0))  # noqa: S311  # nothing secret
    (folder / "new").write_bytes(b"new")
    (folder / "old").unlink()
    power.watch()
    assert power.image("none") == {"old": b"old"}
    assert power.image("all") == {"new": b""}
    power.sync(folder / "new")
    assert power.image("none") == {"old": b"old"}
    assert power.image("all") == {"new": b"new"}
    power.sync(folder)
    assert power.image("none") == power.image("some") == {"new": b"new"}
    power.close()
