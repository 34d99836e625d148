"""One palette and one look for all pictures."""

from __future__ import annotations

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
    "style",
    "tidy",
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
