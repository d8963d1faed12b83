"""Controls, neighbours and theory: what we measure and do not recommend."""

from rarebit.diagnosis.measure import reweighting
from rarebit.research._reweighting import UpdateSplit, factorized_tables, update_split
from rarebit.research.adam_ar import AdamAR
from rarebit.research.aligned_sets import AlignedSets
from rarebit.research.cafe import CAFE
from rarebit.research.darts_emb import DartsEmb
from rarebit.research.dhe import DHE
from rarebit.research.dpq import DPQ
from rarebit.research.frequency_decay import FrequencyDecay
from rarebit.research.fresh_tables import FreshTables
from rarebit.research.group_stopping import GroupStopping
from rarebit.research.id_dropout import IdDropout
from rarebit.research.mgqe import MGQE
from rarebit.research.mixed_dimensions import MixedDimensions
from rarebit.research.mpe import MPE
from rarebit.research.product_start import ProductStart
from rarebit.research.qr import QR
from rarebit.research.robe import ROBE
from rarebit.research.row_rate import RowRate
from rarebit.research.shared_sets import SharedSets
from rarebit.research.tt_rec import TTRec

__all__ = [
    "CAFE",
    "DHE",
    "DPQ",
    "MGQE",
    "MPE",
    "QR",
    "ROBE",
    "AdamAR",
    "AlignedSets",
    "DartsEmb",
    "FrequencyDecay",
    "FreshTables",
    "GroupStopping",
    "IdDropout",
    "MixedDimensions",
    "ProductStart",
    "RowRate",
    "SharedSets",
    "TTRec",
    "UpdateSplit",
    "factorized_tables",
    "reweighting",
    "update_split",
]
