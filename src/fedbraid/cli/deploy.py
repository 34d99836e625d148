"""``fedbraid deploy``: a real federation through Flower, rehearsed on one machine first."""

from __future__ import annotations

import datetime
import json as json_
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup


class _Group(TyperGroup):
    """The commands of this group. An error of the system, such as a full disk, is one line, like a user's mistake."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None


app: typer.Typer = typer.Typer(no_args_is_help=True, cls=_Group)

AppFolder = Annotated[Path, typer.Argument(metavar="APP", help="folder made by `fedbraid deploy init`")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]


Authority = Annotated[Path | None, typer.Option(help="certificate authority of --address (default: no TLS)")]


def _check_authority(place: Path | None) -> None:
    if place is not None and not place.is_file():
        raise ValueError(f"the certificate authority {place} is missing")


def _rehearsal(folder: Path):
    from fedbraid.flower.launch import Rehearsal
    from fedbraid.flower.project import package_of

    package_of(folder)
    return Rehearsal(folder)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="APP", help="folder to make")],
    config: Annotated[Path | None, typer.Argument(help="experiment config (default: the embedded one)")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, such as data.clients=3; may be repeated")
    ] = None,
    evaluate_clients: Annotated[
        str, typer.Option(help="all, or the number of clients that test on their own data, instead of the server")
    ] = "0",
    secure: Annotated[bool, typer.Option("--secure", help="mask uploads: the server sees only their sums")] = False,
    json: Json = False,
) -> None:
    """Write a complete Flower app from an experiment config. Each site then adds the loading of its own data."""
    from fedbraid.experiment import load_config
    from fedbraid.flower.project import write_app

    testers = int(evaluate_clients) if evaluate_clients.isdecimal() else evaluate_clients
    loaded = load_config(config, settings or [])
    made = write_app(folder, loaded, evaluate_clients=testers, secure=secure)  # pyright: ignore[reportArgumentType]
    if json:
        print(json_.dumps(made))
        return
    console = Console(highlight=False)
    console.print(f"wrote [bold]{folder}[/]: {made['population']} clients; files: {', '.join(made['files'])}")
    console.print(f"each site loads its own data in load_data of [bold]{folder}/federation/client.py[/]")
    console.print(f"next: fedbraid deploy up {folder} --nodes {min(made['population'], 3)}")


@app.command()
def check(
    folder: AppFolder = Path(),
    node_config: Annotated[str, typer.Option(help="as for flower-supernode: 'data=\"/path.npz\" partition-id=0'")] = "",
    address: Annotated[
        str | None, typer.Option(help="host:port for the nodes: also check that only registered nodes are served there")
    ] = None,
    root_certificates: Authority = None,
    json: Json = False,
) -> None:
    """Load a site's data as its node would, and check that it fits the federation's schema."""
    from fedbraid.flower.check import check_site
    from fedbraid.flower.exposure import exposure_at, warning_about
    from fedbraid.notices import notice

    _check_authority(root_certificates)
    found = check_site(folder, node_config)
    warning = None
    if address is not None:
        found["exposure"] = exposure_at(address, root_certificates)
        if warning := warning_about(address, found["exposure"]):
            notice(warning)
    if json:
        print(json_.dumps(found))
        return
    tests = f"{found['test_examples'] or 'no'} test examples"
    words = f"the data fits: {found['examples']} examples, {tests}; fingerprint {found['fingerprint']}"
    console = Console(highlight=False)
    console.print(words)
    if address is not None and warning is None:
        console.print(f"{address} serves only nodes: the Control API is {found['exposure']} there")


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="folder to write ca.crt, server.pem and server.key to")],
    host: Annotated[list[str], typer.Option(help="name or address of the SuperLink's machine; may be repeated")],
    days: Annotated[int, typer.Option(help="days for which the certificates are valid")] = 365,
    json: Json = False,
) -> None:
    """Make a certificate authority and a server certificate, for a SuperLink with TLS."""
    from fedbraid.flower.certificates import make_certificates

    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is not empty: choose another folder for the certificates")
    made = make_certificates(folder, tuple(host), days=days)
    if json:
        print(json_.dumps({name: str(place) for name, place in made._asdict().items()}))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"for the SuperLink and the gate: {made.certificate}, {made.key}; for all nodes: {made.authority}")
    console.print("on this machine start the SuperLink, on loopback only, and the gate, the one port to open:")
    console.print(START.format(folder=shlex.quote(str(folder)), host=host[0]), markup=False)


START = """\
  FLWR_TELEMETRY_ENABLED=0 flower-superlink --host 127.0.0.1 --port 8000 --enable-supernode-auth \\
      --disable-runtime-dependency-installation --database state.db \\
      --ssl-ca-certfile {folder}/ca.crt --ssl-certfile {folder}/server.pem --ssl-keyfile {folder}/server.key
  fedbraid deploy gate {folder} --port 9000
