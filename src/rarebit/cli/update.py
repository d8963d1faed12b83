"""`rarebit update`: let a trained run learn another day of its log."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.settings import require
from rarebit.settings import size as size_text

if TYPE_CHECKING:
    from rarebit.training.update import Stages, UpdateResult

EXAMPLES = """[bold]Examples[/bold]

rarebit update --model runs/monday --data tuesday.parquet --out runs/tuesday

rarebit update --model runs/monday --data tuesday.csv --min-count 2 --drop-after 90 --like item=category

rarebit update --resume runs/tuesday
"""


def update(  # noqa: PLR0917  # typer calls it by name
    model: Annotated[
        Path | None,
        Option(help="Folder of the run to go on from; it is only read.", readable=False),
    ] = None,
    data: Annotated[
        list[Path] | None,
        Option(
            help="Raw log of the day, CSV, TSV or Parquet, in order of time. May be repeated.",
            readable=False,
        ),
    ] = None,
    out: opt.Out = None,
    min_count: Annotated[
        int | None,
        Option(
            help="Sightings before a new value gets a row. Default: that of its column when the log was prepared."
        ),
    ] = None,
    half_life: Annotated[float, Option(help="Days after which a sighting counts half.")] = 30.0,
    drop_after: Annotated[
        int | None, Option(help="Drop values not seen for so many days. Default: never.")
    ] = None,
    drop_below: Annotated[
        float, Option(help="But keep those whose decayed count is at least this.")
    ] = 1.0,
    start: Annotated[
        str,
        Option(
            help="Rows of new ids start as the row of unknown values, at the prior, or at noise."
        ),
    ] = "unknown",
    like: Annotated[
        list[str] | None,
        Option(
            help="FIELD=GROUP: a new id of FIELD starts at the mean of the known ids that share its GROUP. May be "
            "repeated."
        ),
    ] = None,
    passes: Annotated[int, Option(help="Passes over the day.")] = 1,
    bad_rows: opt.BadRows = None,
    resume: opt.Resume = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Let a trained run learn another day of its log: new values get rows, old ones keep theirs."""
    from rarebit.data import Growth
    from rarebit.training.update import read_update
    from rarebit.training.update import update as learn_day

    if resume is not None:
        others = {"--model": model, "--data": data, "--out": out, "--like": like}
        opt.refuse_with("--resume", others, ": the update has its own")
        asked = read_update(resume)
    else:
        require(
            model is not None, "which run learns another day? Give its folder: --model runs/monday"
        )
        require(bool(data), "which rows are new? Give the log of the day: --data tuesday.parquet")
        asked = {
            "parent": model,
            "log": data,
            "growth": Growth(
                min_count=min_count,
                half_life=half_life,
                drop_after=drop_after,
                drop_below=drop_below,
            ),
            "start": start,
            "like": _pairs(like or []),
            "passes": passes,
            "bad_rows": opt.choose_bad_rows(bad_rows),
        }
    folder = resume or out or opt.new_folder(Path(asked["parent"]).resolve().name)
    again = opt.choose_threads(threads) + ([] if device == "auto" else ["--device", device])
    with opt.resumable("update", "--resume", str(folder), *again), screen.RunBars() as progress:
        result = learn_day(
            out=folder,
            resume=resume is not None,
            device=opt.choose_device(device),
            progress=progress,
            data_progress=progress.data_stage,
            **asked,
        )
    _show(result, Path(asked["parent"]))


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, _, group = text.partition("=")
        require(
            bool(name and group), f"--like must be FIELD=GROUP, such as item=category, got {text!r}"
        )
        pairs[name] = group
    return pairs


def _show(result: "UpdateResult", parent: Path) -> None:
    rows: list[list[str]] = []
    groups: list[tuple[str, int, Stages | None]] = [
        ("all", result.rows, result.all),
        ("with a new id", result.new_rows, result.new),
        ("with known ids only", result.rows - result.new_rows, result.known),
    ]
    for name, num, stages in groups:
        aucs: list[Any] = ["-"] * 3
        if stages is not None:
            found = (stages.before, stages.learning, stages.after)
            aucs = [screen.auc_text(one.auc) for one in found]
        rows.append([name, f"{num:,}", *aucs])
    screen.table(
        ["rows of the day", "", f"AUC of {parent.name}", "while learning", "after"],
        rows,
        title=f"A day of {result.rows:,} rows",
        note="While learning: each row is scored just before it is learned. After: on the rows that were learned.",
    )
    shown = [field for field in result.fields if field.new or field.dropped or field.waiting]
    screen.table(
        ["field", "rows", "new", "reused", "dropped", "waiting", "unknown", "old rows moved"],
        [
            [
                field.name,
                *(
                    f"{n:,}"
                    for n in (field.rows, field.new, field.reset, field.dropped, field.waiting)
                ),
                f"{field.unknown_share:.1%}",
                f"{field.moved:.1%}",
            ]
            for field in shown or result.fields
        ],
        title="Vocabularies" if shown else "Vocabularies: no new values",
    )
    screen.line(
        f"Tables: {size_text(result.table_bytes)}. Learned {result.samples_per_second:,.0f} rows/s."
    )
    screen.line(f"\nSaved in {result.folder}. To learn the next day:")
    screen.command("update", "--model", str(result.folder), "--data", "NEXT.parquet")
