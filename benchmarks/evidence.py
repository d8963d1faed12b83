"""What papers say and what we measured, as one page, from stored studies alone.

    python benchmarks/evidence.py                 writes docs/evidence.md
    python benchmarks/evidence.py --check         says whether the page is what the stored studies give

Claims and where each is measured stand in `benchmarks/evidence.toml`; no figure does.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rarebit.study.results import CellResult, StudyResult, read_result
from rarebit.study.statistics import Comparison

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "benchmarks/evidence.toml"
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/evidence.md"

HEAD = """\
# What the papers say, and what we measured

Each line is one comparison in AUC: the mean of paired differences over seeds, the interval corrected for all methods
of its study, and what it says of the claim. A claim is *reproduced* where the whole interval lies on its side,
*contradicted* where it lies on the other, *not seen* where differences are too small to matter, and *open* where seeds
are too few to tell. Written by `python benchmarks/evidence.py` from the studies in `benchmarks/results`; do not edit.
"""


@dataclass(frozen=True)
class Line:
    """One comparison of a claim."""

    log: str
    model: str
    side: str
    control: str
    found: Comparison
    at_least: float

    @property
    def verdict(self) -> str:
        """What the comparison says of the claim."""
        low, high = self.found.low - self.at_least, self.found.high - self.at_least
        if low > 0:
            return "**reproduced**"
        if high < 0:
            return "contradicted"
        if self.found.verdict == "no difference" and self.at_least == 0:
            return "not seen"
        return "open"

    def __str__(self) -> str:
        interval = f"{self.found.low:+.4f} to {self.found.high:+.4f}"
        cells = (
            self.log,
            f"`{self.model}`",
            f"`{self.side}`",
            f"`{self.control}`",
            f"{self.found.mean:+.4f} ({interval})",
            str(self.found.n),
            self.verdict,
        )
        return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the page is old"
    )
    options = parser.parse_args()
    text = page(tomllib.loads(CLAIMS.read_text("utf-8"))["claims"])
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text("utf-8") != text:
        sys.exit(
            f"{PAGE.name} is not what the stored studies give; run python benchmarks/evidence.py"
        )


def page(claims: Sequence[Mapping[str, Any]]) -> str:
    """Return the page for these claims."""
    parts = [HEAD]
    for (method, paper), of_method in groupby(
        claims, key=lambda one: (one["method"], one["paper"])
    ):
        parts.append(f"## {method}\n\n{paper}.\n")
        parts.extend("\n".join(_claim(claim)) for claim in of_method)
    return "\n".join(parts)


def _claim(claim: Mapping[str, Any]) -> Iterator[str]:
    yield f"> {claim['says']}\n"
    yield "| log | model | what | against | difference | seeds | the claim |"
    yield "|---|---|---|---|---|---|---|"
    for measured in claim["measured"]:
        yield from map(str, _lines(measured, float(claim.get("at_least", 0.0))))
    yield ""


def _lines(measured: Mapping[str, Any], at_least: float) -> Iterator[Line]:
    result = read_result(RESULTS / f"{measured['study']}.json")
    for control in measured["controls"]:
        for cell in _cells(result, measured):
            # corrected as the plan has it, each method against its own control, where that is this one
            is_own = cell.side(measured["side"]).control == control
            held = cell if is_own else cell.against(control)
            found = held.compare(result.minimum_effect)[measured["side"]]
            yield Line(cell.data, cell.model, measured["side"], control, found, at_least)


def _cells(result: StudyResult, measured: Mapping[str, Any]) -> list[CellResult]:
    found = [
        cell
        for cell in result.cells
        if cell.data == measured["data"] and cell.model == measured.get("model", cell.model)
    ]
    if not found:
        sys.exit(f"{measured['study']} has no log {measured['data']!r}")
    return found


if __name__ == "__main__":
    main()
