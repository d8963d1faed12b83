"""Score a raw log that a trained model has never seen."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rarebit.data.dataset import Dataset
from rarebit.data.log_schema import LogSchema
from rarebit.errors import DataError, ModelFileError, SettingsError, import_extra
from rarebit.models._base import RankingModel
from rarebit.storage.files import DISK, explain, hidden, leftovers
from rarebit.training.metrics import Metrics, measure, predict

if TYPE_CHECKING:
    from rarebit.data.raw.chunks import BadRows, RawChunk
    from rarebit.data.raw.encoder import LogEncoder


@dataclass(frozen=True)
class ScoredRows:
    """The scores of some raw rows, without the malformed ones."""

    scores: NDArray[np.float32]
    """Chances of a click."""
    logits: NDArray[np.float32]
    """The same before the sigmoid: sure scores differ there that are both 1.0 as a chance."""
    label: NDArray[np.uint8]
    """Empty where the rows have no label."""
    unknown: Mapping[str, int]
    """For each field, values that the model has no id for."""
    kept: NDArray[np.bool_] | None
    """Which of the raw rows these are, where some were malformed."""


class RowScorer(Protocol):
    """Scores raw rows: a model with its vocabulary, or a file that was exported from one."""

    schema: LogSchema

    def columns_read(self, *, with_label: bool) -> list[str]:
        """Return the columns that raw rows need."""

    def score(self, chunk: "RawChunk", bad: "BadRows", *, with_label: bool) -> ScoredRows:
        """Return the scores of the good rows of a chunk; malformed rows go to `bad`."""


class ModelScorer:
    """A model that scores raw rows with the vocabulary it was trained with."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.encoder = model, _encoder_of(model)
        self.schema, self.columns_read = self.encoder.schema, self.encoder.columns_read

    def score(self, chunk: "RawChunk", bad: "BadRows", *, with_label: bool) -> ScoredRows:
        """Encode the rows and score them."""
        from rarebit.data.raw.encoder import unknown_values

        encoded, fields = (
            self.encoder.encode(chunk, bad, with_label=with_label),
            self.encoder.fields,
        )
        data = Dataset(fields, encoded.ids, encoded.numeric)
        logits = predict(self.model, data).cpu().float() if len(data) else torch.empty(0)
        unknown = unknown_values(fields, encoded.ids)
        scores = logits.sigmoid().numpy()
        return ScoredRows(scores, logits.numpy(), encoded.label, unknown, encoded.kept)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The result of scoring a log."""

    rows: int
    """Rows that have a score."""
    bad_rows: int
    """Rows that could not be read."""
    unknown: dict[str, int]
    """For each field, values that the model has no id for."""
    metrics: Metrics | None
    """How good the scores are, where the log has the label."""


def score_log(
    model: nn.Module | RowScorer,
    log: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    bad_rows: Literal["stop", "aside"] = "stop",
    progress: Callable[[int, int], None] | None = None,
) -> Scored:
    r"""Score the raw rows of a CSV, TSV or Parquet log with a model trained on a prepared one.

    The scores go to a CSV file, each with its line or row number, chunk by chunk: the log may be of any size. With
    `bad_rows="aside"` malformed rows are skipped and written to a file next to the scores.

    >>> import tempfile
    >>> from rarebit import Dataset
    >>> from rarebit.models.fm import FM
    >>> clicks = {"user": ["ann", "bob"] * 20, "click": [0, 1] * 20}
    >>> model = FM(Dataset.from_frame(clicks, label="click").schema, dim=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "new.csv").write_text("user\nbob\neve\n")
    ...     scored = score_log(model, Path(folder) / "new.csv")
    >>> scored.rows, scored.unknown
    (2, {'user': 1})
    """
    from rarebit.data.raw.chunks import BadRows
    from rarebit.data.raw.readers import column_names, find_format, read_raw

    path, target = Path(log), None if out is None else Path(out)
    scorer = ModelScorer(model) if isinstance(model, nn.Module) else model
    schema = scorer.schema
    written = find_format(path, schema.text)
    with_label = schema.label in column_names(path, written)
    _check_out(path, target, bad_rows)
    unknown: Counter[str] = Counter()
    logits: list[NDArray[np.float32]] = []
    labels: list[NDArray[np.uint8]] = []
    rows = 0
    with _outputs(target) as (to_scores, to_bad_rows):
        bad = BadRows(bad_rows, to_bad_rows)
        columns = scorer.columns_read(with_label=with_label)
        for chunk in read_raw(
            path, columns, bad, format=written, missing=schema.missing, progress=progress
        ):
            if with_label and not rows and chunk.frame[schema.label].is_null().all():
                with_label = False  # a column for it, and nothing in it yet
            found = scorer.score(chunk, bad, with_label=with_label)
            if bad.stops or not len(found.scores):
                continue
            unknown.update(found.unknown)
            rows += len(found.scores)
            if to_scores is not None:
                _append(to_scores, chunk, found, with_file=path.is_dir())
            if with_label:
                logits.append(found.logits)
                labels.append(found.label)
        bad.close()
        bad.raise_if_any()
        if not rows:
            raise DataError(f"no row of {str(path)!r} could be read: {bad.summary()}")
    metrics = None
    if with_label:
        every, clicked = (torch.from_numpy(np.concatenate(found)) for found in (logits, labels))
        metrics = measure(every, clicked.float())
    return Scored(rows=rows, bad_rows=bad.count, unknown=dict(unknown), metrics=metrics)


def bad_rows_file(out: Path) -> Path:
    """Return the file next to the scores for malformed rows, such as `scores.csv.bad_rows.jsonl`."""
    return out.with_name(f"{out.name}.bad_rows.jsonl")


def _check_out(log: Path, out: Path | None, bad_rows: str) -> None:
    """Raise before hours of scoring where the result could not be kept, or would replace the log."""
    if out is None:
        if bad_rows == "aside":
            raise SettingsError(
                "malformed rows are written to a file next to the scores; name a file for the scores "
                "(--out scores.csv)"
            )
        return
    if out.is_dir():
        raise DataError(f"cannot write {str(out)!r}: it is a folder; name a file for the scores")
    if out.exists() and out.samefile(log):
        raise DataError(f"the scores would replace the log {str(log)!r}; choose another name")


def _encoder_of(model: nn.Module) -> "LogEncoder":
    from rarebit.data.raw.encoder import encoder_of

    if not isinstance(model, RankingModel) or model.schema.encoder is None:
        raise ModelFileError(
            "the model has no vocabulary: it was not trained on a log that rarebit data prepare "
            "made, so it cannot score raw rows"
        )
    return encoder_of(model)


def _append(path: Path, chunk: "RawChunk", found: ScoredRows, *, with_file: bool) -> None:
    """Add the scores of a chunk, each with its line or row, and the file where there are several."""
    pl = import_extra("polars", "data", "reading raw logs")
    numbers = chunk.numbers()
    kept = numbers if found.kept is None else numbers[found.kept]
    first = chunk.locate(0)
    frame = pl.DataFrame({first.unit: kept, "score": found.scores})
    if with_file:
        frame = frame.select(pl.lit(first.file).alias("file"), pl.all())
    with path.open("ab") as file:
        frame.write_csv(file, include_header=file.tell() == 0)


@contextmanager
def _outputs(out: Path | None) -> Iterator[tuple[Path | None, Path | None]]:
    """Give places for scores and bad rows, which get their names when all went well, and vanish when not."""
    if out is None:
        yield None, None
        return
    targets = (out, bad_rows_file(out))
    partials = [hidden(target, "writing") for target in targets]
    try:
        for partial in partials:
            partial.write_bytes(b"")
        yield partials[0], partials[1]
        for partial, target in zip(partials, targets, strict=True):
            if partial.stat().st_size:
                DISK.sync_file(partial)
                DISK.rename(partial, target)
            else:
                DISK.remove(target)  # bad rows of an earlier log
        DISK.sync_folder(out.parent)
    except OSError as error:
        raise DataError(f"cannot write {str(out)!r}: {explain(error)}") from None
    finally:
        for path in (
            *partials,
            *(old for target in targets for old in leftovers(out.parent, target.name)),
        ):
            with suppress(OSError):
                DISK.remove(path)
