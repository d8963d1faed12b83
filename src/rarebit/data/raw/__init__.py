"""From raw files to a folder that trains. Everything that needs Polars and PyArrow is in here."""

import importlib.util

from rarebit.errors import MissingExtraError

for package in ("polars", "pyarrow"):
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, "data", "reading raw logs")
