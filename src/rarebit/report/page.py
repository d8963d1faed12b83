"""The parts of a page as HTML: text, verdicts, tables, and charts that keep the size of their letters at any width.

A chart is a grid of plain text (its axes) around an SVG that stretches. Points are strokes of no length, which do not stretch with
it. What a chart shows is also in a table or in its text, so it counts as one image for screen readers.

    page        the whole file
    verdict     what comes first, with the colour of its kind
    forest      differences with their intervals, one per line
    chart       lines or points over two axes
    bars        amounts
    table       figures; the first column is text
"""

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What no page may hold, or what turns the direction of writing."""
COLOURS = 8
"""Series of one chart that differ by colour."""

Kind = Literal["good", "bad", "doubt", "none"]


def text(value: object) -> str:
    """Return a text for HTML: nothing in it is markup.

    >>> text("<b>a&b")
    '&lt;b&gt;a&amp;b'
    """
    clean = CONTROL.sub("", str(value)).encode(errors="replace").decode()
    return html.escape(clean)


def page(title: str, body: Iterable[str]) -> str:
    """Return the file of a page."""
    frame = (files("rarebit.report") / "page.html").read_text("utf-8")
    head, middle, tail = re.split(r"\{\{(?:title|body)\}\}", frame)
    return f"{head}{text(title)}{middle}{chr(10).join(body)}{tail}"


def heading(words: str, level: int = 2) -> str:
    """Return a heading."""
    return f"<h{level}>{_breakable(words)}</h{level}>"


def paragraph(words: str, *, quiet: bool = False) -> str:
    """Return a paragraph."""
    return f"<p{' class=quiet' if quiet else ''}>{text(words)}</p>"


def verdict(kind: Kind, lead: str, *more: str) -> str:
    """Return the sentence that a page is about, and what belongs to it."""
    lines = "".join(f"<p>{text(line)}</p>" for line in more)
    return f'<div class="verdict {kind}"><p class="lead">{text(lead)}</p>{lines}</div>'


def facts(values: Mapping[str, str]) -> str:
    """Return a few figures with their names, large."""
    cells = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in values.items())
    return f'<dl class="facts">{cells}</dl>'


def figure(title: str, *parts: str, note: str = "") -> str:
    """Return a chart with its title and what it shows."""
    below = f"<p>{text(note)}</p>" if note else ""
    caption = f'<figcaption><p class="title">{_breakable(title)}</p>{below}</figcaption>'
    return f"<figure>{caption}{''.join(parts)}</figure>"


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    words: Sequence[str] = (),
    label: str,
) -> str:
    """Return a table that can be sorted; the first column and those named in `words` are text."""
    left = {0} | {place for place, name in enumerate(header) if name in words}

    def cell(tag: str, place: int, value: object) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        kind = ' class="t"' if place in left else ""
        return f"<{tag}{scope}{kind}>{_breakable(value) if place in left else text(value)}</{tag}>"

    head = "".join(cell("th", place, name) for place, name in enumerate(header))
    body = "".join(
        f"<tr>{''.join(cell('td', place, value) for place, value in enumerate(row))}</tr>\n"
        for row in rows
    )
    # a region that scrolls must be reachable by keyboard
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}"><table class="sort">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def details(summary: str, *parts: str, settings: bool = False) -> str:
    """Return something to unfold; settings are unfolded in print."""
    kind = ' class="settings"' if settings else ""
    return f"<details{kind}><summary>{text(summary)}</summary>{''.join(parts)}</details>"


def code(lines: str) -> str:
    """Return text to copy."""
    return f'<pre tabindex="0"><code>{text(lines)}</code></pre>'


@dataclass(frozen=True)
class Interval:
    """One line of a forest plot."""

    name: str
    against: str
    mean: float
    low: float | None
    high: float | None
    """None for an interval that is not known."""
    tag: str
    kind: Kind


def forest(lines: Sequence[Interval], *, least: float) -> str:
    """Return differences with their intervals. Between -`least` and `least` a difference is too small to matter."""
    ends = [x for one in lines for x in (one.mean, one.low, one.high) if x is not None]
    scale = Scale.around([0.0, 2 * least, -2 * least, *ends])

    def at(value: float) -> str:
        return f"{100 * scale.place(value):.2f}%"

    ground = (
        f'<rect class="band" x="{at(-least)}" width="{100 * (scale.place(least) - scale.place(-least)):.2f}%" '
        f'height="100%"/><line class="zero" x1="{at(0)}" x2="{at(0)}" y2="100%"/>'
    )
    rows = []
    for one in lines:
        marks = f'<circle cx="{at(one.mean)}" cy="50%" r="4.5"/>'
        if one.low is not None and one.high is not None:
            marks += f'<line x1="{at(one.low)}" x2="{at(one.high)}" y1="50%" y2="50%"/>'
        interval = "no interval: one seed"
        if one.low is not None and one.high is not None:
            interval = f"{signed(one.low)} to {signed(one.high)}"
        tip = text(f"{one.name}: {signed(one.mean)}, {interval}")
        rows.append(
            f'<li><span class="name">{_breakable(one.name)}<small>against {_breakable(one.against)}</small></span>'
            f'<svg aria-hidden="true">{ground}<g class="mark {one.kind}">{marks}</g>'
            f'<rect width="100%" height="100%" fill="transparent" data-t="{tip}"/></svg>'
            f'<span class="figure">{signed(one.mean)} <small>({interval})</small></span>'
            f'<span class="tag {one.kind}">{text(one.tag)}</span></li>'
        )
    ticks = "".join(
        f'<span style="left:{at(tick)}">{format(tick, scale.form("+"))}</span>'
        for tick in scale.ticks
        if 0.05 < scale.place(tick) < 0.95  # letters stay inside the page
    )
    axis = f'<li aria-hidden="true"><span></span><div class="axis">{ticks}</div></li>'
    return f'<ol class="forest">{"".join(rows)}{axis}</ol>'


def signed(value: float) -> str:
    """Return a difference in AUC as text; one that rounds to zero has no minus.

    >>> signed(-0.00001), signed(-0.0012)
    ('+0.0000', '-0.0012')
    """
    return f"{round(value, 4) + 0.0:+.4f}"


@dataclass(frozen=True)
class Series:
    """Points of a chart that belong together."""

    name: str
    points: Sequence[tuple[float, float]]
    tips: Sequence[str] = ()
    """What is shown over each point."""
    colour: int = 0
    dashes: int = 0


def chart(
    series: Sequence[Series],
    *,
    label: str,
    x: "Scale | None" = None,
    y: "Scale | None" = None,
    x_unit: str = "",
    y_unit: str = "",
    lines: bool = True,
    zero: bool = False,
    legend: bool = True,
) -> str:
    """Return lines through points, or points alone; nothing where there is no point."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    x = x or Scale.around([x for x, _ in points])
    y = y or Scale.around([y for _, y in points] + ([0.0] if zero else []))

    def at(point: tuple[float, float]) -> str:
        return f"{1000 * x.place(point[0]):.0f} {1000 - 1000 * y.place(point[1]):.0f}"

    grid = "".join(f"M0 {1000 - 1000 * y.place(tick):.0f}h1000" for tick in y.ticks)
    drawn = [f'<path class="grid" d="{grid}"/>']
    if zero and y.place(0.0) > 0:
        drawn.append(f'<path class="zero" d="M0 {1000 - 1000 * y.place(0.0):.0f}h1000"/>')
    for one in series:
        marks = f'<g class="s{one.colour % COLOURS}">'
        if lines and len(one.points) > 1:
            dashes = f" d{one.dashes}" if one.dashes else ""
            marks += f'<path class="l{dashes}" d="M{"L".join(map(at, one.points))}"/>'
        tips = one.tips or [""] * len(one.points)
        marks += "".join(
            f'<path class="p" d="M{at(point)}h0"{f" data-t={quoted(tip)}" if tip else ""}/>'
            for point, tip in zip(one.points, tips, strict=True)
        )
        drawn.append(f"{marks}</g>")
    across = "".join(
        f'<span style="left:{100 * x.place(tick):.1f}%">{x.show(tick)}</span>' for tick in x.ticks
    )
    up = "".join(
        f'<span style="bottom:{100 * y.place(tick):.1f}%">{y.show(tick)}</span>' for tick in y.ticks
    )
    axes = f'<div class="y">{up}</div>', f'<div class="x">{across}</div>'
    svg = f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none">{"".join(drawn)}</svg>'
    inside = f'{axes[0]}<div class="plot">{svg}</div>{axes[1]}'
    parts = [
        f'<p class="unit">{text(y_unit)}</p>' if y_unit else "",
        f'<div class="chart" role="img" aria-label="{text(label)}">{inside}</div>',
        f'<p class="unit below">{text(x_unit)}</p>' if x_unit else "",
        _legend(series, lines=lines) if legend and (len(series) > 1 or series[0].name) else "",
    ]
    return "".join(parts)


