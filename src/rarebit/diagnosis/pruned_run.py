"""What a pruning in a folder kept, as numbers and plots beside it."""

from pathlib import Path

from rarebit.data.dataset import Dataset
from rarebit.diagnosis.pruning import pruning_insight, write_insight
from rarebit.tables.ticket import Ticket
from rarebit.training.prune import TICKETS, TicketFolder, read_scans
from rarebit.training.prune_run import PruneResult
from rarebit.training.stages import PRUNING

__all__ = ["explain_pruning"]

INSIGHT = "insight"


def explain_pruning(result: PruneResult, train: Dataset, *, plots: bool = True) -> list[Path]:
    """Write which rows kept how much, and how fields meet before and after; return the files.

    "After" is the smallest budget. The plots need matplotlib.
    """
    insight = pruning_insight(
        _tickets(result),
        train.counts(),
        scans=read_scans(_stage(result, min(result.pruned))),
        before=result.unpruned.model,
        after=result.pruned[min(result.pruned)].model,
    )
    return write_insight(insight, result.folder / INSIGHT, plots=plots)


def _tickets(result: PruneResult) -> list[Ticket]:
    return [TicketFolder(_stage(result, budget) / TICKETS)[budget] for budget in result.pruned]


def _stage(result: PruneResult, budget: int) -> Path:
    """Return the folder of the first stage: that of all budgets, or of this one."""
    shared = result.folder / PRUNING
    return shared if shared.exists() else result.folder / str(budget) / PRUNING
