"""The library's notices as lines on the console."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from fedbraid.notices import LOGGER

__all__ = ["as_notes"]


class _Lines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(f"[yellow]note:[/] {escape(record.getMessage())}", soft_wrap=True)


@contextlib.contextmanager
def as_notes(console: Console) -> Iterator[None]:
    """Print notices of the library on ``console`` while this context is open."""
    handler, passed_on = _Lines(console), LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.propagate = False  # else a handler of the root logger would print them a second time
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.propagate = passed_on
