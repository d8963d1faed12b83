"""Settings: how to train (every dial of `fit`), and everything that a run depends on."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from rarebit.data.dataset import Dataset, Splits
from rarebit.data.prepared import PreparedFolder
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.errors import DataError, SettingsError
from rarebit.models import model_settings
from rarebit.settings import (
    check_types,
    from_mapping,
    require,
    require_mapping,
    shown,
    suggest,
    to_mapping,
)
from rarebit.technique import Technique, technique_from_mapping, technique_to_mapping
from rarebit.training.optimizers import Kind, TableMode

Precision = Literal["float32", "bfloat16"]

PATIENCE = 2
"""Epochs without improvement before plain training stops."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train.

    >>> Training(epochs=3, lr=1e-2).batch_size
    1024
    """

    epochs: int = 10
    """Maximum epochs."""
    batch_size: int = 1024
    """Rows per step."""
    optimizer: Kind = "adam"
    """Adam, SGD or Adagrad: torch's fused optimizers."""
    tables: TableMode = "dense"
    """"dense": the optimizer updates every row in every step, as papers do. "rowwise": only the rows that the step
    looked up, so a step costs what its batch costs; Adam is then lazy."""
    lr: float = 1e-3
    """Learning rate."""
    table_lr: float | None = None
    """Learning rate of the tables; the same one if not given."""
    weight_decay: float = 0.0
    """L2 penalty inside the optimizer."""
    table_weight_decay: float | None = None
    """L2 penalty of the tables; the same one if not given."""
    threshold_weight_decay: float = 1e-5
    """L2 penalty of learned thresholds (`PEP`), which drives them up."""
    decoupled: bool = False
    """Weight decay shrinks weights directly, as AdamW does, in place of adding to gradients."""
    momentum: float = 0.0
    """Momentum, for SGD."""
    clip_norm: float | None = None
    """Maximum gradient norm over network and tables together; None: no clipping."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, which is evaluated and kept; such as 0.999."""
    ema_epochs: float | None = None
    """Memory of that average in epochs, in place of its decay: decay = exp(-1 / (ema_epochs * steps per epoch))."""
    precision: Precision = "float32"
    """Precision of the network's products; tables and loss stay in float32."""
    compile: bool = False
    """Compile the network with `torch.compile`: faster steps after some ten seconds."""
    cuda_graph: bool = True
    """On a GPU, capture the step as a CUDA graph and replay it."""
    monitor: Literal["auc", "logloss"] = "auc"
    """The validation metric that picks the best epoch."""
    patience: int | Literal["auto"] | None = "auto"
    """Stop early after so many epochs without improvement; None: never. "auto": what the methods ask for, at least 2."""
    plateau_factor: float = 1.0
    """Multiply the learning rate by this after `plateau_patience` epochs without improvement."""
    plateau_patience: int = 1
    """Epochs without improvement before the learning rate is reduced."""
    one_pass: bool = False
    """Train once over all rows in the order of the file, and score each batch before training on it (progressive
    validation). Sort the log by time first. Epochs and patience do not matter."""
    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints, where there is a folder for them. An epoch that ends later than a sixtieth of
    this after the last checkpoint writes one as well."""
    seed: int = 0
    """Order of the rows, with the epoch."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("epochs", "batch_size", "plateau_patience"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1, got {name}={value}")
        for name in ("lr", "table_lr", "clip_norm", "ema_epochs", "checkpoint_minutes"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be above 0, got {name}={value}")
        decays = ("weight_decay", "table_weight_decay", "threshold_weight_decay")
        for name in (*decays, "momentum", "seed"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{name} must be 0 or more, got {name}={value}")
        require(
            self.ema_decay is None or 0.0 < self.ema_decay < 1.0,
            f"ema_decay must lie in (0, 1), got ema_decay={self.ema_decay}",
        )
        require(
            self.ema_decay is None or self.ema_epochs is None,
            f"ema_decay={self.ema_decay} and ema_epochs={self.ema_epochs} are two decays of one average; give one",
        )
        require(
            not isinstance(self.patience, int) or self.patience >= 1,
            f"patience must be at least 1, got patience={self.patience}",
        )
        require(
            0.0 < self.plateau_factor <= 1.0,
            f"plateau_factor must lie in (0, 1], got plateau_factor={self.plateau_factor}",
        )

    def with_patience(self, asked: int) -> "Training":
        """Return the settings with a patience, that which methods ask for where none is given.

        >>> Training().with_patience(6).patience, Training(patience=3).with_patience(6).patience
        (6, 3)
        """
        return replace(self, patience=max(asked, PATIENCE)) if self.patience == "auto" else self

    def average_decay(self, steps_per_epoch: int) -> float | None:
        """Return the decay of the weights' average; None: no average.

        >>> Training(ema_epochs=0.5).average_decay(steps_per_epoch=2000)
        0.999000499833375
        """
        if self.ema_epochs is None:
            return self.ema_decay
        return math.exp(-1.0 / (self.ema_epochs * steps_per_epoch))


SECTIONS = ("model", "data", "training", "methods")


@dataclass(frozen=True, kw_only=True)
class PreparedLog:
    """A log that `rarebit data prepare` left in a folder."""

    folder: str
    """The folder."""
    checksum: str = ""
    """Checksum of the log that the run read; another log in the folder is refused. Empty: any log."""

    def __post_init__(self) -> None:
        check_types(self, where="data")
        require(bool(self.folder), "data: a prepared log needs its folder, got folder=''")


@dataclass(frozen=True, kw_only=True)
class MemoryLog:
    """A log that this process holds, by a checksum of its values."""

    checksum: str

    held: ClassVar[dict[str, Splits]] = {}
    """The logs in use."""


Log = SyntheticLog | PreparedLog | MemoryLog
LOGS: dict[str, type[Log]] = {
    "synthetic": SyntheticLog,
    "prepared": PreparedLog,
    "memory": MemoryLog,
}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything a run depends on.

    >>> RunSettings.from_mapping({"model": {"name": "fm", "dim": 8}, "training": {"epochs": 1}}).model
    'fm'
    """

    model: str = "deepfm"
    """The model's name."""
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    """What the model is built with, such as `dim`."""
    data: Log = SyntheticLog()
    """The click log: generated, or prepared from your own."""
    training: Training = Training()
    """How to train. Its seed also draws the initial weights."""
    methods: tuple[Technique, ...] = ()
    """Methods applied to the model's tables before training, in order."""

    def __post_init__(self) -> None:
        model_settings(self.model, self.model_settings)
        for method in self.methods:
            method.check_beside(self.methods)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "RunSettings":
        """Read settings as a TOML file holds them: [model], [data], [training], [[methods]]."""
        require_mapping(values, "the sections")
        for section in values:
            if section not in SECTIONS:
                raise SettingsError(f"unknown section {section!r}{suggest(section, SECTIONS)}")
        for section in ("model", "data", "training"):
            if not isinstance(values.get(section, {}), Mapping):
                raise SettingsError(f"[{section}] must be a table, got {shown(values[section])}")
        methods = values.get("methods", ())
        if not isinstance(methods, list | tuple):
            raise SettingsError(f"[[methods]] must be tables, got {shown(methods)}")
        model, data = dict(values.get("model", {})), dict(values.get("data", {}))
        source = data.pop("source", "prepared" if "folder" in data else "synthetic")
        if source not in LOGS:
            raise SettingsError(f"unknown source of data {source!r}{suggest(str(source), LOGS)}")
        return cls(
            model=str(model.pop("name", "deepfm")),
            model_settings=model,
            data=from_mapping(LOGS[source], data, where="data"),
            training=from_mapping(Training, values.get("training", {}), where="training"),
            methods=tuple(technique_from_mapping(method) for method in methods),
        )

    @property
    def source(self) -> str:
        """Where the data comes from: "synthetic" or "prepared"."""
        return next(name for name, kind in LOGS.items() if isinstance(self.data, kind))

    def to_mapping(self) -> dict[str, Any]:
        """Return the settings as a TOML file would hold them."""
        return {
            "model": {"name": self.model, **self.model_settings},
            "data": {"source": self.source, **to_mapping(self.data)},
            "training": to_mapping(self.training),
            "methods": [technique_to_mapping(method) for method in self.methods],
        }


def study_splits(settings: "RunSettings") -> Splits:
    """Return the rows that a study trains on, picks settings on, and compares on.

    Training in one pass picks on the scores of the first half of the log, and compares on those of the second.
    """
    splits = load_splits(settings.data)
    return splits.in_one_pass() if settings.training.one_pass else splits


def load_splits(log: Log, *, progress: Callable[[int, int], None] | None = None) -> Splits:
    """Generate a click log, or open a prepared one after verifying its checksums."""
    if isinstance(log, SyntheticLog):
        return generate(log, progress=progress)
    if isinstance(log, MemoryLog):
        return MemoryLog.held[log.checksum]
    if log.checksum and PreparedFolder(log.folder).checksum != log.checksum:
        raise DataError(
            f"the log in {log.folder!r} was prepared again since the run, so its rows and ids may differ; train a "
            "new run on it, or prepare the log as it was"
        )
    splits = Dataset.open(log.folder).splits
    if not len(splits.test):
        raise DataError(
            f"{log.folder!r} has no rows to test on; prepare it with a split that leaves some"
        )
    return splits
