"""Harmless transfer: rare rows learn from frequent ones where that does not oppose the main loss (Gong et al.).

    g_i = d(main loss) / d e_i        t_i = scale · d(transfer loss) / d e_i
    mu_i = t_i + lambda_i g_i         lambda_i = max((phi_i - <g_i, t_i>) / ||g_i||^2, 0)
    phi_i = alpha min(||g_i||^2, main loss)

    mu_i    what the optimizer gets of row i in place of g_i; <mu_i, g_i> >= phi_i

It changes how tables are trained and leaves the tables themselves unchanged. In runs and studies it is named among
the methods; in your own loop, `HarmlessTransfer(...).start(model, counts=counts)` starts it. Runs on a prepared log
find frequent relatives once, and keep them with the log. `transfer/` does the work.

Not for small tables, whose rows are all frequent, nor for thresholds that are still being learned.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from rarebit.callbacks import Callback, TrainingData, TrainingMethod
from rarebit.data.dataset import Dataset
from rarebit.data.selection import CoOccurrence, FrequencySplit, Selection, stored_selection
from rarebit.errors import NoTableError, warn
from rarebit.settings import check_types, require, suggest
from rarebit.tables.apply import Site, TableInfo, find_sites
from rarebit.tables.counts import counts_of_table
from rarebit.tables.table import full_table, methods_of
from rarebit.technique import BASELINE, Control, Technique, technique_name, technique_text
from rarebit.text import TextTable
from rarebit.transfer import losses
from rarebit.transfer.ledger import Ledger, explain_ledger
from rarebit.transfer.lexico import TransferRule
from rarebit.transfer.running import RunningTransfer

__all__ = ["HarmlessTransfer"]

LOSSES: dict[str, Callable[[], losses.TransferLoss]] = {
    "adversarial": losses.Adversarial,
    "adversarial-mlp": losses.AdversarialMLP,
    "cos-reg": losses.CosReg,
    "mmd": losses.MMD,
    "moments": losses.Moments,
    "sliced-wasserstein": losses.SlicedWasserstein,
    "relatives": losses.Relatives,
}
SELECTIONS = {"co-occurrence": CoOccurrence, "frequency": FrequencySplit}
LR = losses.Adversarial().lr
SUM_SCALE = 0.01  # of the plain sum, as in the paper; a study tunes it
LEAST_ROWS = 100  # tables with more rows than this take part by default
MIN_WIDTH = 2  # first-order weights have width 1 and take no part


@dataclass(frozen=True, kw_only=True)
class HarmlessTransfer(TrainingMethod):
    """Let rare rows learn from frequent ones as far as the main loss lets them.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(200, 4), nn.Linear(4, 1))
    >>> counts = torch.arange(200).flip(0)
    >>> with HarmlessTransfer(loss="mmd").start(model, counts=counts) as transfer:
    ...     transfer.backward(model(torch.tensor([3, 150, 150])).square().mean())
    >>> transfer.explain("0", 150).side, transfer.ledger.read()["steps"]
    ('rare', 1)
    """

    title: ClassVar[str] = "rare rows learn from frequent ones where that does no harm"
    paper: ClassVar[str] = "Gong et al., Harmless Transfer Learning for Item Embeddings"
    control: ClassVar[str] = "plain-sum"
    controls: ClassVar[tuple[str, ...]] = ("plain-sum", "doubled-rows")
    cost: ClassVar[str] = (
        "a step computes a second gradient for the rows of its batch, without a second pass through the "
        "network; nothing changes at inference time"
    )
    applies: ClassVar[str] = (
        "tables with many rare ids that are like frequent ones; not where rare ids mean something else"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"scale": (1.0, 0.1, 10.0, 0.01)}

    loss: (
        Literal[
            "adversarial",
            "adversarial-mlp",
            "cos-reg",
            "mmd",
            "moments",
            "sliced-wasserstein",
            "relatives",
        ]
        | losses.TransferLoss
    ) = "adversarial"
    """How the distance of rare rows from frequent ones is measured; in your own loop also a `TransferLoss`."""
    select: Literal["co-occurrence", "frequency"] = "co-occurrence"
    """"co-occurrence": rare ids that meet what frequent ones meet learn; "frequency": all rare ids do."""
    rule: TransferRule = "lexico"
    """"lexico": a barrier for each row; "global": one for all rows; "sum": none, both gradients are added."""
    scale: float = 1.0
    """The factor of the transfer gradient."""
    alpha: float = 2.0
    """The least descent of the main loss, in multiples of the main gradient's own."""
    lr: float = LR
    """The learning rate of the discriminator of the adversarial loss."""
    samples: int = 256
    """Frequent rows of each table that a step compares with; loss="adversarial-mlp" takes as many rare ones."""
    both: bool = False
    """Whether frequent rows move as well, towards rare ones."""
    absent: int | Literal["all"] = 0
    """Rare rows of each table that a step moves although its batch lacks them; they follow the transfer alone."""
    fields: str | tuple[str, ...] = ()
    """Fields whose tables take part; by default those with more than 100 values."""
    compile: bool = False
    """Whether torch compiles the parts of a transfer step: fewer kernels on a GPU."""

    def __post_init__(self) -> None:
        check_types(self)
        if not isinstance(self.fields, str) and len(self.fields) == 1:
            # one form for one field, so that a study gives it one name
            object.__setattr__(self, "fields", self.fields[0])
        for name in ("alpha", "lr"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{name} must be above 0 and finite, got {name}={value}")
        is_scale = 0 <= self.scale < math.inf
        require(is_scale, f"scale must be 0 or more and finite, got scale={self.scale}")
        require(self.samples >= 1, f"samples must be at least 1, got samples={self.samples}")
        require(
            self.absent == "all" or self.absent >= 0,
            f"absent must be 'all', or 0 or more, got absent={self.absent}",
        )
        require(
            self.loss == "adversarial" or self.lr == LR,
            f"lr is that of the discriminator of loss='adversarial', got loss={self.loss!r}; leave it out",
        )
        require(
            self.loss != "relatives" or self.select == "co-occurrence",
            "loss='relatives' needs to know the relatives, which select='co-occurrence' finds",
        )

    def check_beside(self, techniques: Sequence[Technique]) -> None:
        """Raise where thresholds are learned to the end, which the transfer would move, too."""
        kinds = {technique_name(technique) for technique in techniques}
        require(
            "pep" not in kinds or "pruned" in kinds,
            "harmless-transfer would move thresholds of pep that are still being learned; prune, and transfer "
            "while what is left is trained again: pep+pruned+harmless-transfer",
        )
        require(
            isinstance(self.loss, str),
            f"a run stores its settings, so its transfer loss goes by name, got loss={self.loss!r}; "
            f"use one of {', '.join(map(repr, LOSSES))}",
        )

    def make_control(self, name: str, techniques: Sequence[Technique]) -> Control | None:
        """Return the plain sum at its best scale, or the barrier without a transfer gradient."""
        if name == "plain-sum" and self.rule != "sum" and self.scale > 0:
            # alpha belongs to the barrier, which a sum does not have
            changed = replace(self, rule="sum", scale=SUM_SCALE, alpha=HarmlessTransfer.alpha)
        elif name == "plain-sum":  # the control of a sum is the run without it
            others = tuple(one for one in techniques if one is not self)
            return Control("+".join(map(technique_text, others)) or BASELINE, others)
        elif name == "doubled-rows":
            changed = replace(self, scale=0.0)
        else:
            return None
        usual = technique_text(
            replace(changed, rule=HarmlessTransfer.rule, scale=HarmlessTransfer.scale)
        )
        own = usual.replace(technique_name(self), name, 1)
        return Control(
            "+".join(own if t is self else technique_text(t) for t in techniques),
            tuple(changed if one is self else one for one in techniques),
            tuned=name == "plain-sum",
        )

    def start(
        self,
        model: nn.Module,
        data: TrainingData | Dataset | Tensor | None = None,
        *,
        counts: Mapping[str, Tensor] | Tensor | None = None,
        select: Selection | CoOccurrence | FrequencySplit | None = None,
        where: Callable[[TableInfo], bool] | None = None,
        seed: int = 0,
        say: Callable[[str], object] = print,
    ) -> RunningTransfer:
        """Return a transfer that runs on a model, for your own loop.

        `data` is the training data: a data set, or lines of tokens `(lines, length)`. `counts` says how often
        training saw each id: a mapping by field or table, or one tensor where one table is chosen; by default it
        is counted in the data set. With counts alone, the top fifth of the ids that training saw is frequent and
        the others are rare. `select=` overrides both.

        `where` chooses tables in place of `fields`. `say` takes a line for each part that `compile` cannot compile.

        Start it when the model is on its device, and before it is compiled or wrapped in DDP.
        """
        if isinstance(data, TrainingData):
            seed, data = data.seed, data.train
        if counts is None and isinstance(data, Dataset):
            counts = data.counts()
        if isinstance(counts, Mapping):
            counts = {name: counts_of_table(name, None, found) for name, found in counts.items()}
        elif counts is not None:
            counts = counts_of_table("the table", None, counts)
        if select is None and data is not None:
            select = SELECTIONS[self.select]()
        if where is None:
            fields = _chosen_fields(model, self.fields)
            where = (lambda info: info.field in fields) if self.fields else _is_large
        loss = LOSSES[self.loss]() if isinstance(self.loss, str) else self.loss
        if self.loss == "adversarial":
            loss = losses.Adversarial(lr=self.lr, seed=seed)
        elif self.loss == "adversarial-mlp":
            loss = losses.AdversarialMLP(seed=seed)
        return RunningTransfer(
            model,
            counts=counts,
            select=select,
            data=data,
            loss=loss,
            where=where,
            rule=self.rule,
            scale=self.scale,
            alpha=self.alpha,
            samples=self.samples,
            both=self.both,
            seed=seed,
            absent=self.absent,
            say=say if self.compile else None,
        )

    def callback(self) -> "TransferCallback":
        """Return the transfer of one run."""
        return TransferCallback(self)

    @staticmethod
    def explain_report(report: Mapping[str, Any]) -> list[TextTable | str]:
        """Return the ledger of a run as tables and notes for people."""
        return explain_ledger(report)


class TransferCallback(Callback):
    """The transfer of one run; none where no table has frequent rows to learn from."""

    def __init__(self, settings: HarmlessTransfer) -> None:
        self.settings = settings
        self.transfer: RunningTransfer | None = None
        self.left_out: list[str] = []

    @property
    def name(self) -> str:
        return f"{technique_name(self.settings)}: {self.settings}"

    def start(self, model: nn.Module, data: TrainingData) -> None:
        fields = _chosen_fields(model, self.settings.fields)
        how = SELECTIONS[self.settings.select]()
        selection = stored_selection(
            data.train, how, fields=fields, folder=data.folder, data_checksum=data.checksum
        )
        chosen = [site for site in _wide_sites(model) if site.info.field in fields]
        names = {site.info.name for site in chosen if _has_frequent(site, selection)}
        self.left_out = [site.info.name for site in chosen if site.info.name not in names]
        if names:
            self.transfer = self.settings.start(
                model, select=selection, where=lambda info: info.name in names, seed=data.seed
            )
            self.backward = self.transfer.backward
        else:
            warn(
                f"no frequent row is left in {', '.join(map(repr, self.left_out))}, so harmless-transfer has none to learn "
                "from and training is plain; leave it out, or name other fields"
            )

    def report(self) -> dict[str, Any]:
        ledger = Ledger() if self.transfer is None else self.transfer.ledger
        return ledger.read() | ({"left_out": self.left_out} if self.left_out else {})

    def state_dict(self) -> dict[str, Any]:
        return {} if self.transfer is None else self.transfer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.transfer is not None:
            self.transfer.load_state_dict(state)

    def close(self) -> None:
        if self.transfer is not None:
            self.transfer.discard()  # a step that an error ended
            self.transfer.close()


def _chosen_fields(model: nn.Module, fields: str | Sequence[str]) -> list[str]:
    """Return the fields that take part, in the order of the model; first-order weights do not."""
    wide = [site.info for site in _wide_sites(model)]
    known = list(dict.fromkeys(info.field for info in wide))
    asked = (fields,) if isinstance(fields, str) else fields
    for name in asked:
        require(name in known, f"fields: there is no table for {name!r}{suggest(name, known)}")
    found = asked or [info.field for info in wide if _is_large(info)]
    if not found:
        seen = ", ".join(f"{info.name} ({info.rows} rows)" for info in wide[:8])
        raise NoTableError(
            f"harmless-transfer takes tables of more than {LEAST_ROWS} rows, and the model has "
            f"{seen or 'no table wider than 1'}; leave it out, or name smaller tables with fields="
        )
    return [name for name in known if name in found]


def _wide_sites(model: nn.Module) -> list[Site]:
    return [site for site in find_sites(model) if site.info.width >= MIN_WIDTH]


def _has_frequent(site: Site, selection: Selection) -> bool:
    """Return whether a table has frequent rows; of a pruned one, rows that are not all zero."""
    source = selection[site.info.field].source
    if any(method.masks_entries for method in methods_of(site.table)):
        source = source & full_table(site.table).cpu().any(dim=1)
    return bool(source.any())


def _is_large(info: TableInfo) -> bool:
    return info.rows > LEAST_ROWS
