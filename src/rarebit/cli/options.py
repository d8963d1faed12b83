"""The options that commands share, from text to settings, and how a command ends."""

import itertools
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast

import torch
from typer import Option

from rarebit import machine
from rarebit.cli import screen
from rarebit.errors import SettingsError, TrainingInterrupted
from rarebit.models import model_names
from rarebit.settings import require
from rarebit.technique import parse_techniques, technique_to_mapping

# readable=False: whoever reads a file reports its problems, with a message that says what to do
Model = Annotated[str | None, Option(help=f"One of {', '.join(model_names())}. Default: deepfm.")]
Data = Annotated[
    str | None,
    Option(help="A folder made by rarebit data prepare, or synthetic for the built-in click log."),
]
Rows = Annotated[int | None, Option(help="Rows of the built-in click log.")]
Config = Annotated[
    Path | None,
    Option(
        help=r"A TOML file: \[model], \[data], \[training], \[\[methods]]. Options override it.",
        readable=False,
    ),
]
Epochs = Annotated[int | None, Option(help="Maximum epochs.")]
BatchSize = Annotated[int | None, Option(help="Batch size.")]
Lr = Annotated[float | None, Option(help="Learning rate.")]
Seed = Annotated[int | None, Option(help="Seed of initial weights and batch order.")]
Set = Annotated[
    list[str] | None,
    Option("--set", help="Any other setting, as section.name=value. May be repeated."),
]
Out = Annotated[Path | None, Option(help="Output folder. Default: a new folder below runs/.")]
Resume = Annotated[
    Path | None,
    Option(help="Resume the work in this folder from its last checkpoint.", readable=False),
]
Device = Annotated[str, Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Json = Annotated[
    bool, Option("--json", help="Print the result as one JSON object and nothing else.")
]
NoPlots = Annotated[
    bool, Option("--no-plots", help="Write numbers only, no plots: needs no matplotlib.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the output if it exists.")]
BadRows = Annotated[
    str | None,
    Option(
        help="Malformed rows: stop, or aside: skip them and write them to a file. Default: stop; aside for "
        "public data sets."
    ),
]

Choice = Literal["stop", "aside"]


def choose_bad_rows(chosen: str | None, default: Choice = "stop") -> Choice:
    """Return what to do with malformed rows."""
    if chosen not in (None, "stop", "aside"):
        raise SettingsError(f"--bad-rows must be stop or aside, got {chosen!r}")
    return cast(Choice, chosen or default)


def choose_device(name: str) -> torch.device:
    """Return the device of a command."""
    require(name in ("cpu", "cuda", "auto"), f"device must be cpu, cuda or auto, got {name!r}")
    return machine.choose_device(name)


def given(**options: object) -> dict[str, Any]:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def override(values: dict[str, Any], section: str, name: str, value: object) -> None:
    """Put one value into a section of the settings, unless it is None."""
    if value is None:
        return
    if not isinstance(values.setdefault(section, {}), dict):
        raise SettingsError(f"[{section}] must be a table, got {values[section]!r}")
    values[section][name] = value


def override_run(
    values: dict[str, Any],
    *,
    model: str | None,
    data: str | None,
    training: Mapping[str, object],
    assignments: Sequence[str] | None,
) -> None:
    """Put the options of a run into its settings, in the form of a settings file."""
    override(values, "model", "name", model)
    if data is not None:
        values["data"] = {"source": data} if data == "synthetic" else {"folder": data}
    for name, value in training.items():
        override(values, "training", name, value)
    for assignment in assignments or []:
        override(values, *parse_assignment(assignment))


def parse_assignment(text: str) -> tuple[str, str, object]:
    """Read `section.name=value`; the value is TOML, or else a string."""
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise SettingsError(f"--set takes section.name=value, got {text!r}")
    try:
        return section, name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return section, name, value.strip()


def read_methods(text: str) -> list[dict[str, Any]]:
    """Return the methods of one run, in the form of a settings file."""
    found = parse_techniques(text)
    require(
        len(found) == 1,
        f"--methods takes one combination here, got {len(found)}: {text!r}; join methods by +, or "
        "compare them: rarebit compare",
    )
    for part in found[0].parts:
        require(
            part.is_sized,
            f"{part.name} needs its size here, got {part.text!r}; give it after a colon: see rarebit methods",
        )
    return [technique_to_mapping(part.build()) for part in found[0].parts]


def refuse_with(what: str, others: Mapping[str, object], why: str = "") -> None:
    """Raise if options that cannot be combined with `what` have a value."""
    found = ", ".join(name for name, value in others.items() if value is not None)
    require(not found, f"{found} cannot be combined with {what}{why}")


def new_folder(name: str) -> Path:
    """Return the first folder runs/NAME-N that does not exist."""
    names = (Path("runs") / f"{name}-{number}" for number in itertools.count(1))
    return next(folder for folder in names if not folder.exists())


@contextmanager
def resumable(*words: str) -> Iterator[None]:
    """End the command with one line that says how to resume, if its training is stopped."""
    command = f"{screen.how_to_call()} {shlex.join(words)}"
    try:
        yield
    except TrainingInterrupted as stopped:
        stop(f"{stopped}. To resume: {command}", code=stopped.exit_code)
    except KeyboardInterrupt:
        stop(f"stopped. To resume from the last checkpoint: {command}", code=130)


def stop(message: str, *, code: int) -> NoReturn:
    """End the command with a message and an exit code."""
    screen.line(f"rarebit: {message}", to=screen.errors)
    sys.exit(code)
