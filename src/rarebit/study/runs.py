"""The runs of a study on disk: one folder per run, named by a hash of its settings and data.

    runs/KEY/checkpoints/    while it runs
    runs/KEY/scores.npy      the model's score of every test row
    runs/KEY/model/          the model, on request
    runs/KEY/result.json     written last: a folder with it holds a finished run
    pruning/KEY/             a first stage that several runs share, until the study is complete

A run that exists is found again from any plan. Its commit, device and versions are recorded, and not part of the key.
"""

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rarebit.callbacks import TrainingMethod
from rarebit.data.prepared import PreparedFolder
from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import StudyError
from rarebit.models._base import OWN_MODELS
from rarebit.settings import from_mapping, require, to_mapping
from rarebit.storage.files import make_folder, read_json, write_file, write_json
from rarebit.technique import Technique, technique_name, technique_text
from rarebit.training.metrics import Evaluation
from rarebit.training.settings import MemoryLog, PreparedLog, RunSettings, Training

FORMAT = 1
RESULT, SCORES, CHECKPOINTS, MODEL = "result.json", "scores.npy", "checkpoints", "model"
KEY_DIGITS = 20
MOST_TOGETHER = 64
"""Runs in a stack by default, where they fit the memory of a GPU."""
UNREADABLE = (AttributeError, LookupError, StudyError, TypeError, ValueError)
"""Errors of JSON files with wrong content."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The result of a finished run. Figures are of the test rows where nothing else is said."""

    key: str
    seed: int
    auc: float
    logloss: float
    rarest_auc: float | None
    valid_auc: float
    """Validation AUC of the epoch whose weights were kept; trials are picked by it."""
    parameters: int
    """Weights of the whole model."""
    table_bytes: int
    """Bytes of everything its tables store."""
    best_epoch: int
    epochs: int
    microseconds_a_row: float
    """Time per row in training steps, the median over the epochs."""
    device: str
    torch: str
    commit: str | None
    grouped_auc: float | None = None
    """Mean AUC within groups of rows, where the log has groups."""
    pr_auc: float | None = None
    rarest_pr_auc: float | None = None
    frequent_pr_auc: float | None = None
    """On the fifth of the test rows whose values were most frequent in training."""
    decile_aucs: tuple[float | None, ...] = ()
    """On tenths of the test rows, from the rarest values to the most frequent."""
    abundance: float | None = None
    """Mean information abundance of the tables, or of their embedding sets."""
    whole_abundance: float | None = None
    """The same of whole tables, all sets side by side: to compare with a plain table of that width."""
    valid_aucs: tuple[float | None, ...] = ()
    """Validation AUC after each epoch; empty in older records and in one pass."""
    still_rising: bool = False
    """Whether patience ended it while validation was still rising."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """Reports of the methods that acted around training, by name."""

    def __post_init__(self) -> None:
        for name in ("auc", "logloss", "valid_auc", "microseconds_a_row"):
            if not math.isfinite(getattr(self, name)):
                raise StudyError(f"{name} of run {self.key} is {getattr(self, name)}")

    @property
    def summary(self) -> str:
        """The result in a line."""
        return (
            f"AUC {self.auc:.4f}, validation AUC {self.valid_auc:.4f} "
            f"(epoch {self.best_epoch} of {self.epochs})"
        )

    @staticmethod
    def test_figures(measured: Evaluation) -> dict[str, Any]:
        """Return the figures that are measured on the test rows, by name."""
        rarest, frequent = measured.rarest, measured.frequent
        return {
            "auc": measured.auc,
            "logloss": measured.logloss,
            "rarest_auc": rarest.auc if rarest else None,
            "grouped_auc": measured.grouped_auc,
            "pr_auc": measured.pr_auc,
            "rarest_pr_auc": rarest.pr_auc if rarest else None,
            "frequent_pr_auc": frequent.pr_auc if frequent else None,
            "decile_aucs": tuple(part.auc for part in measured.deciles),
        }


def ensemble_record(members: Sequence[RunRecord], seed: int, measured: Evaluation) -> RunRecord:
    """Return the record of an ensemble: the figures of its mean score, and the cost of all its models."""
    assert measured.auc is not None, "its models have an AUC"
    keys = "+".join(record.key for record in members)
    abundances = [record.abundance for record in members if record.abundance is not None]
    return dataclasses.replace(
        members[0],
        key=hashlib.sha256(keys.encode()).hexdigest()[:KEY_DIGITS],
        seed=seed,
        valid_auc=statistics.fmean(record.valid_auc for record in members),
        parameters=sum(record.parameters for record in members),
        table_bytes=sum(record.table_bytes for record in members),
        microseconds_a_row=sum(record.microseconds_a_row for record in members),
        abundance=statistics.fmean(abundances) if abundances else None,
        whole_abundance=None,
        reports={},
        **RunRecord.test_figures(measured),
    )


def identify(settings: RunSettings) -> RunSettings:
    """Return the settings with the checksum of the log that is in the folder of data now."""
    log = settings.data
    if not isinstance(log, PreparedLog):
        return settings
    folder = str(Path(log.folder).absolute())
    found = PreparedLog(folder=folder, checksum=PreparedFolder(folder).checksum)
    return dataclasses.replace(settings, data=found)


def run_key(settings: RunSettings) -> str:
    """Return the name of a run: the same for equal settings and data, wherever the data is stored."""
    log = settings.data
    if isinstance(log, PreparedLog | MemoryLog):
        assert log.checksum, "identify() the settings first"
        data = {"checksum": log.checksum}
    else:
        data = _changed(log, SyntheticLog())
    asked = max((method.patience for method in settings.methods), default=0)
    # the patience that it has, whoever chose it; keys are older than "auto", and leave out that of plain training
    training = _changed(settings.training.with_patience(asked), Training().with_patience(0))
    training.pop("checkpoint_minutes", None)  # does not change the result
    if "ema_decay" in training:
        training["ema_start"] = "unbiased"  # older runs averaged from the initial weights on
    averages = any(method.averages for method in settings.methods)
    if averages or training.keys() & {"ema_decay", "ema_epochs"}:
        training["statistics"] = (
            "own"  # older runs used averages with the statistics of the last weights
        )
    values = {
        "format": FORMAT,
        "model": {"name": settings.model, **settings.model_settings},
        "data": data,
        "training": training,
        "methods": [technique_text(method) for method in settings.methods],
    }
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def stage_key(settings: RunSettings) -> str | None:
    """Return the name of the first stage that a run can share with others; None without one."""
    stages = (method.shared_stage(settings.methods) for method in settings.methods)
    shared = next((methods for methods in stages if methods is not None), None)
    return None if shared is None else run_key(dataclasses.replace(settings, methods=shared))


STACKED = (
    *("seed", "epochs", "patience", "lr", "table_lr", "weight_decay", "table_weight_decay"),
    *("threshold_weight_decay", "ema_decay", "ema_epochs", "plateau_factor", "plateau_patience"),
)
"""Settings of training in which runs may differ that train as one stacked model."""


def stack_key(settings: RunSettings) -> str | None:
    """Return what runs have in common that may train as one stacked model; None for runs that cannot."""
    methods, training = settings.methods, settings.training
    drives = any(type(method).drive is not Technique.drive for method in methods)
    if drives or training.one_pass or settings.model in OWN_MODELS:
        return None
    usual = {name: getattr(Training(), name) for name in STACKED}
    values = dataclasses.replace(
        settings, training=dataclasses.replace(training, **usual)
    ).to_mapping()
    # what acts around training may have other strengths; tables may not
    values["methods"] = [
        technique_name(method) if isinstance(method, TrainingMethod) else technique_text(method)
        for method in methods
    ]
    return json.dumps(values, sort_keys=True)


def runs_together(asked: int | Literal["auto"], device: torch.device) -> int:
    """Return how many runs may train as one stacked model at most."""
    if asked == "auto":
        return MOST_TOGETHER if device.type == "cuda" else 1
    require(
        type(asked) is int and asked >= 1,
        f"together must be 'auto' or at least 1, got together={asked!r}",
    )
    return asked


def _changed(settings: object, defaults: object) -> dict[str, Any]:
    """Return the settings that are not the default, so that a new setting leaves old keys unchanged.

    A changed default needs another `FORMAT`.
    """
    usual = to_mapping(defaults)
    return {name: value for name, value in to_mapping(settings).items() if value != usual[name]}


class RunFolder:
    """The folder of one run."""

    def __init__(self, study: Path, key: str) -> None:
        self.key = key
        self.path = study / "runs" / key
        self.checkpoints, self.model = self.path / CHECKPOINTS, self.path / MODEL

    def read(self) -> RunRecord | None:
        """Return the record of the run; None where it is not finished."""
        try:
            values = read_json(self.path / RESULT)["result"]
            record = from_mapping(RunRecord, values)
            require(record.key == self.key, f"it is the result of run {record.key!r}")
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE) as error:
            raise StudyError(
                f"{str(self.path / RESULT)!r} cannot be read: {error}; remove the folder to run it again"
            ) from None
        return record

    def write(self, settings: RunSettings, record: RunRecord, scores: Tensor) -> None:
        """Write the scores, then the result: a run with a result is complete."""
        values = {"settings": settings.to_mapping(), "result": dataclasses.asdict(record)}
        make_folder(self.path)
        file = BytesIO()
        np.save(file, scores.float().cpu().numpy(), allow_pickle=False)
        write_file(self.path / SCORES, file.getvalue(), error=StudyError)
        write_json(self.path / RESULT, values, error=StudyError)

    def scores(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the score of every test row, float32."""
        try:
            return np.load(self.path / SCORES, allow_pickle=False)  # type: ignore[no-any-return]  # of numpy
        except (EOFError, OSError, ValueError) as error:
            raise StudyError(
                f"the scores of a run in {str(self.path)!r} cannot be read: {error}; "
                "remove the folder to run it again"
            ) from None
