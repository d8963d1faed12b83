"""The rules of the repository, as tests. Each rule is a function that is also shown a violation."""

import ast
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rarebit
from rarebit.technique import technique_class, technique_names

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "rarebit"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

# A folder imports from itself and from what stands above it. The public names (`__init__`) come
# after all that they are made of, so only what stands below them may `import rarebit`.
TOP_LEVEL = ["errors", "settings", "machine", "text", "technique"]
FOLDERS = [
    "storage",
    "data",
    "tables",
    "row_gradients",
    "sharding",
    "sets",
    "codes",
    "callbacks",
    "ema",
    "transfer",
    "methods",
    "interactions",
    "models",
    "training",
    "study",
    "diagnosis",
    "pruning",
    "research",
    "report",
    "export",
    "serving",
]
LAYERS = [*TOP_LEVEL, *FOLDERS, "_api", "__init__", "testing", "bench", "cli", "__main__"]

# Inside data/, a file imports only from files above it; a folder's `__init__` counts as a file.
DATA_ORDER = [
    *("schema", "log_schema", "order", "prepared", "dataset"),
    *("co_occurrence", "selection", "synthetic"),
    *("raw", "raw.chunks", "raw.text_files", "raw.readers", "raw.coding"),
    *("raw.periods", "raw.infer", "raw.encoder", "raw.vocabulary", "raw.encode", "raw.parts"),
    *("sources._base", "sources.avazu", "sources.book_crossing", "sources.criteo"),
    *("sources.frappe", "sources.ml_1m", "sources", "prepare"),
]
# (file, module): what a public method imports where it is called, because it needs Polars.
DATA_EXCEPTIONS = {("data/dataset.py", "raw.encode")}

METHOD_PACKAGES = {"methods", "pruning", "research"}
KNOW_METHODS = {*METHOD_PACKAGES, "transfer", "_api.py", "testing.py", "bench"}
"""Files and folders that may know a method by its class; `bench` measures them by name."""
METHOD_CLASSES = {technique_class(name).__name__ for name in technique_names()}

CORE_PACKAGES = {"numpy", "safetensors", "torch"}
EXTRA_PACKAGES = {
    "cli": {"rich", "typer"},
    "__main__": {"rich", "typer"},
    "data/raw": {"polars", "pyarrow"},
    "data/sources": {"polars"},
    "export/raw.py": {"polars"},
    "sharding/sharded.py": {"torchrec"},
    "serving": {"orjson", "starlette", "uvicorn"},
}
# (file, package): an optional package that a function of a core file may import where it uses it.
GUARDED_IMPORTS = {
    ("diagnosis/plots.py", "matplotlib"),
    ("pruning/_plots.py", "matplotlib"),
    ("codes/rows_triton.py", "triton"),
    ("training/row_triton.py", "triton"),
}
"""Packages that a file does without where they are missing, or imports for a type checker."""
LAZY_IMPORTS = {
    ("bench/_fastapi_program.py", "fastapi"),
    ("bench/_fastapi_program.py", "uvicorn"),
    ("bench/_pandas_program.py", "pandas"),
    ("export/check.py", "onnxruntime"),  # a program that does without Rarebit
}
"""Everything else that is optional is imported by `import_extra`."""

MAX_BYTES = 1_000_000
DATA_SUFFIXES = {
    *(".bin", ".ckpt", ".csv", ".dat", ".db", ".feather", ".gz", ".h5", ".npy", ".npz", ".onnx"),
    *(".parquet", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".sqlite", ".tar", ".tsv"),
    *(".xz", ".zip"),
}
STORED = ROOT / "tests" / "training" / "stored" / "model-format-1"
"""A small model that an older version saved, kept to show that it is still read."""
MAX_STORED_BYTES = 10_000
MACHINE_PATH = re.compile(r"(?<![\w.:~/$})-])/(?:home|mnt|root|tmp|Users|work)/\w|\b[A-Z]:\\Users")


def source_files() -> dict[str, str]:
    """Return the text of every file of the package, by its path in it."""
    files = {
        path.relative_to(SRC).as_posix(): path.read_text("utf-8") for path in SRC.rglob("*.py")
    }
    assert len(files) > 10, "the rules must have files to look at"
    return files


