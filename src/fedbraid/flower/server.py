"""The server side: a ServerApp that runs rounds over Flower's Grid.

In every exchange the server asks a seeded cohort, waits until a deadline, and checks each reply. Replies that are late,
lost, malformed, not finite or too large are left out, counted and reported; the weights of the accepted uploads are
normalised without them. The server's state, its history and the tag of every client's last accepted upload are saved in
one checkpoint. So a restarted ServerApp continues with the right round, and its clients stay consistent with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbraid.core import Algorithm, check_count
from fedbraid.flower import wire
from fedbraid.flower.evaluate import check_evaluation, scores_by_client
from fedbraid.flower.rounds import MessageRounds
from fedbraid.flower.secure.messages import check_sums
from fedbraid.flower.site import Round, Site
from fedbraid.notices import notice
from fedbraid.simulation import checkpoint
from fedbraid.simulation.columns import RunColumns
from fedbraid.simulation.loop import RoundLoop, Schedule

__all__ = ["Served", "serve", "server_app"]

PyTree = Any
EVALUATION = "the server sees each client's sums of test metrics (evaluate_clients = 0 does not ask for them)"


class Served(NamedTuple):
    """The result of a deployed run, like :class:`fedbraid.simulation.Result` of a simulated one.

    counts: how many replies of the whole run were late, missing, malformed, nonfinite, oversized, failed or refused,
        and how often a client lost its state.
    """

    params: PyTree
    server: PyTree
    history: dict[str, np.ndarray]
    evaluations: dict[str, np.ndarray]
    rounds: int
    seconds: float
    counts: dict[str, int]
    nodes: dict[int, int]  # client -> node
    taken: dict[int, str]  # client -> tag of its last accepted upload
    clients: dict[str, np.ndarray]  # each client's own metrics in the last evaluation on clients; nan without any
    secure: str | None = None  # the settings of secure aggregation, if it was used
    arrivals: tuple[dict[str, Any], ...] = ()  # of asynchronous steps: clients, versions, clients asked, seconds


def server_app(
    alg: Algorithm, params: PyTree, *, on_end: Callable[[Served], None] | None = None, **options: Any
) -> ServerApp:
    """The ServerApp of an algorithm: :func:`serve` on the Grid that Flower gives it.

    >>> import jax.numpy as jnp, numpy as np
    >>> from fedbraid import fedavg
    >>> from fedbraid.flower import schema_of
    >>> alg = fedavg(lambda p, batch, key: jnp.sum((p - batch["x"].mean(0)) ** 2))
    >>> app = server_app(alg, jnp.zeros(3), schema=schema_of({"x": np.zeros((1, 3))}), rounds=5, population=3)
    """
    check_count("rounds", options.get("rounds"))
    own = {field.name for field in fields(Site)}
    site = Site(**{name: value for name, value in options.items() if name in own})
    check_evaluation(options.get("metrics"), options.get("evaluate_clients"), site.population)
    if site.secure is not None:
        check_sums(alg)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        served = serve(alg, params, grid, **options)
        if on_end is not None:
            on_end(served)

    return app


def serve(
    alg: Algorithm,
    params: PyTree,
    grid: Grid,
    *,
    rounds: int,
    evaluate: Callable[[PyTree], dict[str, float]] | None = None,
    metrics: Callable | None = None,
    evaluate_clients: int | None = None,
    eval_every: int = 1,
    checkpoints: Path | None = None,
    checkpoint_every: int = 1,
    on_round: Callable[[Round], None] | None = None,
    say: Callable[[str], None] = print,
    **site: Any,
) -> Served:
    """Run ``alg`` for ``rounds`` rounds on the nodes of ``grid``, with ``cohort`` of them each (default: all).

    Args:
        evaluate: (params) -> scores, on the server, after every ``eval_every`` rounds and after the last.
        metrics: the same as in the nodes' :func:`client_app`. If given, the clients are asked after the same rounds for
            sums and counts of the metrics on their own test data. The columns are those of a simulated run.
        evaluate_clients: number of clients that evaluate, drawn anew each time (default: all).
        checkpoints: a folder. The run continues from the newest checkpoint in it, and saves one every
            ``checkpoint_every`` rounds. Clients keep the states that a restart would need.
        on_round: called with a :class:`Round` after each round.
        say: called with every line of progress: rounds, nodes that are refused, uploads that are left out.
        site: the fields of :class:`Site` by name: ``schema``, ``population``, ``cohort``, ``seed``, ``policy``,
            ``fingerprint``, ``preprocess``, ``secure``, ``asynchrony``.
    """
    agreed = Site(**site)
    check_count("rounds", rounds)
    check_count("eval_every", eval_every)
    check_count("checkpoint_every", checkpoint_every)
    check_evaluation(metrics, evaluate_clients, agreed.population)
    run = MessageRounds(alg, params, grid, agreed, say)
    run.rounds, run.folder, run.scorer = rounds, checkpoints, evaluate
    run.private.open(checkpoints)
    if agreed.secure is not None:
        say(agreed.secure.describe())
        if metrics is not None:
            notice(f"secure aggregation masks uploads, not evaluations: {EVALUATION}")
    if metrics is not None:
        run.ask_for(metrics, agreed, evaluate_clients or agreed.population)
    if checkpoints is not None and checkpoint.exists(checkpoints):
        run.restore(checkpoint.latest(checkpoints))
        run.private.check(run.done)
        if run.done > rounds:
            raise ValueError(f"the checkpoint in {checkpoints} is of round {run.done}, after the last round {rounds}")
    began = time.monotonic()
    if run.done < rounds:
        run.join()

    def tell() -> None:
        assert run.told is not None
        for line in (run.told.line(), *run.told.notes):
            say(line)
        if on_round is not None:
            on_round(run.told)

    evaluates = evaluate is not None or metrics is not None
    schedule = Schedule(rounds, eval_every if evaluates else None, None if checkpoints is None else checkpoint_every)
    RoundLoop(run, schedule, tell).run()
    return Served(
        alg.params(run.server),
        run.server,
        _columns(run.history),
        _columns(run.evaluations),
        run.done,
        time.monotonic() - began,
        dict(run.counts),
        {client: node.id for client, node in run.roster.clients.items()},
        dict(run.taken),
        scores_by_client(run.tested, agreed.population, run.declared),
        agreed.secure.name if agreed.secure else None,
        tuple(run.arrivals),
    )


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    absent = {name: 0.0 if name.startswith(f"{wire.EVALUATE}/") else np.nan for name in names}  # not every round tests
    return RunColumns({name: np.array([row.get(name, absent[name]) for row in rows]) for name in names})
