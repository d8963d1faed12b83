"""`rarebit compress`: a trained run in fewer bytes, and what each size costs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.cli.report import write_page
from rarebit.errors import MissingExtraError, ModelFileError
from rarebit.settings import require
from rarebit.settings import size as size_text

if TYPE_CHECKING:
    from rarebit.training.compress import CompressedRun, FrontierPoint, TrainedRun

EXAMPLES = """[bold]Examples[/bold]

rarebit compress runs/clicks --size 1/16 --out runs/small

rarebit compress runs/clicks --loss 0.001 --out runs/small

rarebit compress runs/clicks --frontier --out runs/sizes
"""


def compress(  # noqa: PLR0917  # typer calls it by name
    run: Annotated[Path, Argument(help="Folder of a run, made by rarebit train.", readable=False)],
    size: Annotated[
        str | None,
        Option(help="Bytes of all tables together: 1/16 or 0.05 of the plain ones, or 2MB."),
    ] = None,
    loss: Annotated[
        float | None,
        Option(
            help="Or the validation AUC that may be lost, such as 0.001: the smallest such size."
        ),
    ] = None,
    frontier: Annotated[
        bool,
        Option(
            "--frontier",
            help="Compare sizes from 1/4 to 1/128 with int8, int4, low rank and pruning; alone, or before "
            "--size or --loss.",
        ),
    ] = False,
    out: opt.Out = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Store the tables of a trained run in fewer bytes, each row as precisely as training knows it."""
    from rarebit.training.compress import TrainedRun, check_size, compress_run, refuse_run

    given = [name for name, value in (("--size", size), ("--loss", loss)) if value is not None]
    require(len(given) < 2, "--size and --loss cannot be combined; give one of them")
    require(
        bool(given) or frontier,
        "how small? Give --size 1/16, or --loss 0.001 for the smallest size that loses no more, or look at "
        "--frontier first",
    )
    share = None if size is None else opt.size_or_share(size)
    if given:
        check_size(share, loss)
    folder = out or opt.new_folder(f"{run.resolve().name}-small")
    refuse_run(folder)
    chosen = opt.choose_device(device)
    with screen.RunBars() as progress:
        trained = TrainedRun(run, device=chosen, progress=progress.rows)
        opt.choose_threads(threads)
        progress.say(
            f"{trained.settings.model} from {run}: tables of {size_text(trained.plain.table_bytes)}"
        )
        points = _frontier(trained, progress) if frontier else []
        found = None
        if given:
            found = compress_run(trained, folder, size=share, loss=loss, say=progress.say)
    if points:
        _show_frontier(trained, points, folder)
    if found is not None:
        _show(found, f"{trained.settings.model} from {run}")
    write_page(folder)


def _show(found: "CompressedRun", title: str) -> None:
    before, after = asdict(found.before), asdict(found.after)
    ratio = found.before.table_bytes / found.after.table_bytes
    sizes = [size_text(figures["table_bytes"]) for figures in (before, after)]
    rows = [["bytes of tables", *sizes, f"1/{ratio:.1f}"]]
    for name, key in (
        ("AUC, validation", "valid_auc"),
        ("AUC, test", "test_auc"),
        ("AUC, rarest fifth of test", "rarest_auc"),
    ):
        rows.append([name, *_aucs(before[key], after[key])])
    screen.table(["", "before", "after", "difference"], rows, title=title)
    if found.one_row:
        names = ", ".join(name.removeprefix("backbone.tables.") for name in found.one_row)
        screen.line(f"Tables left with one row for all ids: {names}.")
    screen.line(f"\nSaved in {found.folder}. To score data with it:")
    screen.command("predict", "--model", str(found.folder))


def _aucs(before: float | None, after: float | None) -> list[str]:
    if before is None or after is None:
        return ["-", "-", "-"]
    return [f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"]


def _frontier(trained: "TrainedRun", progress: screen.RunBars) -> "list[FrontierPoint]":
    from rarebit.training.compress import frontier

    points = []
    for point in frontier(trained):
        share = "" if point.size is None else f" at 1/{point.size}"
        auc = _aucs(trained.plain.valid_auc, point.valid_auc)[-1]
        progress.say(
            f"{point.compressor}{share}: {size_text(point.table_bytes)}, validation AUC {auc}"
        )
        points.append(point)
    return points


def _show_frontier(trained: "TrainedRun", points: "list[FrontierPoint]", folder: Path) -> None:
    """Print the sizes and what they cost, and write them as JSON and as plots."""
    from rarebit.diagnosis.plots import FrontierPanel, draw_frontier
    from rarebit.machine import machine
    from rarebit.storage.files import write_files, write_json
    from rarebit.training.compress import OURS
    from rarebit.training.run import make_folder

    plain = trained.plain
    rows = []
    for point in sorted(
        points, key=lambda point: point.size or plain.table_bytes / point.table_bytes
    ):
        both = [
            _aucs(plain.valid_auc, point.valid_auc)[-1],
            _aucs(plain.test_auc, point.test_auc)[-1],
            _aucs(plain.rarest_auc, point.rarest_auc)[-1],
        ]
        ratio = f"1/{plain.table_bytes / point.table_bytes:.1f}"
        rows.append([point.compressor, size_text(point.table_bytes), ratio, *both])
    screen.table(
        ["compressor", "tables", "of plain", "validation AUC", "test AUC", "rarest fifth"],
        rows,
        title=f"Change of AUC by size: {trained.settings.model} from {trained.folder}",
        note=f"Plain tables: {size_text(plain.table_bytes)}, test AUC {screen.auc_text(plain.test_auc)}.",
    )
    report = {
        "run": trained.folder.name,
        "plain": asdict(plain),
        "points": [asdict(point) for point in points],
        "machine": machine(),
    }
    made = [write_json(make_folder(folder) / "frontier.json", report, error=ModelFileError)]
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        if point.test_auc is not None:
            lines.setdefault(point.compressor, []).append((point.table_bytes, point.test_auc))
    if plain.test_auc is not None:
        panel = FrontierPanel(
            f"{trained.settings.model}, {trained.folder.name}",
            plain=(plain.table_bytes, plain.test_auc),
            lines=lines,
        )
        try:
            images = draw_frontier([panel], ours=(OURS,))
            made += write_files(folder, images, error=ModelFileError)
        except MissingExtraError as missing:
            screen.line(f"no plots: {missing}", to=screen.errors)
    screen.line(f"Written to {folder}: {', '.join(path.name for path in made)}")
