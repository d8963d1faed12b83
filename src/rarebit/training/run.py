"""One training run from settings to a folder: data, model, methods, training, test.

What `rarebit train` does, as one function. The folder it leaves holds the model
(`model.json`, `weights.safetensors`), what the run was and gave (`run.json`), and its checkpoints.
"""

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rarebit.data.dataset import Dataset, Splits
from rarebit.data.folder import PreparedFolder
from rarebit.data.schema import Schema
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.errors import DataError, ModelFileError, SettingsError
from rarebit.methods import method_from_mapping, method_to_mapping
from rarebit.models import build_model, model_settings
from rarebit.models._base import RankingModel
from rarebit.settings import check_types, from_mapping, require, suggest, to_mapping
from rarebit.tables.apply import apply_, end_training_
from rarebit.tables.find import find_tables, table_bytes, table_parameters
from rarebit.tables.table import Method
from rarebit.training.evaluate import Evaluation, evaluate
from rarebit.training.fit import History, fit
from rarebit.training.model_file import save_model
from rarebit.training.progress import Progress
from rarebit.training.settings import Training

__all__ = [
    "CHECKPOINTS",
    "PreparedLog",
    "RunResult",
    "RunSettings",
    "finish_model",
    "load_splits",
    "num_parameters",
    "read_run",
    "run",
    "start_model",
]

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
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
    methods: tuple[Method, ...] = ()
    """Methods applied to the model's tables before training, in order."""

    def __post_init__(self) -> None:
        model_settings(self.model, self.model_settings)

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
            methods=tuple(method_from_mapping(method) for method in values.get("methods", ())),
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
            "methods": [method_to_mapping(method) for method in self.methods],
        }


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run gave."""

    model: nn.Module
    history: History
    test: Evaluation
    num_parameters: int
    """Weights of the whole model."""
    table_bytes: int
    """Bytes of its tables."""
    folder: Path | None
    """Where it was written."""


def run(
    settings: RunSettings,
    *,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    device: torch.device | str = "cpu",
    progress: Progress | bool = True,
    data_progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = print,
) -> RunResult:
    """Generate or open the data, build and train the model, measure it on the test split, and write it.

    With a folder, training writes checkpoints there, and `resume` goes on from the newest.

    >>> small = RunSettings.from_mapping({
    ...     "model": {"name": "fm", "dim": 2}, "data": {"rows": 2000}, "training": {"epochs": 1}})
    >>> run(small, progress=False, say=lambda line: None).test.overall.rows
    200
    """
    # a prepared log that cannot be used is told before anything is written
    settings = _with_checksum(settings)
    prepared = load_splits(settings.data) if isinstance(settings.data, PreparedLog) else None
    out = None if folder is None else _make_folder(Path(folder))
    if out is not None and not resume:
        _refuse_used(out)
        _write(out / RUN_FILE, {"settings": _stored(settings)})
    splits = prepared or load_splits(settings.data, progress=data_progress)
    model = start_model(settings, splits.train.schema, say=say).to(device)
    history = fit(
        model,
        splits.train,
        splits.valid if len(splits.valid) else None,
        settings=settings.training,
        folder=None if out is None else out / CHECKPOINTS,
        resume=resume,
        progress=progress,
    )
    finish_model(settings, model, say=say)
    result = RunResult(
        model=model,
        history=history,
        test=evaluate(model, splits.test, counts=splits.train.counts()),
        num_parameters=num_parameters(model),
        table_bytes=table_bytes(model),
        folder=out,
    )
    if out is not None:
        save_model(model, out)
        _write(out / RUN_FILE, _describe(settings, result))
    return result


def start_model(
    settings: RunSettings, schema: Schema, *, say: Callable[[str], object] = print
) -> RankingModel:
    """Return the model of a run as training finds it, with the methods of training applied.

    The seed draws the weights before any method does, so that methods of one seed start from the same
    tables; and it is set again, so that what training draws does not depend on what they drew.

    >>> from rarebit import Field
    >>> schema = Schema((Field(name="user", rows=9), Field(name="item", rows=7)))
    >>> type(start_model(RunSettings(model="fm"), schema)).__name__
    'FM'
    """
    torch.manual_seed(settings.training.seed)
    model = build_model(settings.model, schema, settings.model_settings)
    for method in settings.methods:
        if not method.after_training:
            say(str(apply_(model, method, verbose=False)))
    torch.manual_seed(settings.training.seed)
    return model


def finish_model(
    settings: RunSettings, model: nn.Module, *, say: Callable[[str], object] = print
) -> bool:
    """Make a trained model what is served; return whether its scores are others than in training.

    What only training needs is folded; then come the methods that are made for trained tables.
    """
    end_training_(model)
    last = [method for method in settings.methods if method.after_training]
    for method in last:
        say(str(apply_(model, method, verbose=False)))
    return bool(last)


def num_parameters(model: nn.Module) -> int:
    """Return how many weights a model has, those that its tables keep as integers included.

    >>> num_parameters(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1)))
    45
    """
    tables = sum(info.num_parameters for info in find_tables(model))
    trained = sum(parameter.numel() for parameter in table_parameters(model).values())
    return sum(parameter.numel() for parameter in model.parameters()) - trained + tables


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


def read_run(folder: str | os.PathLike[str]) -> RunSettings:
    """Return the settings of the run that wrote a folder."""
    path = Path(folder) / RUN_FILE
    try:
        return RunSettings.from_mapping(json.loads(path.read_text(encoding="utf-8"))["settings"])
    except FileNotFoundError:
        raise ModelFileError(
            f"{str(folder)!r} holds no run: {RUN_FILE} is missing; train one with rarebit train"
        ) from None
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{str(path)!r} is damaged: {error}") from None


def _with_checksum(settings: RunSettings) -> RunSettings:
    """Return the settings with which log it is that lies in the folder now."""
    log = settings.data
    if isinstance(log, SyntheticLog) or log.checksum:
        return settings
    found = dataclasses.replace(log, checksum=PreparedFolder(log.folder).checksum)
    return dataclasses.replace(settings, data=found)


def _stored(settings: RunSettings) -> dict[str, Any]:
    """Return the settings for a file: a folder of data is found from anywhere."""
    values = settings.to_mapping()
    if isinstance(settings.data, PreparedLog):
        values["data"]["folder"] = str(Path(settings.data.folder).absolute())
    return values


def _describe(settings: RunSettings, result: RunResult) -> dict[str, Any]:
    from rarebit import __version__

    return {
        "settings": _stored(settings),
        "test": dataclasses.asdict(result.test),
        "history": dataclasses.asdict(result.history),
        "num_parameters": result.num_parameters,
        "table_bytes": result.table_bytes,
        "versions": {
            "rarebit": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _refuse_used(folder: Path) -> None:
    """Raise when a folder holds the checkpoints of another run, before anything of it is changed."""
    if (folder / CHECKPOINTS).exists():
        raise ModelFileError(
            f"{str(folder)!r} holds a run already; go on with it by resume "
            f"(rarebit train --resume {folder}), or choose another folder"
        )


def _make_folder(folder: Path) -> Path:
    """Make the folder before hours of training, not after: it may not be writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ModelFileError(
            f"cannot write to the folder {str(folder)!r}: {error.strerror}; choose another one"
        ) from None
    return folder


def _write(path: Path, values: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ModelFileError(f"cannot write {str(path)!r}: {error.strerror}") from None
