"""What the commands share: devices, settings on the command line, and how a command ends."""

import itertools
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from rarebit.cli.show import errors
from rarebit.errors import SettingsError, TrainingInterrupted

__all__ = [
    "DeviceOption",
    "SetOption",
    "choose_device",
    "new_folder",
    "override",
    "override_run",
    "parse_assignment",
    "stop",
    "told_how_to_go_on",
]

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other setting, as section.name=value. May be repeated."),
]


def choose_device(name: str) -> torch.device:
    """Return the device of a command."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise SettingsError(f"device must be cpu, cuda or auto, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device cuda was asked for, but torch sees no GPU here")
    return torch.device(name)


def override(values: dict[str, Any], section: str, name: str, value: object) -> None:
    """Put one value into a section, where it was given."""
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
    """Put what options say of a run into its settings, as a file holds them."""
    override(values, "model", "name", model)
    if data is not None:
        values["data"] = {"source": data} if data == "synthetic" else {"folder": data}
    for name, value in training.items():
        override(values, "training", name, value)
    for assignment in assignments or []:
        override(values, *parse_assignment(assignment))


def parse_assignment(text: str) -> tuple[str, str, object]:
    """Read `section.name=value`; the value is TOML, or a word."""
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise SettingsError(f"--set takes section.name=value, got {text!r}")
    try:
        return section, name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return section, name, value.strip()


def new_folder(name: str) -> Path:
    """Return the first folder runs/NAME-N that is not there yet."""
    names = (Path("runs") / f"{name}-{number}" for number in itertools.count(1))
    return next(folder for folder in names if not folder.exists())


@contextmanager
def told_how_to_go_on(again: str) -> Iterator[None]:
    """End the command with what to type, in one line, where its training is stopped."""
    try:
        yield
    except TrainingInterrupted as stopped:
        stop(f"{stopped}. To go on: {again}", code=stopped.exit_code)
    except KeyboardInterrupt:
        stop(f"stopped at once. To go on from the last checkpoint: {again}", code=130)


def stop(message: str, *, code: int) -> NoReturn:
    """End the command with a message and an exit code."""
    errors.print(f"rarebit: {message}", markup=False, soft_wrap=True)
    sys.exit(code)
