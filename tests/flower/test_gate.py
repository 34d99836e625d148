"""The gate forwards signed calls of nodes and nothing else, also if the SuperLink would answer everything."""

import asyncio
import stat

import httpx
import numpy as np
import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node

from fedbraid.flower.certificates import make_certificates
from fedbraid.flower.exposure import exposure_at, warning_about
from fedbraid.flower.gate import CALLS, FLEET, gate_app, is_loopback, run_gate
from told import told

SIGNED = [(b"flwr-public-key", b"a"), (b"flwr-signature", b"b"), (b"flwr-timestamp", b"c")]


class Door:
    """A gate in front of a SuperLink that answers every request with 200; ``reached`` has the requests that came."""

    def __init__(self, **options):
        self.reached = []
        transport = httpx.MockTransport(self.answer)
        self.app = gate_app(httpx.AsyncClient(base_url="https://superlink", transport=transport), **options)

    def answer(self, request):
        self.reached.append(request)
        return httpx.Response(200, content=b"yes", headers={"content-type": "application/protobuf", "server": "x"})

    def ask(self, path, *, method="POST", query=b"", headers=SIGNED, body=b"", parts=1):
        scope = {"type": "http", "method": method, "path": path.decode("latin1"), "raw_path": path}
        scope |= {"query_string": query, "headers": headers}
        events = [
            {"type": "http.request", "body": bytes(piece), "more_body": i + 1 < parts}
            for i, piece in enumerate(np.array_split(np.frombuffer(body, np.uint8), parts))
        ]
        sent = []

        async def receive():
            return events.pop(0)

        async def send(event):
            sent.append(event)

        asyncio.run(self.app(scope, receive, send))
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def test_a_signed_call_of_a_node_is_forwarded_as_it_is():
    door = Door()
    private = [(b"authorization", b"Bearer x"), (b"x-forwarded-for", b"1.2.3.4"), (b"flwr-package-name", b"flwr")]
    status, headers, body = door.ask(b"/v1/fleet/get-run", headers=SIGNED + private, body=b"12345", parts=3)
    assert (status, body) == (200, b"yes")
    assert headers == {b"content-type": b"application/protobuf", b"content-length": b"3"}
    (request,) = door.reached
    assert (request.method, request.url.path, request.content) == ("POST", "/v1/fleet/get-run", b"12345")
    assert request.headers["flwr-signature"] == "b"
    assert request.headers["flwr-package-name"] == "flwr"
    assert "authorization" not in request.headers
    assert "x-forwarded-for" not in request.headers


def strange_paths(rng, number):
    """Paths made of parts of the SuperLink's own, of encodings and of tricks that a decoder may undo."""
    apis = ["control", "runtime", "fleet", "FLEET", "fleet%2f..%2fcontrol", "fleet/..", "./fleet", "fleet;", "%66leet"]
    calls = [
        *CALLS,
        "start-run",
        "register-node",
        "unregister-node",
        "acquire-task",
        "list-nodes",
        "",
        "..",
        "get-run/",
    ]
    ends = ["", "/", "//", "?", "#", "%00", " ", "/..", "/../../control/start-run", "\\", ";a", "%23"]
    starts = ["/v1/", "//v1/", "/v1//", "v1/", "/V1/", "/%761/", "/v1/fleet/../", "https://a/v1/", "/./v1/", "\\v1\\"]
    for _ in range(number):
        parts = [str(rng.choice(some)) for some in (starts, apis)]
        yield f"{''.join(parts)}/{rng.choice(calls)}{rng.choice(ends)}".encode("latin1")


def test_no_other_path_or_method_reaches_the_superlink():
    rng, door, allowed = np.random.default_rng(0), Door(), {f"{FLEET}{call}".encode() for call in CALLS}
    tried = 0
    for path in (*strange_paths(rng, 600), b"/docs", b"/openapi.json", b"/health", b"/", b"*"):
        if path not in allowed:
            assert door.ask(path)[0] == 403, path
            tried += 1
    for path in allowed:
        for method in ("GET", "PUT", "HEAD", "OPTIONS", "CONNECT", "post", "DELETE"):
            assert door.ask(path, method=method)[0] == 403
        assert door.ask(path, query=b"a=1")[0] == 403
        for i in range(3):
            assert door.ask(path, headers=SIGNED[:i] + SIGNED[i + 1 :])[0] == 401
    assert tried > 500
    assert not door.reached


def test_a_body_is_limited_whether_it_states_its_size_or_not():
    door = Door(limit=1000)
    assert door.ask(b"/v1/fleet/push-object", body=bytes(1000), parts=5)[0] == 200
    assert door.ask(b"/v1/fleet/push-object", body=bytes(1001), parts=5)[0] == 413
    stated = [*SIGNED, (b"content-length", b"5000")]
    assert door.ask(b"/v1/fleet/push-object", headers=stated)[0] == 413
    assert len(door.reached) == 1


def test_a_node_replies_only_in_its_own_name():
    def push(node, *senders):
        messages = [Message(metadata=Metadata(src_node_id=sender)) for sender in senders]
        return PushMessagesRequest(node=Node(node_id=node), messages_list=messages).SerializeToString()

    door = Door()
    assert door.ask(b"/v1/fleet/push-messages", body=push(7, 7))[0] == 200
    assert door.ask(b"/v1/fleet/push-messages", body=push(7, 8))[0] == 403
    assert door.ask(b"/v1/fleet/push-messages", body=push(7, 7, 8))[0] == 403
    assert door.ask(b"/v1/fleet/push-messages", body=b"\xff\xff")[0] == 400
    assert len(door.reached) == 1


def test_a_superlink_that_is_down_is_an_answer_after_which_nodes_try_again():
    def fail(request):
        raise httpx.ConnectError("refused")

    door = Door()
    door.app = gate_app(httpx.AsyncClient(base_url="https://a", transport=httpx.MockTransport(fail)))
    status, _, body = door.ask(b"/v1/fleet/get-run")
    assert status == 502
    assert b"ConnectError" in body


def test_certificates_name_loopback_and_a_superlink_elsewhere_is_mentioned(tmp_path, monkeypatch):
    from cryptography import x509

    monkeypatch.setattr("uvicorn.Server.run", lambda self: None)
    made = make_certificates(tmp_path, ("server.example.org",))
    names = x509.load_pem_x509_certificate(made.certificate.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert "localhost" in names.value.get_values_for_type(x509.DNSName)
    assert [str(a) for a in names.value.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    with told("not on loopback"):
        run_gate(made, host="127.0.0.1", port=9000, superlink="10.0.0.5:8000")
    run_gate(made, host="127.0.0.1", port=9000, superlink="127.0.0.1:8000")  # without a notice
    with pytest.raises(ValueError, match="port"):
        run_gate(made, host="127.0.0.1", port=90000, superlink="127.0.0.1:8000")
    assert not is_loopback("example.org")


def test_an_address_that_does_not_answer_is_one_clear_error(tmp_path):
    made = make_certificates(tmp_path)
    for address in ("127.0.0.1:1", "no such host:80", "127.0.0.1", "[::1", "a:b:c"):
        for authority in (None, made.authority, made.key):
            with pytest.raises(ValueError, match="cannot reach"):
                exposure_at(address, authority)
    assert warning_about("a:1", "closed") is None
    assert warning_about("a:1", "accounts") is None
    assert "a:1" in (warning_about("a:1", "runtime") or "")
