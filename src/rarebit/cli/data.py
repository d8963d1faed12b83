"""`rarebit data`: from a raw log to a folder that trains."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from rarebit.cli.show import BarProgress, console, how_to_call
from rarebit.cli.show_data import show_dataset, show_schema
from rarebit.data.folder import BAD_ROWS, SCHEMA, PreparedFolder
from rarebit.data.log_schema import LogSchema, Split
from rarebit.data.sources import source_names
from rarebit.errors import SettingsError
from rarebit.settings import suggest

__all__ = ["choose_bad_rows", "data_app"]

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
    from rarebit.data import prepare as raw

    if out is None:
        raise SettingsError("where to? Give the folder to make: --out data/clicks")
    keep = choose_bad_rows(bad_rows, "stop" if source is None else "aside")
    if source is not None:
        _refuse_beside(
            "--source",
            {"a log": log, "--label": label, "--schema": schema, "--valid": valid, "--test": test}
            | {"--split": split, "--by": by, "--shares": shares, "--seed": seed},
        )
        if from_ is None:
            raise SettingsError("where are the set's files? Give their folder: --from FOLDER")
        with BarProgress() as bars:
            raw.prepare_source(
                source,
                from_,
                out,
                protocol=protocol,
                bad_rows=keep,
                overwrite=overwrite,
                progress=_tell(bars),
            )
    else:
        _refuse_beside("a log of your own", {"--from": from_, "--protocol": protocol or None})
        if log is None:
            raise SettingsError("which log? Name a file, or a well-known set (--source ml-1m)")
        files = {"train": log, "valid": valid, "test": test}
        several = {part: file for part, file in files.items() if file is not None}
        if len(several) > 1:
            _refuse_beside(
                "--valid and --test",
                {"--split": split, "--by": by, "--shares": shares, "--seed": seed},
            )
            changes = {"kind": "given", "column": ""}
        else:
            changes = _split_changes(split, by, shares, seed)
        found = _schema(log, label, schema, changes)
        with BarProgress() as bars:
            raw.prepare(
                several if len(several) > 1 else log,
                out,
                schema=found,
                bad_rows=keep,
                overwrite=overwrite,
                progress=_tell(bars),
            )
    _report(out)


@data_app.command(name="schema")
def schema_(  # noqa: PLR0917  # typer calls it by name
    log: Annotated[Path, typer.Argument(help="The log.", readable=False)],
    label: LabelOption = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this TOML file.")] = None,
    split: SplitOption = None,
    by: ByOption = None,
    shares: SharesOption = None,
    seed: SeedOption = None,
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
    found = _schema(log, label, None, _split_changes(split, by, shares, seed))
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


def _schema(
    log: Path, label: str | None, file: Path | None, changes: Mapping[str, Any]
) -> LogSchema:
    """Return the schema of a file, or a guessed one, with changes to its split, and show it."""
    from rarebit.data.prepare import infer_log

    if file is not None:
        _refuse_beside("--schema", {"--label": label})
        schema = LogSchema.read(file)
        schema = schema.with_split(replace(schema.split, **changes))
        show_schema(schema)
    else:
        inferred = infer_log(log, label, split=Split(**changes))
        schema = inferred.schema
        show_schema(schema, inferred.reasons)
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


def _refuse_beside(what: str, others: dict[str, object]) -> None:
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
