"""The training loop, optimizers, metrics, runs, and models as files."""

from rarebit.training.fit import History
from rarebit.training.memory import MemoryEstimate, estimate_memory
from rarebit.training.metrics import Evaluation, Metrics
from rarebit.training.run import RunResult
from rarebit.training.score import Scored, score_log
from rarebit.training.settings import PreparedLog

__all__ = [
    "Evaluation",
    "History",
    "MemoryEstimate",
    "Metrics",
    "PreparedLog",
    "RunResult",
    "Scored",
    "estimate_memory",
    "score_log",
]
