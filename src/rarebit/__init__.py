"""Embedding tables that are better on rare items, smaller, and able to grow."""

from rarebit.callbacks import Callback, TrainingData, TrainingMethod
from rarebit.codes.packed import Pack, load_packed, pack_, save_packed
from rarebit.data.dataset import Batch, Dataset, Splits, collate
from rarebit.data.log_schema import Column, LogSchema, Split, TextFormat
from rarebit.data.prepare import prepare, prepare_source
from rarebit.data.schema import Field, Schema
from rarebit.data.selection import (
    CoOccurrence,
    FrequencySplit,
    Selection,
    load_selection,
    save_selection,
    select,
)
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.diagnosis.diagnose import diagnose
from rarebit.diagnosis.report import Diagnosis
from rarebit.methods._counts import set_counts_
from rarebit.methods.forgetting import Forgetting, forget_
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.methods.hashing import Hashing
from rarebit.methods.low_rank import LowRank
from rarebit.methods.mlet import MLET
from rarebit.methods.multi_embedding import MultiEmbedding
from rarebit.methods.quantize import Quantize
from rarebit.methods.shrinkage import Shrinkage
from rarebit.pruning.masked import Masked, Ticket, load_ticket, save_ticket
from rarebit.pruning.pep import PEP, LearnedPruner, Pruner, set_threshold_, take_ticket
from rarebit.pruning.pruned import Pruned, Pruning, prune, retrain
from rarebit.research.aligned_sets import AlignedSets
from rarebit.research.frequency_decay import FrequencyDecay
from rarebit.research.fresh_tables import FreshTables
from rarebit.research.group_stopping import GroupStopping
from rarebit.research.id_dropout import IdDropout
from rarebit.research.product_start import ProductStart
from rarebit.research.row_rate import RowRate
from rarebit.research.shared_sets import SharedSets
from rarebit.row_gradients.seam import RowGradients, sum_losses
from rarebit.study.plan import StudyPlan
from rarebit.study.results import StudyResult
from rarebit.study.study import study
from rarebit.tables.apply import (
    TableChanges,
    TableInfo,
    apply_,
    check_optimizer,
    find_tables,
    merge_,
)
from rarebit.tables.spectrum import information_abundance
from rarebit.tables.table import Method, Table
from rarebit.technique import Rank
from rarebit.training.ema import EMA
from rarebit.training.fit import History, fit
from rarebit.training.memory import MemoryEstimate, estimate_memory
from rarebit.training.metrics import Evaluation, Metrics, evaluate, predict
from rarebit.training.model_file import load_model, save_model
from rarebit.training.optimizers import optimizer
from rarebit.training.run import RunResult, run
from rarebit.training.score import Scored, score_log
from rarebit.training.settings import PreparedLog, RunSettings, Training
from rarebit.training.step import clip_grad_norm_
from rarebit.transfer.losses import MMD, Adversarial, CosReg, Moments, Relatives, SlicedWasserstein

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "MLET",
    "MMD",
    "PEP",
    "Adversarial",
    "AlignedSets",
    "Batch",
    "Callback",
    "CoOccurrence",
    "Column",
    "CosReg",
    "Dataset",
    "Diagnosis",
    "Evaluation",
    "Field",
    "Forgetting",
    "FrequencyDecay",
    "FrequencySplit",
    "FreshTables",
    "GroupStopping",
    "HarmlessTransfer",
    "Hashing",
    "History",
    "IdDropout",
    "LearnedPruner",
    "LogSchema",
    "LowRank",
    "Masked",
    "MemoryEstimate",
    "Method",
    "Metrics",
    "Moments",
    "MultiEmbedding",
    "Pack",
    "PreparedLog",
    "ProductStart",
    "Pruned",
    "Pruner",
    "Pruning",
    "Quantize",
    "Rank",
    "Relatives",
    "RowGradients",
    "RowRate",
    "RunResult",
    "RunSettings",
    "Schema",
    "Scored",
    "Selection",
    "SharedSets",
    "Shrinkage",
    "SlicedWasserstein",
    "Split",
    "Splits",
    "StudyPlan",
    "StudyResult",
    "SyntheticLog",
    "Table",
    "TableChanges",
    "TableInfo",
    "TextFormat",
    "Ticket",
    "Training",
    "TrainingData",
    "TrainingMethod",
    "__version__",
    "apply_",
    "check_optimizer",
    "clip_grad_norm_",
    "collate",
    "diagnose",
    "estimate_memory",
    "evaluate",
    "find_tables",
    "fit",
    "forget_",
    "generate",
    "information_abundance",
    "load_model",
    "load_packed",
    "load_selection",
    "load_ticket",
    "merge_",
    "optimizer",
    "pack_",
    "predict",
    "prepare",
    "prepare_source",
    "prune",
    "retrain",
    "run",
    "save_model",
    "save_packed",
    "save_selection",
    "save_ticket",
    "score_log",
    "select",
    "set_counts_",
    "set_threshold_",
    "study",
    "sum_losses",
    "take_ticket",
]
