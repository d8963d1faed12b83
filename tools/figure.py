"""Draw the figure of README.md, bytes of the tables against test AUC, from benchmarks/results/compression.json.

    python tools/figure.py            write docs/assets/frontier-*.svg: light and dark, wide and for phones
    python tools/figure.py --check    change nothing; fail if a file is out of date

All panels span the same width of AUC. "The best other" is the highest line through int8, int4, low rank, pruning and
every other compressor of plain tables in the file, chosen on the test rows, to their advantage.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rarebit.settings import size

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/compression.json"
FOLDER = ROOT / "docs/assets"
LOGS = {
    "book-crossing": "Book-Crossing",
    "criteo-80k": "Criteo-80k",
    "ml-1m-ids": "ML-1M with ids",
    "ml-1m": "ML-1M, seven fields",
    "frappe": "Frappe",
}
PLAIN, CODED, TAIL = ("plain", "32 bits"), ("plain", "evidence coding"), ("tail", "evidence coding")
WHOLE_TAIL = ("tail", "32 bits")
LABELS = {
    "tail": "tail + evidence coding",
    "coded": "evidence coding",
    "other": "best other compressor",
}
THEMES = {
    "light": {
        "text": "#1f2328", "quiet": "#59636e", "grid": "#d8dee4", "page": "#ffffff",
        "tail": "#0a58ca", "coded": "#b3530a", "other": "#6e7781",
    },
    "dark": {
        "text": "#f0f6fc", "quiet": "#9aa4af", "grid": "#30363d", "page": "#0d1117",
        "tail": "#6cb0ff", "coded": "#f0a35c", "other": "#9aa4af",
    },
}  # fmt: skip
COLUMNS = {"": 3, "narrow-": 2}
"""Panels side by side, on wide pages and on phones."""
ACROSS, DOWN = 264, 258
"""The size of a panel with its labels."""
BELOW, ABOVE, STEP = 0.021, 0.014, 0.01
"""The AUC that a panel shows below and above plain tables, and between two lines of its grid."""
SMALLEST = 160
"""The right end of a panel: so many times fewer bytes."""

Point = tuple[float, float]


def main() -> None:
    """Write the figures, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="only fail if a file is out of date")
    check = parser.parse_args().check
    for path, image in images(json.loads(RESULT.read_text("utf-8"))).items():
        if not check:
            path.write_text(image, encoding="utf-8")
        elif not path.exists() or path.read_text("utf-8") != image:
            sys.exit(f"{path.name} is not what {RESULT.name} gives: run python tools/figure.py")


def images(result: Mapping[str, Any]) -> dict[Path, str]:
    """Return the figure for light and dark pages, wide and narrow, by path."""
    return {
        FOLDER / f"frontier-{shape}{theme}.svg": draw(result, theme, columns)
        for shape, columns in COLUMNS.items()
        for theme in THEMES
    }


def means(cells: Sequence[Mapping[str, Any]], log: str) -> dict[tuple[str, str], list[Point]]:
    """Return bytes and test AUC, means over seeds, of each kind of tables and compressor, largest first."""
    found: dict[tuple[str, str], dict[int | None, list[Point]]] = {}
    for cell in cells:
        for point in cell["points"] if cell["log"] == log else ():
            sizes = found.setdefault((cell["tables"], point["compressor"]), {})
            sizes.setdefault(point["size"], []).append((point["table_bytes"], point["test_auc"]))
    return {
        name: sorted(
            (tuple(map(statistics.fmean, zip(*seeds, strict=True))) for seeds in sizes.values()),
            reverse=True,
        )
        for name, sizes in found.items()
    }


def lines_of(points: Mapping[tuple[str, str], Sequence[Point]]) -> dict[str, list[Point]]:
    """Return the three lines of a panel."""
    [plain] = points[PLAIN]
    others = [
        point
        for name, line in points.items()
        if name not in (PLAIN, CODED, TAIL, WHOLE_TAIL) and "counts" not in name[1]
        for point in (line if name[0] != "tail" else ())
    ]
    sizes: dict[int, Point] = {}  # the best one of each size, a power of two
    for point in others:
        slot = round(math.log2(plain[0] / point[0]))
        sizes[slot] = max(point, sizes.get(slot, point), key=lambda each: each[1])
    best = [  # no other one of fewer bytes is as good
        point
        for slot, point in sorted(sizes.items())
        if all(point[1] > other[1] for smaller, other in sizes.items() if smaller > slot)
    ]
    return {
        "other": [plain, *best],
        "coded": [plain, *points[CODED]],
        "tail": [*points[WHOLE_TAIL], *points[TAIL]],
    }


