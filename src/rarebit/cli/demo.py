"""`rarebit demo`: the main job on the built-in click log."""

from pathlib import Path
from typing import Annotated

import typer

from rarebit.cli.common import DeviceOption, choose_device
from rarebit.cli.compare import run_study
from rarebit.cli.show import console, how_to_call
from rarebit.study.plan import StudyPlan

__all__ = ["demo"]

ROWS = 60_000
FOLDER = Path("studies/demo")
PLAN = {
    "methods": [
        "baseline",
        "mlet",
        "pruned",
        "multi-embedding:num_sets=2",
        "harmless-transfer",
        "shrinkage+forgetting",
    ],
    "sweeps": False,
    "model": {"name": "dcn_v2", "dim": 8, "hidden": [64, 64]},
    # all may go on until validation rows say that it is enough: some take three epochs, and some ten
    "training": {"epochs": 12, "patience": 2, "tables": "rowwise"},
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
    seeds: Annotated[int, typer.Option(help="Runs of each side.")] = 3,
    device: DeviceOption = "auto",
) -> None:
    """Try all five methods on the built-in click log, each against its strongest simple control."""
    console.print(
        "A generated click log, and a DCN-V2 on it whose tables are trained in five ways. Each is held against its "
        "strongest simple control, with the same seeds. Settings are fixed and nothing is tuned, on neither side: "
        "a first look, and no verdict on a method.\n"
    )
    plan = StudyPlan.from_mapping({**PLAN, "data": {"rows": rows}, "seeds": seeds})
    run_study(FOLDER, plan, device=choose_device(device))
    console.print("\nWhat to try next:")
    for purpose, commands in NEXT.items():
        console.print(f"  {purpose}")
        for words in commands:
            console.print(f"    {how_to_call()} {words}", markup=False, soft_wrap=True)
    console.print("The README shows how to use it on a model of your own.")
