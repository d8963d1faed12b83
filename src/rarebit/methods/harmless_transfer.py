"""Harmless transfer: rare rows learn from frequent ones where that does not oppose the main loss (Gong et al.).

    g_i = d(main loss) / d e_i        t_i = scale · d(transfer loss) / d e_i
    mu_i = t_i + lambda_i g_i         lambda_i = max((phi_i - <g_i, t_i>) / ||g_i||^2, 0)
    phi_i = alpha min(||g_i||^2, main loss)

    mu_i    what the optimizer gets of row i in place of g_i; <mu_i, g_i> >= phi_i

It changes how tables are trained and leaves the tables themselves as they are. These are its settings in runs and
studies; in a loop of one's own, `rarebit.HarmlessTransfer` does the same. Which rare rows have a frequent
relative is found once a prepared log, and kept with it.

Not for small tables, whose rows are all frequent, nor for thresholds that are still being learned.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import nn

from rarebit.callbacks import Callback, TrainingData, TrainingMethod
from rarebit.data.selection import CoOccurrence, FrequencySplit, Selection, stored_selection
from rarebit.errors import NoTableError
from rarebit.settings import check_types, require, suggest
from rarebit.tables.find import Site, TableInfo, find_sites
from rarebit.tables.table import full_table, methods_of
from rarebit.technique import BASELINE, Control, Technique, technique_name, technique_text
from rarebit.text import TextTable
from rarebit.transfer.harmless_transfer import LEAST_ROWS, HarmlessTransfer
from rarebit.transfer.ledger import Ledger
from rarebit.transfer.ledger_text import explain_ledger
from rarebit.transfer.lexico import TransferRule
from rarebit.transfer.losses import (
    MMD,
    Adversarial,
    CosReg,
    Moments,
    Relatives,
    SlicedWasserstein,
    TransferLoss,
)

__all__ = ["Transfer", "TransferLossName", "TransferSelect"]

TransferLossName = Literal[
    "adversarial", "cos-reg", "mmd", "moments", "sliced-wasserstein", "relatives"
]
TransferSelect = Literal["co-occurrence", "frequency"]

LOSSES: dict[str, Callable[[], TransferLoss]] = {
    "cos-reg": CosReg,
    "mmd": MMD,
    "moments": Moments,
    "sliced-wasserstein": SlicedWasserstein,
    "relatives": Relatives,
}
"""Those without settings of their own here."""
LR = Adversarial().lr
SCALES = (0.01, 0.1, 1.0, 10.0)
"""What a plain sum multiplies the transfer gradient by; validation picks."""
MIN_WIDTH = 2
"""First-order weights have width 1 and take no part."""


@dataclass(frozen=True, kw_only=True)
class Transfer(TrainingMethod):
    """Let rare rows learn from frequent ones as far as the main loss lets them.

    >>> Transfer(loss="mmd", fields="zip").fields
    'zip'
    """

    title: ClassVar[str] = "rare rows learn from frequent ones where that does no harm"
    paper: ClassVar[str] = "Gong et al., Harmless Transfer Learning for Item Embeddings"
    control: ClassVar[str] = "plain-sum"
    controls: ClassVar[tuple[str, ...]] = ("plain-sum", "doubled-rows")
    cost: ClassVar[str] = (
        "a step computes a second gradient for the rows of its batch, without a second pass through the "
        "network; tables are served as they are"
    )
    applies: ClassVar[str] = (
        "tables with many rare ids that are like frequent ones; not where rare ids mean something else"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"scale": (1.0, 0.1, 10.0, 0.01)}

    loss: TransferLossName = "adversarial"
    """What the transfer lowers: how far rare rows are from frequent ones, measured in one of these ways."""
    select: TransferSelect = "co-occurrence"
    """"co-occurrence": rare ids that meet what frequent ones meet learn; "frequency": all rare ids do."""
    rule: TransferRule = "lexico"
    """"lexico": a barrier for each row; "global": one for all rows; "sum": none, both gradients are added."""
    scale: float = 1.0
    """What the transfer gradient is multiplied by."""
    alpha: float = 2.0
    """How many times the main gradient's own descent the barrier asks for, at most."""
    lr: float = LR
    """The learning rate of the discriminator, of the adversarial loss."""
    samples: int = 256
    """Frequent rows of each table that a step compares with."""
    both: bool = False
    """Whether frequent rows move as well, towards rare ones."""
    fields: str | tuple[str, ...] = ()
    """Fields whose tables take part; those with more than 100 values if not given."""
    compile: bool = False
    """Whether torch compiles what the transfer does in a step: fewer kernels on a GPU."""

    def __post_init__(self) -> None:
        check_types(self)
        if not isinstance(self.fields, str) and len(self.fields) == 1:
            # one form for one field, so that a study gives it one name
            object.__setattr__(self, "fields", self.fields[0])
        require(
            0 <= self.scale < math.inf,
            f"scale must be 0 or more and finite, got scale={self.scale}",
        )
        require(
            0 < self.alpha < math.inf, f"alpha must be above 0 and finite, got alpha={self.alpha}"
        )
        require(0 < self.lr < math.inf, f"lr must be above 0 and finite, got lr={self.lr}")
        require(self.samples >= 1, f"samples must be at least 1, got samples={self.samples}")
        require(
            self.loss == "adversarial" or self.lr == LR,
            f"lr is that of the discriminator, and loss={self.loss!r} has none; leave it out",
        )
        require(
            self.loss != "relatives" or self.select == "co-occurrence",
            "loss='relatives' needs to know the relatives, which select='co-occurrence' finds",
        )

    def check_beside(self, techniques: Sequence[Technique]) -> None:
        """Raise where thresholds are learned to the end: the transfer would move those, too."""
        kinds = {technique_name(technique) for technique in techniques}
        require(
            "pep" not in kinds or "pruned" in kinds,
            "harmless-transfer would move thresholds of pep that are still being learned; prune, and transfer "
            "while what is left is trained again: pep+pruned+harmless-transfer",
        )

    def make_control(self, name: str, techniques: Sequence[Technique]) -> Control | None:
        """Return the plain sum at several scales, or the barrier without a transfer gradient."""
        if name == "plain-sum" and self.rule != "sum" and self.scale > 0:
            # alpha belongs to the barrier, which a sum does not have
            changed = [replace(self, rule="sum", scale=s, alpha=Transfer.alpha) for s in SCALES]
        elif name == "plain-sum":  # the control of a sum is the run without it
            others = tuple(one for one in techniques if one is not self)
            return Control("+".join(map(technique_text, others)) or BASELINE, (others,))
        elif name == "doubled-rows":
            changed = [replace(self, scale=0.0)]
        else:
            return None
        trials = tuple(tuple(new if one is self else one for one in techniques) for new in changed)
        usual = technique_text(replace(changed[0], rule=Transfer.rule, scale=Transfer.scale))
        own = usual.replace(technique_name(self), name, 1)
        return Control(
            "+".join(own if t is self else technique_text(t) for t in techniques), trials
        )

    def callback(self) -> "_Running":
        """Return the transfer for one training."""
        return _Running(self)

    def build(
        self, model: nn.Module, data: TrainingData
    ) -> tuple[HarmlessTransfer | None, list[str]]:
        """Return the transfer with counts and relatives of the training rows, and tables left out."""
        fields = self._fields(model)
        selection = self._selection(data, fields)
        chosen = [site for site in _wide_sites(model) if site.info.field in fields]
        names = {site.info.name for site in chosen if _has_frequent(site, selection)}
        left_out = [site.info.name for site in chosen if site.info.name not in names]
        if not names:
            return None, left_out
        transfer = HarmlessTransfer(
            model,
            select=selection,
            loss=self._loss(data.seed),
            where=lambda info: info.name in names,
            rule=self.rule,
            transfer_scale=self.scale,
            alpha=self.alpha,
            samples=self.samples,
            both=self.both,
            seed=data.seed,
            compile=self.compile,
        )
        return transfer, left_out

    def _fields(self, model: nn.Module) -> list[str]:
        """Return the fields that take part, in the order of the model; first-order weights do not."""
        wide = [site.info for site in _wide_sites(model)]
        known = list(dict.fromkeys(info.field for info in wide))
        asked = (self.fields,) if isinstance(self.fields, str) else self.fields
        for name in asked:
            require(name in known, f"fields: there is no table for {name!r}{suggest(name, known)}")
        found = asked or [info.field for info in wide if _is_large(info)]
        if not found:
            raise NoTableError(
                f"no field of the model has more than {LEAST_ROWS} values, so harmless-transfer has no rare "
                f"ones to help; leave it out, or name fields: {', '.join(known)}"
            )
        return [name for name in known if name in found]

    @staticmethod
    def explain_report(report: Mapping[str, Any]) -> list[TextTable | str]:
        """Return the ledger of a run as tables and notes for people."""
        return explain_ledger(report)

    def _selection(self, data: TrainingData, fields: list[str]) -> Selection:
        """Return which of the training rows' values are frequent and rare."""
        settings = CoOccurrence() if self.select == "co-occurrence" else FrequencySplit()
        return stored_selection(
            data.train, settings, fields=fields, folder=data.folder, data_checksum=data.checksum
        )

    def _loss(self, seed: int) -> TransferLoss:
        if self.loss == "adversarial":
            return Adversarial(lr=self.lr, seed=seed)
        return LOSSES[self.loss]()