def draw(result: Mapping[str, Any], theme: str, columns: int = 3) -> str:
    """Return the figure as SVG."""
    color = THEMES[theme]
    cells = result["cells"]
    logs = [log for log in LOGS if any(cell["log"] == log for cell in cells)]
    seeds = len({cell["seed"] for cell in cells})
    *places, last = [
        (12 + ACROSS * (number % columns), 8 + DOWN * (number // columns))
        for number in range(len(logs) + 1)
    ]
    parts = [
        _panel(log, means(cells, log), color, x=x, y=y)
        for log, (x, y) in zip(logs, places, strict=True)
    ]
    parts.append(_legend(color, *last, seeds=seeds))
    width, height = ACROSS * columns + 8, last[1] + DOWN
    title = (
        f"Bytes of the tables against test AUC on {len(logs)} logs: {', '.join(LABELS.values())}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="-apple-system,Segoe UI,Helvetica,Arial,sans-serif" font-size="13">\n'
        f"<title>{escape(title)}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(
    log: str,
    points: Mapping[tuple[str, str], Sequence[Point]],
    color: Mapping[str, str],
    x: int,
    y: int,
) -> str:
    """Return one log's panel."""
    left, top, width, height = x + 44, y + 30, 204, 168
    [(whole, plain)] = points[PLAIN]

    def place(point: Point) -> Point:
        across = math.log(whole / point[0]) / math.log(SMALLEST)
        return left + width * across, top + height * (plain + ABOVE - point[1]) / (ABOVE + BELOW)

    out = [_text(left, y + 18, LOGS[log], color["text"], weight=600)]
    for tick in range(math.ceil((plain - BELOW) / STEP), math.floor((plain + ABOVE) / STEP) + 1):
        height_at = place((whole, tick * STEP))[1]
        out.append(_rule(left, height_at, left + width, height_at, color["grid"]))
        out.append(
            _text(left - 6, height_at + 4, f"{tick * STEP:.2f}", color["quiet"], anchor="end")
        )
    for part in (1, 4, 16, 64):
        at = place((whole / part, plain))[0]
        out.append(_rule(at, top + height, at, top + height + 4, color["quiet"]))
        label = "1" if part == 1 else f"1/{part}"
        out.append(_text(at, top + height + 18, label, color["quiet"], anchor="middle"))
        if part in (1, 16):
            out.append(
                _text(at, top + height + 33, size(whole / part), color["quiet"], anchor="middle")
            )
    level = place((whole, plain))[1]
    out.append(_rule(left, level, left + width, level, color["text"], dashes="5 4"))
    clip = f"clip-{log}"
    out.append(
        f'<clipPath id="{clip}"><rect x="{left - 6}" y="{top - 4}" width="{width + 12}" height="{height + 4}"/></clipPath>'
    )
    out.append(f'<g clip-path="url(#{clip})">')
    for kind, line in lines_of(points).items():
        out.append(_line(kind, [place(point) for point in line], color))
    out.append(_marker("plain", *place((whole, plain)), color))
    out.append("</g>")
    return "\n".join(out)


def _legend(color: Mapping[str, str], x: int, y: int, seeds: int) -> str:
    """Return what the lines are, in the place of the last panel."""
    lines = [
        ("tail", "tail + evidence coding", "ours: better and smaller"),
        ("coded", "evidence coding", "ours: smaller"),
        ("other", "best other compressor", "at each size, trained or not"),
        ("plain", "plain tables, 32 bits", "not tuned"),
    ]
    out = []
    for number, (kind, name, note) in enumerate(lines):
        at = y + 44 + 40 * number
        if kind == "plain":
            out.append(_rule(x + 14, at, x + 48, at, color["text"], dashes="5 4"))
            out.append(_marker(kind, x + 31, at, color))
        else:
            out.append(_line(kind, [(x + 14, at), (x + 31, at), (x + 48, at)], color))
        out.append(_text(x + 58, at + 1, name, color["text"], weight=600))
        out.append(_text(x + 58, at + 17, note, color["quiet"]))
    notes = (
        "up: test AUC, the same scale",
        "right: bytes of the tables",
        f"DCN-V2, mean of up to {seeds} seeds",
    )
    for number, note in enumerate(notes):
        out.append(_text(x + 14, y + 212 + 17 * number, note, color["quiet"]))
    return "\n".join(out)


def _line(kind: str, places: Sequence[Point], color: Mapping[str, str]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="2 3"' if kind == "other" else ""
    line = (
        f'<polyline points="{path}" fill="none" stroke="{color[kind]}" stroke-width="2"{dashes}/>'
    )
    return "\n".join([line, *(_marker(kind, x, y, color) for x, y in places)])


def _marker(kind: str, x: float, y: float, color: Mapping[str, str]) -> str:
    """Return a point; each kind has its own shape, for those who see no colours."""
    if kind == "tail":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color[kind]}"/>'
    if kind == "coded":
        return (
            f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" fill="{color[kind]}"/>'
        )
    if kind == "other":
        path = f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9z"
        return (
            f'<path d="{path}" fill="{color["page"]}" stroke="{color[kind]}" stroke-width="1.5"/>'
        )
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color["page"]}" stroke="{color["text"]}" stroke-width="2"/>'


def _rule(x1: float, y1: float, x2: float, y2: float, color: str, *, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dashed}/>'
    )


def _text(
    x: float, y: float, text: str, color: str, *, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


if __name__ == "__main__":
    main()
