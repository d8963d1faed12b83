"""Pruning: PEP, tickets, budgets, the two stages of a run, and insight into what pruning kept.

prune, retrain        find the entries that survive, and train them again, for your own model
prune_run             the same for the settings of a run, at several budgets: `rarebit prune`
pruning_insight       which rows kept how much
"""

from rarebit.pruning._insight import PruningInsight, pruning_insight, write_insight
from rarebit.pruning.masked import Masked, Ticket, load_ticket, save_ticket
from rarebit.pruning.pep import PEP, LearnedPruner, Pruner, set_threshold_, take_ticket
from rarebit.pruning.pruned import (
    Pruned,
    PruneResult,
    PruneSettings,
    Pruning,
    explain_pruning,
    prune,
    prune_run,
    read_prune,
    retrain,
)

__all__ = [
    "PEP",
    "LearnedPruner",
    "Masked",
    "PruneResult",
    "PruneSettings",
    "Pruned",
    "Pruner",
    "Pruning",
    "PruningInsight",
    "Ticket",
    "explain_pruning",
    "load_ticket",
    "prune",
    "prune_run",
    "pruning_insight",
    "read_prune",
    "retrain",
    "save_ticket",
    "set_threshold_",
    "take_ticket",
    "write_insight",
]
