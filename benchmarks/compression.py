"""Trained tables in fewer bytes: what each compressor loses, by log, size and seed.

    python benchmarks/compression.py --data data/ml-1m data/frappe --trained plan --workers 16 --out studies/compression
    python benchmarks/compression.py --show studies/compression/compression.json

For each log and seed, DCN-V2 is trained with plain tables and with `Tail`; then its tables are coded at every size by
every compressor that needs no training (`rarebit.training.compress.COMPRESSORS`), at the same bytes. With --trained,
methods that train smaller tables are trained as plain tables are: same epochs, patience, batches, rates and seeds.

Each figure is the difference to plain 32-bit tables of the same log and seed, with Student's 95 % interval over the seeds.
Bytes are those of all tables in the file of the model.

**The plan** (--trained plan) has 50 runs to code, of five logs and five seeds, and `TRAINED`: published compressors at two sizes, three seeds
and all logs, 330 runs. Three seeds and two sizes, as what they lose is many times the spread over seeds, and the budget is 400
runs. Sizes are 1/16 and 1/64, where evidence coding begins to lose. Tables of 32-bit numbers do not need so many bits, so each of
them is also rounded to 8 bits after training, which loses next to nothing ("trained, 8 bits"). So those are trained at 1/4 and 1/16, for 1/16
and 1/64 in 8 bits: at the same bytes this is the stronger compressor. What has codes already is trained at 1/16 and 1/64. Three have one
size: 1/16 DHE and PEP, as their training takes many times longer, and 1/4 mixed dimensions and DartsEmb, as no row is below one number, or an
eighth of the width. "narrow" is the model with narrower tables and nothing else. PEP searches for 10 epochs, MPE and DartsEmb for one, and all three
then train again as all others do. None was tuned.

A task is a log, a seed and one of these tables. Tasks run in --workers processes, the first seeds first, and share the device. A finished
task is in OUT/compression.json, a run in --runs, with checkpoints: neither is made again, so the same command resumes after
--minutes, Ctrl-C or a kill.
"""

import argparse
import dataclasses
import math
import re
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import rarebit as rb
from rarebit.diagnosis.plots import FrontierPanel, draw_frontier
from rarebit.errors import RarebitError, SettingsError
from rarebit.machine import allowed_cores, choose_device, machine
from rarebit.methods.quantize import best_scale, round_to_codes
from rarebit.settings import require, size
from rarebit.storage.files import make_folder, read_json, write_files, write_json
from rarebit.study.pool import Pool
from rarebit.study.statistics import paired_interval
from rarebit.study.worker import Worker
from rarebit.study.worker import main as work
from rarebit.tables.apply import table_bytes, table_parameters
from rarebit.technique import Technique, parse_techniques
from rarebit.text import TextTable
from rarebit.training.compress import (
    COMPRESSORS,
    MARGIN,
    OURS,
    FrontierPoint,
    TrainedRun,
    frontier,
)
from rarebit.training.run import RUN_FILE, read_run, start_model, with_checksum
from rarebit.training.settings import load_splits

