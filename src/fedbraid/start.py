"""The first import of the package: Ctrl-C while the command line still imports ends it without a traceback.

It does nothing in other programs that import fedbraid.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["is_command", "started"]

NAME = __name__.partition(".")[0]


def is_command(words: list[str]) -> bool:
    """Whether a process with these arguments is the command line of fedbraid.

    >>> is_command(["/usr/bin/python3", "-m", "fedbraid", "run"]), is_command(["python", "-m", "pytest"])
    (True, False)
    """
    as_module = any(words[i : i + 2] == ["-m", NAME] for i in range(1, 3))
    return as_module or any(Path(word).name in (NAME, f"{NAME}.exe") for word in words[:2])


def _leave(*_: Any) -> None:
    # at once: an exception during an import is turned into others by the modules that import
    os._exit(130)


def started() -> None:
    """The imports are done: from now on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if (
    is_command(sys.orig_argv)
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _leave)
