"""Seam 1: a table is a function from ids to rows."""