SIZES = (8, 16, 32, 64, 128)
TABLES: dict[str, tuple[Technique, ...]] = {"plain": (), "tail": (rb.Tail(),)}
"""What is trained and then coded, and its methods."""
NARROW = "narrow"
"""Plain tables of fewer columns."""
NUMBERS, CODES, ONE = (4, 16), (16, 64), (16,)
TRAINED: dict[str, tuple[int, ...]] = {
    NARROW: NUMBERS,
    **dict.fromkeys(("hashing", "qr", "robe", "cafe", "tt-rec"), NUMBERS),
    **dict.fromkeys(("mgqe", "dpq", "mpe"), CODES),
    **dict.fromkeys(("mixed-dimensions", "darts-emb"), (4,)),
    **dict.fromkeys(("dhe", "pruned:epochs=10"), ONE),
}
"""Of the plan: what trains smaller tables, and its sizes."""
TRAINED_SEEDS = 3
WHOLE, REFERENCE = "32 bits", "plain, 32 bits"
SMALL, EIGHT_BITS = "trained", "trained, 8 bits"
FIGURES = ("valid_auc", "test_auc", "rarest_auc")
WORKER = "--worker"
"""Of the processes that this program starts: the word before device and threads."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and code what is missing, print a table per log, and draw it."""
    options = parse(arguments)
    out: Path = options.show or options.out / "compression.json"
    report = read_json(out) if out.exists() else {"cells": []}
    failures: list[str] = []
    if options.show is None:
        failures = make(options, out, report)
        report["cells"].sort(key=lambda cell: (cell["log"], cell["tables"], cell["seed"]))
        report["differences"] = differences(report["cells"])
        write_json(out, report, error=RarebitError)
    logs = [
        log
        for log in dict.fromkeys(cell["log"] for cell in report["cells"])
        if references(log, report["cells"])
    ]
    for log in logs:
        print(f"{table(log, report['cells'])}\n")
    if options.plot:
        panels = [panel(log, report["cells"]) for log in logs]
        images = draw_frontier(panels, ours=[f"{name}, {OURS}" for name in TABLES])
        files = write_files(out.parent, images, error=RarebitError)
        print(f"Drawn: {', '.join(map(str, files))}")
    if failures:
        sys.exit("\n".join(failures))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--data", nargs="+", type=Path, default=[], help="logs as rarebit data prepare leaves them")
    add("--seeds", type=int, default=5)
    add("--first-seed", type=int, default=0)
    add("--sizes", type=numbers, default=SIZES, help="8,16: an eighth and a sixteenth of the bytes")
    add("--trained", default="", help='methods that train smaller tables: hashing,qr; or "plan"')
    add("--trained-sizes", type=numbers, default=NUMBERS, help="their sizes, those of a plan aside")
    add("--trained-seeds", type=int, default=TRAINED_SEEDS, help="at most as many as --seeds")
    add("--model", default="dcn_v2@me")
    add("--dim", type=int, default=16)
    add("--epochs", type=int, default=60)
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--workers", type=int, default=1, help="processes that share the device")
    add("--threads", type=int, help="CPU threads of each; default: all cores, shared")
    add("--minutes", type=float, help="stop then; the same command resumes")
    add("--out", type=Path, default=Path("studies/compression"), help="results")
    add("--runs", type=Path, help="folder of the runs; default: OUT/runs")
    add("--commit", help="what this copy is of, where git does not know")
    add("--plot", action="store_true", help="draw bytes against AUC as PNG and SVG")
    add("--show", type=Path, metavar="FILE", help="print a stored result and run nothing")
    options = parser.parse_args(arguments)
    if options.show is None and not options.data:
        parser.error("give logs with --data, or a stored result with --show")
    return options


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers that are separated by commas."""
    return tuple(int(part) for part in text.split(","))


def make(options: argparse.Namespace, out: Path, report: dict[str, Any]) -> list[str]:
    """Add the cells that are missing to the report, and write it after each of them; return what failed."""
    deadline = options.minutes and time.monotonic() + 60 * options.minutes
    device = choose_device(options.device)
    threads = options.threads or max(allowed_cores() // options.workers, 1)
    facts = machine() | {"threads": threads, "workers": options.workers}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
    facts["commit"] = options.commit or facts["commit"]
    cells: list[dict[str, Any]] = report["cells"]
    tasks = {}
    for key, task in planned(options):
        cell = cell_of(cells, key)
        missing = [part for part in task["sizes"] if part not in cell.get("sizes", ())]
        if missing:
            name = f"{key['log']}, {key['tables']}, seed {key['seed']}"
            name += f", 1/{task['sizes'][0]}" if "expression" in task else ""
            tasks[name] = (key, {**task, "sizes": missing, "measured": "points" in cell})
    settings = comparable(settings_of(options, options.data[0], 0))
    same = {part: settings[part] for part in ("model", "training")}
    require(
        report.setdefault("settings", same) == same,
        f"{str(out)!r} holds runs with other settings; choose another --out",
    )
    make_folder(out.parent)
    failures, left = [], len(tasks)

    def hear(name: str, answer: Mapping[str, Any]) -> None:
        nonlocal left
        key, task = tasks[name]
        if "points" in answer:
            cell = cell_of(cells, key)
            cell["points"] = [*cell.get("points", ()), *answer["points"]]
            cell["sizes"] = [*cell.get("sizes", ()), *task["sizes"]]
            cell["commit"] = facts["commit"]
            if not any(cell is one for one in cells):
                cells.append(cell)
            report["machine"] = facts
            write_json(out, report, error=RarebitError)
            left -= 1
            say(f"{name}: {answer['seconds']:.0f} s; {left} left")
        for why in ("failed", "diverged", "died"):
            if why in answer:
                failures.append(f"{name} {why}: {answer[why]}")
                say(failures[-1])

    program = (str(Path(__file__).resolve()), WORKER)
    with Pool(options.workers, str(device), threads, program) as pool:
        pool.run({name: task for name, (_, task) in tasks.items()}, hear, deadline)
    if left:
        say(f"{left} of {len(tasks)} tasks are left; the same command resumes")
    return failures


def planned(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the key of each cell and the task that makes it, in order."""
    runs = str((options.runs or options.out / "runs").absolute())
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for seed in seeds:
        for data in options.data:
            for name in TABLES:
                settings = settings_of(options, data, seed).to_mapping()
                task = {"settings": settings, "runs": runs, "tables": name, "sizes": options.sizes}
                yield {"log": data.name, "tables": name, "seed": seed}, task
    small = trained_tables(options)
    for seed in seeds[: options.trained_seeds]:
        for text, part in small:
            for data in options.data:
                settings = settings_of(options, data, seed).to_mapping()
                key = {"log": data.name, "tables": text, "seed": seed, "sizes": [part]}
                yield key, {"settings": settings, "runs": runs, "expression": text, "sizes": [part]}


