"""`rarebit data`: from a raw log to a folder that trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, cast

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

rarebit data schema clicks.csv --label click --out clicks.toml    (edit it, then:)

rarebit data prepare clicks.csv --schema clicks.toml --out data/clicks

rarebit data prepare --source ml-1m --from ml-1m/ --out data/ml-1m
"""

data_app = typer.Typer(
    name="data",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Prepare a raw click log for training, and look at it.",
)

LogArgument = Annotated[
    Path | None, typer.Argument(help="The log: .csv .tsv .txt (.gz .bz2 .xz), or .parquet.")
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
        Path | None, typer.Option(help="What the columns are, as `data schema` writes it.")
    ] = None,
    split: SplitOption = None,
    by: ByOption = None,
    shares: SharesOption = None,
    seed: SeedOption = None,
    valid: Annotated[Path | None, typer.Option(help="A second log, to choose by.")] = None,
    test: Annotated[Path | None, typer.Option(help="A third log, to report on.")] = None,
    source: Annotated[
        str | None, typer.Option(help=f"A well-known set: {', '.join(source_names())}.")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="The folder with the set's files.")
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="How a paper prepared the set; the set's first if not given.")
    ] = "",
    bad_rows: Annotated[
        str | None,
        typer.Option(help="stop at rows that cannot be read, or set them aside in a file."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a folder prepared before.")
    ] = False,
) -> None:
    """Encode a raw log, or one of the well-known sets, into a folder that trains."""
    from rarebit.data import prepare as raw

    if out is None:
        raise SettingsError("where to? Give the folder to make: --out data/clicks")
    if source is not None:
        _refuse_beside("--source", {"a log": log, "--label": label, "--schema": schema})
        if from_ is None:
            raise SettingsError("where are the set's files? Give their folder: --from FOLDER")
        with BarProgress() as bars:
            raw.prepare_source(
                source,
                from_,
                out,
                protocol=protocol,
                bad_rows=choose_bad_rows(bad_rows, "aside"),
                overwrite=overwrite,
                progress=_tell(bars),
            )
    else:
        _refuse_beside("a log of your own", {"--from": from_, "--protocol": protocol or None})
        if log is None:
            raise SettingsError("which log? Name a file, or a well-known set (--source ml-1m)")
        wanted = _split(split, by, shares, seed)
        found = _schema(log, label, schema, wanted)
        files = {"train": log, "valid": valid, "test": test}
        several = {part: file for part, file in files.items() if file is not None}
        if len(several) > 1:
            _refuse_beside("--valid and --test", {"--split": split, "--by": by})
            found = found.with_split(Split(kind="given"))
        with BarProgress() as bars:
            raw.prepare(
                several if len(several) > 1 else log,
                out,
                schema=found,
                bad_rows=choose_bad_rows(bad_rows, "stop"),
                overwrite=overwrite,
                progress=_tell(bars),
            )
    _report(out)


@data_app.command(name="schema")
def schema_(  # noqa: PLR0917  # typer calls it by name
    log: Annotated[Path, typer.Argument(help="The log.")],
    label: LabelOption = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this TOML file.")] = None,
    split: SplitOption = None,
    by: ByOption = None,
    shares: SharesOption = None,
    seed: SeedOption = None,
) -> None:
    """Guess what the columns of a log are, show it, and write it to a file to edit."""
    found = _schema(log, label, None, _split(split, by, shares, seed))
    if out is None:
        return
    try:
        out.write_text(found.to_toml(), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot write {str(out)!r}: {error.strerror}") from None
    console.print(f"\nEdit {out}, then:", soft_wrap=True)
    console.print(
        f"  {how_to_call()} data prepare {log} --schema {out} --out data/{log.name.split('.')[0]}",
        soft_wrap=True,
    )


@data_app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A folder that `data prepare` made.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of it and compare checksums.")
    ] = False,
) -> None:
    """Show a prepared log: rows, fields, how long their tails are."""
    prepared = PreparedFolder(folder)
    if verify:
        prepared.verify()
        console.print("All files are as they were written.")
    _show(prepared)


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
    )
    console.print("To train on it:")
    console.print(f"  {how_to_call()} train --data {out}", soft_wrap=True, markup=False)


def _schema(log: Path, label: str | None, file: Path | None, split: Split | None) -> LogSchema:
    """Return the schema of a file, or a guessed one, and show it."""
    from rarebit.data.prepare import infer_log

    if file is not None:
        _refuse_beside("--schema", {"--label": label})
        schema = LogSchema.read(file)
        schema = schema if split is None else schema.with_split(split)
        show_schema(schema)
    else:
        inferred = infer_log(log, label, split=split)
        schema = inferred.schema
        show_schema(schema, inferred.reasons)
    return schema


def _split(kind: str | None, by: str | None, shares: str | None, seed: int | None) -> Split | None:
    """Return the split that the options say; None where they say nothing."""
    if kind is None and by is None and shares is None and seed is None:
        return None
    usual = Split()
    kinds = ("random", "order", "time", "user", "given")
    if kind is not None and kind not in kinds:
        raise SettingsError(f"unknown split {kind!r}{suggest(kind, kinds)}")
    try:
        parts = usual.shares if shares is None else tuple(float(s) for s in shares.split(","))
    except ValueError:
        raise SettingsError(
            f"--shares takes three numbers, as 0.8,0.1,0.1; got {shares!r}"
        ) from None
    return Split(
        kind=kind or usual.kind,  # type: ignore[arg-type]  # one of the kinds
        shares=parts,
        seed=usual.seed if seed is None else seed,
        column=by or "",
    )


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
        bars.stage(stage, done, total)

    return tell
