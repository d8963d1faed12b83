"""Make `.venv`, the project's own environment, and install the package into it with some extras.

    python3 tools/setup_environment.py cli test

A second call with nothing new to install does nothing and touches no network. A torch that the
calling Python already has is kept: it is the heaviest package by far, and the one that has to fit
the machine. Needs the standard library only.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # said here, before a line that older ones cannot run
    sys.exit(
        "Rarebit needs Python 3.11 or later, this is {}.{}; name another one: "
        "make PYTHON=python3.12 ...".format(*sys.version_info)
    )

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PYPROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "constraints.txt"

# Two files in .venv. The first is written before anything else and says that the folder is ours;
# the second is written last and says what is in it, so an interrupted setup is never mistaken for
# a finished one.
OWNER = VENV / "rarebit-owner.json"
STAMP = VENV / "rarebit-stamp.json"

TORCHREC = "torchrec"
OLDEST_TORCH = (2, 6)
CORE_MB = 20  # without torch
DOWNLOAD_MB = {
    "cli": 2,
    "data": 110,
    "dev": 25,
    "docs": 20,
    "examples": 30,
    "export": 45,
    "plots": 20,
    "serve": 25,
    "study": 35,
    "test": 90,
    "text": 30,
    TORCHREC: 15,
}


class Torch(NamedTuple):
    """A torch that the calling Python can import."""

    version: str
    folder: str


def main(extras: list[str]) -> None:
    """Set up what the extras need, unless it is there already."""
    wanted = with_implied(extras)
    torch = find_torch()
    base = describe_base(torch)
    inputs = describe_inputs()
    stamp = read_json(STAMP)
    same_base = stamp.get("base") == base
    installed = set(stamp.get("extras", [])) if same_base else set()
    if same_base and stamp["inputs"] == inputs and wanted <= installed:
        say(f"environment .venv is ready ({', '.join(sorted(wanted))}); nothing to install")
        return

    if not same_base:
        check_can_create()
    announce(wanted, torch, fresh=not same_base)
    STAMP.unlink(missing_ok=True)
    if not same_base:
        create(torch)
    done = install(wanted | installed, constraints_for(torch, CONSTRAINTS.read_text()))
    STAMP.write_text(json.dumps({"base": base, "inputs": inputs, "extras": sorted(done)}))
    say("environment .venv is ready")


def with_implied(extras: list[str]) -> set[str]:
    """Return the extras and those they include, as `rarebit[cli]` in `test`."""
    groups = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    found: set[str] = set()
    todo = list(extras)
    while todo:
        extra = todo.pop()
        if extra not in groups:
            fail(f"unknown extra {extra!r}; pyproject.toml has: {', '.join(groups)}")
        found.add(extra)
        for requirement in groups[extra]:
            implied = re.fullmatch(r"rarebit\[(.+)\]", requirement)
            if implied:
                todo += [name for name in implied[1].split(",") if name not in found]
    return found


def find_torch() -> Torch | None:
    """Return the torch of the calling Python, if it has one that is recent enough."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # a folder that happens to be named torch
        return None
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is None or (int(release[1]), int(release[2])) < OLDEST_TORCH:
        say(f"torch {version} is too old and not used; Rarebit needs 2.6 or later")
        return None
    return Torch(version, str(Path(spec.origin).parent.parent))


