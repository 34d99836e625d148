"""Steps that a client does at most once, also if two processes get the same request at the same time.

Flower may start two processes for two messages, and both read the node's context before either writes it. A file that
only one of them can create decides which one answers.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import tempfile
import time
from pathlib import Path

from flwr.app import Context

from fedbraid.flower.states import STATE_DIR
from fedbraid.masking.member import Member, ProtocolError

__all__ = ["claim"]

KEPT = 86_400.0  # seconds after which a file is removed; by then the secrets of its exchange are gone


def claim(context: Context, member: Member, step: str) -> None:
    """Take the right to do this step of the member's exchange; a ProtocolError if it was taken before."""
    folder = _folder(context)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = hashlib.sha256(f"{step} ".encode() + member.public).hexdigest()[:32]
    try:
        (folder / name).touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        raise ProtocolError(f"this client has already answered the step {step!r} of this exchange") from None
    old = time.time() - KEPT
    for place in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may remove it, too
            if place.stat().st_mtime < old:
                place.unlink()


def _folder(context: Context) -> Path:
    given = context.node_config.get(STATE_DIR)
    if given is not None:
        return Path(str(given)).expanduser() / "secure-once"
    return Path(tempfile.gettempdir()) / f"fedbraid-secure-{getpass.getuser()}"
