"""`rarebit methods`: list the methods, and which of them can be combined."""

import inspect
import json
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.technique import (
    Technique,
    compositions,
    technique_class,
    technique_name,
    technique_names,
)

CONTROLS = {
    "baseline": "plain tables",
    "magnitude": "magnitude pruning after training, to the same number of entries",
    "matched-rate": "plain tables with other learning rates and initial values",
    "plain-sum": "the same transfer with both gradients added, the best of several scales",
    "tuned": "plain tables with the best of several learning rates and weight decays",
    "narrow": "narrower plain tables with the same number of bytes",
    "wide": "plain tables as wide as all embedding sets together",
}
HOW_TO_COMBINE = (
    "Join methods by +, in the order they are applied, and give settings after a colon: "
    "hashing:buckets=1000+low-rank. A method without its size gets the size that keeps the requested share of "
    "the weights. --json also lists why a combination is refused."
)


def methods(json_: opt.Json = False) -> None:
    """List the methods: what each changes and costs, its control, and what it combines with."""
    if json_:
        print(json.dumps(methods_as_data()))
    else:
        show_methods()


def methods_as_data() -> dict[str, Any]:
    """Return the descriptions of all methods and pairs as plain values."""
    pairs = [
        {"first": first, "then": then, "allowed": reason is None, "words": reason or ""}
        for (first, then), reason in compositions().items()
    ]
    return {
        "methods": [_as_data(technique_class(name)) for name in technique_names()],
        "pairs": pairs,
    }


def _as_data(method: type[Technique]) -> dict[str, Any]:
    return {
        "name": technique_name(method),
        "title": method.title,
        "settings": list(inspect.signature(method).parameters),
        "control": method.control,
        "cost": method.cost,
        "applies": method.applies,
        "knobs": {name: list(values) for name, values in method.knobs.items()},
        "paper": method.paper,
    }


def show_methods(*, to: Console = screen.console) -> None:
    """Print every method, and which may be applied after which."""
    for name in technique_names():
        about = _as_data(technique_class(name))
        control = CONTROLS.get(about["control"], "")
        knobs = (f"{name} ({', '.join(map(str, tried))})" for name, tried in about["knobs"].items())
        lines = {
            "settings": ", ".join(about["settings"]),
            "tuned": ", ".join(knobs),
            "control": f"{about['control']}: {control}" if control else about["control"],
            "cost": about["cost"],
            "when to use": about["applies"],
            "paper": about["paper"],
        }
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for label, line in lines.items():
            if line:
                table.add_row(label, Text(line))
        to.print(Text.assemble((about["name"], "bold"), f": {about['title']}"))
        to.print(Padding(table, (0, 0, 1, 2)))
    to.print(Text("Combinations", style="bold"), Text(HOW_TO_COMBINE), sep="\n")
    allowed = [pair for pair, reason in compositions().items() if reason is None]
    names = technique_names()
    rows = [[name, ", ".join(then for first, then in allowed if first == name)] for name in names]
    header = ["method", "may be followed by"]
    screen.table(header, rows, left=header, fixed=header[:1], to=to)
