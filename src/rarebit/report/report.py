"""A page from what is stored in a folder or a JSON file (`rarebit report`).

    results.json       a study, or a backtest
    improvement.json   an improvement: a study, and what was tried before it
    run.json           a run, also one with compressed tables
    prune.json         a pruning
    frontier.json      sizes of one run, or of several: benchmarks/results/compression.json
    diagnosis.json     a diagnosis
    text-ner.json      a recipe of recipes/text

A folder may hold several. Every figure comes from the file, by the functions that print it elsewhere.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rarebit import __version__
from rarebit.errors import ReportError
from rarebit.report import models, studies, texts
from rarebit.report.page import page, paragraph
from rarebit.storage.files import make_folder, read_json, write_file

PAGE = "report.html"
FILES = (
    "improvement.json",
    "results.json",
    "prune.json",
    "run.json",
    "frontier.json",
    "diagnosis.json",
)
"""What a folder may hold, the most telling first."""
Section = Callable[[Mapping[str, Any]], Iterator[str]]
KINDS: dict[str, tuple[frozenset[str], Section]] = {
    "improvement": (frozenset({"improvement", "study"}), studies.improvement),
    "study": (frozenset({"study"}), studies.study),
    "backtest": (frozenset({"backtest"}), studies.backtest),
    "pruning": (frozenset({"pruning", "result"}), models.pruning),
    "run": (frozenset({"settings", "test", "history"}), models.run),
    "frontier": (frozenset({"plain", "points"}), models.frontier),
    "frontiers": (frozenset({"cells", "differences"}), models.frontiers),
    "diagnosis": (frozenset({"tables", "findings"}), models.diagnosis),
    "text recipe": (frozenset({"recipe", "metric", "verdicts"}), texts.recipe),
}
"""Kinds of results, by the keys of their files; the first that fits."""


def page_of(path: str | os.PathLike[str]) -> str:
    """Return the page of what is stored in a folder or a JSON file."""
    path = Path(path)
    known = [path / name for name in FILES if (path / name).is_file()] if path.is_dir() else [path]
    found = [one for file in known if (one := _parts(file)) is not None]
    if not found:
        names = ", ".join(FILES)
        what = "does not exist" if not path.exists() else "holds no finished result"
        raise ReportError(
            f"{str(path)!r} {what}; a page is made from a folder or file with one of {names}"
        )
    title = (path if path.is_dir() else path.with_suffix("")).resolve().name
    first, *rest = found
    body = list(first)
    for part in (part for parts in rest for part in parts):
        if not (
            part.startswith(("<figure", "<details")) and part in body
        ):  # a run and its diagnosis
            body.append(part.replace("<h1>", "<h2>").replace("</h1>", "</h2>"))
    made = f"Made by rarebit {__version__} from {', '.join(file.name for file in known)}. "
    body.append(
        paragraph(f"{made}It holds figures and names of fields, and no row of the log.", quiet=True)
    )
    return page(title, body)


def report(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of what is stored in a folder or a JSON file, by default `report.html` in the folder, and return it.

    >>> import tempfile
    >>> from rarebit import RunSettings, run
    >>> settings = RunSettings.from_mapping({"model": {"name": "fm"}, "data": {"rows": 2000}, "training": {"epochs": 1}})
    >>> folder = Path(tempfile.mkdtemp())
    >>> found = run(settings, folder=folder, progress=False, say=lambda line: None)
    >>> report(folder).name
    'report.html'
    """
    path = Path(path)
    made = page_of(path)
    beside = path / PAGE if path.is_dir() else Path(f"{path.stem}.html")
    file = beside if out is None else Path(out)
    try:
        make_folder(file.absolute().parent)
    except OSError as error:
        raise ReportError(f"cannot write {str(file)!r}: {error.strerror}") from None
    return write_file(file, made.encode(), error=ReportError)


def _parts(file: Path) -> list[str] | None:
    """Return the sections of a file; None for one without a finished result."""
    try:
        values = read_json(file)
        kinds = [section for keys, section in KINDS.values() if keys <= values.keys()]
        if file.name == "run.json" and not kinds:  # not finished
            return None
        if kinds:
            return list(kinds[0](values))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ReportError(f"cannot read {str(file)!r}: {error.strerror}") from None
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ReportError(f"{str(file)!r} is damaged: {error}; make it again") from None
    raise ReportError(
        f"{str(file)!r} holds {', '.join(list(values)[:6])}, which is no result that a page shows: {', '.join(KINDS)}"
    )
