"""Draws docs/images/architecture.svg from the table in docs/architecture.md: ``python docs/architecture.py``."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
PICTURE = PAGE.parent / "images" / "architecture.svg"

# Where the rooms stand: (centre, row). A room stands higher than all rooms that it may import; chosen by hand so that
# no arrow passes behind a box.
PLACES = {
    "testing": (350, 0),
    "cli": (490, 0),
    "reproduce": (242, 1),
    "flower": (389, 1),
    "fedbraid": (395, 2),
    "start": (287, 3),
    "experiment": (459, 3),
    "version": (225, 4),
    "simulation": (353, 4),
    "theory": (514, 4),
    "algorithms": (659, 4),
    "models": (795, 4),
    "costs": (80, 5),
    "sealed": (219, 5),
    "address": (343, 5),
    "units": (485, 5),
    "lowering": (795, 5),
    "masking": (66, 6),
    "data": (235, 6),
    "transforms": (595, 6),
    "metric": (729, 6),
    "files": (66, 7),
    "names": (218, 7),
    "drawing": (529, 7),
    "local": (795, 7),
    "notices": (66, 8),
    "recipes": (287, 8),
    "problems": (413, 8),
    "limited_json": (537, 8),
    "core": (702, 8),
}
STATIONS = (  # the way of a run: what, where, and a word on it
    ("configuration", "experiment", "TOML and --set, checked"),
    ("assemble", "experiment", "model, loss, metrics, algorithm"),
    ("RoundLoop", "simulation", "program + feed + schedule"),
    ("results", "simulation", "params, states, history"),
    ("report", "experiment", "tables, pictures, run folder"),
)
WIDTH, HEIGHT, LEFT = 1240, 760, 850  # of the picture, and of its left part
BOX, HIGH = 112, 34  # a room


def allowed(page: str) -> dict[str, set[str]]:
    """The table of the page: for every room, the rooms that it may import."""
    found = re.search(r"^```layers\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError("the page has no block ```layers with one line 'room -> rooms it may import' per room")
    table: dict[str, set[str]] = {}
    for line in found[1].splitlines():
        room, arrow, targets = line.partition("->")
        if not arrow or room.strip() in table:
            raise ValueError(f"one line 'room -> rooms' per room, got {line!r}")
        table[room.strip()] = {target.strip() for target in targets.split(",")} - {""}
    unknown = {target for targets in table.values() for target in targets} - table.keys()
    if unknown:
        raise ValueError(f"rooms without a line of their own: {sorted(unknown)}")
    return table


def reduced(table: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that do not follow from two or more others."""
    reach: dict[str, set[str]] = {}
    for room in TopologicalSorter(table).static_order():  # what is imported comes first
        reach[room] = table[room] | {far for near in table[room] for far in reach[near]}
    return {room: near - {far for other in near for far in reach[other]} for room, near in table.items()}


def places() -> dict[str, tuple[float, float]]:
    """The centre of every room's box."""
    return {room: (x, 62 + row * 80) for room, (x, row) in PLACES.items()}


def _box(x: float, y: float, wide: float, high: float, kind: str) -> str:
    corner = f'x="{x - wide / 2:.0f}" y="{y - high / 2:.0f}"'
    return f'<rect class="{kind}" {corner} width="{wide:.0f}" height="{high:.0f}"/>'


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{words}</text>'


def _arrow(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    line = f'x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"'
    return f'<line class="{kind}" {line} marker-end="url(#{kind})"/>'


def draw(table: dict[str, set[str]]) -> str:
    """The picture as SVG."""
    at = places()
    missing = table.keys() ^ at.keys()
    if missing:
        raise ValueError(f"the picture and the table differ in their rooms: {sorted(missing)}")
    parts = []
    for room, targets in reduced(table).items():
        for target in sorted(targets):
            (x1, y1), (x2, y2) = at[room], at[target]
            if y1 >= y2:
                raise ValueError(f"{room} may import {target}, so it must stand above it in PLACES")
            lean = (x2 - x1) / 12  # leave and arrive on the side that faces the other room
            lean = max(-BOX / 2.4, min(BOX / 2.4, lean))
            parts.append(_arrow(x1 + lean, y1 + HIGH / 2, x2 - lean, y2 - HIGH / 2 - 2, "import"))
    for room, (x, y) in at.items():
        parts += [_box(x, y, BOX, HIGH, "room"), _text(x, y + 5, room, "name")]
    x, step = LEFT + 190, 112
    parts.append(_text(x, 40, "the way of a run", "title"))
    parts.append(_text(135, 40, "who may import whom", "title"))
    for i, (what, where, about) in enumerate(STATIONS):
        y = 100 + i * step
        parts += [_box(x, y, 250, 64, "station"), _text(x, y - 10, what, "name")]
        parts += [_text(x, y + 8, f"in {where}", "small"), _text(x, y + 24, about, "small")]
        if i:
            parts.append(_arrow(x, y - step + 32, x, y - 34, "run"))
    y = 100 + len(STATIONS) * step
    parts += [_box(x, y, 250, 64, "station"), _text(x, y - 10, "deploy", "name")]
    parts += [_text(x, y + 8, "in flower, from what assemble made", "small")]
    parts += [_text(x, y + 24, "messages replace the program", "small")]
    side = x + 125  # beside the boxes, from assemble down to deploy
    parts += [
        f'<path class="run" d="M {side} {100 + step} H {side + 30} V {y} H {side + 2}" marker-end="url(#run)"/>',
        "</svg>",
    ]
    return "\n".join([_head(), *parts]) + "\n"


def _head() -> str:
    tips = "".join(
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{colour}"/></marker>'
        for kind, colour in (("import", "#5b6b7b"), ("run", "#b3541e"))
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">
<title>The rooms of fedbraid, who may import whom, and the way of a run</title>
<style>
.room {{ fill: #eef3f8; stroke: #5b6b7b; }} .station {{ fill: #fdf1e7; stroke: #b3541e; }}
.import {{ stroke: #5b6b7b; stroke-width: 1.2; }} .run {{ stroke: #b3541e; stroke-width: 1.8; fill: none; }}
.name {{ font-size: 15px; text-anchor: middle; fill: #1b2733; }}
.small {{ font-size: 12px; text-anchor: middle; fill: #48535e; }}
.title {{ font-size: 17px; text-anchor: middle; font-weight: bold; fill: #1b2733; }}
</style>
<defs>{tips}</defs>
<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"""


if __name__ == "__main__":
    PICTURE.write_text(draw(allowed(PAGE.read_text())))
    print(PICTURE)