def _legend(series: Sequence[Series], *, lines: bool) -> str:
    items = []
    for one in series:
        stroke = f'<path class="l d{one.dashes}" d="M0 6h22"/>' if lines else ""
        mark = f'{stroke}<path class="p" d="M11 6h0"/>'
        items.append(
            f'<li><svg class="s{one.colour % COLOURS}" width="22" height="12" aria-hidden="true">{mark}</svg>'
            f"{_breakable(one.name)}</li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def bars(amounts: Mapping[str, float], shown: Mapping[str, str]) -> str:
    """Return amounts as bars, each with its figure."""
    most = max(amounts.values(), default=0.0) or 1.0
    lines = "".join(
        f'<dt>{_breakable(name)}</dt><dd><i style="width:{100 * amount / most:.1f}%"></i><b>{text(shown[name])}</b></dd>'
        for name, amount in amounts.items()
    )
    return f'<dl class="bars">{lines}</dl>'


@dataclass(frozen=True)
class Scale:
    """An axis: from where to where, by a logarithm or not, and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False
    names: Mapping[float, str] | None = None

    @classmethod
    def around(cls, values: Iterable[float], *, most: int = 6) -> "Scale":
        """Return a scale around values, with round ticks.

        >>> Scale.around([0.71, 0.746]).ticks
        (0.71, 0.72, 0.73, 0.74)
        """
        known = [value for value in values if math.isfinite(value)]
        low, high = min(known), max(known)
        margin = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
        low, high = low - margin, high + margin
        rough = (high - low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
        first, last = math.ceil(low / step), math.floor(high / step)
        return cls(low, high, tuple(round(n * step, 12) for n in range(first, last + 1)))

    @classmethod
    def counting(cls, last: int) -> "Scale":
        """Return a scale of the numbers 1, 2, ..."""
        step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**6) if last / n <= 12)
        ticks = tuple(float(n) for n in range(1, last + 1) if n == 1 or n % step == 0)
        return cls(0.7, max(last, 2) + 0.3, ticks)

    @classmethod
    def of_bytes(cls, values: Iterable[float]) -> "Scale":
        """Return a logarithmic scale of bytes: each tick twice or ten times the last one."""
        known = [max(value, 1.0) for value in values]
        low, high = 0.85 * min(known), 1.18 * max(known)
        factor = 2.0 if high / low < 50 else 10.0 if high / low > 2000 else 4.0
        unit = 10.0 ** (3 * int(math.log10(max(known)) / 3))
        first = math.ceil(math.log(low / unit, factor))
        last = math.floor(math.log(high / unit, factor))
        ticks = [unit * factor**n for n in range(first, last + 1)] or [max(known)]
        return cls(low, high, tuple(ticks), True, {tick: short_size(tick) for tick in ticks})

    @classmethod
    def of_powers(cls, values: Iterable[float]) -> "Scale":
        """Return a logarithmic scale with a tick for each power of ten."""
        known = [value for value in values if value > 0]
        low, high = 0.8 * min(known, default=1.0), 1.25 * max(known, default=10.0)
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        every = max(1, (last - first) // 4 + 1)
        ticks = [10.0**n for n in range(first, last + 1, every)] or [high]
        return cls(low, high, tuple(ticks), True, {tick: f"{tick:,.4g}" for tick in ticks})

    def place(self, value: float) -> float:
        """Return where a value is, from 0 to 1."""
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def form(self, sign: str = "") -> str:
        """Return the format of its ticks: as many digits as two of them need to differ."""
        steps = [b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)]
        digits = 0 if not steps else max(0, -math.floor(math.log10(min(steps)) + 1e-9))
        if steps and round(min(steps) * 10**digits, 6) % 1:  # 2.5
            digits += 1
        return f"{sign},.{digits}f"

    def show(self, tick: float) -> str:
        """Return a tick as text."""
        return self.names[tick] if self.names is not None else format(tick, self.form())


def short_size(num_bytes: float) -> str:
    """Return bytes with at most three digits.

    >>> short_size(1_500_000), short_size(250)
    ('1.5 MB', '250 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def toml(values: Mapping[str, Any]) -> str:
    """Return settings as a TOML file: first plain values, then tables and lists of tables. None is left out.

    >>> print(toml({"seeds": 5, "model": [{"name": "fm", "dim": 4}]}))
    seeds = 5
    <BLANKLINE>
    [[model]]
    name = "fm"
    dim = 4
    """
    lines, below = [], []
    for key, value in values.items():
        if isinstance(value, Mapping):
            below.append((f"[{key}]", value))
        elif isinstance(value, list) and value and all(isinstance(x, Mapping) for x in value):
            below += [(f"[[{key}]]", one) for one in value]
        elif value is not None:
            lines.append(f"{_key(key)} = {_toml_value(value)}")
    parts = ["\n".join(lines)] if lines else []
    for head, table in below:
        body = [f"{_key(k)} = {_toml_value(v)}" for k, v in table.items() if v is not None]
        parts.append("\n".join([head, *body]))
    return "\n\n".join(parts)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None)
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # JSON's numbers, booleans and texts are TOML's, but for DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def quoted(words: str) -> str:
    """Return a text as an attribute in quotes."""
    return f'"{text(words)}"'


def _breakable(words: object) -> str:
    """Return a text for HTML that may be broken between the parts of a name."""
    return re.sub(r"(?<=[+:,_/=])(?=\w)", "<wbr>", text(words))
