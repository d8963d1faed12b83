"""Harmless transfer in a tied language model on WikiText-2: perplexity of all, of frequent and of rare words.

    python recipes/text/language_model.py --from wikitext-2 --paper --device cuda --minutes 10

Each arm of `_arms.py` is trained with the same seeds: the same first weights, the same dropout. Validation
picks the epoch, and the weight of the transfer loss where several are tried (`--scales`); test reports.
The model and its dropouts are AWD-LSTM's; so is the schedule with `--paper`, else it is a short one: see
`_training.py`. An arm whose best epoch is the last one in most of its runs is cut off, and compared with none.

A run that was stopped goes on with the same command. What is there is in OUT/wikitext.json.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from _arms import ARMS
from _language_model import LanguageModel, Sizes
from _runs import Run, Study, load_text, machine_of, make_runs, write_json
from _training import PaperSchedule, Schedule

from rarebit.errors import RarebitError, SettingsError

__all__ = ["main"]

SMALL_SIZES = Sizes(
    layers=2,
    dim=16,
    hidden=24,
    word_dropout=0.0,
    input_dropout=0.1,
    hidden_dropout=0.1,
    output_dropout=0.1,
    weight_drop=0.1,
)
SMALL_SCHEDULE = Schedule(epochs=3, batch_size=4, length=20, lr=2e-2, eval_batch_size=4)
SMALL_PAPER = PaperSchedule(epochs=8, batch_size=4, length=20, lr=5.0, eval_batch_size=4, trigger=2)
BASELINE = "baseline"


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Make the runs that time allows, print what is there, and write it."""
    began = time.monotonic()
    options = parse(given)
    study = study_of(options, began)
    facts = machine_of(study.device)  # before the runs, so that they are of the code that is run
    text = load_text(study.source).described()
    print(", ".join(f"{name}: {value}" for name, value in text.items()), flush=True)
    torch.set_float32_matmul_precision("high")
    if len(options.scales) > 1:
        first = [Run(arm=arm, scale=scale, seed=0) for arm, scale in trials(options)]
        make_runs(study, first, options.together)
    picked = {arm: best_scale(study, arm, options) for arm in options.arms}
    runs = [
        Run(arm=arm, scale=scale, seed=seed)
        for seed in range(options.seeds)
        for arm, scale in picked.items()
        if scale is not None
    ]
    make_runs(study, runs, options.together)
    report = {
        "recipe": "wikitext",
        "machine": facts,
        "text": text,
        "sizes": asdict(study.sizes),
        "schedule": asdict(study.schedule),
        "flops_per_epoch": flops_per_epoch(study),
        **figures(study, options, picked),
    }
    write_json(study.out / "wikitext.json", report)
    print_report(report)
    print(f"\nwritten: {study.out / 'wikitext.json'}", flush=True)
    return report


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="with wiki.train.tokens and so on",
    )
    text.add_argument(
        "--small", action="store_true", help="a small text and model, made on the spot"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/transfer"), help="folder to write to"
    )
    parser.add_argument("--arms", type=arms, default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--seeds", type=count, default=3, help="runs of each arm, from seed 0")
    parser.add_argument(
        "--scales",
        type=scales,
        default=[1.0],
        help="multiples of an arm's weight to try, such as 1,10",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument(
        "--together", type=count, default=1, help="runs side by side, which a GPU does sooner"
    )
    parser.add_argument(
        "--paper", action="store_true", help="SGD at 30 and NT-ASGD, 50 epochs, in place of Adam"
    )
    for name, kind in (("epochs", count), ("batch-size", count), ("lr", float)):
        parser.add_argument(f"--{name}", type=kind, help="in place of the schedule's own")
    return parser.parse_args(given)


def study_of(options: argparse.Namespace, began: float) -> Study:
    """Return what all runs share."""
    if options.paper:
        base: Schedule = SMALL_PAPER if options.small else PaperSchedule()
    else:
        base = SMALL_SCHEDULE if options.small else Schedule()
    changed = {
        name: getattr(options, name)
        for name in ("epochs", "batch_size", "lr")
        if getattr(options, name) is not None
    }
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda needs a CUDA device, and none is visible; leave it out")
    return Study(
        source=options.source,
        out=options.out,
        sizes=SMALL_SIZES if options.small else Sizes(),
        schedule=replace(base, **changed),
        device=options.device,
        deadline=began + 60 * options.minutes,
    )


def trials(options: argparse.Namespace) -> list[tuple[str, float]]:
    """Return the arms with the weights to try; a baseline has none."""
    return [
        (arm, scale)
        for arm in options.arms
        for scale in (options.scales if ARMS[arm].loss is not None else [1.0])
    ]


def best_scale(study: Study, arm: str, options: argparse.Namespace) -> float | None:
    """Return the weight that validation picks with the first seed; None until all were tried."""
    tried = [scale for name, scale in trials(options) if name == arm]
    if len(tried) == 1:
        return tried[0]
    found = {scale: Run(arm=arm, scale=scale, seed=0).result(study) for scale in tried}
    done = {scale: result["valid"]["all"] for scale, result in found.items() if result is not None}
    return min(done, key=done.__getitem__) if len(done) == len(found) else None


def figures(
    study: Study, options: argparse.Namespace, picked: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return all results that are there, and the names of those that are not."""
    seeds, missing, tried = range(options.seeds), [], {}
    results: dict[str, dict[str, Any]] = {}
    for arm, scale in picked.items():
        runs = [Run(arm=arm, scale=scale or 1.0, seed=seed) for seed in seeds]
        found = {run: None if scale is None else run.result(study) for run in runs}
        missing += [str(run) for run, result in found.items() if result is None]
        results[arm] = {str(run.seed): result for run, result in found.items() if result}
        tried[arm] = {
            f"{other:g}": result["valid"]["all"]
            for name, other in trials(options)
            if name == arm and (result := Run(arm=arm, scale=other, seed=0).result(study))
        }
    cut_off = {arm: is_cut_off(by_seed) for arm, by_seed in results.items()}
    return {
        "picked": dict(picked),
        "tried": tried,
        "results": results,
        "cut_off": cut_off,
        "missing": missing,
    }


def is_cut_off(by_seed: Mapping[str, Any]) -> bool:
    """Return whether the best epoch is the last one in most runs: longer training might rank them otherwise.

    >>> runs = [{"best_epoch": best, "history": [{}] * 5} for best in (5, 4, 5)]
    >>> is_cut_off(dict(enumerate(runs))), is_cut_off(dict(enumerate(runs[:2])))
    (True, False)
    """
    last = [run["best_epoch"] == len(run["history"]) for run in by_seed.values()]
    return sum(last) > len(last) / 2


def print_report(report: Mapping[str, Any]) -> None:
    """Print a line per arm: perplexities, and the difference to the baseline of the same seeds."""
    results = report["results"]
    print(
        f"\n{'arm':27}{'runs':>5}{'valid':>16}{'test':>16}{'head':>16}{'tail':>18}{'over baseline':>17}"
    )
    for arm, by_seed in results.items():
        runs = list(by_seed.values())
        cells = [
            summary([run[part][words] for run in runs])
            for part, words in (
                ("valid", "all"),
                ("test", "all"),
                ("test", "head"),
                ("test", "tail"),
            )
        ]
        over = "-" if arm == BASELINE else summary(differences(results.get(BASELINE, {}), by_seed))
        if report["cut_off"][arm] or report["cut_off"].get(BASELINE):
            over = "cut off"
        widths = (16, 16, 16, 18)
        line = "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        print(f"{arm:27}{len(runs):>5}{line}{over:>17}")
    if report["missing"]:
        print(f"not there yet: {'; '.join(report['missing'])}")


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[float]:
    """Return the test perplexity over that of the other arm, of each seed that both have."""
    return [
        theirs[seed]["test"]["all"] - ours[seed]["test"]["all"] for seed in ours if seed in theirs
    ]


def summary(values: Sequence[float]) -> str:
    """Return mean and standard deviation over seeds.

    >>> summary([1.0, 2.0]), summary([1.0]), summary([])
    ('1.50 ± 0.71', '1.00', '-')
    """
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def flops_per_epoch(study: Study) -> float:
    """Return the operations of an epoch: 6 a weight and word, forward and backward."""
    text = load_text(study.source)
    with torch.device("meta"):
        model = LanguageModel(len(text.counts), study.sizes)
    return 6.0 * len(text.train) * sum(weight.numel() for weight in model.parameters())


def count(text: str) -> int:
    """Return the number of an option that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def scales(text: str) -> list[float]:
    """Return the multiples of an option such as `1,10`."""
    found = [float(part) for part in text.split(",")]
    if not all(0 < scale < math.inf for scale in found):
        raise argparse.ArgumentTypeError(f"must be numbers above 0, got {text}")
    return found


def arms(text: str) -> list[str]:
    """Return the arms of an option such as `baseline,cosreg-sum`."""
    found = text.split(",")
    for name in found:
        if name not in ARMS:
            raise argparse.ArgumentTypeError(f"arms are {', '.join(ARMS)}; got {name!r}")
    return found


if __name__ == "__main__":
    try:
        main()
    except RarebitError as error:
        sys.exit(f"error: {error}")
