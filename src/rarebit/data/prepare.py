"""Prepare a log for training: your own file, or one of the well-known data sets."""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rarebit.data.dataset import Dataset
from rarebit.data.log_schema import (
    PART_NAMES,
    SPLIT_NAMES,
    Comparison,
    LogSchema,
    Split,
    TextFormat,
    check_arguments,
)
from rarebit.data.prepared import CHANGES, ENCODER, PreparedFolder, Progress, no_progress
from rarebit.data.sources import find_source
from rarebit.errors import DataError, SettingsError, import_extra
from rarebit.settings import require, suggest
from rarebit.storage.files import file_checksum, fresh_folder, read_json, write_json

if TYPE_CHECKING:  # reading raw logs needs Polars, importing this does not
    from rarebit.data.raw.chunks import BadRows, RawChunk
    from rarebit.data.raw.encoder import LogEncoder
    from rarebit.data.raw.infer import Inferred
    from rarebit.data.raw.periods import By
    from rarebit.data.raw.vocabulary import DayChanges, Growth

PathLike = str | os.PathLike[str]

PERIODS = "periods.json"
"""What a folder of periods says of itself."""


def prepare(
    log: PathLike | Sequence[PathLike] | Mapping[str, PathLike],
    out: PathLike,
    *,
    label: str | None = None,
    schema: LogSchema | None = None,
    split: Split | None = None,
    format: TextFormat | None = None,
    weight: str = "",
    group: str = "",
    other_labels: Sequence[str] = (),
    bad_rows: Literal["stop", "aside"] = "stop",
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Dataset:
    r"""Encode a CSV, TSV, NDJSON or Parquet log into a folder that trains, and open it.

    A `schema` describes the columns; without one, it is guessed from the first rows and the name of the
    `label`. A list of files is one log, in this order. A mapping of "train", "valid" and "test" to files is
    a log that is split already. Without a schema, `weight` names the column of how much a row counts in the loss, `group`
    that of rows that compete with each other, for the grouped AUC, and `other_labels` columns that a model must not read.
    `bad_rows="aside"` skips malformed rows and writes them to a file of the folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = Path(folder) / "clicks.csv"
    ...     _ = log.write_text("user,click\n" + "ann,0\nbob,1\n" * 20)
    ...     data = prepare(log, Path(folder) / "clicks", label="click")
    >>> len(data), data.schema["user"].rows
    (40, 5)
    """
    from rarebit.data.raw.chunks import BadRows
    from rarebit.data.raw.encode import encode_log

    check_arguments(label, schema, split, format)
    files, split = _files(log, schema, split)
    if files[0][0] not in ("", "train"):
        raise SettingsError("a log in several files needs one for train")
    roles: dict[str, Any] = {"weight": weight, "group": group, "other_labels": other_labels}
    if schema is None:
        found = infer_log(files[0][1], label, split=split, format=format, **roles)
        found.warn()
        schema = found.schema
    elif any(roles.values()):
        raise SettingsError(
            "a schema says weight, group and what is ignored itself; give one of the two"
        )
    schema = _with_text(files, schema, split, format)
    bad = BadRows(bad_rows)
    encode_log(
        _read(files, schema, bad, progress),
        schema,
        out,
        origin=_origin(files),
        notes=schema.notes,
        bad=bad,
        overwrite=overwrite,
        progress=progress,
    )
    return Dataset.open(out, verify=False)


def count_part(
    log: PathLike | Sequence[PathLike] | Mapping[str, PathLike],
    out: PathLike,
    *,
    schema: LogSchema,
    bad_rows: Literal["stop", "aside"] = "stop",
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> None:
    r"""Read a part of a log into a folder of codes and counts: the first of three steps on several machines.

    Every part needs the same `schema`. `merge_parts` and then `encode_part` of every part make the folder that
    `prepare` makes of all files, byte for byte.
    A mapping, such as `{"valid": "last-day.csv"}`, is a part of a log whose files are split already.

    >>> import tempfile
    >>> from rarebit.data import Column
    >>> schema = LogSchema(label="click", columns=(Column(name="user"),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     place = Path(folder)
    ...     for day in ("monday", "tuesday"):
    ...         _ = (place / f"{day}.csv").write_text("user,click\n" + "ann,0\nbob,1\n" * 20)
    ...         count_part(place / f"{day}.csv", place / "counts" / day, schema=schema)
    ...     parts = [place / "counts" / "monday", place / "counts" / "tuesday"]
    ...     merge_parts(parts, place / "clicks")
    ...     encode_part(parts[1], place / "clicks")
    ...     encode_part(parts[0], place / "clicks")
    ...     len(Dataset.open(place / "clicks"))
    ['monday.csv']
    []
    80
    """
    from rarebit.data.raw.chunks import BadRows
    from rarebit.data.raw.parts import count_log

    require(schema is not None, "parts of a log need a schema, the same for all of them")
    check_arguments(schema=schema)
    files, split = _files(log, schema, None)
    schema = _with_text(files, schema, split, None)
    bad = BadRows(bad_rows)
    count_log(
        _read(files, schema, bad, progress),
        schema,
        Path(out),
        origin=_origin(files),
        log=[path for _, path in files],
        notes=schema.notes,
        bad=bad,
        overwrite=overwrite,
    )


def merge_parts(
    parts: Sequence[PathLike],
    out: PathLike,
    *,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Split the rows of all parts and make the vocabulary: the second step, after `count_part` of every part.

    The order of the parts is the order of the log. The folder `out` opens once every part is encoded.

    >>> merge_parts([], "data/clicks")
    Traceback (most recent call last):
    ...
    rarebit.errors.DataError: no parts to merge; give the folders that rarebit data count made
    """
    from rarebit.data.raw.parts import merge_counted

    merge_counted([Path(part) for part in parts], Path(out), overwrite=overwrite, progress=progress)


def encode_part(part: PathLike, out: PathLike, *, progress: Progress = no_progress) -> list[str]:
    """Write the rows of a part to a merged folder: the third step, for every part and in any order.

    Return the files of the parts that are still missing; none once the folder is complete. A part may be
    encoded twice, also at once: after a failure, run it again.

    >>> encode_part("counts/monday", "data/clicks")
    Traceback (most recent call last):
    ...
    rarebit.errors.DataError: 'counts/monday' holds no counted part: manifest.json is missing; ...
    """
    from rarebit.data.raw.parts import encode_counted

    return encode_counted(Path(part), Path(out), progress=progress)


def _files(
    log: PathLike | Sequence[PathLike] | Mapping[str, PathLike],
    schema: LogSchema | None,
    split: Split | None,
) -> tuple[list[tuple[str, Path]], Split | None]:
    """Return the files of a log, each with the split it is for or "", and the split if it changes."""
    if isinstance(log, Mapping):
        by_part = {}
        for name, file in log.items():
            part = PART_NAMES.get(name)
            if part is None or part in by_part:
                what = "unknown part" if part is None else f"two files for {part}, the second"
                raise SettingsError(f"{what} {name!r}{suggest(name, SPLIT_NAMES)}")
            by_part[part] = _path(file)
        files = [(part, by_part[part]) for part in SPLIT_NAMES if part in by_part]
        if split is not None and split.kind != "given":
            raise SettingsError(f"the files are split already: leave out the split by {split.kind}")
        drawn_by = split or (schema.split if schema is not None else Split())
        split = Split(kind="given", seed=drawn_by.seed)
    else:
        listed = (
            [log] if isinstance(log, str | os.PathLike) or not isinstance(log, Sequence) else log
        )
        files = [("", one) for file in listed for one in _matching(_path(file))]
    require(len(files) > 0, f"a log needs at least one file, got {log!r}")
    return files, split


def _matching(path: Path) -> list[Path]:
    """Return the files that a pattern such as logs/day-*.csv stands for, by name; any other path is itself."""
    if path.exists() or not any(mark in str(path) for mark in "*?["):
        return [path]
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207  # also absolute patterns
    if not found:
        raise DataError(f"no file is like {str(path)!r}; check the folder and the pattern")
    return found


def _with_text(
    files: Sequence[tuple[str, Path]],
    schema: LogSchema,
    split: Split | None,
    format: TextFormat | None,
) -> LogSchema:
    """Return the schema with the split and the text format that the files are read with."""
    from rarebit.data.raw.readers import find_format

    text = format or schema.text or find_format(files[0][1])
    return replace(schema, split=split or schema.split, text=text)


def _read(
    files: Sequence[tuple[str, Path]], schema: LogSchema, bad: "BadRows", progress: Progress
) -> Iterator["RawChunk"]:
    """Yield the rows of the files in order."""
    from rarebit.data.raw.readers import read_raw

    counts = [c.name for c in schema.columns if c.kind == "numeric" and not c.is_number]
    for part, path in files:
        for chunk in read_raw(
            path,
            schema.columns_read,
            bad,
            format=schema.text,
            integers=counts if schema.positive else [schema.label, *counts],
            missing=schema.missing,
            progress=partial(progress, "reading"),
        ):
            yield replace(chunk, part=part)


def _origin(files: Sequence[tuple[str, Path]]) -> str:
    return ", ".join(path.name for _, path in files)


def prepare_day(
    log: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    like: "LogEncoder",
    growth: "Growth",
    format: TextFormat | None = None,
    bad_rows: Literal["stop", "aside"] = "stop",
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Dataset:
    """Encode the next day of a log into a folder, all rows in their order, and open it.

    The vocabularies are those of the day before, and grow; `changes_of` tells how.
    """
    from rarebit.data.raw.chunks import BadRows
    from rarebit.data.raw.encode import Growing, encode_log

    listed = [log] if isinstance(log, str | os.PathLike) else log
    files = [("", _path(file)) for file in listed]
    require(len(files) > 0, f"a day needs at least one file, got {log!r}")
    text = format or like.schema.text
    schema = replace(like.schema, split=Split(kind="order", shares=(1.0, 0.0, 0.0)), text=text)
    bad = BadRows(bad_rows)
    encode_log(
        _read(files, schema, bad, progress),
        schema,
        out,
        origin=_origin(files),
        bad=bad,
        overwrite=overwrite,
        progress=progress,
        grow=Growing(like, growth),
    )
    return Dataset.open(out, verify=False)


def changes_of(folder: PathLike) -> "DayChanges":
    """Return what a day that was prepared in a folder did to the vocabularies."""
    from rarebit.data.raw.encoder import LogEncoder
    from rarebit.data.raw.vocabulary import DayChanges, read_days

    folder = Path(folder)
    try:
        days = read_days(folder / CHANGES, PreparedFolder(folder).manifest["days"])
    except (LookupError, OSError, TypeError, ValueError):
        raise DataError(f"{str(folder)!r} is no day of a log that grows, or damaged") from None
    return DayChanges.of(LogEncoder.open(folder / ENCODER).schema, days)


def prepare_periods(
    log: PathLike,
    out: PathLike,
    *,
    label: str | None = None,
    time: str | None = None,
    by: "By" = "day",
    warm_up: int = 1,
    schema: LogSchema | None = None,
    growth: "Growth | None" = None,
    progress: Progress = no_progress,
) -> list[Path]:
    """Cut a log into periods of time, and encode each with a vocabulary that grows; return their folders.

    The first period has the rows of `warm_up` periods and starts the vocabulary. The others are days of a log that grows, as
    `prepare_day` makes them. A folder that holds the same periods already is left as it is. The log is sorted in memory.
    """
    from rarebit.data.raw.encoder import encoder_of
    from rarebit.data.raw.periods import SortedLog
    from rarebit.data.raw.readers import column_names, log_files
    from rarebit.data.raw.vocabulary import Growth

    source, target, growth = _path(log), Path(out), growth or Growth()
    check_arguments(label, schema)
    if schema is not None:
        label = schema.label
        time = time or (schema.split.column if schema.split.kind == "time" else None)
    if not label:
        raise SettingsError("which column is the label? Name it (--label click), or give a schema")
    require(
        not (schema.positive if schema is not None else Comparison.split(label)[1]),
        f"periods need a label of 0 and 1, got a comparison, {label!r}; write such a column first",
    )
    if not time:
        raise SettingsError("which column is the time? Name it (--time timestamp)")
    text = None if schema is None else schema.text
    files = log_files(source, is_text=text is not None)
    columns = column_names(source, text) if schema is None else schema.columns_read
    asked = {
        "log": [file_checksum(file) for file in files if file.exists()],
        "label": label,
        "time": time,
        "by": by,
        "warm_up": warm_up,
        "schema": None if schema is None else schema.to_mapping(),
        "growth": asdict(growth),
    }
    if target.exists():
        return _known_periods(target, asked)
    rows = SortedLog.read(
        source,
        time,
        [label, *columns],
        format=text,
        missing=() if schema is None else schema.missing,
        progress=partial(progress, "reading"),
    )
    parts = rows.cut(by, label, warm_up=warm_up)
    every = Split(kind="order", shares=(1.0, 0.0, 0.0))
    with fresh_folder(target) as folder:
        for number, part in enumerate(parts):
            raw, period = folder / "part.parquet", folder / f"{number:04}"
            part.rows.write_parquet(raw)
            if number == 0:
                if schema is None:
                    found = infer_log(raw, label, split=Split(kind="time", column=time))
                    found.warn()
                    schema = found.schema
                data = prepare(raw, period, schema=schema, split=every)
            else:
                data = prepare_day(raw, period, like=encoder_of(data), growth=growth)
            raw.unlink()
            progress("periods", number + 1, len(parts))
        write_json(
            folder / PERIODS,
            {"asked": asked, "starts": [part.start for part in parts]},
            error=DataError,
        )
    return _known_periods(target, asked)


def _known_periods(folder: Path, asked: Mapping[str, object]) -> list[Path]:
    """Return the folders of the periods of a log; raise where it is another log, or was cut in another way."""
    found = read_periods(folder)
    for name, wanted in asked.items():
        if found["asked"].get(name) != wanted:
            raise DataError(
                f"{str(folder)!r} holds periods with another {name}; choose another output folder, or remove it"
            )
    return [folder / f"{number:04}" for number in range(len(found["starts"]))]


def read_periods(folder: PathLike) -> dict[str, Any]:
    """Return what a folder of periods says of itself: what was asked for, and the start of each period."""
    try:
        return read_json(Path(folder) / PERIODS)
    except (OSError, ValueError) as error:
        raise DataError(f"{str(folder)!r} holds no periods of a log: {error}") from None


def _path(file: PathLike) -> Path:
    """Return the path of a file of a log, or raise if it is none."""
    if not isinstance(file, str | os.PathLike):
        raise SettingsError(
            f"prepare reads files: a path, a list of paths, or a mapping of train, valid and test to paths; "
            f"got {type(file).__name__}. Rows in memory: rb.Dataset.from_frame"
        )
    return Path(file)


def prepare_source(
    name: str,
    folder: PathLike,
    out: PathLike,
    *,
    protocol: str = "",
    bad_rows: Literal["stop", "aside"] = "aside",
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Dataset:
    """Encode a well-known data set from its files, by a protocol of its papers, and open it.

    Malformed rows are skipped and written to a file of the folder: nobody can fix published files.

    >>> prepare_source("movielens", "ml-1m", "data/ml-1m")
    Traceback (most recent call last):
    ...
    rarebit.errors.SettingsError: unknown source 'movielens'; ...
    """
    from rarebit.data.raw.chunks import BadRows
    from rarebit.data.raw.encode import encode_log

    source = find_source(name)
    bad = BadRows(bad_rows)
    chunks = source.rows(Path(folder), bad, partial(progress, "reading"))
    encode_log(
        chunks,
        replace(source.schema(protocol), text=source.text),
        out,
        origin=name,
        notes=partial(source.notes, protocol),
        bad=bad,
        overwrite=overwrite,
        progress=progress,
    )
    return Dataset.open(out, verify=False)


def infer_log(
    log: PathLike,
    label: str | None,
    *,
    split: Split | None = None,
    format: TextFormat | None = None,
    weight: str = "",
    group: str = "",
    other_labels: Sequence[str] = (),
) -> "Inferred":
    """Guess the schema of a log from its first rows."""
    from rarebit.data.raw.chunks import BadRows
    from rarebit.data.raw.infer import SAMPLE_ROWS, infer_schema, is_row
    from rarebit.data.raw.readers import find_format, read_raw

    pl = import_extra("polars", "data", "reading raw logs")
    check_arguments(label, split=split, format=format)
    log = _path(log)
    if not label:
        raise SettingsError("which column is the label? Name it (--label click), or give a schema")
    frames, rows = [], 0
    bad = BadRows()
    written = format or find_format(log)
    for chunk in read_raw(log, None, bad, format=written, block_bytes=1 << 20):
        frames.append(chunk.frame)
        rows += chunk.frame.height
        if rows >= SAMPLE_ROWS:
            break
    if not frames:
        bad.raise_if_any()  # a few malformed rows are reported when the log is encoded
    try:  # files of one folder may have other columns, or the same with other types
        sample = pl.concat(frames, how="diagonal_relaxed").head(SAMPLE_ROWS)
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"the files of {str(log)!r} do not agree on their columns: {error}; prepare them one by "
            "one, or give a schema"
        ) from None
    if written is not None and written.header and is_row(sample.columns, sample):
        row = ", ".join(map(repr, sample.columns[:4])) + (", ..." if sample.width > 4 else "")
        raise DataError(
            f"the first row of {str(log)!r} looks like data ({row}), not like the names of {sample.width:,} "
            "columns; name them: --names click,user,item or TextFormat(header=False, names=...)"
        )
    roles: dict[str, Any] = {"weight": weight, "group": group, "other_labels": other_labels}
    found = infer_schema(sample, label, split=split, **roles)
    return replace(found, schema=replace(found.schema, text=written))
