"""What a run depends on, and the log it is made on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rarebit.data.dataset import Dataset, Splits
from rarebit.data.prepared import PreparedFolder
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.errors import DataError, SettingsError
from rarebit.models import model_settings
from rarebit.settings import check_types, from_mapping, require, suggest, to_mapping
from rarebit.technique import Technique, technique_from_mapping, technique_to_mapping
from rarebit.training.settings import Training

__all__ = ["PreparedLog", "RunSettings", "load_splits"]

SECTIONS = ("model", "data", "training", "methods")


@dataclass(frozen=True, kw_only=True)
class PreparedLog:
    """A log that `rarebit data prepare` left in a folder."""

    folder: str
    """The folder."""
    checksum: str = ""
    """Of the log as a run read it; another log in the folder is refused. Empty: any log will do."""

    def __post_init__(self) -> None:
        check_types(self, where="data")
        require(bool(self.folder), "data: a prepared log needs its folder, got folder=''")


LOGS: dict[str, type[SyntheticLog | PreparedLog]] = {
    "synthetic": SyntheticLog,
    "prepared": PreparedLog,
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
    data: SyntheticLog | PreparedLog = SyntheticLog()
    """The click log: generated, or prepared from one's own."""
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
        for section in values:
            if section not in SECTIONS:
                raise SettingsError(f"unknown section {section!r}{suggest(section, SECTIONS)}")
        for section in ("model", "data", "training"):
            if not isinstance(values.get(section, {}), Mapping):
                raise SettingsError(f"[{section}] must be a table, got {values[section]!r}")
        model, data = dict(values.get("model", {})), dict(values.get("data", {}))
        source = data.pop("source", "prepared" if "folder" in data else "synthetic")
        if source not in LOGS:
            raise SettingsError(f"unknown source of data {source!r}{suggest(str(source), LOGS)}")
        return cls(
            model=str(model.pop("name", "deepfm")),
            model_settings=model,
            data=from_mapping(LOGS[source], data, where="data"),
            training=from_mapping(Training, values.get("training", {}), where="training"),
            methods=tuple(technique_from_mapping(method) for method in values.get("methods", ())),
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


def load_splits(
    log: SyntheticLog | PreparedLog, *, progress: Callable[[int, int], None] | None = None
) -> Splits:
    """Generate a click log, or open a prepared one, whose checksums are compared first.

    >>> len(load_splits(SyntheticLog(rows=100)).test)
    10
    """
    if isinstance(log, SyntheticLog):
        return generate(log, progress=progress)
    if log.checksum and PreparedFolder(log.folder).checksum != log.checksum:
        raise DataError(
            f"the log in {log.folder!r} was prepared anew since the run, so its rows and ids may be "
            "others; train a new run on it, or prepare the log again as it was"
        )
    splits = Dataset.open(log.folder, verify=True).splits
    if not len(splits.test):
        raise DataError(
            f"{log.folder!r} has no rows to test on; prepare it with a split that leaves some"
        )
    return splits