def constraints_for(torch: Torch | None, pinned: str) -> str:
    """Return the constraints, with the torch that was found in place of the pinned one.

    A local version such as 2.11.0+cu128 is kept whole: the bare number would admit another build.
    The pins of torch's own requirements go too, since another torch may ask for other versions.
    """
    if torch is None:
        return pinned
    lines = []
    for line in pinned.splitlines():
        if line.startswith("torch=="):
            lines.append(f"torch=={torch.version}")
        elif not line.endswith("# via torch"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def describe_base(torch: Torch | None) -> dict[str, Any]:
    """Return what an environment is built on; when it changes, the environment is built anew."""
    return {
        "project": str(ROOT),  # an environment cannot be moved
        "python": [sys.version, sys.base_prefix],
        "torch": list(torch) if torch else None,
    }


def describe_inputs() -> str:
    """Return a digest of what decides which packages are installed."""
    project = tomllib.loads(PYPROJECT.read_text())
    relevant = [project["build-system"], project["project"], CONSTRAINTS.read_text()]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def announce(wanted: set[str], torch: Torch | None, *, fresh: bool) -> None:
    """Say what will happen and how much it will download, before it does."""
    megabytes = CORE_MB + sum(DOWNLOAD_MB.get(extra, 0) for extra in wanted)
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    say(f"{'making' if fresh else 'updating'} .venv with {python}: {', '.join(sorted(wanted))}")
    say(f"downloads at most about {megabytes} MB of small packages, kept inside .venv")
    if torch:
        say(f"torch {torch.version} is installed already and is used as it is")
    elif fresh:
        pin = re.search(r"^torch==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
        say(f"torch {pin[1] if pin else ''}: about 190 MB more as a CPU build")
        say("    where the package index only has the CUDA build (Linux), it is several GB:")
        say("    to avoid that, stop here, install a torch of your own (2.6 or later) and name the")
        say("    Python that has it: make PYTHON=/path/to/python ...")


def check_can_create() -> None:
    """End with one line where an environment cannot be made."""
    if importlib.util.find_spec("ensurepip") is None:
        fail(
            "this Python cannot make environments: its module 'ensurepip' is missing; "
            "on Debian and Ubuntu: apt install python3-venv"
        )
    check_ours()


def create(torch: Torch | None) -> None:
    """Make an empty environment that sees the torch that was found."""
    remove()
    VENV.mkdir()
    OWNER.write_text(json.dumps({"python": sys.executable}))
    builder = venv.EnvBuilder(with_pip=True, symlinks=True, system_site_packages=bool(torch))
    try:
        builder.create(VENV)
    except (OSError, subprocess.CalledProcessError) as error:
        fail(f"could not make .venv: {error}")
    if torch and not can_import_torch():
        # The calling Python is itself a virtual environment, which the system's packages leave out.
        site_packages = sysconfig.get_path("purelib", "venv", {"base": str(VENV)})
        (Path(site_packages) / "rarebit-torch.pth").write_text(torch.folder + "\n")


def install(extras: set[str], constraints: str) -> set[str]:
    """Install the package, editable, see that torch works, and return the extras that are there."""
    file = VENV / "constraints.txt"
    file.write_text(constraints)
    # "all" would bring what not every platform has
    plain = sorted(extras - {"all", TORCHREC})
    # Runs in the project, so that the requirement is a plain "." whatever the folder is called.
    if not pip(file, "-e", f".[{','.join(plain)}]" if plain else "."):
        fail("pip could not install the packages, see above; run the same command again to retry")
    if not can_import_torch():
        fail(f"the installed torch cannot be imported; see: {PYTHON} -c 'import torch'")
    if TORCHREC not in extras:
        return extras
    # TorchRec's own requirements are those of its CUDA build
    if pip(file, "-e", f".[{TORCHREC}]") and pip(
        file, "--no-deps", "--only-binary=:all:", TORCHREC
    ):
        return extras
    say("this platform has no TorchRec; its tests are skipped")
    return extras - {"all", TORCHREC}


def pip(constraints: Path, *words: str) -> bool:
    """Install packages; return whether that was possible."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-c", str(constraints), *words], cwd=ROOT, check=False)
    return done.returncode == 0


def can_import_torch() -> bool:
    """Return whether the environment's own Python can import torch."""
    command = [str(PYTHON), "-c", "import torch"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def check_ours() -> None:
    """End with one line where `.venv` was made by someone else: it is not ours to delete."""
    if VENV.exists() and not OWNER.exists() and any(VENV.iterdir()):
        fail(".venv was not made by this project's setup; move it away and run again")


def remove() -> None:
    """Delete the environment, but only one that this script made."""
    check_ours()
    if VENV.exists():
        shutil.rmtree(VENV)


def run_with_the_python_that_made_the_environment() -> None:
    """Start again outside `.venv`: it may have to be built anew while it is activated."""
    maker = read_json(OWNER).get("python")
    if maker is None or not Path(maker).exists():
        fail("the Python that made .venv is gone; leave the environment first: deactivate")
    os.execv(maker, [maker, *sys.argv])  # noqa: S606  # the same script, no shell


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file holds, or nothing where it is missing or damaged."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def say(message: str) -> None:
    """Print at once, so that it stands above what pip prints."""
    print(f"[setup] {message}", flush=True)


def fail(message: str) -> NoReturn:
    """End with one line and no traceback."""
    sys.exit(f"[setup] {message}")


if __name__ == "__main__":
    try:
        if Path(sys.prefix).resolve() == VENV:
            run_with_the_python_that_made_the_environment()
        if sys.argv[1:] == ["--remove"]:
            remove()
        elif len(sys.argv) > 1:
            main(sys.argv[1:])
        else:
            fail("name the extras to install, for example: cli; or --remove")
    except KeyboardInterrupt:
        fail("interrupted; run the same command again to start over")
