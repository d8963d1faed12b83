"""The options that commands share, from text to settings, and how a command ends."""

import itertools
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast

from typer import Option

from rarebit.cli import screen
from rarebit.errors import RarebitError, SettingsError, TrainingInterrupted
from rarebit.machine import OtherLoad, allowed_cores, free_cores
from rarebit.machine import choose_device as find_device
from rarebit.settings import offered, require
from rarebit.technique import (
    BASELINE,
    parse_techniques,
    technique_names,
    technique_to_mapping,
    value_text,
)

if TYPE_CHECKING:
    import torch

    from rarebit.sharding.plan import PlanSpec
    from rarebit.training.settings import RunSettings

LOAD = OtherLoad()
"""What other processes use, from the start of the command on."""
MODELS = offered("rarebit.models")
"""The names of all models, without importing them: help and completion are quick."""


def complete(names: Callable[[], Sequence[str]], marks: str = "") -> Callable[[str], list[str]]:
    """Return a completion of names; after one of the marks, another name begins."""

    def completions(incomplete: str) -> list[str]:
        start = 1 + max((incomplete.rfind(mark) for mark in marks), default=-1)
        known = [name for name in names() if name.startswith(incomplete[start:])]
        return [incomplete[:start] + name for name in known]

    return completions


def complete_methods(incomplete: str) -> list[str]:
    """Return the completions of methods that are separated by commas, combined by +."""
    return complete(lambda: [BASELINE, *technique_names()], marks=",+")(incomplete)


# readable=False: whoever reads a file reports its problems, with a message that says what to do
Model = Annotated[
    str | None,
    Option(
        help=f"One of {', '.join(MODELS)}. Default: deepfm.",
        autocompletion=complete(lambda: MODELS),
    ),
]
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
DEVICES = ("cpu", "cuda", "auto")
Together = Annotated[
    str,
    Option(
        metavar="auto|N",
        help="Runs that train as one stacked model: those of a variant that differ in seed, learning rate and the like. auto: "
        "as many as fit on a GPU, 1 on a CPU.",
    ),
]
Device = Annotated[
    str,
    Option(
        help="cpu, cuda, or auto: a GPU if there is one.", autocompletion=complete(lambda: DEVICES)
    ),
]
Threads = Annotated[
    int | None,
    Option(help="CPU threads. Default: one per core that other processes leave free."),
]
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


def choose_device(name: str) -> "torch.device":
    """Return the device of a command."""
    require(name in DEVICES, f"device must be cpu, cuda or auto, got {name!r}")
    return find_device(name)


def choose_together(text: str) -> "int | Literal['auto']":
    """Return how many runs may train as one stack."""
    if text == "auto":
        return "auto"
    require(text.isdecimal(), f"--together must be auto or a number of runs, got {text!r}")
    return int(text)


def choose_threads(threads: int | None) -> list[str]:
    """Use so many CPU threads, or one per free core: a thread that waits for a busy core delays all. Return the option."""
    import torch

    if threads is None and os.environ.get("OMP_NUM_THREADS"):  # which torch has read
        return []
    if threads is None:
        threads, cores = free_cores(LOAD), allowed_cores()
        busy = "" if threads == cores else f" of {cores}: other processes use the rest (--threads)"
        screen.line(f"CPU threads: {threads}{busy}", to=screen.errors)
    require(threads >= 1, f"--threads must be at least 1, got {threads}")
    torch.set_num_threads(threads)
    return ["--threads", str(threads)]


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


def run_words(settings: "RunSettings") -> list[str]:
    """Return the options of `compare` that give the settings of a run, but for its methods and seed."""
    from rarebit.training.settings import RunSettings

    values, plain = settings.to_mapping(), RunSettings().to_mapping()
    words = ["--model", values["model"].pop("name")]
    words += ["--data", values["data"].pop("folder", "synthetic")]
    for section, name in (("data", "source"), ("data", "checksum"), ("training", "seed")):
        values[section].pop(name, None)
    for section in ("model", "data", "training"):
        for name, value in values[section].items():
            if value != plain[section].get(name):
                words += ["--set", f"{section}.{name}={value_text(value)}"]
    return words


def parse_assignment(text: str) -> tuple[str, str, object]:
    """Read `section.name=value`; the value is TOML, or else a string."""
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise SettingsError(f"--set takes section.name=value, got {text!r}")
    try:
        return section, name, tomllib.loads(f"value = {value}")["value"]
    except (RecursionError, ValueError):
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


def size_or_share(text: str) -> str | float:
    """Return the size of tables: a number is a share of the plain ones, all else a text such as 1/16 or 2MB."""
    try:
        return float(text)
    except ValueError:
        return text


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
    command = screen.command_text(*words)
    try:
        yield
    except TrainingInterrupted as stopped:
        stop(f"{stopped}. To resume: {command}", code=stopped.exit_code)
    except KeyboardInterrupt:
        stop(f"stopped. To resume: {command}", code=130)


def shared_folder(engine: str, folder: Path | None) -> Path:
    """Return the folder that several processes share."""
    require(engine == "torchrec", f"--engine must be torchrec, got {engine!r}")
    if folder is None:
        raise SettingsError(
            "--engine needs --out: all processes use one folder, on a disk that all of them see"
        )
    return folder


def choose_plan(plan: str) -> "PlanSpec":
    """Return how tables lie over the processes."""
    plans = ("auto", "table", "row", "column")
    require(plan in plans, f"--plan must be one of {', '.join(plans)}, got {plan!r}")
    return cast("PlanSpec", plan)


def was_restarted(folder: Path) -> bool:
    """Return whether torchrun started this process again, after a failure of one of them, with work in the folder."""
    return (
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        and (folder / "run.json").exists()
    )


@contextmanager
def one_of_several(*words: str) -> Iterator[None]:
    """End the command with one line if its training is stopped, or another process fails; the first process says how to resume."""
    rank = os.environ.get("RANK", "0")
    command = screen.command_text(*words)
    try:
        yield
    except TrainingInterrupted as stopped:
        if rank != "0":
            sys.exit(stopped.exit_code)
        stop(f"{stopped}. To resume, under torchrun: {command}", code=stopped.exit_code)
    except RarebitError as error:
        stop(f"process {rank}: {error}", code=2)
    except RuntimeError as error:
        text = str(error).split("\n", 1)[0]
        if not any(word in text for word in ("gloo", "NCCL", "Connection", "Timed out", "store")):
            raise
        stop(
            f"process {rank}: lost another process, whose own error says why. To resume, under torchrun: {command} "
            f"({text})",
            code=1,
        )


def stop(message: str, *, code: int) -> NoReturn:
    """End the command with a message and an exit code."""
    screen.line(f"rarebit: {message}", to=screen.errors)
    sys.exit(code)
