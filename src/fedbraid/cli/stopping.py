"""Ctrl-C and SIGTERM: what was done is kept, and the exit status says which of them ended the command.

Exit statuses: 0 done, 1 an error of the operating system (such as a full disk), 2 a mistake in the input, 130 stopped
by Ctrl-C, 143 stopped by SIGTERM, which schedulers send.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["BY_CTRL_C", "BY_SIGTERM", "Terminated", "catch_sigterm", "exit_status"]

BY_CTRL_C, BY_SIGTERM = 130, 143
AGAIN = 0.05  # seconds


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM. It is handled like Ctrl-C."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated


def catch_sigterm() -> None:
    """Let SIGTERM raise `Terminated` from now on. Only a main thread can do this; elsewhere nothing changes.

    Python drops an exception that is raised while the garbage collector or a weak reference calls back, which happens
    often inside jax. A stop that was dropped there is sent again, be it SIGTERM or Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _raise)
    if not isinstance(sys.unraisablehook, _SendAgain):
        sys.unraisablehook = _SendAgain(sys.unraisablehook)


class _SendAgain:
    """Called by Python with each exception that it drops: a stop is sent again a moment later."""

    def __init__(self, others: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self.others = others
        self.waiting = False

    def __call__(self, dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            self.others(dropped)
            return
        if not self.waiting:  # one stop, however often it is dropped
            self._send_later(dropped.exc_value)

    def _send_later(self, stop: KeyboardInterrupt) -> None:
        self.waiting = True
        number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        timer = threading.Timer(AGAIN, self._send, (number,))
        timer.daemon = True
        try:
            timer.start()
        except KeyboardInterrupt as again:  # on a busy machine the stop may arrive here, and Python would drop it, too
            self._send_later(again)

    def _send(self, number: int) -> None:
        self.waiting = False
        os.kill(os.getpid(), number)


def exit_status(stopped: KeyboardInterrupt) -> int:
    """The exit status of a command that was stopped."""
    return BY_SIGTERM if isinstance(stopped, Terminated) else BY_CTRL_C
