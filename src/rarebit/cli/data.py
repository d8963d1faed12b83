"""`rarebit data`: prepare a raw log for training, and show it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.data.log_schema import SPLIT_NAMES, Column, LogSchema, Split, TextFormat
from rarebit.data.prepared import (
    BAD_ROWS,
    SCHEMA,
    DataStatistics,
    FieldStatistics,
    PreparedFolder,
    tail_ranks,
)
from rarebit.data.sources import source_names
from rarebit.errors import SettingsError
from rarebit.settings import suggest, updated
from rarebit.storage.files import write_file
from rarebit.text import NOTHING, percent

EXAMPLES = """[bold]Examples[/bold]

rarebit data prepare clicks.parquet --label click --out data/clicks

rarebit data prepare clicks.csv --label click --split time --by timestamp --out data/clicks

rarebit data schema clicks.csv --label click --out clicks.toml

rarebit data prepare clicks.csv --schema clicks.toml --out data/clicks

rarebit data prepare --source ml-1m --from ml-1m/ --out data/ml-1m
"""
PARTS_EXAMPLE = """[bold]One log on several machines[/bold]

rarebit data count monday.csv --schema clicks.toml --out counts/monday

rarebit data count tuesday.csv --schema clicks.toml --out counts/tuesday

rarebit data merge counts/monday counts/tuesday --out data/clicks

rarebit data encode counts/monday --out data/clicks

rarebit data encode counts/tuesday --out data/clicks
"""

SPLITS = ("random", "order", "time", "user", "given")
SPLITS_BY_COLUMN = {"time": "timestamp", "user": "user", "given": "part"}
"""The splits that need a column, each with an example of its name."""
MOST_LINES = 200
"""Columns that are shown: a table of thousands is not read, and takes a minute to draw."""
MOST_PARTS = 20
"""Parts that are listed by name."""
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "._-:=+*#"
SHORT_KINDS = {"categorical": "cat", "multi": "multi", "numeric": "num"}

data_app = typer.Typer(rich_markup_mode="rich")

LogArgument = Annotated[
    list[Path] | None,
    Argument(
        help="The log: .csv .tsv .txt .ndjson (.gz .bz2 .xz .zst), or .parquet. Several files are one log, in this order.",
        readable=False,
    ),
]
OutOption = Annotated[Path | None, Option(help="The folder to create.")]
SchemaOption = Annotated[
    Path | None, Option(help="A schema file, as rarebit data schema writes it.", readable=False)
]
PartArgument = Annotated[
    Path, Argument(help="A folder made by rarebit data count.", readable=False)
]
LabelOption = Annotated[
    list[str] | None,
    Option(
        help='The label column: 1 for a click, else 0. Or what counts as 1: "rating>=4", "income=>50K". Give it again for '
        "other labels: the first is learned, the others are kept out of the model."
    ),
]
WeightOption = Annotated[
    str | None, Option(help="The column that says how much a row counts in the loss.")
]
GroupOption = Annotated[
    str | None,
    Option(
        help="The column of rows that compete, such as a user or a session: for the grouped AUC."
    ),
]
SplitOption = Annotated[
    str | None, Option(help="random (8:1:1, the default), order, time, user, or given (see --by).")
]
ByOption = Annotated[
    str | None, Option(help="The column to split by: a time, a user, or train/valid/test.")
]
SharesOption = Annotated[
    str | None, Option(help="Shares of train, valid and test. Default: 0.8,0.1,0.1.")
]
SplitSeedOption = Annotated[int | None, Option(help="Seed of the split.")]
SeparatorOption = Annotated[
    str | None, Option(help="The separator of a text file. Default: detected.")
]
EncodingOption = Annotated[str | None, Option(help="utf-8 or latin-1. Default: detected.")]
NamesOption = Annotated[
    str | None, Option(help="Column names, separated by commas, for a text file without a header.")
]


@data_app.command(epilog=EXAMPLES)
def prepare(  # noqa: PLR0917  # typer calls it by name
    log: LogArgument = None,
    out: OutOption = None,
    label: LabelOption = None,
    weight: WeightOption = None,
    group: GroupOption = None,
    schema: SchemaOption = None,
    split: SplitOption = None,
    by: ByOption = None,
    shares: SharesOption = None,
    seed: SplitSeedOption = None,
    separator: SeparatorOption = None,
    encoding: EncodingOption = None,
    names: NamesOption = None,
    valid: Annotated[
        Path | None, Option(help="A second log for validation.", readable=False)
    ] = None,
    test: Annotated[Path | None, Option(help="A third log for test.", readable=False)] = None,
    source: Annotated[
        str | None, Option(help=f"A public data set: {', '.join(source_names())}.")
    ] = None,
    from_: Annotated[
        Path | None, Option("--from", help="The folder with the files of --source.", readable=False)
    ] = None,
    protocol: Annotated[
        str, Option(help="How a paper prepared the data set. Default: its first protocol.")
    ] = "",
    bad_rows: opt.BadRows = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Encode a raw log, or a public data set, into a folder for training."""
    from rarebit.data.prepare import prepare as prepare_log
    from rarebit.data.prepare import prepare_source

    out = _needed(out)
    settings: dict[str, Any] = {
        "bad_rows": opt.choose_bad_rows(bad_rows, "stop" if source is None else "aside"),
        "overwrite": overwrite,
    }
    splitting = {"--split": split, "--by": by, "--shares": shares, "--seed": seed}
    if source is not None:
        others: dict[str, object] = {"a log": log or None, "--valid": valid, "--test": test}
        others |= {"--separator": separator, "--encoding": encoding, "--names": names}
        others |= {"--label": label, "--weight": weight, "--group": group, "--schema": schema}
        opt.refuse_with("--source", others | splitting)
        if from_ is None:
            raise SettingsError("--source needs the folder of its files: --from FOLDER")
        with screen.RunBars() as bars:
            prepare_source(
                source, from_, out, protocol=protocol, progress=bars.data_stage, **settings
            )
    else:
        opt.refuse_with("your own log", {"--from": from_, "--protocol": protocol or None})
        if not log:
            raise SettingsError("no log; give a file, or a public data set (--source ml-1m)")
        first = log[0]
        parts = {"train": first, "valid": valid, "test": test}
        logs = {part: file for part, file in parts.items() if file is not None}
        changes: dict[str, Any] = {"kind": "given", "column": ""}
        if len(logs) > 1:
            opt.refuse_with("--valid and --test", {"a second log": log[1:] or None, **splitting})
        else:
            changes = _split_changes(split, by, shares, seed)
        text = _text(first, separator, encoding, names)
        found = _schema(first, _Roles(label, weight, group), schema, changes, text)
        with screen.RunBars() as bars:
            given = logs if len(logs) > 1 else log
            prepare_log(given, out, schema=found, progress=bars.data_stage, **settings)
    _report(out)