nodes connect to {host}:9000; runs are started on this machine, or through ssh -L 8000:127.0.0.1:8000 {host}"""


@app.command()
def gate(
    certificates: Annotated[Path, typer.Argument(help="folder with ca.crt, server.pem and server.key")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="port for the nodes, the only one to open to the network")] = 9000,
    superlink: Annotated[str, typer.Option(help="host:port of the SuperLink, on this machine")] = "127.0.0.1:8000",
) -> None:
    """Serve the port for the nodes: only their calls reach the SuperLink, not those that start runs or add nodes."""
    from fedbraid.flower.certificates import Certificates
    from fedbraid.flower.gate import run_gate

    Console(stderr=True, highlight=False).print(f"the gate listens on {host}:{port}, in front of {superlink}")
    run_gate(Certificates.at(certificates), host=host, port=port, superlink=superlink)


@app.command()
def key(
    place: Annotated[Path, typer.Argument(help="file for the private key; the public key is written as FILE.pub")],
    json: Json = False,
) -> None:
    """Make a node's key pair: the private key stays at the site, the public key is registered with the SuperLink."""
    from fedbraid.flower.certificates import make_node_key

    public = make_node_key(place)
    if json:
        print(json_.dumps({"private": str(place), "public": str(public)}))
    else:
        Console(highlight=False).print(f"keep {place} at the site; register {public} with the SuperLink")


