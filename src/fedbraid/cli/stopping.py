"""Ctrl-C and SIGTERM: what was done is kept, and the exit status says which of them ended the command.

Exit statuses: 0 done, 1 an error of the operating system (such as a full disk), 2 a mistake in the input, 130 stopped
by Ctrl-C, 143 stopped by SIGTERM, which schedulers send.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from types import FrameType

__all__ = ["BY_CTRL_C", "BY_SIGTERM", "Terminated", "catch_sigterm", "exit_status"]

BY_CTRL_C, BY_SIGTERM = 130, 143
AGAIN = 0.05  # seconds


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM. It is handled like Ctrl-C."""


def _raise(number: int, frame: FrameType | None) -> None:
    if _in_gc_callback(frame):  # Python ignores exceptions there, so the signal is sent again, after the callback
        threading.Timer(AGAIN, os.kill, (os.getpid(), number)).start()
        return
    raise Terminated


def _in_gc_callback(frame: FrameType | None) -> bool:
    """Whether a frame runs inside a callback of the garbage collector. jax has such a callback."""
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


def catch_sigterm() -> None:
    """Let SIGTERM raise `Terminated` from now on. Only a main thread can do this; elsewhere nothing changes."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise)


def exit_status(stopped: KeyboardInterrupt) -> int:
    """The exit status of a command that was stopped."""
    return BY_SIGTERM if isinstance(stopped, Terminated) else BY_CTRL_C
