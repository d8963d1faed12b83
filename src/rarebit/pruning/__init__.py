"""Pruning: PEP, tickets, budgets, the driver of the two stages, and what pruning kept."""
