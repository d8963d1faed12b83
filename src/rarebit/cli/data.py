"""What the command line shows of data: a schema with its reasons, and a prepared data set.

`rarebit data`: from a raw log to a folder that trains.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rarebit.cli.show import BarProgress, console, how_to_call
from rarebit.data.log_schema import SPLIT_NAMES, Column, LogSchema, Split, TextFormat
from rarebit.data.prepared import BAD_ROWS, SCHEMA, PreparedFolder
from rarebit.data.sources import source_names
from rarebit.data.statistics import DataStatistics, FieldStatistics, tail_ranks
from rarebit.errors import SettingsError
from rarebit.settings import suggest, updated

__all__ = ["choose_bad_rows", "data_app", "show_dataset", "show_schema", "tail_chart", "treatment"]

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "._-:=+*#"
WIDE = 110
"""From this width of the terminal on, nothing is shortened."""
SHORT_KINDS = {"categorical": "cat", "multi": "multi", "numeric": "num"}
NOTHING = "-"


def show_schema(
    schema: LogSchema, reasons: Mapping[str, str] | None = None, *, to: Console = console
) -> None:
    """Print what each column of a log is, how it is treated and, if known, why."""
    table = _table("column", "kind", "how it is treated", *(["why"] if reasons is not None else []))
    table.columns[0].min_width = 8
    table.columns[1].no_wrap = True
    for column in schema.columns:
        style = "dim" if column.kind == "ignored" else ""
        cells = [column.name, column.kind, treatment(column, schema)]
        if reasons is not None:
            cells.append(reasons.get(column.name, ""))
        table.add_row(*(Text(cell) for cell in cells), style=style)
    to.print(table)
    for line in _schema_lines(schema):
        to.print(Text(line))


def treatment(column: Column, schema: LogSchema) -> str:
    """Return in words what becomes of a column.

    >>> price = Column(name="price", kind="numeric", treatment="quantile", bins=10)
    >>> treatment(price, LogSchema(label="click", columns=(price,)))
    '10 bins of equally many rows'
    """
    if column.kind == "ignored":
        return "not read"
    if column.kind == "time":
        by_time = schema.split.kind == "time" and schema.split.column == column.name
        return "decides the split, not for the model" if by_time else "not for the model"
    if column.kind == "numeric":
        return {
            "standardised": "(x - mean) / std",
            "log_square": "an id per floor(ln(x)^2)",
            "quantile": f"{column.bins} bins of equally many rows",
        }[column.treatment]
    return ", ".join(_id_words(column, schema))


def _id_words(column: Column, schema: LogSchema) -> list[str]:
    if column.buckets is not None:
        words = [f"hashed to {column.buckets:,} ids"]
    elif column.min_count > 1:
        words = [f"an id if seen {column.min_count} times"]
    else:
        words = ["an id per value"]
    if column.kind == "multi":
        between = f"split at {column.separator!r}" if column.separator else "from lists"
        words.append(f"{between}, up to {column.max_length} a row, {column.pooling}")
    if column.vocabulary:
        same = [other.name for other in schema.vocabularies[column.vocabulary] if other != column]
        words += [f"ids shared with {', '.join(same)}"] if same else []
    return words


def _schema_lines(schema: LogSchema) -> list[str]:
    lines = [f"Label: {schema.label}. Split: {_split_words(schema.split)}."]
    if schema.missing:
        lines.append(f"Missing: an empty value, or {', '.join(map(repr, schema.missing))}.")
    if schema.counts == "all":
        lines.append(
            "Ids are made from all rows, as some papers did: what is only in the test rows gets an "
            "id, too, so the vocabulary leaks into training."
        )
    return lines


def _split_words(split: Split) -> str:
    if split.kind == "given":
        return f"as the column {split.column!r} says" if split.column else "as the files say"
    shares = " : ".join(f"{100 * share:g}" for share in split.shares)
    how = {
        "random": f"random, seed {split.seed}",
        "order": "in the order of the file",
        "time": f"by the time in {split.column!r}",
        "user": f"each {split.column!r} in one part, seed {split.seed}",
    }[split.kind]
    return f"{shares} percent, {how}"


def show_dataset(
    statistics: DataStatistics, *, title: str, notes: Sequence[str] = (), to: Console = console
) -> None:
    """Print the rows of a prepared data set, its fields, and a drawing of each field's tail."""
    to.print(Text(title, style="bold"))
    to.print(_splits_table(statistics))
    if statistics.bad_rows:
        rows = "bad row was" if statistics.bad_rows == 1 else "bad rows were"
        to.print(Text(f"{statistics.bad_rows:,} {rows} set aside."))
    if statistics.fields:
        to.print(_fields_table(statistics.fields, to))
        to.print(Text(_explanation(to)))
    else:
        to.print(Text("It has no fields."))
    for note in notes:
        to.print(Text(note))


