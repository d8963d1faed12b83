"""Every error Rarebit raises on purpose.

    RarebitError
    ├── SettingsError           a setting is unknown, of the wrong type or out of range   (ValueError)
    ├── DataError               data is empty, of the wrong dtype, or out of range        (ValueError)
    ├── TableError              a table cannot be changed as asked                        (ValueError)
    │   ├── NoTableError        a method matched no table of the model
    │   └── UnsupportedTableError   a matched table does something a method cannot keep
    ├── OptimizerError          an optimizer would leave a table untrained                (ValueError)
    ├── TrainingError           training cannot go on                                     (RuntimeError)
    │   ├── NotEnoughMemoryError    it would take more memory than there is
    │   └── NotFiniteError      a loss, a gradient or a weight is not finite
    ├── TrainingInterrupted     a signal asked training to stop, and it did
    ├── ModelFileError          a saved model is missing, damaged or of another shape     (ValueError)
    ├── ExportError             a model has no form in a format, or the file differs      (ValueError)
    ├── CheckpointError         a checkpoint cannot be written or read                    (ValueError)
    │   └── NewerFormatError    a checkpoint was written by a later version
    ├── StudyError              a study cannot go on, or its folder cannot be read        (RuntimeError)
    ├── StudyInterrupted        a signal asked a study to stop, and it did
    ├── ReportError             what is stored makes no page                              (ValueError)
    ├── ServingError            a model cannot be served                                  (RuntimeError)
    ├── RequestError            a scoring request is malformed or too large               (ValueError)
    └── MissingExtraError       an optional package is not installed, or broken           (ImportError)

A message says what was expected, what came and what to do. The command line prints it as one
paragraph and exits with code 2. What works, but hardly as it was meant, is a `UserWarning` (`warn`).
"""

import inspect
import shlex
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).parent / "_").removesuffix("_")
"""The folder of the package, with the last slash."""


def warn(message: str) -> None:
    """Warn at the line outside of the package that led here.

    Python shows a warning once per line, so the user sees it once, not once per table.
    """
    frame, levels = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, levels = frame.f_back, levels + 1
    warnings.warn(message, UserWarning, stacklevel=levels + 1)


class RarebitError(Exception):
    """Base of all errors that Rarebit raises on purpose."""


class SettingsError(RarebitError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(RarebitError, ValueError):
    """Data is empty, of the wrong dtype, or out of range."""


class TableError(RarebitError, ValueError):
    """A table cannot be changed as asked."""


class NoTableError(TableError):
    """A method matched no table of the model."""


class UnsupportedTableError(TableError):
    """A matched table does something that a method cannot keep."""


class OptimizerError(RarebitError, ValueError):
    """An optimizer would leave a trainable table untrained."""


class TrainingError(RarebitError, RuntimeError):
    """Training cannot go on."""


class NotEnoughMemoryError(TrainingError):
    """What was asked for would take more memory than there is."""


class NotFiniteError(TrainingError):
    """A loss, a gradient or a weight is not finite."""


class TrainingInterrupted(RarebitError):  # noqa: N818  # a wish of the user's, not a mistake
    """A signal asked training to stop, and it did. `exit_code` is what a shell expects of it."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
        self.exit_code = 128 + signal


class ModelFileError(RarebitError, ValueError):
    """A saved model is missing, damaged, or of another architecture."""


class ExportError(RarebitError, ValueError):
    """A model cannot be exported, or what was exported gives other scores."""


class CheckpointError(RarebitError, ValueError):
    """A checkpoint cannot be written, is missing or damaged, or another process is at work on it."""


class NewerFormatError(CheckpointError):
    """A checkpoint was written by a later version."""


class StudyError(RarebitError, RuntimeError):
    """A study cannot go on, or its folder cannot be read."""


class StudyInterrupted(RarebitError):  # noqa: N818  # a wish of the user's, not a mistake
    """A signal asked a study to stop, and it did; what was learned is written."""


class ReportError(RarebitError, ValueError):
    """What is stored in a folder or file makes no page, or a page cannot be written."""


class ServingError(RarebitError, RuntimeError):
    """A model cannot be served."""


class RequestError(RarebitError, ValueError):
    """A scoring request is malformed or too large; `status` is the HTTP status of the answer."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class MissingExtraError(RarebitError, ImportError):
    """An optional package is not installed, or cannot be imported: then `broken` says why."""

    def __init__(
        self, package: str, extra: str, purpose: str, *, broken: ImportError | None = None
    ) -> None:
        pip = f"{shlex.quote(sys.executable)} -m pip install"
        what = f"is not installed; install it with: {pip} 'rarebit[{extra}]'"
        if broken is not None:
            why = " ".join(str(broken).split())
            what = f"cannot be imported ({why}); repair it with: {pip} --upgrade {package}"
        super().__init__(f"{purpose} needs the package {package!r}, which {what}")


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Return a module of an optional package; every import of one goes through here.

    >>> import_extra("json.decoder", "data", "reading raw logs").JSONDecoder().decode("[1]")
    [1]
    """
    package = module.partition(".")[0]
    try:
        import_module(package)
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        broken = None if missing else error
        raise MissingExtraError(package, extra, purpose, broken=broken) from broken
