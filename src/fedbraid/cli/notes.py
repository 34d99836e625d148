"""What the library warns of, as a line that people read."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape

__all__ = ["as_notes"]


@contextlib.contextmanager
def as_notes(console: Console) -> Iterator[None]:
    """What the library warns its caller of is one line here; other people's warnings are shown as they are."""
    before = warnings.showwarning

    def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
        if category is UserWarning:
            console.print(f"[yellow]note:[/] {escape(str(message))}", soft_wrap=True)
        else:
            before(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
