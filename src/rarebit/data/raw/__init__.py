"""From the files people have to the folder that trains. Everything that needs Polars is in here."""

import importlib.util

from rarebit.errors import MissingExtraError

if importlib.util.find_spec("polars") is None:
    raise MissingExtraError("polars", "data", "reading raw logs")
