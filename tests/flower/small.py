"""A small federation for tests: five clients of the zoo's problem, and an algorithm that shows inconsistent states."""

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Error, RecordDict

from fedbraid import address
from fedbraid.core import Algorithm, Down, Exchange, Report, Up
from fedbraid.flower import InProcessGrid, Policy, client_app, schema_of, serve
from fedbraid.flower.wire import PLAIN
from zoo import clients, start

SPLIT = clients()


def narrow(batch, key, train):
    """Preprocessing of ``WIDE``: two of the five stored columns are dropped, and training adds noise."""
    x = batch["x"][:, :3] / 2
    return {**batch, "x": x + 0.1 * jax.random.normal(key, x.shape, x.dtype) if train else x}


def _widened(x):
    return np.concatenate([2 * x, np.ones((len(x), 2))], 1)


WIDE = replace(SPLIT, arrays={**SPLIT.arrays, "x": _widened(SPLIT.arrays["x"])}, preprocess=narrow)

# The stated overhead of a message in bytes: for the order or answer and Flower's own message, and for the objects of
# each dtype's buffer.
MESSAGE, BUFFER = 1000, 350


class Ledger(NamedTuple):
    """The server's side of the ledger algorithm."""

    params: object
    mean: object  # of all clients' states, if server and clients agree on which uploads were accepted


def ledger() -> Algorithm:
    """Every client adds random noise to its state and sends the change; the server keeps the mean of the states.

    If a client keeps the state of a lost upload, or if an upload counts twice, ``mean == mean of the states`` is false
    from then on.
    """

    def client(down, state, data, key):
        change = jax.random.normal(key, (3,)) + down.params["b"] + data.size
        return Report(Up({"w": change, "b": jnp.float32(0)}), jnp.float32(1), state + change, {"size": data.size * 1.0})

    def receive(server, aggregate, key):
        moved = aggregate.up.pseudograd["w"] * aggregate.count / aggregate.population
        return Ledger(jax.tree.map(lambda p: p + 0.1, server.params), server.mean + moved)

    exchange = Exchange("train", lambda server: Down(server.params), client, receive)
    return Algorithm(lambda p: Ledger(p, jnp.zeros(3)), lambda p: jnp.zeros(3), (exchange,), lambda s: s.params)


def load(context):
    return SPLIT.client(int(context.node_config["partition-id"]))


def load_wide(context):
    return WIDE.client(int(context.node_config["partition-id"]))


def two_digits(context):
    """A site's own loader, which a node's config can name."""
    return {"x": np.zeros((2, 64), np.uint8), "y": np.zeros(2, np.int32)}


@functools.cache
def app_of(alg, x64, name):
    return client_app(alg, start(), load, cache=False, fingerprint=name)


def grid_of(alg, params=None, name=None, **options):
    """Node 100 + i is client i. Grids of one algorithm share its compiled programs."""
    shared = app_of(alg, jax.config.jax_enable_x64, name)
    app = shared if params is None else client_app(alg, params, load, cache=False)
    return InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(SPLIT.num_clients)}, **options)


def deploy(alg, grid, *, rounds, params=None, **options):
    options = {
        "schema": schema_of(SPLIT.arrays),
        "population": SPLIT.num_clients,
        "policy": Policy(deadline=1.0, join=1.0),
    } | options
    return serve(alg, start() if params is None else params, grid, rounds=rounds, **options)


def losing(arrival):
    """Lose exactly the uploads that the simulator loses under an arrival model that does not depend on steps."""

    def tamper(order, reply):
        plain = order.content[PLAIN]
        if "round" not in plain:
            return reply
        key = address.exchange_key(jax.random.key(plain["seed"]), plain["round"], plain["exchange"])
        return reply if arrival(address.arrival_key(key, plain["client"]), 1) else None

    return tamper


def seeded(monkeypatch, grid, exchanges=1):
    """Give a private deployment the simulator's noise and cohorts, so that everything else can be compared.

    exchanges: number of exchanges per round, with a fresh cohort each.
    """
    drawn = itertools.count()

    def last_order():
        """The key and the client of the newest order; other messages have no seed."""
        plain = next(m.content[PLAIN] for m in reversed(grid.sent) if "seed" in m.content[PLAIN])
        key = address.exchange_key(jax.random.key(plain["seed"]), plain["round"], plain["exchange"])
        return key, plain["client"]

    def of_client(shapes):
        draw = address.client_noise(*last_order())
        return tuple(draw(like) for like in shapes)

    def of_server(shapes):
        draw = address.server_noise(last_order()[0])
        return tuple(draw(like) for like in shapes)

    def cohort(population, size):
        return address.cohort(0, *divmod(next(drawn), exchanges), population, size)

    monkeypatch.setattr("fedbraid.flower.client.entropy", SimpleNamespace(normals=of_client))
    monkeypatch.setattr("fedbraid.flower.aggregate.entropy", SimpleNamespace(normals=of_server))
    monkeypatch.setattr("fedbraid.flower.private.entropy", SimpleNamespace(cohort=cohort))


def close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


# --- faulty replies


def plain(**changes):
    """Change values of plain fields."""

    def change(reply):
        for name, value in changes.items():
            reply.content[PLAIN][name] = value
        return reply

    return change


def bare(reply):
    """Remove all content."""
    reply.content = RecordDict()
    return reply


def crash(reply):
    """Replace the reply by the error of a node whose program failed."""
    reply.__dict__["_content"] = None
    reply.error = Error(2, "ZeroDivisionError")
    return reply
