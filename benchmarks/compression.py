"""Trained tables in fewer bytes: what each compressor loses, by log, size and seed.

    python benchmarks/compression.py --data data/book-crossing data/frappe --seeds 5 --out studies/compression --plot
    python benchmarks/compression.py --show studies/compression/compression.json

For each log and seed, DCN-V2 is trained with plain tables and with `Tail`; then its tables are coded at every size by
every compressor that needs no training (`rarebit.training.compress.COMPRESSORS`), at the same bytes. With --trained,
methods that train smaller tables are trained as plain tables are, at the sizes of --trained-sizes.

Each figure is the difference to plain 32-bit tables of the same log and seed, with Student's 95 % interval over the seeds.
Bytes are those of all tables in the file of the model.

A finished run is a folder in OUT/runs and a coded one is in OUT/compression.json: neither is made again, so the same
command resumes.
"""

import argparse
import dataclasses
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import rarebit as rb
from rarebit.diagnosis.plots import FrontierPanel, draw_frontier
from rarebit.errors import RarebitError
from rarebit.machine import machine
from rarebit.settings import require, size
from rarebit.storage.files import read_json, write_files, write_json
from rarebit.study.statistics import paired_interval
from rarebit.tables.apply import table_bytes
from rarebit.technique import Expression, Technique, parse_techniques
from rarebit.text import TextTable
from rarebit.training.compress import COMPRESSORS, OURS, FrontierPoint, TrainedRun, frontier
from rarebit.training.run import RUN_FILE, read_run, with_checksum
from rarebit.training.settings import load_splits

SIZES = (8, 16, 32, 64, 128)
TABLES: dict[str, tuple[Technique, ...]] = {"plain": (), "tail": (rb.Tail(),)}
"""What is trained and then coded, and its methods."""
WHOLE, REFERENCE = "32 bits", "plain, 32 bits"
FIGURES = ("valid_auc", "test_auc", "rarest_auc")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and code what is missing, print a table per log, and draw it."""
    options = parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    out: Path = options.show or options.out / "compression.json"
    report = read_json(out) if out.exists() else {"cells": []}
    if options.show is None:
        make(options, out, report)
        report["differences"] = differences(report["cells"])
        write_json(out, report, error=RarebitError)
    logs = dict.fromkeys(cell["log"] for cell in report["cells"])
    for log in logs:
        print(f"{table(log, report['cells'])}\n")
    if options.plot:
        panels = [panel(log, report["cells"]) for log in logs]
        images = draw_frontier(panels, ours=[f"{name}, {OURS}" for name in TABLES])
        files = write_files(out.parent, images, error=RarebitError)
        print(f"Drawn: {', '.join(map(str, files))}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--data", nargs="+", type=Path, default=[], help="logs as rarebit data prepare leaves them")
    add("--seeds", type=int, default=5)
    add("--first-seed", type=int, default=0)
    add("--sizes", type=numbers, default=SIZES, help="8,16: an eighth and a sixteenth of the bytes")
    add("--trained", default="", help="methods that train smaller tables: hashing,low-rank")
    add("--trained-sizes", type=numbers, default=(8, 32), help="their sizes")
    add("--model", default="dcn_v2@me")
    add("--dim", type=int, default=16)
    add("--epochs", type=int, default=60)
    add("--threads", type=int, help="CPU threads; default: those of torch")
    add("--out", type=Path, default=Path("studies/compression"), help="runs and results")
    add("--plot", action="store_true", help="draw bytes against AUC as PNG and SVG")
    add("--show", type=Path, metavar="FILE", help="print a stored result and run nothing")
    options = parser.parse_args(arguments)
    if options.show is None and not options.data:
        parser.error("give logs with --data, or a stored result with --show")
    return options


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers that are separated by commas."""
    return tuple(int(part) for part in text.split(","))


