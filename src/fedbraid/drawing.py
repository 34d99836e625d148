"""One palette and one look for all pictures."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "AMBER",
    "BLACK",
    "BLUE",
    "COLOURS",
    "DASHES",
    "GREEN",
    "GREY",
    "ORANGE",
    "PINK",
    "SKY",
    "YELLOW",
    "bars_svg",
    "figure_html",
    "image_html",
    "lines_svg",
    "log_scale",
    "style",
    "table_html",
    "tidy",
    "whole_numbers",
]

# The colours of Okabe and Ito, which colour-blind readers can tell apart. Yellow is left out of COLOURS because it is
# hard to see on white.
BLUE, ORANGE, GREEN, PINK, SKY, AMBER, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#444444",
)
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, AMBER, GREY)
YELLOW, BLACK = "#F0E442", "#000000"
DASHES = ("-", "--", ":", "-.")


def style(i: int) -> dict[str, Any]:
    """Colour and dashes of series ``i``: the dashes change when all colours are used.

    >>> style(0), style(7)
    ({'color': '#0072B2', 'ls': '-'}, {'color': '#0072B2', 'ls': '--'})
    """
    return {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[(i // len(COLOURS)) % len(DASHES)]}


def tidy(axis: Any) -> None:
    """A faint grid, and only the left and the bottom edge of the frame."""
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def log_scale(axis: Any) -> None:
    """A logarithmic y axis with plain numbers: 4.8 and 0.02, not 4.8 x 10^0 and 2 x 10^-2."""
    from matplotlib.ticker import LogFormatterSciNotation

    class Plain(LogFormatterSciNotation):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""  # matplotlib chooses which ticks have a label

    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(Plain())
    axis.yaxis.set_minor_formatter(Plain())


def whole_numbers(axis: Any) -> None:
    """Ticks of the x axis only at whole numbers, such as rounds."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))


# --- notebooks: small tables and pictures ----------------------------------------------------------------------------


def table_html(rows: Sequence[Sequence[Any]], heads: Sequence[str] = ()) -> str:
    """A small table whose first column names its rows.

    >>> "rounds</th>" in table_html([("rounds", "<5")]), "&lt;5</td>" in table_html([("rounds", "<5")])
    (True, True)
    """
    left = 'style="text-align:left"'
    head = "".join(f"<th {left}>{html.escape(str(one))}</th>" for one in heads)
    body = "".join(
        f"<tr><th {left}>{html.escape(str(row[0]))}</th>"
        + "".join(f"<td {left}>{html.escape(str(cell))}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if heads else ''}<tbody>{body}</tbody></table>"


def image_html(png: bytes, about: str) -> str:
    """A PNG inside a page; ``about`` describes it for those who cannot see it."""
    data = base64.b64encode(png).decode()
    return f'<img alt="{html.escape(about)}" style="max-width:100%" src="data:image/png;base64,{data}">'


def figure_html(figure: Any, about: str) -> str:
    """A matplotlib figure inside a page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90, format="png")
    return image_html(buffer.getvalue(), about)


def lines_svg(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str = "") -> str:
    """Lines as a small SVG, without matplotlib: ``lines`` has (x, y) by label; ``x`` and ``y`` name the axes."""
    points = {
        label: [(float(a), float(b)) for a, b in zip(*line, strict=True) if math.isfinite(a) and math.isfinite(b)]
        for label, line in lines.items()
    }
    points = {label: line for label, line in points.items() if line}
    if not points:
        return ""
    every = [point for line in points.values() for point in line]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*every, strict=True))
    width, edge, top = 420, 44, 10 + 13 * -(-len(points) // 2)  # the labels stand above the lines
    height = top + 142
    across, up = (right - left) or 1.0, (high - low) or 1.0

    def place(point: tuple[float, float]) -> str:
        across_by, up_by = (point[0] - left) / across, (high - point[1]) / up
        return f"{edge + across_by * (width - edge - 8):.1f},{top + up_by * (height - top - 36):.1f}"

    parts = []
    for i, (label, line) in enumerate(points.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(map(place, line))
        mark = (
            f'<circle cx="{place(line[0]).split(",")[0]}" cy="{place(line[0]).split(",")[1]}" r="2.5" fill="{colour}"/>'
        )
        drawn = f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>'
        parts.append(drawn if len(line) > 1 else mark)
        words = f"{html.escape(label)} {line[-1][1]:.4g}"
        parts.append(f'<text x="{edge + 6 + 190 * (i % 2)}" y="{14 + 13 * (i // 2)}" fill="{colour}">{words}</text>')
    axes = [
        f'<text x="{edge - 4}" y="{top + 8}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{edge - 4}" y="{height - 36}" text-anchor="end">{low:.3g}</text>',
        f'<text x="{edge}" y="{height - 20}">{left:g}</text>',
        f'<text x="{width - 8}" y="{height - 20}" text-anchor="end">{right:g}</text>',
        f'<text x="{(edge + width) / 2}" y="{height - 6}" text-anchor="middle">{html.escape(x)}</text>',
        f'<text x="2" y="{(top + height) / 2 - 14}">{html.escape(y)}</text>',
        f'<path d="M{edge} {top - 2}V{height - 34}H{width - 6}" fill="none" stroke="currentColor" opacity=".4"/>',
    ]
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-size="11" fill="currentColor" '
        f'font-family="sans-serif" role="img">{"".join([*axes, *parts])}</svg>'
    )


def bars_svg(values: Mapping[str, float]) -> str:
    """Numbers that are not negative as horizontal bars, a small SVG."""
    known = {name: value for name, value in values.items() if math.isfinite(value) and value >= 0}
    most = max(known.values(), default=0.0)
    if most <= 0:
        return ""
    rows = "".join(
        f'<text x="120" y="{18 * i + 14}" text-anchor="end">{html.escape(name)}</text>'
        f'<rect x="126" y="{18 * i + 3}" width="{max(220 * value / most, 1):.1f}" height="13" fill="{BLUE}"/>'
        f'<text x="{132 + 220 * value / most:.1f}" y="{18 * i + 14}">{value:.3g}</text>'
        for i, (name, value) in enumerate(known.items())
    )
    high = 18 * len(known) + 6
    return (
        f'<svg viewBox="0 0 420 {high}" width="420" height="{high}" font-size="11" fill="currentColor" '
        f'font-family="sans-serif" role="img">{rows}</svg>'
    )
