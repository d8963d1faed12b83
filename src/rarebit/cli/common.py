"""What the commands share: devices, settings on the command line, and how a command ends."""

import sys
import tomllib
from typing import Annotated, Any, NoReturn

import torch
import typer

from rarebit.cli.show import errors
from rarebit.errors import SettingsError

__all__ = ["DeviceOption", "SetOption", "choose_device", "override", "parse_assignment", "stop"]

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


def stop(message: str, *, code: int) -> NoReturn:
    """End the command with a message and an exit code."""
    errors.print(f"rarebit: {message}", markup=False, soft_wrap=True)
    sys.exit(code)
