"""The schema that docs/data.md shows is one."""

import re
import tomllib
from pathlib import Path

from rarebit.data import LogSchema
from rarebit.data.sources import source_names

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text("utf-8")


def test_the_schema_on_the_page_is_read():
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    schema = LogSchema.from_mapping(tomllib.loads(text))
    assert schema.split.kind == "time"
    assert list(schema.vocabularies) == ["user", "item", "genres"]
    assert {column.kind for column in schema.columns} == {"time", "categorical", "multi", "numeric"}


def test_the_page_lists_every_set():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.split("## Well-known sets")[1], re.MULTILINE)
    assert sorted(rows) == source_names()
