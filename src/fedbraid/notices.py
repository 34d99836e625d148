"""Notices: messages to the user that are not errors.

Every notice is one record of the logger ``fedbraid``. Python prints such records on standard error unless the program
configures logging. The command line prints each as a line that begins with "note:".
"""

from __future__ import annotations

import logging

__all__ = ["LOGGER", "notice"]

LOGGER = logging.getLogger("fedbraid")


def notice(text: str) -> None:
    """Send one notice. It should say what happened, why, and how to avoid it."""
    LOGGER.warning(text)
