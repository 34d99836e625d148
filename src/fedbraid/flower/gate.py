"""The gate: the only port that a server opens to the network.

Flower's SuperLink serves three interfaces on one port. The Control API starts runs and registers nodes, the Runtime API
serves the ServerApp, and the Fleet API serves the nodes. Only the Fleet API asks who calls. Whoever reaches the other
two can run code on the server and on every node. So the SuperLink listens on loopback, and this gate listens on the
network. It forwards the calls of nodes to the SuperLink, and refuses everything else before it reads a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import uvicorn
from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError

from fedbraid.flower.certificates import Certificates, check_certificates
from fedbraid.notices import notice
from fedbraid.units import format_bytes

__all__ = ["FLEET", "gate_app", "run_gate"]

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

FLEET = "/v1/fleet/"
# Calls of a node with a registered key. Flower's register-node and unregister-node are for servers that admit any node.
CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
PATHS = frozenset(f"{FLEET}{call}".encode() for call in CALLS)
SIGNED = frozenset({b"flwr-public-key", b"flwr-signature", b"flwr-timestamp"})  # headers of every call of a node
KEPT = frozenset({b"content-type", b"accept"})  # further headers that are forwarded, beside those that begin with flwr-
LIMIT = 32 << 20  # bytes of one request. Flower cuts arrays into parts of 5 MiB
TIMEOUT = 60.0  # seconds to wait for the body of a request, and for the SuperLink
CONNECTIONS = 512  # at the same time


class RefusedError(Exception):
    """A request that the gate does not forward: an HTTP status and the reason."""

    status: int
    reason: str

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def _check(scope: Scope) -> None:
    """Refuse everything but a signed call of a node. The path is compared as it was sent, without decoding."""
    path = scope.get("raw_path") or str(scope["path"]).encode()
    if scope["method"] != "POST" or path not in PATHS or scope["query_string"]:
        raise RefusedError(403, "this port is only for the calls of nodes")
    if not {name for name, _ in scope["headers"]} >= SIGNED:
        raise RefusedError(401, "a call of a node must be signed")


async def _body(scope: Scope, receive: Receive, limit: int) -> bytes:
    stated = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    body = bytearray()
    while max(int(stated), len(body)) <= limit:
        event = await receive()
        if event["type"] != "http.request":
            raise RefusedError(400, "the request was cut off")
        body += event.get("body", b"")
        if not event.get("more_body") and len(body) <= limit:
            return bytes(body)
    raise RefusedError(413, f"a request may have at most {format_bytes(limit)}")


def _check_sender(path: bytes, body: bytes) -> None:
    """Refuse replies in the name of another node: the SuperLink checks who calls, but not who signed the replies."""
    if path != f"{FLEET}push-messages".encode():
        return
    try:
        sent = PushMessagesRequest.FromString(body)
    except DecodeError:
        raise RefusedError(400, "the request cannot be read") from None
    if any(message.metadata.src_node_id != sent.node.node_id for message in sent.messages_list):
        raise RefusedError(403, "a node can reply only in its own name")


def gate_app(superlink: httpx.AsyncClient, *, limit: int = LIMIT) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The gate as an ASGI application; ``superlink`` is a client of the SuperLink."""

    async def forward(scope: Scope, receive: Receive) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        _check(scope)
        path = scope.get("raw_path") or str(scope["path"]).encode()
        try:
            body = await asyncio.wait_for(_body(scope, receive, limit), TIMEOUT)
        except TimeoutError:
            raise RefusedError(408, f"the request did not arrive within {TIMEOUT:g} s") from None
        _check_sender(path, body)
        headers = [(name, value) for name, value in scope["headers"] if name in KEPT or name.startswith(b"flwr-")]
        try:
            answer = await superlink.post(path.decode("ascii"), content=body, headers=headers)
        except httpx.HTTPError as error:
            raise RefusedError(502, f"the SuperLink does not answer: {type(error).__name__}") from None
        names = [(n.lower(), v) for n, v in answer.headers.raw]
        return answer.status_code, [(n, v) for n, v in names if n in KEPT or n.startswith(b"flwr-")], answer.content

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # websockets
            return
        try:
            status, headers, body = await forward(scope, receive)
        except RefusedError as error:
            status, body = error.status, json.dumps({"detail": f"fedbraid gate: {error.reason}"}).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from its own machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("[::1]"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def run_gate(files: Certificates, *, host: str, port: int, superlink: str) -> None:
    """Serve the gate at ``host:port`` with TLS, in front of the SuperLink at ``superlink`` (host:port)."""
    check_certificates(files)
    if not 1 <= port <= 65535:
        raise ValueError(f"port must be from 1 to 65535, got {port}")
    if not is_loopback(superlink.rpartition(":")[0]):
        notice(
            f"the SuperLink at {superlink} is not on loopback: whoever reaches it there can start runs without this "
            "gate; start it with --host 127.0.0.1, or let only this machine reach it"
        )
    verify = ssl.create_default_context(cafile=str(files.authority))
    client = httpx.AsyncClient(base_url=f"https://{superlink}", verify=verify, timeout=TIMEOUT, trust_env=False)
    config = uvicorn.Config(
        gate_app(client),  # pyright: ignore[reportArgumentType]
        host=host,
        port=port,
        ssl_certfile=str(files.certificate),
        ssl_keyfile=str(files.key),
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="warning",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=30,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run()
