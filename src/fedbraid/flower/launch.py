"""A rehearsal: a SuperLink and its SuperNodes as processes on this machine, and runs on them.

With TLS it is set up like a real federation: nodes connect to the gate (:mod:`fedbraid.flower.gate`), which forwards
their calls to the SuperLink, and only the operator uses the SuperLink's own port.

All its files are in one folder of the app, ``.rehearsal``: Flower's home folders, logs, certificates, keys, the nodes'
states and compiled programs. Flower does the networking. This module starts, watches and stops Flower's programs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedbraid.flower.certificates import (
    Certificates,
    check_certificates,
    check_node_key,
    make_certificates,
    make_node_key,
)
from fedbraid.flower.federation import TAG

__all__ = ["Link", "Member", "Rehearsal", "run_app"]

FOLDER = ".rehearsal"
HOST = "127.0.0.1"
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}  # no telemetry, no update check


@dataclass(frozen=True)
class Member:
    """One process of a rehearsal. ``started`` distinguishes it from a later process with the same pid."""

    name: str
    pid: int
    started: str
    port: int
    log: str

    @property
    def alive(self) -> bool:
        return _started(self.pid) == self.started


def _started(pid: int) -> str:
    """The start time of a process, in the format of the system; empty if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def check_port(port: int) -> None:
    """Refuse a port on which the SuperLink could not listen."""
    if not 1 <= port <= 65535:
        raise ValueError(f"port must be from 1 to 65535, got {port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ValueError(
                f"port {port} of this machine cannot be used ({error.strerror}): choose another with --port, or stop "
                "the program that uses it"
            ) from None


class Link(NamedTuple):
    """How to connect to a SuperLink."""

    address: str
    certificates: Path | None  # the certificate authority; None: no encryption
    home: Path  # home folder of Flower during the connection

    @contextmanager
    def control(self) -> Iterator[Any]:
        """A client of the SuperLink's control API, which the ``flwr`` command uses, too."""
        import httpx
        from flwr.cli.typing import SuperLinkConnection
        from flwr.cli.utils import init_http_client_from_connection

        with _environ({"FLWR_HOME": str(self.home)} | OFFLINE), _quiet():
            connection = SuperLinkConnection(
                "fedbraid",
                address=self.address,
                root_certificates=str(self.certificates.resolve()) if self.certificates else None,
                insecure=self.certificates is None,
            )
            client = init_http_client_from_connection(connection)
        try:
            yield client
        except httpx.HTTPStatusError as error:
            raise ValueError(f"the SuperLink at {self.address} refused: {_reason(error)}") from None
        except httpx.HTTPError as error:
            raise ValueError(f"cannot reach the SuperLink at {self.address}: {error}") from None
        finally:
            client.close()


