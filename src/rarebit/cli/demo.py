"""`rarebit demo`: the main job on the built-in click log."""

from pathlib import Path
from typing import Annotated

import typer

from rarebit.cli.common import DeviceOption, choose_device
from rarebit.cli.compare import run_study
from rarebit.cli.show import console, how_to_call
from rarebit.study.plan import StudyPlan

__all__ = ["demo"]

ROWS = 100_000
FOLDER = Path("studies/demo")
PLAN = {
    "methods": ["baseline", "low-rank", "hashing"],
    "model": {"name": "deepfm", "dim": 16, "hidden": [128, 128]},
    "training": {"epochs": 4, "tables": "rowwise"},
}

NEXT = {
    "see what is wasted in a table: train a model, then diagnose it": (
        "train --rows 100000 --out runs/first",
        "diagnose runs/first",
    ),
    "do the same on a log of your own": (
        "data prepare clicks.csv --label click --out data/clicks",
        "compare --data data/clicks --model deepfm --methods baseline,low-rank,hashing",
    ),
    "see all methods, and how they combine": ("methods",),
    "see every option": ("compare --help",),
}


def demo(
    rows: Annotated[int, typer.Option(help="Rows of the generated click log.")] = ROWS,
    seeds: Annotated[int, typer.Option(help="Runs of each side.")] = 5,
    device: DeviceOption = "auto",
) -> None:
    """Make tables smaller in two ways on the built-in click log, and see whether that hurts."""
    console.print(
        "A generated click log, and a DeepFM on it whose tables are made half as large in two ways. Each "
        "is held against plain tables of the same size, with the same seeds.\n"
    )
    plan = StudyPlan.from_mapping({**PLAN, "data": {"rows": rows}, "seeds": seeds})
    run_study(FOLDER, plan, device=choose_device(device))
    console.print("\nWhat to try next:")
    for purpose, commands in NEXT.items():
        console.print(f"  {purpose}")
        for words in commands:
            console.print(f"    {how_to_call()} {words}", markup=False, soft_wrap=True)
    console.print("The README shows how to use it on a model of your own.")
