"""Numbers for people."""

import pytest

from rarebit.settings import size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (3_450_000, "3.5 MB"), (2e9, "2.0 GB")],
)
def test_bytes_for_people(num_bytes, text):
    assert size(num_bytes) == text