@app.command()
def up(
    folder: AppFolder = Path(),
    nodes: Annotated[int | None, typer.Option(help="SuperNodes to start (default: one per client, at most 8)")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="encrypt, and admit only nodes whose key is registered")] = False,
    port: Annotated[int | None, typer.Option(help="the SuperLink's port (default: a free one)")] = None,
    json: Json = False,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, for a rehearsal. They run until `fedbraid deploy down`."""
    from fedbraid.flower.federation import load_federation
    from fedbraid.flower.project import package_of

    population = load_federation(package_of(folder)).population
    rehearsal = _rehearsal(folder)
    if nodes is None:
        nodes = population
        if nodes > 8:
            raise ValueError(f"the federation has {population} clients: give the number of nodes to start, --nodes")
    if nodes > population:
        raise ValueError(f"nodes must be at most the population of {population} clients, got {nodes}")
    console = Console(stderr=True, highlight=False)
    if json:
        members = rehearsal.up(nodes, tls=tls, port=port)
        print(json_.dumps({"tls": tls, "members": [_member(m) for m in members]}))
        return
    with console.status("starting a SuperLink and its nodes"):
        members = rehearsal.up(nodes, tls=tls, port=port)
    Console(highlight=False).print(_members(members))
    console.print(f"next: fedbraid deploy run {folder}")


def _member(member: Any) -> dict[str, Any]:
    return {"name": member.name, "pid": member.pid, "port": member.port, "alive": member.alive, "log": member.log}


def _members(members: list[Any]) -> Table:
    table = Table("process", "pid", "port", "state", box=None)
    table.add_column("log", overflow="fold")
    for m in members:
        table.add_row(m.name, str(m.pid), str(m.port), "running" if m.alive else "[red]ended[/]", m.log)
    return table


@app.command()
def run(
    folder: AppFolder = Path(),
    out: Annotated[Path | None, typer.Option(help="run folder to make (default: runs/NAME-TIME)")] = None,
    resume: Annotated[Path | None, typer.Option(help="run folder of a stopped run to continue")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds (default: as in the experiment's config)")] = None,
    address: Annotated[str | None, typer.Option(help="host:port of the SuperLink (default: the rehearsal's)")] = None,
    root_certificates: Authority = None,
    json: Json = False,
) -> None:
    """Run the app on its nodes and print a line per round. The run folder has the same files as of `fedbraid run`."""
    from fedbraid.experiment.runfolder import read_summary
    from fedbraid.flower.federation import load_federation
    from fedbraid.flower.launch import Link, run_app
    from fedbraid.flower.project import package_of

    config = load_federation(package_of(folder)).config
    if resume is not None and out is not None:
        raise ValueError("--resume continues in the run folder that it names: leave out --out")
    if address is None:
        link = _rehearsal(folder).link
    else:
        _check_authority(root_certificates)
        link = Link(address, root_certificates, folder / ".rehearsal" / "homes" / "control")
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    place = resume or out or Path("runs") / f"{config.algorithm.name}-{config.data.name}-deployed-{stamp}"
    if resume is not None and not (resume / "config.toml").is_file():
        raise ValueError(f"{resume} is not a run folder: it has no config.toml")
    if resume is None and place.exists() and any(place.iterdir()):
        raise ValueError(f"{place} exists and is not empty: choose another --out, or continue with --resume {place}")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    show = (lambda line: None) if json else (lambda line: console.print(line, markup=False))
    overrides = {} if rounds is None else {"rounds": rounds}
    status, details = run_app(link, folder.resolve(), str(place.absolute()), on_line=show, **overrides)
    ended = status == "finished:completed"
    summary = read_summary(place).to_json() if ended and address is None else {"out": str(place)}
    if json:
        print(json_.dumps({"status": status, "details": details, **summary}))
    if not ended:
        console.print(f"[bold red]error:[/] the run ended as {status}", end="" if details else "\n")
        if details:
            console.print(f": {details}", markup=False)
        sys.exit(1)
    if not json:
        console.print(f"run folder: {place}")


@app.command()
def status(folder: AppFolder = Path(), json: Json = False) -> None:
    """Show the processes of the rehearsal, the connected nodes, and the status of its runs."""
    from fedbraid.flower.launch import online, runs_of

    rehearsal = _rehearsal(folder)
    members = rehearsal.members
    nodes, runs = [], {}
    if any(m.name == "superlink" and m.alive for m in members):
        with rehearsal.link.control() as control:
            nodes, runs = online(control), runs_of(control)
    if json:
        shown = {"members": [_member(m) for m in members], "online": nodes, "runs": runs, "tls": rehearsal.tls}
        print(json_.dumps(shown))
        return
    console = Console(highlight=False)
    console.print(_members(members))
    console.print(f"{len(nodes)} nodes connected, {'TLS and registered keys' if rehearsal.tls else 'no TLS'}")
    for number, state in runs.items():
        console.print(f"run {number}: {state}")


@app.command()
def down(folder: AppFolder = Path(), json: Json = False) -> None:
    """Stop all processes of the rehearsal."""
    stopped = _rehearsal(folder).down()
    if json:
        print(json_.dumps({"stopped": [member.name for member in stopped]}))
    else:
        names = ", ".join(member.name for member in stopped) or "nothing was running"
        Console(highlight=False).print(f"stopped: {names}")