def _splits_table(statistics: DataStatistics) -> Table:
    table = _table("split", "rows", "label rate", right=(1, 2))
    splits = list(zip(SPLIT_NAMES, statistics.rows, statistics.label_rates, strict=True))
    for name, rows, rate in splits:
        table.add_row(name, f"{rows:,}", _percent(rate, of=rows))
    total = sum(statistics.rows)
    clicks = sum(rows * rate for _, rows, rate in splits)
    table.add_row("all", f"{total:,}", _percent(clicks / max(total, 1), of=total))
    return table


def _fields_table(fields: Iterable[FieldStatistics], to: Console) -> Table:
    fields = list(fields)
    wide = to.width >= WIDE
    headers = ["field", "kind", "distinct", "table rows", "top 20 %", "rare", "missing", "unknown"]
    if not wide:
        headers = ["field", "kind", "distinct", "rows", "top", "rare", "miss", "unk"]
    table = _table(*headers, "tail", right=range(2, 8))
    table.columns[0].min_width = 6
    for column in table.columns[1:]:
        column.no_wrap = True
    most = max((field.tail[0] for field in fields if field.tail), default=1)
    longest = max((field.distinct for field in fields if field.tail), default=1)
    width = 24 if wide else 12
    for field in fields:
        chart = tail_chart(field, width=width, most=most, longest=longest)
        if to.options.ascii_only:
            chart = chart.translate(str.maketrans(BLOCKS, ASCII_BLOCKS))
        table.add_row(Text(field.name), *_field_cells(field, wide=wide), Text(chart, style="cyan"))
    return table


def _field_cells(field: FieldStatistics, *, wide: bool) -> list[str]:
    kind = field.kind if wide else SHORT_KINDS.get(field.kind, field.kind)
    has_values = len(field.tail) > 0
    unknown = field.unknown_shares[-1] if field.unknown_shares and field.rows else None
    return [
        kind,
        f"{field.distinct:,}" if field.distinct else NOTHING,
        f"{field.rows:,}" if field.rows else NOTHING,
        _percent(field.top_share) if has_values else NOTHING,
        _percent(field.rare_share) if has_values else NOTHING,
        _percent(field.missing_share),
        NOTHING if unknown is None else _percent(unknown),
    ]


def tail_chart(field: FieldStatistics, *, width: int, most: int, longest: int) -> str:
    """Draw how often the values of a field occur, the most frequent first, on two log scales.

    A full block is `most` rows, the lowest is one row; a field of `longest` values is `width` wide.

    >>> values = {"name": "user", "kind": "categorical", "distinct": 4, "rows": 7, "top_share": 0.6}
    >>> values |= {"rare_share": 0.2, "missing_share": 0.0, "unknown_shares": (), "tail": (64, 8, 2, 1)}
    >>> tail_chart(FieldStatistics(**values), width=8, most=64, longest=4)
    '█▇▆▅▄▃▂▁'
    """
    if not field.tail:
        return ""
    length = max(1, round(width * math.log(field.distinct) / max(math.log(longest), 1e-9)))
    ranks = np.log(tail_ranks(field.distinct))
    places = np.linspace(0, ranks[-1], length)
    heights = np.interp(places, ranks, np.log(field.tail)) / max(math.log(most), 1e-9)
    return "".join(BLOCKS[round(float(height) * (len(BLOCKS) - 1))] for height in heights)


def _explanation(to: Console) -> str:
    short = to.width < WIDE
    top, missing, unknown = ("top", "miss", "unk") if short else ("top 20 %", "missing", "unknown")
    return (
        f"{top}: rows whose value is among the 20 % most frequent ones; rare: rows whose value is seen "
        f"fewer than 10 times; {missing}: rows without a value; {unknown}: test rows whose value has "
        "no id. tail: how often the values occur, from the most frequent to the rarest, on log scales "
        "that all fields share."
    )


