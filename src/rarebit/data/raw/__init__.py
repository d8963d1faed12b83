"""From raw files to a folder that trains. Everything that needs Polars and PyArrow is in here."""

from rarebit.errors import import_extra

for package in ("polars", "pyarrow"):
    import_extra(package, "data", "reading raw logs")