def trained_tables(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return what trains smaller tables, and at which size."""
    if options.trained == "plan":
        return [(text, part) for text, sizes in TRAINED.items() for part in sizes]
    texts = [text.strip() for text in options.trained.split(",")] if options.trained else []
    parsed = [text if text == NARROW else parse_techniques(text)[0].text for text in texts]
    return [(text, part) for text in parsed for part in options.trained_sizes]


def cell_of(cells: Sequence[dict[str, Any]], key: dict[str, Any]) -> dict[str, Any]:
    """Return the cell with this key, or a new one."""
    identity = {name: key[name] for name in key if name != "sizes"}
    for cell in cells:
        if identity.items() <= cell.items() and key.get("sizes", cell["sizes"]) == cell["sizes"]:
            return cell
    return dict(identity)


def settings_of(options: argparse.Namespace, data: Path, seed: int) -> rb.RunSettings:
    """Return the run with plain tables."""
    model = {"name": options.model, "dim": options.dim, "init": "normal"}
    training = {"epochs": options.epochs, "patience": 6, "batch_size": 1024, "weight_decay": 1e-5}
    return with_checksum(
        rb.RunSettings.from_mapping(
            {
                "model": model,
                "data": {"folder": str(data.absolute())},
                "training": training | {"seed": seed},
            }
        )
    )


class CompressionWorker(Worker):
    """Makes the cells of this benchmark."""

    def make(self, task: Mapping[str, Any]) -> None:
        """Train, code and measure."""
        begin = time.monotonic()
        warnings.simplefilter("ignore")  # of tables with little left
        base, runs = rb.RunSettings.from_mapping(task["settings"]), Path(task["runs"])
        if "expression" in task:
            [part] = task["sizes"]
            found = trained_points(base, task["expression"], part, runs, device=self.device)
        else:
            found = coded_points(base, task, runs, device=self.device)
        made = list(map(rounded, found))
        self.tell({"points": made, "seconds": time.monotonic() - begin})


def train(settings: rb.RunSettings, folder: Path, device: torch.device) -> Path:
    """Train a run unless it is finished, from its last checkpoint if there is one; return its folder."""
    there = (folder / RUN_FILE).exists()
    if there:
        require(
            comparable(read_run(folder)) == comparable(settings),
            f"{str(folder)!r} holds a run with other settings; choose another --out",
        )
    if not there or "test" not in read_json(folder / RUN_FILE):
        rb.run(
            settings, folder=folder, resume=there, device=device, progress=False, say=lambda _: None
        )
    return folder


def comparable(settings: rb.RunSettings) -> dict[str, Any]:
    """Return what must be equal: all but where the log is stored."""
    return settings.to_mapping() | {"data": getattr(settings.data, "checksum", None)}


def coded_points(
    base: rb.RunSettings, task: Mapping[str, Any], runs: Path, *, device: torch.device
) -> Iterator[FrontierPoint]:
    """Train a run; yield its figures and those of its coded tables at some sizes."""
    name, log = task["tables"], Path(base.data.folder).name
    settings = dataclasses.replace(base, methods=TABLES[name])
    folder = train(settings, runs / f"{log}-{name}-{base.training.seed}", device)
    run = TrainedRun(folder, device=device)
    if not task["measured"]:
        yield FrontierPoint(compressor=WHOLE, size=None, **dataclasses.asdict(run.plain))
    chosen = [one for one in COMPRESSORS if not (task["measured"] and one.sizing == "none")]
    yield from frontier(run, sizes=task["sizes"], compressors=chosen)


def trained_points(
    base: rb.RunSettings, text: str, part: int, runs: Path, *, device: torch.device
) -> Iterator[FrontierPoint]:
    """Train smaller tables; yield their figures, as they are and in 8 bits; nothing where they cannot be so small."""
    splits = load_splits(base.data)
    shapes = [
        (info.rows, info.width)
        for info in rb.find_tables(start_model(base, splits.train.schema, say=lambda _: None))
    ]
    plain = 4 * sum(rows * width for rows, width in shapes)
    settings = smaller(base, text, part, shapes)
    if settings is None:
        return
    name = "".join(c if c.isalnum() or c in "-_=." else "-" for c in text)
    folder = runs / f"{Path(base.data.folder).name}-{name}-{part}-{base.training.seed}"
    model = rb.load_model(train(settings, folder, device), device=device)
    counts = splits.train.counts()

    def point(compressor: str, part: int, bytes_: int) -> FrontierPoint:
        test = rb.evaluate(model, splits.test, counts=counts)
        return FrontierPoint(
            compressor=compressor,
            size=part,
            table_bytes=bytes_,
            valid_auc=rb.evaluate(model, splits.valid).auc,
            test_auc=test.auc,
            rarest_auc=test.rarest.auc if test.rarest else None,
        )

    whole = table_bytes(model)
    yield point(SMALL, part, whole)
    small = round_to_eight_bits_(model)
    if small < 0.9 * whole:  # else it has codes already
        yield point(EIGHT_BITS, 2 ** round(math.log2(plain / small)), small)


def smaller(
    base: rb.RunSettings, text: str, part: int, shapes: Sequence[tuple[int, int]]
) -> rb.RunSettings | None:
    """Return the run with smaller tables, which take at most 5 % more than their part of the bytes; None if it takes more."""
    if text == NARROW:
        width = int(MARGIN * base.model_settings["dim"] / part)
        return width and dataclasses.replace(
            base, model_settings=base.model_settings | {"dim": width}
        )
    [expression] = parse_techniques(text)
    wide = [shape for shape in shapes if shape[1] > 1]
    for share in (1 / part, MARGIN / part):
        try:
            return dataclasses.replace(base, methods=expression.build(wide, share))
        except SettingsError as error:
            say(f"{text} at 1/{part} of {Path(base.data.folder).name}: {error}")
    return None


@torch.no_grad()
def round_to_eight_bits_(model: torch.nn.Module) -> int:
    """Round the weights of all tables to 8 bits with a scale per tensor; return the bytes that the tables then take."""
    bytes_ = table_bytes(model)
    for weight in filter(torch.numel, table_parameters(model).values()):
        scale = best_scale(weight, 8)
        weight.copy_(round_to_codes(weight, scale, 8).to(weight.dtype) * scale)
        bytes_ -= weight.nbytes - weight.numel() - scale.nbytes
    return bytes_


def rounded(point: FrontierPoint) -> dict[str, Any]:
    """Return a point as a file holds it."""
    values = dataclasses.asdict(point)
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}


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
    if sys.argv[1:2] == [WORKER]:
        work(*sys.argv[2:], kind=CompressionWorker)
    else:
        main()
