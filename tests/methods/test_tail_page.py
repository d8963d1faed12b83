"""docs/tail.md names every form of shrinkage."""

import re
from pathlib import Path

import pytest

from rarebit.methods.shrinkage import PRIORS, RULES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tail.md").read_text("utf-8")


@pytest.mark.parametrize("form", [*RULES, *PRIORS])
def test_every_form_has_a_line_in_a_table(form):
    assert re.search(rf'^\| `"{form}"` \|', PAGE, flags=re.MULTILINE)
