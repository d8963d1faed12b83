"""`rarebit demo`: compare methods on the built-in click log."""

from pathlib import Path
from typing import Annotated

from typer import Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.cli.compare import run_study

ROWS = 60_000
FOLDER = Path("studies/demo")
PLAN = {
    "methods": [
        "baseline",
        "mlet:init=keep",  # the plain tables of its control start as they do
        "pruned:epochs=12",
        "multi-embedding:num_sets=2",
        "harmless-transfer",
        "shrinkage+forgetting",
    ],
    "sweeps": False,
    "model": {"name": "dcn_v2", "dim": 8, "hidden": [64, 64]},
    # every variant trains until the validation AUC stops rising: some take three epochs, some fifteen
    "training": {"epochs": 30, "patience": 2, "tables": "rowwise"},
}

NEXT = {
    "See what is wasted in a table: train a model, then diagnose it": (
        "train --rows 100000 --out runs/first",
        "diagnose runs/first",
    ),
    "Do the same on your own log": (
        "data prepare clicks.csv --label click --out data/clicks",
        "compare --data data/clicks --model deepfm --methods baseline,low-rank,hashing",
    ),
    "List all methods and how to combine them": ("methods",),
    "See every option": ("compare --help",),
}


def demo(
    rows: opt.Rows = ROWS,
    seeds: Annotated[int, Option(help="Runs of each variant.")] = 3,
    device: opt.Device = "auto",
) -> None:
    """Try five methods on the built-in click log, each against its strongest simple control."""
    from rarebit.study.plan import StudyPlan

    screen.console.print(
        "Trains a DCN-V2 on a generated click log with five methods, and compares each with its strongest "
        "simple control, with the same seeds. Settings are fixed and nothing is tuned, for any variant: "
        "a first look, not a verdict on a method.\n"
    )
    plan = StudyPlan.from_mapping({**PLAN, "data": {"rows": rows}, "seeds": seeds})
    run_study(FOLDER, plan, device=opt.choose_device(device))
    screen.console.print("\nWhat to try next:")
    for purpose, commands in NEXT.items():
        screen.console.print(f"  {purpose}")
        for command in commands:
            screen.command(*command.split())
    screen.console.print("The README shows how to use Rarebit with your own model.")
    screen.line(f"\nThe results as a page: {(FOLDER / 'report.html').absolute()}")
