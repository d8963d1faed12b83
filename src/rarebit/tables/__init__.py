"""Seam 1: a table is a function from ids to rows."""

from rarebit.tables.apply import TableChanges, TableInfo

__all__ = ["TableChanges", "TableInfo"]
