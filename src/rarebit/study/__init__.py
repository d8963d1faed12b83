"""Comparisons: runs by hash, paired seeds, controls, statistics."""