def repository_files() -> list[Path]:
    """Return the files that are, or would be, in git; without git, all that look like it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = listed.stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = []
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    return files or [path for path in ROOT.rglob("*") if path.is_file() and not is_output(path)]


def is_output(path: Path) -> bool:
    outputs = {"__pycache__", "build", "data", "dist", "runs"}
    parts = path.relative_to(ROOT).parts
    hidden = [p for p in parts[:-1] if p.startswith(".") and p != ".ci"]
    top = parts[0] in outputs or "__pycache__" in parts
    return bool(hidden) or top or any(p.endswith(".egg-info") for p in parts)


def _is_for_types(node: ast.AST) -> bool:
    """Return whether a block is read by type checkers only: it imports nothing."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the full name of each import, and whether it waits for a function to be called."""
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for_types = {id(n) for block in ast.walk(tree) if _is_for_types(block) for n in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        names: list[str] = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                module = "." * node.level + (node.module or "")
                names = [f"{module}.{alias.name}" for alias in node.names]
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names = [name]
        for name in names:
            yield name, id(node) in inside


def layer(name: str) -> str:
    """Return the layer of a module of the package; a public name belongs to `__init__`."""
    part = [*name.split("."), "__init__"][1]
    return "__init__" if part not in LAYERS and name.count(".") == 1 else part


def layer_violations(path: str, source: str) -> list[str]:
    own = Path(path).parts[0].removesuffix(".py")
    if own not in LAYERS:
        return [f"{path}: {own!r} has no place in LAYERS"]
    found = []
    for name, _ in imports(source):
        if name.startswith("."):
            found.append(f"{path}: relative import {name}")
        elif name.split(".")[0] == "rarebit" and name != "rarebit.__version__":
            other = layer(name)
            if other not in LAYERS or LAYERS.index(other) > LAYERS.index(own):
                found.append(f"{path}: imports {name}, which is not above it")
    return found


def data_violations(path: str, source: str) -> list[str]:
    """Return imports inside data/ that are not of a file above, in functions as well."""
    folder, *parts = Path(path).with_suffix("").parts
    if folder != "data":
        return []
    own = ".".join(parts).removesuffix("__init__").rstrip(".")
    if own and own not in DATA_ORDER:
        return [f"{path}: {own!r} has no place in DATA_ORDER"]
    above = DATA_ORDER[: DATA_ORDER.index(own)] if own else DATA_ORDER
    found = []
    for name, _ in imports(source):
        if not name.startswith("rarebit.data"):
            continue
        parts = name.split(".")[2:]
        modules = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        module = next((module for module in modules if module in DATA_ORDER), "__init__")
        if module not in above and (path, module) not in DATA_EXCEPTIONS:
            found.append(f"{path}: imports {name}, which is not above it in DATA_ORDER")
    return found


def method_violations(path: str, source: str) -> list[str]:
    """Return imports of a method by its module or its class, where methods are known by name only."""
    if Path(path).parts[0] in KNOW_METHODS:
        return []
    found = []
    for name, _ in imports(source):
        package, _, rest = name.removeprefix("rarebit.").partition(".")
        inside = name.startswith("rarebit.") and package in METHOD_PACKAGES
        # a public name of the package, such as rarebit.pruning.prune, is no file
        of_a_file = inside and (SRC / package / f"{rest.partition('.')[0]}.py").is_file()
        if of_a_file or (name.startswith("rarebit") and name.rpartition(".")[2] in METHOD_CLASSES):
            found.append(f"{path}: imports {name}; find methods by name")
    return found


def package_violations(path: str, source: str) -> list[str]:
    folders = [Path(path).parts[0].removesuffix(".py"), Path(path).parent.as_posix(), path]
    extra = {package for folder in folders for package in EXTRA_PACKAGES.get(folder, ())}
    allowed = sys.stdlib_module_names | CORE_PACKAGES | extra | {"rarebit"}
    return [
        f"{path}: imports {name}"
        for name, lazy in imports(source)
        if (package := name.split(".")[0]) not in allowed
        and not (lazy and (path, package) in LAZY_IMPORTS)
        and (path, package) not in GUARDED_IMPORTS
    ]


def code_violations(path: str, source: str) -> list[str]:
    """Return what may run foreign code or hide an error."""
    found = [
        f"{path}: imports {name}"
        for name, _ in imports(source)
        if name.split(".")[0] in {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
    ]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                found.append(f"{path}:{node.lineno}: {name}()")
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                found.append(f"{path}:{node.lineno}: torch.load")
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found.append(f"{path}:{node.value.lineno}: allow_pickle=True")
            case ast.ExceptHandler(type=None):
                found.append(f"{path}:{node.lineno}: bare except")
    return found


def file_violations(path: Path, stored: Path = STORED) -> list[str]:
    found = []
    content = path.read_bytes()
    if len(content) > MAX_BYTES:
        found.append(f"{path.name}: {len(content)} bytes, at most {MAX_BYTES}")
    is_stored = path.is_relative_to(stored) and len(content) <= MAX_STORED_BYTES
    if path.suffix in DATA_SUFFIXES and not is_stored:
        found.append(f"{path.name}: a data file")
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        if MACHINE_PATH.search(line):
            found.append(f"{path.name}:{number}: a path of one machine: {line.strip()}")
    return found


def documentation_violations(name: str, thing: object) -> list[str]:
    doc = thing.__doc__ or ""
    if inspect.isclass(thing):
        # A dataclass without a docstring is given its own signature as one.
        return [] if doc and not doc.startswith(f"{name}(") else [f"{name}: no docstring"]
    if inspect.isroutine(thing):
        return [] if ">>>" in doc else [f"{name}: no docstring with a >>> example"]
    return []


def all_order(name: str) -> tuple[int, str]:
    """Return the key that ruff sorts `__all__` by: constants, classes, then the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def public_imports(source: str) -> set[str]:
    """Return the public names that a module's top-level imports bind."""
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name for node in nodes for alias in node.names}
    return {name for name in names if not name.startswith("_")}


def version_problem(version: str, changelog: str) -> str | None:
    """Return what is wrong: the newest section is this version, or says that it will be."""
    headings = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    if not headings:
        return "the changelog has no section"
    if headings[0] == version:
        return None
    if headings[0] == "Unreleased" and f"To be released as {version}." in changelog:
        return None
    released = next((heading for heading in headings if heading != "Unreleased"), "nothing")
    if released == version:
        return None
    return f"the version is {version}, the changelog's newest is {released}"


def all_violations(rule) -> str:
    """Return what a rule finds in the package, a line each; empty when all is well."""
    return "\n".join(
        violation for path, source in source_files().items() for violation in rule(path, source)
    )


def test_a_folder_imports_only_from_above():
    assert all_violations(layer_violations) == ""


def test_a_file_of_data_imports_only_from_above():
    assert all_violations(data_violations) == ""


def test_data_is_imported_without_polars_and_pyarrow():
    code = "import sys, rarebit.data; sys.exit(bool({'polars', 'pyarrow'} & set(sys.modules)))"
    environment = dict(os.environ, PYTHONPATH=str(SRC.parent))
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


def test_only_methods_know_methods():
    assert all_violations(method_violations) == ""


def test_every_optional_import_names_an_extra_that_has_the_package():
    groups = PYPROJECT["project"]["optional-dependencies"]
    calls = [
        node.args
        for source in source_files().values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_extra"
    ]
    assert len(calls) > 5
    found = [[ast.unparse(argument).strip("'") for argument in call[:2]] for call in calls]
    for module, extra in found:
        listed = " ".join(groups[extra])
        assert module == "package" or f"{module.split('.')[0]}>=" in listed, module


def test_the_demo_installs_what_its_advice_needs():
    [line] = re.findall(
        r"^demo:.*\n\t@\$\(SETUP\) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert set(line.split()) == {"cli", "data", "plots"}


def test_only_the_packages_of_the_core_are_imported():
    assert all_violations(package_violations) == ""


def test_no_code_that_runs_foreign_code_or_hides_errors():
    assert all_violations(code_violations) == ""


def test_no_large_files_data_or_machine_paths():
    files = repository_files()
    assert ROOT / "pyproject.toml" in files
    assert "\n".join(v for path in files for v in file_violations(path)) == ""


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (layer_violations, "data/x.py", "from rarebit.tables.apply import find_tables"),
        (layer_violations, "tables/x.py", "def f():\n    import rarebit.models"),
        (layer_violations, "serving/x.py", "import rarebit as rb"),
        (layer_violations, "__init__.py", "from rarebit.bench import x"),
        (layer_violations, "training/x.py", "from rarebit import apply_"),
        (layer_violations, "data/x.py", "from rarebit import models"),
        (layer_violations, "cli/x.py", "from rarebit.nowhere.x import y"),
        (layer_violations, "data/x.py", "from . import schema"),
        (layer_violations, "data/x.py", "importlib.import_module('rarebit.cli')"),
        (layer_violations, "nowhere/x.py", ""),
        (data_violations, "data/schema.py", "from rarebit.data.order import batch_bounds"),
        (data_violations, "data/prepared.py", "def f():\n    import rarebit.data.raw.encoder"),
        (data_violations, "data/raw/chunks.py", "from rarebit.data.raw.chunks import Place"),
        (data_violations, "data/order.py", "from rarebit.data import Batch"),
        (data_violations, "data/nowhere.py", ""),
        (method_violations, "training/x.py", "from rarebit.methods.mlet import MLET"),
        (method_violations, "training/x.py", "from rarebit.methods._counts import set_counts_"),
        (method_violations, "training/x.py", "def f():\n    import rarebit.research.row_rate"),
        (method_violations, "diagnosis/x.py", "from rarebit.methods import mlet"),
        (method_violations, "study/x.py", "from rarebit.pruning import Pruned"),
        (method_violations, "cli/x.py", "from rarebit.pruning.pruned import prune_run"),
        (method_violations, "cli/x.py", "from rarebit import Hashing"),
        (package_violations, "data/x.py", "import pandas as pd"),
        (package_violations, "data/x.py", "def f():\n    from scipy.stats import norm"),
        (package_violations, "bench/x.py", "import rich"),
        (package_violations, "cli/x.py", "import click"),
        (package_violations, "settings.py", "import typer"),
        (package_violations, "data/x.py", "pandas = __import__('pandas')"),
        (code_violations, "x.py", "eval('1')"),
        (code_violations, "x.py", "exec('1')"),
        (code_violations, "x.py", "import pickle"),
        (code_violations, "x.py", "torch.load('x')"),
        (code_violations, "x.py", "numpy.load('x', allow_pickle=True)"),
        (code_violations, "x.py", "try:\n    f()\nexcept:\n    pass"),
    ],
)
def test_a_violation_is_found(rule, path, source):
    assert len(rule(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "data/order.py",
            "from rarebit.errors import DataError\nfrom rarebit.data.schema import Field",
        ),
        ("data/raw/encode.py", "from rarebit.data.raw.chunks import Place"),
        ("data/dataset.py", "def f():\n    from rarebit.data.raw.encode import encode_frame"),
        ("cli/x.py", "import typer\nimport rarebit as rb\nfrom rarebit import apply_"),
        ("training/x.py", "def save():\n    from rarebit import __version__"),
        ("cli/x.py", "from rarebit.pruning import prune_run\nimport rarebit.methods"),
        ("bench/x.py", "from rarebit.methods.mlet import MLET"),
        ("__main__.py", "from rarebit.cli.app import app"),
        ("models/x.py", "import torch\nmodel.eval()\ntry:\n    f()\nexcept OSError:\n    pass"),
    ],
)
def test_what_is_allowed_is_not_found(path, source):
    rules = (
        layer_violations,
        data_violations,
        method_violations,
        package_violations,
        code_violations,
    )
    assert [violation for rule in rules for violation in rule(path, source)] == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("big.txt", "x" * (MAX_BYTES + 1)),
        ("table.parquet", ""),
        ("notes.md", "see " + "/home" + "/someone/data"),
        ("notes.md", "`" + "/tmp" + "/data`"),  # noqa: S108  # the path that must be found
        ("notes.md", "C:" + "\\Users\\someone"),
    ],
)
def test_an_unwanted_file_is_found(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    assert len(file_violations(tmp_path / name)) == 1


def test_a_stored_model_is_allowed_while_it_is_small(tmp_path):
    weights = tmp_path / "weights.safetensors"
    for size, is_found in ((MAX_STORED_BYTES, False), (MAX_STORED_BYTES + 1, True)):
        weights.write_bytes(b"x" * size)
        assert bool(file_violations(weights, stored=tmp_path)) is is_found
        assert len(file_violations(weights)) == 1
    assert file_violations(STORED / "weights.safetensors") == []


def test_a_harmless_file_is_not_found(tmp_path):
    (tmp_path / "notes.md").write_text("#!/usr/bin/env bash\nhttps://example.org/home/x ~/tmp/x\n")
    assert file_violations(tmp_path / "notes.md") == []


def test_public_names_are_sorted_and_complete():
    assert list(rarebit.__all__) == sorted(rarebit.__all__, key=all_order)
    assert public_imports((SRC / "_api.py").read_text("utf-8")) - set(rarebit.__all__) == set()
    assert [name for name in rarebit.__all__ if not hasattr(rarebit, name)] == []
    assert len(set(rarebit.__all__)) == len(rarebit.__all__)


def test_public_names_are_documented():
    things = {name: getattr(rarebit, name) for name in rarebit.__all__}
    assert things
    found = [v for name, thing in things.items() for v in documentation_violations(name, thing)]
    assert "\n".join(found) == ""


def test_a_missing_docstring_is_found():
    def bare(): ...

    def without_example():
        """Do something."""

    def with_example():
        """>>> 1."""

    class Bare: ...

    assert documentation_violations("bare", bare)
    assert documentation_violations("without_example", without_example)
    assert documentation_violations("Bare", Bare)
    assert documentation_violations("with_example", with_example) == []


BLOCK_THE_COMMAND_LINE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("typer", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_importing_rarebit_loads_nothing_optional():
    done = run_python("import json, sys, rarebit; rarebit.fit; print(json.dumps([*sys.modules]))")
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "rarebit" in loaded
    assert loaded & {"matplotlib", "pandas", "pyarrow", "rich", "scipy", "typer"} == set()


def test_rarebit_works_without_the_command_line():
    done = run_python(BLOCK_THE_COMMAND_LINE + "import rarebit; print(rarebit.fit.__name__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fit"


def test_the_command_line_names_the_extra_that_is_missing():
    start = "import runpy; sys.argv = ['rarebit']; runpy.run_module('rarebit', run_name='__main__')"
    done = run_python(BLOCK_THE_COMMAND_LINE + start)
    assert done.returncode == 2, done.stderr
    assert "rarebit[cli]" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_versions_agree():
    source = ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{rarebit.__version__}"' in source.read_text("utf-8")
    assert version_problem(rarebit.__version__, (ROOT / "CHANGELOG.md").read_text("utf-8")) is None
    assert f"\nversion: {rarebit.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


@pytest.mark.parametrize(
    ("version", "changelog", "agrees"),
    [
        ("0.1.0", "## [Unreleased]\n\nTo be released as 0.1.0.\n", True),
        ("0.2.0", "## [Unreleased]\n\nTo be released as 0.1.0.\n", False),
        ("0.1.0", "## [Unreleased]\n\n## [0.1.0] - 2026-01-01\n", True),
        ("0.2.0", "## [Unreleased]\n\n## [0.1.0] - 2026-01-01\n", False),
        ("0.1.0", "nothing", False),
    ],
)
def test_a_version_that_disagrees_is_found(version, changelog, agrees):
    assert (version_problem(version, changelog) is None) is agrees


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    found = [re.match(r"([\w-]+)==(\S+)", line) for line in lines if line and line[0] != "#"]
    assert None not in found, "every line of constraints.txt is a pin or a comment"
    return {match[1]: match[2] for match in found if match}


def test_every_dependency_is_pinned_within_its_range():
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    needed = [Requirement(text) for group in groups for text in group]
    needed = [requirement for requirement in needed if requirement.name != "rarebit"]
    assert len(needed) > 5
    pinned = pins()
    assert [r.name for r in needed if pinned.get(r.name, "") not in r.specifier] == []


def test_setup_keeps_the_torch_that_is_there():
    setup = runpy.run_path(str(ROOT / "tools" / "setup_environment.py"))
    pinned = "numpy==2.4.6\ntorch==2.13.0\nsympy==1.14.0  # via torch\n"
    kept = setup["constraints_for"](setup["Torch"]("2.11.0+cu128", "folder"), pinned)
    assert kept == "numpy==2.4.6\ntorch==2.11.0+cu128\n"
    assert setup["constraints_for"](None, pinned) == pinned


def test_setup_knows_what_an_extra_includes():
    setup = runpy.run_path(str(ROOT / "tools" / "setup_environment.py"))
    assert setup["with_implied"](["dev"]) == {
        *("cli", "data", "dev", "docs", "export", "plots", "serve", "study", "test")
    }
    with pytest.raises(SystemExit, match="unknown extra 'nonsense'"):
        setup["with_implied"](["nonsense"])


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("# type: ignore[misc]  # torch gives no types here", ""),
        ("# type: ignore[misc]", "gives no reason"),
        ("# type: ignore  # some reason", "names no code"),
        ("# noqa: S101, D103  # some reason", ""),
        ("# noqa: S101 some reason", ""),
        ("# noqa: S101", "gives no reason"),
        ("# noqa", "names no code"),
    ],
)
def test_a_suppression_needs_a_code_and_a_reason(comment, problem, tmp_path):
    tools = runpy.run_path(str(ROOT / "tools" / "count_suppressions.py"))
    (tmp_path / "x.py").write_text(f"x = '# noqa'  {comment}\n")
    (found,) = tools["suppressions"](tmp_path / "x.py")
    assert found.problem == problem
    assert tools["main"]([str(tmp_path)]) == (1 if problem else 0)
