"""`rarebit methods`: what can be done to tables, and what can be combined."""

import json
from typing import Annotated

import typer

from rarebit.cli.show_methods import methods_as_data, show_methods

__all__ = ["methods"]


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
