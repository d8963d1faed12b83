"""One training run from settings to a folder: data, model, methods, training, test.

What `rarebit train` does, as one function. The folder it leaves holds the model
(`model.json`, `weights-<hash>.safetensors`), what the run was and gave (`run.json`), and its checkpoints.
"""

import dataclasses
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rarebit.data.prepared import PreparedFolder
from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import ModelFileError
from rarebit.storage.files import write_json
from rarebit.tables.find import table_bytes
from rarebit.technique import SharedStage
from rarebit.training.loop import History
from rarebit.training.metrics import Evaluation, evaluate
from rarebit.training.model_file import save_model
from rarebit.training.progress import Progress
from rarebit.training.run_settings import PreparedLog, RunSettings, load_splits
from rarebit.training.stages import (
    CHECKPOINTS,
    STAGE,
    finish_model,
    num_parameters,
    train_model,
)

__all__ = [
    "RunResult",
    "make_folder",
    "read_reports",
    "read_run",
    "run",
    "stored_settings",
    "with_checksum",
]

RUN_FILE = "run.json"


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
    shared: SharedStage | None = None,
) -> RunResult:
    """Generate or open the data, build and train the model, measure it on the test split, and write it.

    With a folder, training writes checkpoints there, and `resume` goes on from the newest. `shared` is a
    first stage of pruning that this run has together with others.

    >>> small = RunSettings.from_mapping({
    ...     "model": {"name": "fm", "dim": 2}, "data": {"rows": 2000}, "training": {"epochs": 1}})
    >>> run(small, progress=False, say=lambda line: None).test.overall.rows
    200
    """
    # a prepared log that cannot be used is told before anything is written
    settings = with_checksum(settings)
    prepared = load_splits(settings.data) if isinstance(settings.data, PreparedLog) else None
    out = None if folder is None else make_folder(Path(folder))
    if out is not None and not resume:
        _refuse_used(out)
        values = {"settings": stored_settings(settings)}
        write_json(out / RUN_FILE, values, error=ModelFileError)
    splits = prepared or load_splits(settings.data, progress=data_progress)
    model, history = train_model(
        settings,
        splits.train,
        splits.valid if len(splits.valid) else None,
        folder=None if out is None else out / CHECKPOINTS,
        resume=resume,
        device=device,
        progress=progress,
        say=say,
        shared=shared,
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
        write_json(out / RUN_FILE, _describe(settings, result), error=ModelFileError)
    return result


def read_run(folder: str | os.PathLike[str]) -> RunSettings:
    """Return the settings of the run that wrote a folder."""
    try:
        return RunSettings.from_mapping(_read_values(folder)["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from None


def read_reports(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the methods that took part in a run tell of it, by their names; none of an older run.

    >>> read_reports("nowhere")
    Traceback (most recent call last):
    rarebit.errors.ModelFileError: 'nowhere' holds no run: run.json is missing; train one with rarebit train
    """
    try:
        return dict(_read_values(folder).get("reports", {}))
    except (ValueError, TypeError) as error:
        raise _damaged(folder, error) from None


def _read_values(folder: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(folder) / RUN_FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ModelFileError(
            f"{str(folder)!r} holds no run: {RUN_FILE} is missing; train one with rarebit train"
        ) from None
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise _damaged(folder, error) from None


def _damaged(folder: str | os.PathLike[str], error: Exception) -> ModelFileError:
    if isinstance(error, ModelFileError):
        return error
    return ModelFileError(f"{str(Path(folder) / RUN_FILE)!r} is damaged: {error}")


def with_checksum(settings: RunSettings) -> RunSettings:
    """Return the settings with which log it is that lies in the folder now."""
    log = settings.data
    if isinstance(log, SyntheticLog) or log.checksum:
        return settings
    found = dataclasses.replace(log, checksum=PreparedFolder(log.folder).checksum)
    return dataclasses.replace(settings, data=found)


def stored_settings(settings: RunSettings) -> dict[str, Any]:
    """Return the settings for a file: a folder of data is found from anywhere."""
    values = settings.to_mapping()
    if isinstance(settings.data, PreparedLog):
        values["data"]["folder"] = str(Path(settings.data.folder).absolute())
    return values


def _describe(settings: RunSettings, result: RunResult) -> dict[str, Any]:
    from rarebit import __version__

    history = dataclasses.asdict(result.history)
    reports = history.pop("reports")
    return {
        "settings": stored_settings(settings),
        "test": dataclasses.asdict(result.test),
        "history": history,
        "reports": reports,
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
    if (folder / CHECKPOINTS).exists() or (folder / STAGE).exists():
        raise ModelFileError(
            f"{str(folder)!r} holds a run already; go on with it by resume "
            f"(rarebit train --resume {folder}), or choose another folder"
        )


def make_folder(folder: Path) -> Path:
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