class _Running(Callback):
    """A transfer at work in one training; none where no table has frequent rows to learn from."""

    def __init__(self, method: Transfer) -> None:
        self.method = method

    def start(self, model: nn.Module, data: TrainingData) -> None:
        """Attach the transfer to the model."""
        self.transfer, self.left_out = self.method.build(model, data)
        self.backward = None if self.transfer is None else self.transfer.backward

    def report(self) -> dict[str, Any]:
        """Return the ledger, and which tables had nothing to learn from."""
        ledger = Ledger() if self.transfer is None else self.transfer.ledger
        told = {"left_out": self.left_out} if self.left_out else {}
        return ledger.read() | told

    def state_dict(self) -> dict[str, Any]:
        """Return discriminators, the number of the step, and the ledger."""
        return {} if self.transfer is None else self.transfer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from them."""
        if self.transfer is not None:
            self.transfer.load_state_dict(state)

    def close(self) -> None:
        """Take the transfer off the model; a step that an error ended is forgotten."""
        if self.transfer is not None:
            self.transfer.discard()
            self.transfer.close()


def _wide_sites(model: nn.Module) -> list[Site]:
    return [site for site in find_sites(model) if site.info.width >= MIN_WIDTH]


def _has_frequent(site: Site, selection: Selection) -> bool:
    """Return whether a table has frequent rows; of a pruned one, rows of which something is left."""
    source = selection[site.info.field].source
    if any(method.masks_entries for method in methods_of(site.table)):
        source = source & full_table(site.table).cpu().any(dim=1)
    return bool(source.any())


def _is_large(info: TableInfo) -> bool:
    return info.rows > LEAST_ROWS
