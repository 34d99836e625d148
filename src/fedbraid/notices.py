"""Notices: what a user should know although nothing failed, through one channel.

Every notice is one record of the logger ``fedbraid``. Python shows such records on standard error unless the program
sets logging up; the command line prints each as a line that begins with "note:".
"""

from __future__ import annotations

import logging

__all__ = ["LOGGER", "notice"]

LOGGER = logging.getLogger("fedbraid")


def notice(text: str) -> None:
    """Tell the user one thing: what happened, why, and what to do if it is unwanted."""
    LOGGER.warning(text)
