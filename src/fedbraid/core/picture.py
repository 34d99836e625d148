"""The picture of a round that a notebook shows for an algorithm."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["picture"]

WIDE = 150  # pixels per exchange


def picture(exchanges: Sequence[str]) -> str:
    """An SVG of a round: the server above, the clients below, and the exchanges, by name, between them."""
    parts = [
        f'<text x="{WIDE * i + 75}" y="62" text-anchor="middle">{html.escape(name)}</text>'
        f'<path d="M{WIDE * i + 45} 30V86m-4-8l4 8 4-8M{WIDE * i + 105} 90V34m-4 8l4-8 4 8" fill="none" '
        'stroke="#0072B2" stroke-width="1.6"/>'
        for i, name in enumerate(exchanges)
    ]
    across = WIDE * max(len(parts), 1)
    bars = "".join(
        f'<rect x="1" y="{y}" width="{across - 2}" height="26" rx="5" fill="none" stroke="currentColor"/>'
        f'<text x="{across / 2}" y="{y + 17}" text-anchor="middle">{name}</text>'
        for y, name in ((2, "server"), (92, "clients"))
    )
    return (
        f'<svg viewBox="0 0 {across} 120" width="{across}" height="120" font-size="12" fill="currentColor" '
        f'font-family="sans-serif" role="img">{bars}{"".join(parts)}</svg>'
    )