def _table(*headers: str, right: Iterable[int] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    for place in right:
        table.columns[place].justify = "right"
    return table


def _percent(share: float, *, of: int = 1) -> str:
    """Return a share for people; a small one is not shown as none, nor a large one as all.

    >>> [_percent(share) for share in (0, 0.00001, 0.1234, 0.99999, 1)]
    ['0 %', '<0.1 %', '12.3 %', '>99.9 %', '100 %']
    """
    if not of:
        return NOTHING
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    if share < 0.001:
        return "<0.1 %"
    if share > 0.999:
        return ">99.9 %"
    return f"{100 * share:.1f} %"


EXAMPLES = """[bold]Examples[/bold]

rarebit data prepare clicks.parquet --label click --out data/clicks

rarebit data prepare clicks.csv --label click --split time --by timestamp --out data/clicks

rarebit data schema clicks.csv --label click --out clicks.toml

rarebit data prepare clicks.csv --schema clicks.toml --out data/clicks

rarebit data prepare --source ml-1m --from ml-1m/ --out data/ml-1m
"""

SPLITS = ("random", "order", "time", "user", "given")
SPLITS_BY_COLUMN = {"time": "timestamp", "user": "user", "given": "part"}
"""The splits that go by a column, each with an example of its name."""

data_app = typer.Typer(
    name="data",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Prepare a raw click log for training, and look at it.",
)

# readable=False: what cannot be read is told by whoever reads it, in our words
LogArgument = Annotated[
    Path | None,
    typer.Argument(help="The log: .csv .tsv .txt (.gz .bz2 .xz), or .parquet.", readable=False),
]
LabelOption = Annotated[str | None, typer.Option(help="The column that is 1 for a click, else 0.")]
SplitOption = Annotated[
    str | None,
    typer.Option(help="random (8:1:1, the default), order, time, user, or given (see --by)."),
]
ByOption = Annotated[
    str | None, typer.Option(help="The column to split by: a time, a user, or train/valid/test.")
]
SharesOption = Annotated[
    str | None, typer.Option(help="Parts for train, valid and test: 0.8,0.1,0.1 if not given.")
]
SeedOption = Annotated[int | None, typer.Option(help="Draws the rows or users of the split.")]
SeparatorOption = Annotated[
    str | None,
    typer.Option(help="What stands between values of a text file; found out if not given."),
]
EncodingOption = Annotated[
    str | None, typer.Option(help="utf-8 or latin-1; found out if not given.")
]
NamesOption = Annotated[
    str | None, typer.Option(help="Column names, with commas, for a text file without a header.")
]


@data_app.command(epilog=EXAMPLES)
def prepare(  # noqa: PLR0917  # typer calls it by name
    log: LogArgument = None,
    out: Annotated[Path | None, typer.Option(help="The folder to make.")] = None,
    label: LabelOption = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="What the columns are, as `data schema` writes it.", readable=False),
    ] = None,
    split: SplitOption = None,
    by: ByOption = None,
    shares: SharesOption = None,
    seed: SeedOption = None,
    separator: SeparatorOption = None,
    encoding: EncodingOption = None,
    names: NamesOption = None,
    valid: Annotated[
        Path | None, typer.Option(help="A second log, to choose by.", readable=False)
    ] = None,
    test: Annotated[
        Path | None, typer.Option(help="A third log, to report on.", readable=False)
    ] = None,
    source: Annotated[
        str | None, typer.Option(help=f"A well-known set: {', '.join(source_names())}.")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="The folder with the set's files.", readable=False)
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="How a paper prepared the set; the set's first if not given.")
    ] = "",
    bad_rows: Annotated[
        str | None,
        typer.Option(
            help="stop at rows that cannot be read, the default; or set them aside in a file, the "
            "default of the well-known sets."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a folder prepared before.")
    ] = False,
) -> None:
    """Encode a raw log, or one of the well-known sets, into a folder that trains."""
    if out is None:
        raise SettingsError("where to? Give the folder to make: --out data/clicks")
    keep = choose_bad_rows(bad_rows, "stop" if source is None else "aside")
    settings: dict[str, Any] = {"bad_rows": keep, "overwrite": overwrite}
    text = {"--separator": separator, "--encoding": encoding, "--names": names}
    splitting = {"--split": split, "--by": by, "--shares": shares, "--seed": seed}
    if source is not None:
        own: dict[str, Any] = {
            "a log": log,
            "--label": label,
            "--schema": schema,
            "--valid": valid,
            "--test": test,
        }
        _refuse_beside("--source", own | splitting | text)
        _prepare_source(source, from_, out, protocol, settings)
    else:
        _refuse_beside("a log of your own", {"--from": from_, "--protocol": protocol or None})
        if log is None:
            raise SettingsError("which log? Name a file, or a well-known set (--source ml-1m)")
        parts = {"train": log, "valid": valid, "test": test}
        files = {part: file for part, file in parts.items() if file is not None}
        changes: dict[str, Any] = {"kind": "given", "column": ""}
        if len(files) > 1:
            _refuse_beside("--valid and --test", splitting)
        else:
            changes = _split_changes(split, by, shares, seed)
        found = _schema(log, label, schema, changes, _text(log, separator, encoding, names))
        _prepare_log(files, out, found, settings)
    _report(out)