def make(options: argparse.Namespace, out: Path, report: dict[str, Any]) -> None:
    """Add the cells that are missing to the report, and write it after each of them."""
    trained = parse_techniques(options.trained) if options.trained else ()
    cells: list[dict[str, Any]] = report["cells"]
    for data in options.data:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            base = settings_of(options, data, seed)
            for name, methods in TABLES.items():
                key = {"log": data.name, "tables": name, "seed": seed}
                folder = options.out / "runs" / f"{data.name}-{name}-{seed}"
                run = train(dataclasses.replace(base, methods=methods), folder)
                cell = next((one for one in cells if key.items() <= one.items()), key)
                missing = [n for n in options.sizes if n not in cell.get("sizes", ())]
                if missing:
                    say(f"{folder.name}: coded at {', '.join(f'1/{n}' for n in missing)}")
                    fill(cell, run, missing)
                    store(out, report, cell)
            for expression in trained:
                for part in options.trained_sizes:
                    key = {"log": data.name, "tables": expression.text, "seed": seed}
                    key["sizes"] = [part]
                    if not any(key.items() <= one.items() for one in cells):
                        made = train_small(base, expression, part, folder)
                        store(out, report, key | {"points": made})


def settings_of(options: argparse.Namespace, data: Path, seed: int) -> rb.RunSettings:
    """Return the run with plain tables."""
    model = {"name": options.model, "dim": options.dim, "init": "normal"}
    training = {"epochs": options.epochs, "patience": 6, "batch_size": 1024, "weight_decay": 1e-5}
    return with_checksum(
        rb.RunSettings.from_mapping(
            {
                "model": model,
                "data": {"folder": str(data)},
                "training": training | {"seed": seed},
            }
        )
    )


def train(settings: rb.RunSettings, folder: Path) -> Path:
    """Train a run unless it is finished, from its last checkpoint if there is one; return its folder."""
    there = (folder / RUN_FILE).exists()
    if there:
        require(
            comparable(read_run(folder)) == comparable(settings),
            f"{str(folder)!r} holds a run with other settings; choose another --out",
        )
    if not there or "test" not in read_json(folder / RUN_FILE):
        say(f"{folder.name}: training")
        rb.run(settings, folder=folder, resume=there, progress=False, say=say)
    return folder


def comparable(settings: rb.RunSettings) -> dict[str, Any]:
    """Return what must be equal: all but where the log is stored."""
    return settings.to_mapping() | {"data": getattr(settings.data, "checksum", None)}


def fill(cell: dict[str, Any], folder: Path, sizes: Sequence[int]) -> None:
    """Measure a run and its coded tables."""
    run = TrainedRun(folder)
    first = "points" not in cell
    if first:
        whole = FrontierPoint(compressor=WHOLE, size=None, **dataclasses.asdict(run.plain))
        cell |= {"sizes": [], "points": [rounded(whole)]}
    chosen = [one for one in COMPRESSORS if first or one.sizing != "none"]
    cell["points"] += map(rounded, frontier(run, sizes=sizes, compressors=chosen))
    cell["sizes"] += sizes


def train_small(
    base: rb.RunSettings, expression: Expression, part: int, beside: Path
) -> list[dict[str, Any]]:
    """Train smaller tables and return their figures; none where the method cannot be so small."""
    splits, model = load_splits(base.data), rb.load_model(beside)
    shapes = [(info.rows, info.width) for info in rb.find_tables(model) if info.width > 1]
    try:
        methods = expression.build(shapes, 1 / part)
    except rb.errors.SettingsError as error:
        say(f"{expression.text} at 1/{part}: {error}")
        return []
    name = "".join(c if c.isalnum() or c in "-_=." else "-" for c in expression.text)
    folder = beside.with_name(f"{Path(base.data.folder).name}-{name}-{part}-{base.training.seed}")
    model = rb.load_model(train(dataclasses.replace(base, methods=methods), folder))
    test = rb.evaluate(model, splits.test, counts=splits.train.counts())
    point = FrontierPoint(
        compressor="trained",
        size=part,
        table_bytes=table_bytes(model),
        valid_auc=rb.evaluate(model, splits.valid).auc,
        test_auc=test.auc,
        rarest_auc=test.rarest.auc if test.rarest else None,
    )
    return [rounded(point)]


def rounded(point: FrontierPoint) -> dict[str, Any]:
    """Return a point as a file holds it."""
    values = dataclasses.asdict(point)
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}


