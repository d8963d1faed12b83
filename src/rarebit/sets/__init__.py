"""Seam 2: several embedding sets, each with its own interaction."""
