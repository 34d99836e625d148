"""Whether strangers can start runs at an address: what a SuperLink answers to a caller without any key."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Literal

import httpx

__all__ = ["Exposure", "exposure_at", "warning_about"]

Exposure = Literal["closed", "accounts", "open", "runtime"]
"""``closed``: neither API answers. ``accounts``: the Control API asks for an account. ``open``: whoever reaches the
address controls the SuperLink. ``runtime``: the Runtime API answers, which gives waiting tasks to any caller."""

TIMEOUT = 10.0
PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}


def exposure_at(address: str, root_certificates: Path | None) -> Exposure:
    """What an address offers to a caller without any key. ValueError if it cannot be reached.

    The calls change nothing: one lists the nodes, the other is refused by the Runtime API because it has no token.
    """
    scheme = "http" if root_certificates is None else "https"
    try:
        verify = ssl.create_default_context(cafile=str(root_certificates)) if root_certificates is not None else True
        with httpx.Client(base_url=f"{scheme}://{address}", verify=verify, timeout=TIMEOUT, trust_env=False) as client:
            control = client.post("/v1/control/list-nodes", content=b"", headers=PROTOBUF)
            runtime = client.post("/v1/runtime/get-nodes", content=b"", headers=PROTOBUF)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise ValueError(
            f"cannot reach {address} {'without TLS' if root_certificates is None else f'with {root_certificates}'}: "
            f"{error or type(error).__name__}"
        ) from None
    if control.is_success:
        return "open"
    if runtime.status_code not in (403, 404, 405, 502, 503):
        return "runtime"
    return "accounts" if control.status_code == 401 else "closed"


def warning_about(address: str, found: Exposure) -> str | None:
    """What to tell the user about an address; None if strangers can do nothing there."""
    safe = "let the SuperLink listen on 127.0.0.1 and open only the port of fedbraid deploy gate (see docs/threats.md)"
    if found == "open":
        return (
            f"the Control API answers at {address} without asking who calls: whoever reaches this port can run code on "
            f"the server and on every node, and register nodes; {safe}"
        )
    if found == "runtime":
        return f"the Runtime API answers at {address}: whoever reaches this port can take over a run's tasks; {safe}"
    return None
