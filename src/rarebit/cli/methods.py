"""What the command line shows of methods: each with what is said of it, and the table of pairs.

`rarebit methods`: what can be done to tables, and what can be combined.
"""

import inspect
import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rarebit.cli.show import console
from rarebit.technique import (
    Technique,
    compositions,
    technique_class,
    technique_name,
    technique_names,
)

__all__ = ["methods", "methods_as_data", "show_methods"]

CONTROLS = {
    "baseline": "plain tables",
    "magnitude": "the smallest trained entries cut at once, to the same number",
    "matched-rate": "plain tables with other learning rates and starts",
    "plain-sum": "the same transfer with both gradients added, the best of several scales",
    "tuned": "plain tables at the best of several learning rates and weight decays",
    "narrow": "plain tables made narrower until they have the same bytes",
    "wide": "plain tables as wide as all embedding sets together",
}
HOW_TO_WRITE = (
    "Methods are joined by +, in the order they are applied, and take settings after a colon: "
    "hashing:buckets=1000+low-rank. A method without its size gets one that keeps the share of the "
    "weights that is asked for."
)


def methods_as_data() -> dict[str, Any]:
    """Return all that is said of the methods as plain values, for programs.

    >>> methods_as_data()["methods"][0]["name"]
    'aligned-sets'
    """
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


def show_methods(*, to: Console = console) -> None:
    """Print every method, and which may be applied after which."""
    for name in technique_names():
        method = technique_class(name)
        to.print(Text.assemble((technique_name(method), "bold"), f": {method.title}"))
        to.print(Padding(_about(method), (0, 0, 1, 2)))
    to.print(Text("Combinations", style="bold"), Text(HOW_TO_WRITE), sep="\n")
    to.print(_pairs_table())


def _about(method: type[Technique]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    control = CONTROLS.get(method.control, "")
    knobs = (f"{name} ({', '.join(map(str, tried))})" for name, tried in method.knobs.items())
    lines = {
        "settings": ", ".join(inspect.signature(method).parameters),
        "tuned": ", ".join(knobs),
        "held against": f"{method.control}: {control}" if control else method.control,
        "cost": method.cost,
        "when to use": method.applies,
        "paper": method.paper,
    }
    for word, line in lines.items():
        if line:
            table.add_row(word, Text(line))
    return table


def _pairs_table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("combination", no_wrap=True)
    table.add_column("")
    table.add_column("why")
    for (first, then), reason in sorted(compositions().items(), key=lambda item: bool(item[1])):
        verdict = Text("refused", "red") if reason else Text("allowed", "green")
        table.add_row(Text(f"{first}+{then}"), verdict, Text(reason or ""))
    return table


def methods(
    json_: Annotated[
        bool, typer.Option("--json", help="Print nothing but the same as one JSON object.")
    ] = False,
) -> None:
    """List the methods: what each changes and costs, what it is held against, what combines."""
    if json_:
        print(json.dumps(methods_as_data()))
    else:
        show_methods()