def _prepare_source(
    source: str, folder: Path | None, out: Path, protocol: str, settings: dict[str, Any]
) -> None:
    from rarebit.data.prepare import prepare_source

    if folder is None:
        raise SettingsError("where are the set's files? Give their folder: --from FOLDER")
    with BarProgress() as bars:
        prepare_source(source, folder, out, protocol=protocol, progress=_tell(bars), **settings)


def _prepare_log(
    files: Mapping[str, Path], out: Path, schema: LogSchema, settings: dict[str, Any]
) -> None:
    from rarebit.data.prepare import prepare

    log = files if len(files) > 1 else files["train"]
    with BarProgress() as bars:
        prepare(log, out, schema=schema, progress=_tell(bars), **settings)


@data_app.command(name="schema")
def schema_(  # noqa: PLR0917  # typer calls it by name
    log: Annotated[Path, typer.Argument(help="The log.", readable=False)],
    label: LabelOption = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this TOML file.")] = None,
    split: SplitOption = None,
    by: ByOption = None,
    shares: SharesOption = None,
    seed: SeedOption = None,
    separator: SeparatorOption = None,
    encoding: EncodingOption = None,
    names: NamesOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file of that name.")
    ] = False,
) -> None:
    """Guess what the columns of a log are, show it, and write it to a file to edit."""
    if out is not None and out.exists() and not overwrite:
        raise SettingsError(
            f"{str(out)!r} exists already, and may have been edited; choose another name, or "
            "replace it (--overwrite)"
        )
    text = _text(log, separator, encoding, names)
    found = _schema(log, label, None, _split_changes(split, by, shares, seed), text)
    if out is None:
        console.print("\nTo write it to a file to edit: --out clicks.toml")
        return
    try:
        out.write_text(found.to_toml(), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot write {str(out)!r}: {error.strerror}") from None
    console.print(f"\nEdit {out}, then:", soft_wrap=True, markup=False)
    target = f"data/{log.name.split('.')[0]}"
    _show_command("data", "prepare", str(log), "--schema", str(out), "--out", target)


@data_app.command()
def show(
    folder: Annotated[
        Path, typer.Argument(help="A folder that `data prepare` made.", readable=False)
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of it and compare checksums.")
    ] = False,
) -> None:
    """Show a prepared log: rows, fields, how long their tails are."""
    prepared = PreparedFolder(folder)
    if verify:
        prepared.verify()
    _show(prepared)
    if verify:
        console.print("All files are as they were written.")


def _show(prepared: PreparedFolder) -> None:
    notes = [f"Prepared from {prepared.manifest['origin']}.", *prepared.manifest["notes"]]
    show_dataset(prepared.statistics, title=str(prepared.folder), notes=notes)


def _report(out: Path) -> None:
    """Say what became of every row, and how to go on."""
    prepared = PreparedFolder(out)
    _show(prepared)
    manifest, encoded = prepared.manifest, sum(prepared.rows)
    aside = manifest["rows_read"] - encoded
    console.print(
        f"\n{manifest['rows_read']:,} rows read = {encoded:,} encoded + {aside:,} set aside."
    )
    if aside:
        reasons = ", ".join(f"{count:,} x {why}" for why, count in manifest["bad_rows"].items())
        console.print(f"Set aside in {out / BAD_ROWS}: {reasons}.", soft_wrap=True, markup=False)
    if manifest["values_cut"]:
        console.print(
            f"{manifest['values_cut']:,} values of multi-valued columns were left out, of rows that "
            "have more than max_length."
        )
    console.print(
        f"The schema is in {out / SCHEMA}: edit a copy and prepare again to change it.",
        soft_wrap=True,
        markup=False,
    )
    console.print("To train on it:")
    _show_command("train", "--data", str(out))


def _show_command(*words: str) -> None:
    """Print a command to copy."""
    console.print(f"  {how_to_call()} {shlex.join(words)}", soft_wrap=True, markup=False)


def _text(
    log: Path, separator: str | None, encoding: str | None, names: str | None
) -> TextFormat | None:
    """Return how the options say that the log is written; None where they say nothing."""
    if separator is None and encoding is None and names is None:
        return None
    from rarebit.data.raw.readers import find_format

    changes: dict[str, Any] = {} if separator is None else {"separator": separator}
    changes |= {} if encoding is None else {"encoding": encoding}
    changes |= {} if names is None else {"header": False, "names": tuple(names.split(","))}
    return updated(find_format(log) or TextFormat(), changes)


def _schema(
    log: Path,
    label: str | None,
    file: Path | None,
    changes: Mapping[str, Any],
    text: TextFormat | None,
) -> LogSchema:
    """Return the schema of a file, or a guessed one, with changes to its split, and show it."""
    from rarebit.data.prepare import infer_log

    if file is not None:
        _refuse_beside("--schema", {"--label": label})
        schema = LogSchema.read(file)
        schema = replace(
            schema.with_split(replace(schema.split, **changes)), text=text or schema.text
        )
        show_schema(schema)
    else:
        inferred = infer_log(log, label, split=Split(**changes), format=text)
        schema = inferred.schema
        show_schema(schema, inferred.reasons)
    if schema.text is not None:
        written = schema.text
        quotes = f"quotes {written.quote}" if written.quote else "no quotes"
        console.print(
            f"Text: separator {written.separator!r}, {quotes}, {written.encoding}.", markup=False
        )
    return schema


def _split_changes(
    kind: str | None, by: str | None, shares: str | None, seed: int | None
) -> dict[str, Any]:
    """Return what the options say of the split; the rest stays as the schema has it."""
    changes: dict[str, Any] = {}
    if kind is not None and kind not in SPLITS:
        raise SettingsError(f"unknown split {kind!r}{suggest(kind, SPLITS)}")
    if kind in SPLITS_BY_COLUMN and not by:
        raise SettingsError(
            f"--split {kind} goes by a column; name it: --by {SPLITS_BY_COLUMN[kind]}"
        )
    if by and kind not in SPLITS_BY_COLUMN:
        raise SettingsError(
            f"--by {by} needs a split that goes by a column: --split time, user or given"
        )
    if kind is not None:
        changes |= {"kind": kind, "column": by or ""}
    if shares is not None:
        changes["shares"] = _shares(shares)
    if seed is not None:
        changes["seed"] = seed
    return changes


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError:
        raise SettingsError(f"--shares takes three numbers, as 0.8,0.1,0.1; got {text!r}") from None


def choose_bad_rows(
    chosen: str | None, usual: Literal["stop", "aside"] = "stop"
) -> Literal["stop", "aside"]:
    """Return what to do with bad rows, as an option says it."""
    if chosen not in (None, "stop", "aside"):
        raise SettingsError(f"--bad-rows must be stop or aside, got {chosen!r}")
    return cast(Literal["stop", "aside"], chosen or usual)


def _refuse_beside(what: str, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if value is not None:
            raise SettingsError(f"{name} has no place beside {what}")


def _tell(bars: BarProgress) -> Callable[[str, int, int], None]:
    """Return what shows how far the work is."""

    def tell(stage: str, done: int, total: int) -> None:
        if stage == "reading":  # bytes, for people
            bars.stage("reading, MB", done // 1_000_000, max(total // 1_000_000, 1))
        else:
            bars.stage(f"{stage}, rows", done, total)

    return tell
