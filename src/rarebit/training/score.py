"""Raw rows to scores: what a trained model says of a log that it has never seen."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rarebit.data.dataset import Dataset
from rarebit.data.folder import StoredEncoder
from rarebit.data.schema import UNKNOWN
from rarebit.errors import DataError, ModelFileError
from rarebit.models._base import RankingModel
from rarebit.training.evaluate import predict
from rarebit.training.metrics import Metrics, measure

if TYPE_CHECKING:
    from rarebit.data.raw.chunk import RawChunk
    from rarebit.data.raw.encoder import EncodedRows, Encoder

__all__ = ["Scored", "score_log"]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What scoring a log gave."""

    rows: int
    """Rows that have a score."""
    bad_rows: int
    """Rows that could not be read."""
    unknown: dict[str, int]
    """For each field, values that the model has no id for."""
    metrics: Metrics | None
    """How good the scores are, where the log has the label."""


def score_log(
    model: nn.Module,
    log: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    bad_rows: Literal["stop", "aside"] = "stop",
    progress: Callable[[int, int], None] | None = None,
) -> Scored:
    r"""Score the raw rows of a CSV, TSV or Parquet log with a model trained on a prepared one.

    The scores go to a CSV file, with the line or row of each, chunk by chunk: the log may be of any
    size. With `bad_rows="aside"` rows that cannot be read have no score and are kept in a file beside.

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
    from rarebit.data.raw.bad_rows import BadRows
    from rarebit.data.raw.readers import column_names, read_raw

    encoder = _encoder_of(model)
    path = Path(log)
    with_label = encoder.schema.label in column_names(path)
    bad = BadRows(bad_rows, None if out is None else Path(f"{os.fspath(out)}.bad_rows.jsonl"))
    chunks = read_raw(
        path,
        encoder.columns_read(with_label=with_label),
        bad,
        missing=encoder.schema.missing,
        progress=progress,
    )
    unknown = dict.fromkeys((field.name for field in encoder.fields.table_fields), 0)
    scores: list[Tensor] = []
    labels: list[Tensor] = []
    rows = 0
    with _scores_file(out) as file:
        for chunk in chunks:
            encoded = encoder.encode(chunk, bad, with_label=with_label)
            if bad.stops or not len(encoded.ids):
                continue
            found = torch.sigmoid(predict(model, _dataset(encoder, encoded)))
            _count_unknown(unknown, encoder, encoded)
            rows += len(found)
            if file is not None:
                _write(file, chunk, encoded, found)
            if with_label:
                scores.append(found)
                labels.append(torch.from_numpy(encoded.label))
        bad.close()
        bad.raise_if_any()
    metrics = measure(torch.cat(scores).logit(), torch.cat(labels).float()) if scores else None
    return Scored(rows=rows, bad_rows=bad.count, unknown=unknown, metrics=metrics)


def _encoder_of(model: nn.Module) -> "Encoder":
    encoder = model.schema.encoder if isinstance(model, RankingModel) else None
    if encoder is None:
        raise ModelFileError(
            "the model has no vocabulary: it was not trained on a log that rarebit data prepare "
            "made, so it cannot score raw rows"
        )
    found: Encoder = encoder.load() if isinstance(encoder, StoredEncoder) else encoder
    return found


def _dataset(encoder: "Encoder", encoded: "EncodedRows") -> Dataset:
    return Dataset(encoder.fields, encoded.ids, encoded.numeric)


def _count_unknown(unknown: dict[str, int], encoder: "Encoder", encoded: "EncodedRows") -> None:
    for name, slots in encoder.fields.slots.items():
        unknown[name] += int((encoded.ids[:, slots] == UNKNOWN).sum())


def _write(file: IO[bytes], chunk: "RawChunk", encoded: "EncodedRows", scores: Tensor) -> None:
    import polars as pl

    numbers = chunk.numbers()
    kept = numbers if encoded.kept is None else numbers[encoded.kept]
    unit = chunk.locate(0).unit
    frame = pl.DataFrame({unit: kept, "score": scores.cpu().numpy().astype(np.float32)})
    frame.write_csv(file, include_header=file.tell() == 0, float_precision=6)


@contextmanager
def _scores_file(out: str | os.PathLike[str] | None) -> Iterator[IO[bytes] | None]:
    """Give a file that gets its name when all scores are in it."""
    if out is None:
        yield None
        return
    target = Path(out)
    partial = target.with_name(f"{target.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(target)
    except OSError as error:
        raise DataError(f"cannot write {str(target)!r}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
