"""Row-wise optimizers in each of their forms."""

import pytest

from rarebit.training.optimizers import row_kernel


@pytest.fixture(params=["plain torch", "compiled"])
def form(request, monkeypatch):
    """Run a test with the plain form and, where there is a compiler, with the compiled one."""
    monkeypatch.setenv("RAREBIT_COMPILE", "1" if request.param == "compiled" else "0")
    row_kernel.cache_clear()
    yield request.param
    row_kernel.cache_clear()