def store(out: Path, report: dict[str, Any], cell: dict[str, Any]) -> None:
    """Write the report with a cell that is new, or has new points."""
    facts = machine()
    cell["commit"] = facts["commit"]
    if not any(cell is one for one in report["cells"]):
        report["cells"].append(cell)
    out.parent.mkdir(parents=True, exist_ok=True)
    report["machine"] = facts
    write_json(out, report, error=RarebitError)


def points(log: str, cells: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield all points of a log: the name of the line, the seed and the figures."""
    for cell in cells:
        if cell["log"] == log:
            for point in cell["points"]:
                yield f"{cell['tables']}, {point['compressor']}", cell["seed"], point


def references(log: str, cells: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the figures of plain 32-bit tables by seed."""
    return {seed: point for name, seed, point in points(log, cells) if name == REFERENCE}


def table(log: str, cells: Sequence[dict[str, Any]]) -> TextTable:
    """Return the mean differences to plain 32-bit tables of the same seeds, by size."""
    plain = references(log, cells)
    lines: dict[tuple[int, str], list[tuple[int, dict[str, Any]]]] = {}
    for name, seed, point in points(log, cells):
        if seed in plain and name != REFERENCE:
            ratio = plain[seed]["table_bytes"] / point["table_bytes"]
            lines.setdefault((point["size"] or round(ratio), name), []).append((seed, point))
    rows = []
    for (part, name), found in sorted(lines.items(), key=lambda line: line[0][0]):
        bytes_ = statistics.fmean(point["table_bytes"] for _, point in found)
        differences = [
            difference([point[figure] - plain[seed][figure] for seed, point in found])
            for figure in FIGURES
        ]
        rows.append(
            [name, f"1/{part}" if part > 1 else "1", size(bytes_), *differences, str(len(found))]
        )
    aucs = [point["test_auc"] for point in plain.values()]
    header = ("tables", "size", "bytes", "validation AUC", "test AUC", "rarest fifth", "n")
    note = (
        f"Difference to plain 32-bit tables (test AUC {statistics.fmean(aucs):.4f}): mean over paired seeds and its "
        "95 % interval."
    )
    return TextTable(log, header, rows, note)


def differences(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the differences to plain 32-bit tables, one per seed: by log, tables and compressor, size, and figure."""
    found: dict[str, Any] = {}
    for log in dict.fromkeys(cell["log"] for cell in cells):
        plain = references(log, cells)
        for name, seed, point in points(log, cells):
            if seed in plain and name != REFERENCE:
                word = "-".join(re.findall(r"\w+", name))  # pages name it in one word
                sizes = found.setdefault(log, {}).setdefault(word, {})
                figures = sizes.setdefault(str(point["size"] or 1), {})
                for figure in FIGURES:
                    gap = round(point[figure] - plain[seed][figure], 6)
                    figures.setdefault(figure, []).append(gap)
    return found


def difference(values: Sequence[float]) -> str:
    """Return a mean difference with its interval."""
    mean = f"{statistics.fmean(values):+.4f}"
    if len(values) < 2:
        return mean
    low, high = paired_interval(values)
    return f"{mean} ({low:+.4f} to {high:+.4f})"


def panel(log: str, cells: Sequence[dict[str, Any]]) -> FrontierPanel:
    """Return mean bytes and test AUC over seeds: of coded plain tables, of ours with `Tail`, and of trained smaller tables."""
    plain = references(log, cells)
    lines: dict[str, dict[int | None, list[dict[str, Any]]]] = {}
    for name, seed, point in points(log, cells):
        if seed in plain and point["compressor"] != WHOLE and is_drawn(name):
            lines.setdefault(name, {}).setdefault(point["size"], []).append(point)

    def mean(found: Sequence[dict[str, Any]]) -> tuple[float, float]:
        return (
            statistics.fmean(point["table_bytes"] for point in found),
            statistics.fmean(point["test_auc"] for point in found),
        )

    drawn = {name: [mean(found) for found in by_size.values()] for name, by_size in lines.items()}
    seeds = f"{len(plain)} seed{'s' if len(plain) > 1 else ''}"
    return FrontierPanel(f"{log}, {seeds}", plain=mean(list(plain.values())), lines=drawn)


def is_drawn(name: str) -> bool:
    """Return whether a line is worth its place in a plot: of `Tail` only ours."""
    return not name.startswith("tail,") or name == f"tail, {OURS}"


def say(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
