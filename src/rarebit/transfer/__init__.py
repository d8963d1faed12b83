"""Rare rows learn from frequent ones, held back where that opposes the main loss."""
