"""The public names: what `rarebit.NAME` is."""

from rarebit import __version__, pruning, research, transfer
from rarebit.callbacks import Callback, LogTo, TrainingMethod
from rarebit.codes.packed import pack_
from rarebit.data.dataset import Dataset
from rarebit.data.prepare import prepare
from rarebit.diagnosis.diagnose import diagnose
from rarebit.ema import EMA
from rarebit.export.export import export
from rarebit.methods._counts import count_lookups, set_counts_
from rarebit.methods.evidence_coding import EvidenceCoding, compress_, measure_sensitivity
from rarebit.methods.forgetting import Forgetting, forget_
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.methods.hashing import Hashing
from rarebit.methods.low_rank import LowRank
from rarebit.methods.mlet import MLET
from rarebit.methods.multi_embedding import MultiEmbedding
from rarebit.methods.quantize import Quantize
from rarebit.methods.shrinkage import Shrinkage
from rarebit.methods.tail import Tail
from rarebit.pruning.pep import PEP
from rarebit.report.report import report
from rarebit.row_gradients.seam import RowGradients
from rarebit.sharding.pieces import save_shards, unshard
from rarebit.sharding.sharded import shard
from rarebit.study.improve import Improvement, improve
from rarebit.study.plan import StudyPlan
from rarebit.study.results import StudyResult
from rarebit.study.study import study
from rarebit.tables.apply import apply_, check_optimizer, find_tables, merge_
from rarebit.tables.grow import grow_
from rarebit.tables.spectrum import information_abundance
from rarebit.tables.table import Method, Table
from rarebit.technique import Rank
from rarebit.training.fit import fit
from rarebit.training.metrics import evaluate, predict
from rarebit.training.model_file import load_model, save_model
from rarebit.training.optimizers import optimizer
from rarebit.training.run import run
from rarebit.training.settings import RunSettings, Training
from rarebit.training.step import clip_grad_norm_
from rarebit.training.update import update

__all__ = [
    "EMA",
    "MLET",
    "PEP",
    "Callback",
    "Dataset",
    "EvidenceCoding",
    "Forgetting",
    "HarmlessTransfer",
    "Hashing",
    "Improvement",
    "LogTo",
    "LowRank",
    "Method",
    "MultiEmbedding",
    "Quantize",
    "Rank",
    "RowGradients",
    "RunSettings",
    "Shrinkage",
    "StudyPlan",
    "StudyResult",
    "Table",
    "Tail",
    "Training",
    "TrainingMethod",
    "__version__",
    "apply_",
    "check_optimizer",
    "clip_grad_norm_",
    "compress_",
    "count_lookups",
    "diagnose",
    "evaluate",
    "export",
    "find_tables",
    "fit",
    "forget_",
    "grow_",
    "improve",
    "information_abundance",
    "load_model",
    "measure_sensitivity",
    "merge_",
    "optimizer",
    "pack_",
    "predict",
    "prepare",
    "pruning",
    "report",
    "research",
    "run",
    "save_model",
    "save_shards",
    "set_counts_",
    "shard",
    "study",
    "transfer",
    "unshard",
    "update",
]
