"""Notices in tests: a test must name the notices that it expects; any other notice fails it."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from fedbraid.notices import LOGGER


class Collector(logging.Handler):
    """Keeps the texts of notices."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def collecting() -> Iterator[list[str]]:
    """The texts of all notices inside this context; an outer context does not get them."""
    collector, before = Collector(), list(LOGGER.handlers)
    LOGGER.handlers[:] = [collector]
    try:
        yield collector.texts
    finally:
        LOGGER.handlers[:] = before


@contextlib.contextmanager
def told(match: str) -> Iterator[list[str]]:
    """Like ``pytest.warns``: at least one notice must match."""
    with collecting() as texts:
        yield texts
    assert any(re.search(match, text) for text in texts), f"no notice matches {match!r}: {texts}"