@data_app.command(epilog=PARTS_EXAMPLE)
def count(  # noqa: PLR0917  # typer calls it by name
    log: LogArgument = None,
    schema: SchemaOption = None,
    out: OutOption = None,
    for_: Annotated[
        str | None,
        Option("--for", help="train, valid or test, for a log whose files are split already."),
    ] = None,
    bad_rows: opt.BadRows = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Read a part of a log, to prepare the log on several machines: count, merge, encode."""
    from rarebit.data.prepare import count_part

    out = _needed(out, "counts/monday")
    if not log:
        raise SettingsError("no log; give the files of this part")
    if schema is None:
        raise SettingsError(
            "no schema, which all parts share: rarebit data schema LOG --label click --out clicks.toml, "
            "then --schema clicks.toml"
        )
    if for_ is not None and len(log) > 1:
        raise SettingsError("--for takes one file; count the others as parts of their own")
    with screen.RunBars() as bars:
        count_part(
            log if for_ is None else {for_: log[0]},
            out,
            schema=LogSchema.read(schema),
            bad_rows=opt.choose_bad_rows(bad_rows),
            overwrite=overwrite,
            progress=bars.data_stage,
        )
    screen.line(
        f"{out} is counted. Once all parts are: rarebit data merge, in the order of the log."
    )


@data_app.command(epilog=PARTS_EXAMPLE)
def merge(
    parts: Annotated[
        list[Path],
        Argument(
            help="Folders made by rarebit data count, in the order of the log.", readable=False
        ),
    ],
    out: OutOption = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Split the rows of all counted parts and make the vocabulary; then encode each part."""
    from rarebit.data.prepare import merge_parts

    out = _needed(out)
    with screen.RunBars() as bars:
        merge_parts(parts, out, overwrite=overwrite, progress=bars.data_stage)
    screen.line("Split and vocabulary are frozen. Encode the parts, in any order:")
    for part in parts[:MOST_PARTS]:
        screen.command("data", "encode", str(part), "--out", str(out))


@data_app.command(epilog=PARTS_EXAMPLE)
def encode(
    part: PartArgument,
    out: Annotated[
        Path | None, Option(help="The folder made by rarebit data merge.", readable=False)
    ] = None,
) -> None:
    """Write the rows of a counted part to a merged log. The last part completes the log."""
    from rarebit.data.prepare import encode_part

    out = _needed(out)
    with screen.RunBars() as bars:
        missing = encode_part(part, out, progress=bars.data_stage)
    if not missing:
        _report(out)
        return
    more = f" and {len(missing) - MOST_PARTS:,} more" if len(missing) > MOST_PARTS else ""
    screen.line(f"{part} is encoded. Still to encode: {', '.join(missing[:MOST_PARTS])}{more}.")


def _needed(out: Path | None, example: str = "data/clicks") -> Path:
    """Return the output folder, or raise if none is given."""
    if out is None:
        raise SettingsError(f"no output folder; give the folder to create: --out {example}")
    return out


@data_app.command(name="schema")
def schema_(  # noqa: PLR0917  # typer calls it by name
    log: Annotated[Path, Argument(help="The log.", readable=False)],
    label: LabelOption = None,
    weight: WeightOption = None,
    group: GroupOption = None,
    out: Annotated[Path | None, Option(help="Write the schema to this TOML file.")] = None,
    split: SplitOption = None,
    by: ByOption = None,
    shares: SharesOption = None,
    seed: SplitSeedOption = None,
    separator: SeparatorOption = None,
    encoding: EncodingOption = None,
    names: NamesOption = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Infer the schema of a log, show it, and write it to a file to edit."""
    if out is not None and out.exists() and not overwrite:
        raise SettingsError(
            f"{str(out)!r} exists already, and may have been edited; choose another name, or "
            "replace it (--overwrite)"
        )
    text = _text(log, separator, encoding, names)
    roles = _Roles(label, weight, group)
    found = _schema(log, roles, None, _split_changes(split, by, shares, seed), text)
    if out is None:
        screen.console.print("\nTo write it to a file to edit: --out clicks.toml")
        return
    write_file(out, found.to_toml().encode(), error=SettingsError)
    screen.line(f"\nEdit {out}, then:")
    target = f"data/{log.name.split('.')[0]}"
    screen.command("data", "prepare", str(log), "--schema", str(out), "--out", target)


@data_app.command()
def show(
    folder: Annotated[
        Path, Argument(help="A folder made by rarebit data prepare.", readable=False)
    ],
    verify: Annotated[
        bool, Option("--verify", help="Read all files and compare their checksums.")
    ] = False,
) -> None:
    """Show a prepared log: rows, fields, and how long their tails are."""
    prepared = PreparedFolder(folder)
    if verify:
        prepared.verify()
    _show_prepared(prepared)
    if verify:
        screen.console.print("All checksums match.")


def _show_prepared(prepared: PreparedFolder) -> None:
    notes = [f"Prepared from {prepared.manifest['origin']}.", *prepared.manifest["notes"]]
    show_dataset(prepared.statistics, title=str(prepared.folder), notes=notes)


def _report(out: Path) -> None:
    """Print what became of every row, and the next command."""
    prepared = PreparedFolder(out)
    _show_prepared(prepared)
    manifest, encoded = prepared.manifest, sum(prepared.rows)
    skipped = manifest["rows_read"] - encoded
    screen.console.print(
        f"\n{manifest['rows_read']:,} rows read = {encoded:,} encoded + {skipped:,} skipped."
    )
    if skipped:
        reasons = ", ".join(f"{count:,} x {why}" for why, count in manifest["bad_rows"].items())
        screen.line(f"Skipped rows, written to {out / BAD_ROWS}: {reasons}.")
    if manifest["values_cut"]:
        screen.console.print(
            f"{manifest['values_cut']:,} values of multi-valued columns were dropped: their rows have "
            "more than max_length."
        )
    screen.line(f"The schema is in {out / SCHEMA}: to change it, edit a copy and prepare again.")
    screen.console.print("To train on it:")
    screen.command("train", "--data", str(out))


def _text(
    log: Path, separator: str | None, encoding: str | None, names: str | None
) -> TextFormat | None:
    """Return the text format with the options applied; None without such options."""
    if separator is None and encoding is None and names is None:
        return None
    from rarebit.data.raw.readers import find_format

    changes = opt.given(separator=separator, encoding=encoding)
    changes |= {} if names is None else {"header": False, "names": tuple(names.split(","))}
    return updated(find_format(log) or TextFormat(), changes)


class _Roles(NamedTuple):
    """What the options say of columns that are no features."""

    label: list[str] | None
    weight: str | None
    group: str | None


def _schema(
    log: Path,
    roles: _Roles,
    file: Path | None,
    changes: Mapping[str, Any],
    text: TextFormat | None,
) -> LogSchema:
    """Return and show the schema of a file, or an inferred one, with changes to its split."""
    from rarebit.data.prepare import infer_log

    if file is not None:
        opt.refuse_with("--schema", {f"--{name}": value for name, value in roles._asdict().items()})
        schema = LogSchema.read(file)
        schema = replace(schema, split=replace(schema.split, **changes), text=text or schema.text)
        show_schema(schema)
    else:
        labels = roles.label or []
        inferred = infer_log(
            log,
            labels[0] if labels else None,
            split=Split(**changes),
            format=text,
            weight=roles.weight or "",
            group=roles.group or "",
            other_labels=labels[1:],
        )
        schema = inferred.schema
        show_schema(schema, inferred.reasons)
        for warning in inferred.warnings:
            screen.console.print(Text(f"Check: {warning}.", style="yellow"))
    if schema.text is not None:
        written = schema.text
        quotes = f"quotes {written.quote}" if written.quote else "no quotes"
        screen.line(f"Text: separator {written.separator!r}, {quotes}, {written.encoding}.")
    return schema


def _split_changes(
    kind: str | None, by: str | None, shares: str | None, seed: int | None
) -> dict[str, Any]:
    """Return the changes that the options make to the split of a schema."""
    changes = opt.given(kind=kind, seed=seed)
    if kind is not None and kind not in SPLITS:
        raise SettingsError(f"unknown split {kind!r}{suggest(kind, SPLITS)}")
    if kind in SPLITS_BY_COLUMN and not by:
        raise SettingsError(f"--split {kind} needs a column: --by {SPLITS_BY_COLUMN[kind]}")
    if by and kind not in SPLITS_BY_COLUMN:
        raise SettingsError(f"--by {by} needs a split by a column: --split time, user or given")
    if kind is not None:
        changes["column"] = by or ""
    if shares is not None:
        try:
            changes["shares"] = tuple(float(share) for share in shares.split(","))
        except ValueError:
            raise SettingsError(
                f"--shares takes three numbers, such as 0.8,0.1,0.1; got {shares!r}"
            ) from None
    return changes


def show_schema(
    schema: LogSchema, reasons: Mapping[str, str] | None = None, *, to: Console = screen.console
) -> None:
    """Print the kind of each column of a log, how it is encoded and, if known, why."""
    header = ["column", "kind", "treatment", "why"][: 3 if reasons is None else 4]
    rows = []
    for column in schema.columns[:MOST_LINES]:
        why = "" if reasons is None else reasons.get(column.name, "")
        cells = [column.name, column.kind, treatment(column, schema), why][: len(header)]
        style = "dim" if column.kind == "ignored" else ""
        rows.append([Text(cell, style=style) for cell in cells])
    screen.table(header, rows, left=header, fixed=["kind"], to=to)
    if len(schema.columns) > MOST_LINES:
        more = (
            f"and {len(schema.columns) - MOST_LINES:,} more columns: rarebit data schema --out FILE"
        )
        to.print(Text(more))
    split = schema.split
    if split.kind == "given":
        how = f"given by the column {split.column!r}" if split.column else "given by the files"
    else:
        shares = " : ".join(f"{100 * share:g}" for share in split.shares)
        by = {
            "random": f"random, seed {split.seed}",
            "order": "in file order",
            "time": f"by the time in {split.column!r}",
            "user": f"each {split.column!r} in one part, seed {split.seed}",
        }[split.kind]
        how = f"{shares} percent, {by}"
    named = [f"Label: {schema.label}{schema.positive}."]
    named += [f"Weight: {schema.weight}."] if schema.weight else []
    named += [f"Grouped by: {schema.group}."] if schema.group else []
    to.print(Text(" ".join([*named, f"Split: {how}."])))
    if schema.missing:
        values = ", ".join(map(repr, schema.missing))
        to.print(Text(f"Missing: an empty value, or {values}."))
    if schema.counts == "all":
        leak = (
            "values that occur only in test rows get an id too: the vocabulary leaks into training"
        )
        to.print(Text(f"Ids are made from all rows, as in some papers: {leak}."))


def treatment(column: Column, schema: LogSchema) -> str:
    """Return how a column is encoded."""
    if column.kind in ("ignored", "time"):
        if schema.split.column == column.name:
            return "decides the split, no feature"
        return "not read" if column.kind == "ignored" else "no feature"
    if column.kind == "numeric":
        return {
            "standardised": "(x - mean) / std",
            "log_square": "one id per floor(ln(x)^2)",
            "quantile": f"{column.bins} bins of equally many rows",
        }[column.treatment]
    if column.buckets is not None:
        parts = [f"hashed to {column.buckets:,} ids"]
    elif column.min_count > 1:
        parts = [f"one id per value seen {column.min_count} times"]
    else:
        parts = ["one id per value"]
    if column.kind == "multi":
        between = f"split at {column.separator!r}" if column.separator else "from lists"
        parts.append(f"{between}, up to {column.max_length} per row, {column.pooling}")
    if column.vocabulary:
        same = [other.name for other in schema.vocabularies[column.vocabulary] if other != column]
        parts += [f"ids shared with {', '.join(same)}"] if same else []
    return ", ".join(parts)


def show_dataset(
    statistics: DataStatistics,
    *,
    title: str,
    notes: Sequence[str] = (),
    to: Console = screen.console,
) -> None:
    """Print the rows of a prepared log, its fields, and a chart of each field's tail."""
    to.print(Text(title, style="bold"))
    splits = list(zip(SPLIT_NAMES, statistics.rows, statistics.label_rates, strict=True))
    total, clicks = sum(statistics.rows), sum(rows * rate for _, rows, rate in splits)
    lines = [
        [name, f"{rows:,}", percent(rate if rows else None, digits=1)]
        for name, rows, rate in [*splits, ("all", total, clicks / max(total, 1))]
    ]
    screen.table(["split", "rows", "label rate"], lines, to=to)
    if statistics.bad_rows:
        rows = "row was" if statistics.bad_rows == 1 else "rows were"
        to.print(Text(f"{statistics.bad_rows:,} malformed {rows} skipped."))
    if statistics.fields:
        _show_fields(statistics.fields, to)
    else:
        to.print(Text("It has no fields."))
    for note in notes:
        to.print(Text(note))


def _show_fields(fields: Sequence[FieldStatistics], to: Console) -> None:
    wide = to.width >= screen.WIDE
    header = ["field", "kind", "distinct", "table rows", "top 20 %", "rare", "missing", "unknown"]
    if not wide:
        header = ["field", "kind", "distinct", "rows", "top", "rare", "miss", "unk"]
    most = max((field.tail[0] for field in fields if field.tail), default=1)
    longest = max((field.distinct for field in fields if field.tail), default=1)
    rows: list[list[str | Text]] = []
    for field in fields[:MOST_LINES]:
        chart = tail_chart(field, width=24 if wide else 12, most=most, longest=longest)
        if to.options.ascii_only:
            chart = chart.translate(str.maketrans(BLOCKS, ASCII_BLOCKS))
        unknown = field.unknown_shares[-1] if field.unknown_shares and field.rows else None
        rows.append(
            [
                field.name,
                field.kind if wide else SHORT_KINDS.get(field.kind, field.kind),
                f"{field.distinct:,}" if field.distinct else NOTHING,
                f"{field.rows:,}" if field.rows else NOTHING,
                percent(field.top_share if field.tail else None, digits=1),
                percent(field.rare_share if field.tail else None, digits=1),
                percent(field.missing_share, digits=1),
                percent(unknown, digits=1),
                Text(chart, style="cyan"),
            ]
        )
    top, missing, unseen = header[4], header[6], header[7]
    note = (
        f"{top}: rows whose value is among the 20 % most frequent ones; rare: rows whose value is seen "
        f"fewer than 10 times; {missing}: rows without a value; {unseen}: test rows whose value has "
        "no id; tail: how often the values occur, from the most frequent to the rarest, on log scales "
        "that all fields share."
    )
    header.append("tail")
    screen.table(header, rows, note=note, left=["kind", "tail"], fixed=header[1:], to=to)
    if len(fields) > MOST_LINES:
        to.print(Text(f"and {len(fields) - MOST_LINES:,} more fields: they are in manifest.json"))


def tail_chart(field: FieldStatistics, *, width: int, most: int, longest: int) -> str:
    """Draw how often the values of a field occur, the most frequent first, on two log scales.

    A full block is `most` rows, the lowest is one row; a field of `longest` values is `width` wide.
    """
    if not field.tail:
        return ""
    length = max(1, round(width * math.log(field.distinct) / max(math.log(longest), 1e-9)))
    ranks = np.log(tail_ranks(field.distinct))
    places = np.linspace(0, ranks[-1], length)
    heights = np.interp(places, ranks, np.log(field.tail)) / max(math.log(most), 1e-9)
    return "".join(BLOCKS[round(float(height) * (len(BLOCKS) - 1))] for height in heights)
