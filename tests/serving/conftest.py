"""One server for all tests that only ask it questions."""

import pytest
from served import serving, write_file


@pytest.fixture(scope="session")
def clicks(tmp_path_factory):
    """Return the path of an exported file."""
    return write_file(tmp_path_factory.mktemp("served") / "clicks.onnx")


@pytest.fixture(scope="session")
def server(clicks):
    with serving(
        clicks, "--max-bytes", "1000000", "--max-rows", "1000", "--timeout", "2"
    ) as server:
        yield server