class Rehearsal:
    """The processes of one app's rehearsal."""

    def __init__(self, app: Path) -> None:
        self.app: Path = app.resolve()
        self.folder: Path = self.app / FOLDER
        self._list = self.folder / "members.json"
        self._children: list[subprocess.Popen] = []

    # -- settings and members

    @property
    def settings(self) -> dict[str, Any]:
        if not self._list.is_file():
            raise ValueError(f"no rehearsal of {self.app} is running: start one with fedbraid deploy up {self.app}")
        return json.loads(self._list.read_text())

    @property
    def members(self) -> list[Member]:
        return [Member(**member) for member in self.settings["members"]]

    @property
    def tls(self) -> bool:
        return bool(self.settings["tls"])

    def _write(self, settings: dict[str, Any]) -> None:
        partial = self._list.with_suffix(".partial")
        partial.write_text(json.dumps(settings, indent=1))
        partial.replace(self._list)

    def _save(self, member: Member) -> None:
        settings = self.settings
        kept = [m for m in settings["members"] if m["name"] != member.name]
        self._write(settings | {"members": [*kept, asdict(member)]})

    # -- starting

    def up(
        self,
        nodes: int,
        *,
        tls: bool = False,
        port: int | None = None,
        configs: Mapping[int, Mapping[str, Any]] | None = None,
        timeout: float = 60.0,
    ) -> list[Member]:
        """Start a SuperLink and ``nodes`` SuperNodes, numbered from 0, and wait until all are connected.

        configs: further entries of the nodes' configs, by node number.
        """
        if nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {nodes}")
        if self._list.is_file() and any(member.alive for member in self.members):
            raise ValueError(f"a rehearsal of {self.app} is running: stop it with fedbraid deploy down {self.app}")
        if port is not None:
            check_port(port)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ".gitignore").write_text("*\n")
        if tls:
            self._prepare_tls()
        self._write({"tls": tls, "port": port or free_port(), "gate": free_port() if tls else None, "members": []})
        try:
            gate = self.start_gate() if tls else None
            self.start_link(timeout=timeout)
            if gate is not None:
                self._wait(lambda: _listens(gate.port), gate, timeout, "the gate does not listen")
            keys = [self.key_of(i) for i in range(nodes)] if tls else []
            for key in keys:
                self.register(make_node_key(key))
            for i in range(nodes):
                self.start_node(i, (configs or {}).get(i))
            self.wait_online(nodes, timeout=timeout)
        except BaseException:
            self.down()
            raise
        return self.members

    @property
    def certificates(self) -> Certificates:
        return Certificates.at(self.folder / "certificates")

    def key_of(self, number: int) -> Path:
        return self.folder / "keys" / f"node-{number}"

    def _prepare_tls(self) -> None:
        files = self.certificates
        if not files.authority.parent.exists():
            make_certificates(files.authority.parent)
        check_certificates(files)

    def _environment(self, home: Path) -> dict[str, str]:
        home.mkdir(parents=True, exist_ok=True)
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return os.environ | {
            "PATH": programs,  # a SuperLink starts Flower's other programs by name
            "FLWR_HOME": str(home),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PYTHONUNBUFFERED": "1",
            **OFFLINE,
        }

    def _start(self, name: str, command: list[str], port: int) -> Member:
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        program = shutil.which(command[0], path=self._environment(self.folder / "homes" / name)["PATH"])
        if program is None:
            raise ValueError(f"Flower's program {command[0]} is not installed: pip install 'fedbraid[flower]'")
        with log.open("ab") as out:
            process = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self._environment(self.folder / "homes" / name),
                start_new_session=True,  # own process group: it outlives this command and is stopped as a whole
            )
        self._children.append(process)
        member = Member(name, process.pid, _started(process.pid), port, str(log))
        self._save(member)
        return member

    def start_link(self, *, timeout: float = 60.0) -> Member:
        """Start the SuperLink and wait until it listens."""
        port = int(self.settings["port"])
        check_port(port)
        command = ["flower-superlink", "--disable-runtime-dependency-installation", "--host", HOST, "--port", str(port)]
        if self.tls:
            files = self.certificates
            command += ["--ssl-ca-certfile", str(files.authority), "--ssl-certfile", str(files.certificate)]
            command += ["--ssl-keyfile", str(files.key), "--enable-supernode-auth"]
        else:
            command.append("--insecure")
        member = self._start("superlink", command, port)
        self._wait(lambda: _listens(port), member, timeout, "the SuperLink does not listen")
        return member

    def start_gate(self) -> Member:
        """Start the gate, the port for the nodes."""
        port = int(self.settings["gate"])
        words = ["--host", HOST, "--port", str(port), "--superlink", f"{HOST}:{self.settings['port']}"]
        folder = str(self.certificates.authority.parent)
        return self._start("gate", [sys.executable, "-m", "fedbraid", "deploy", "gate", folder, *words], port)

    def start_node(self, number: int, config: Mapping[str, Any] | None = None, *, key: Path | None = None) -> Member:
        """Start SuperNode ``number``; ``config`` adds to its node config."""
        port, settings = free_port(), self.settings
        entries = {
            "partition-id": number,
            "state-dir": str(self.folder / "states"),
            "cache-dir": str(self.folder / "compiled"),
        } | dict(config or {})
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in entries.items())
        command = ["flower-supernode", "--superlink", f"{HOST}:{settings['gate'] or settings['port']}"]
        command += ["--port", str(port), "--node-config", words]
        if self.tls:
            private = key or self.key_of(number)
            check_node_key(private)
            command += ["--root-certificates", str(self.certificates.authority)]
            command += ["--auth-supernode-private-key", str(private), "--max-retries", "5"]
        else:
            command.append("--insecure")
        return self._start(f"node-{number}", command, port)

    def _wait(self, ready: Callable[[], bool], member: Member, timeout: float, problem: str) -> None:
        until = time.monotonic() + timeout
        while not ready():
            self._reap()
            if not member.alive:
                raise ValueError(f"{problem}: it ended; last lines of {member.log}:\n{_tail(Path(member.log))}")
            if time.monotonic() > until:
                raise ValueError(
                    f"{problem} after {timeout:g} s; last lines of {member.log}:\n{_tail(Path(member.log))}"
                )
            time.sleep(0.1)

    def wait_online(self, nodes: int, *, timeout: float = 60.0) -> None:
        """Wait until ``nodes`` nodes are connected."""
        by_name = {member.name: member for member in self.members}
        with self.link.control() as control:
            for number in range(nodes):
                member = by_name[f"node-{number}"]
                wanted = f"node {number} is not connected"
                self._wait(lambda n=number + 1: len(online(control)) >= n, member, timeout, wanted)

    @property
    def link(self) -> Link:
        """The SuperLink of this rehearsal, at the operator's port."""
        for member in self.members:
            if member.name == "superlink" and not member.alive:
                raise ValueError(
                    f"the SuperLink of {self.app} has ended, see {member.log}: fedbraid deploy down and up"
                )
        certificate = self.certificates.authority if self.tls else None
        return Link(f"{HOST}:{self.settings['port']}", certificate, self.folder / "homes" / "control")

    def register(self, public_key: Path) -> None:
        """Register a node's public key with the SuperLink. With TLS only registered nodes are admitted."""
        from flwr.cli.supernode.register import try_load_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with self.link.control() as control:
            control.RegisterNode(RegisterNodeRequest(public_key=try_load_public_key(public_key)))

    # -- stopping

    def processes(self, name: str = "") -> list[int]:
        """The pids of this rehearsal's processes, or of one member's, found by their Flower home folder."""
        homes = self.folder / "homes"
        mark = f"FLWR_HOME={homes / name if name else homes}{chr(0) if name else os.sep}".encode()
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes() and _started(int(place.name)):
                    found.append(int(place.name))
        return found

    def kill(self, name: str) -> None:
        """Kill one member and its child processes at once, as if its machine lost power."""
        self._end([member for member in self.members if member.name == name], signal.SIGKILL)

    def down(self) -> list[Member]:
        """Stop all members; returns those that were still running."""
        if not self._list.is_file():
            return []
        members = self.members
        running = [member for member in members if member.alive]
        self._end(members, signal.SIGTERM)
        self._list.unlink()
        return running

    def _end(self, members: list[Member], how: int) -> None:
        """Send a signal to the process groups of the members; kill the processes that remain after 8 seconds."""
        for member in members:
            if member.alive:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(member.pid, how)
        self._wait_end(members, 8.0)
        for member in members:
            for pid in self.processes(member.name):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        self._wait_end(members, 2.0)

    def _wait_end(self, members: list[Member], seconds: float) -> None:
        pids, until = {member.pid for member in members}, time.monotonic() + seconds
        while time.monotonic() < until:
            self._reap()
            if not (any(m.alive for m in members) or any(child.pid in pids for child in self._children)):
                return
            time.sleep(0.05)

    def _reap(self) -> None:
        """Collect ended child processes: their own children would otherwise see them as still running."""
        self._children = [child for child in self._children if child.poll() is None]


def _reason(error: Any) -> str:
    words = error.response.text.strip() if error.response.is_closed else ""
    return f"{error.response.status_code} {words[:200]}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((HOST, port)) == 0


def _tail(log: Path, lines: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def _environ(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def online(control: Any) -> list[int]:
    """The ids of the nodes that are connected."""
    from flwr.proto.control_pb2 import ListNodesRequest

    return [node.node_id for node in control.ListNodes(ListNodesRequest()).nodes_info if node.status == "online"]


def start_run(control: Any, app: Path, overrides: Mapping[str, Any]) -> int:
    """Submit an app; returns the run's number."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    with _quiet():
        content = build_fab_from_disk(app)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(overrides)))
    response = control.StartRun(request)
    if not response.HasField("run_id"):
        raise ValueError(f"the SuperLink did not start the run: {getattr(response, 'note', '')}")
    return response.run_id


def run_status(control: Any, run: int) -> tuple[str, str]:
    """(status, details) of a run; the status of a successful run is ``finished:completed``."""
    from flwr.proto.control_pb2 import ListRunsRequest

    info = control.ListRuns(ListRunsRequest(run_id=run)).run_dict[run]
    status = info.status
    return f"{status.status}:{status.sub_status}".rstrip(":"), status.details


def runs_of(control: Any) -> dict[int, str]:
    """All runs of the SuperLink by number, with their status."""
    from flwr.proto.control_pb2 import ListRunsRequest

    found = control.ListRuns(ListRunsRequest()).run_dict
    return {number: f"{run.status.status}:{run.status.sub_status}".rstrip(":") for number, run in found.items()}


def run_app(
    link: Link, app: Path, out: str, *, on_line: Callable[[str], None] | None = None, **overrides: Any
) -> tuple[str, str]:
    """Run an app and follow its progress until it ends; returns its :func:`run_status`.

    ``out`` is the run folder on the SuperLink's machine.
    """
    from flwr.proto.control_pb2 import StreamLogsRequest

    with link.control() as control:
        run = start_run(control, app, {"out": out} | overrides)
        for part in control.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=0.0)):
            for line in part.log_output.splitlines():
                if on_line is not None and line.startswith(TAG):
                    on_line(line.removeprefix(TAG))
        return run_status(control, run)
