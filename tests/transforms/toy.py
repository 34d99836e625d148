"""An algorithm whose uploads are known, so that the effect of a transform can be computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid import address
from fedbraid.core import (
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Report,
    Up,
    noised,
    receive_noised,
    reduce_reports,
)
from fedbraid.data.federated import Split
from fedbraid.local import Batches, ClientData, local_work


def holding(vectors):
    """Client i has one example, ``vectors[i]``."""
    return Split.from_clients([{"u": np.asarray(v)[None]} for v in vectors])


def sending(d, *, aux=False, opaque=False, weight=None):
    """Client i sends (k + 1) u_i if k of its uploads have arrived before; the server adds up the reduced uploads.

    With ``aux`` the aux is -u_i. ``weight(u)`` is the weight of an upload, 1 by default.
    """

    def report(u, k):
        up = Up({"x": (k + 1) * u}, {"a": -u} if aux else ())
        return Report(up, jnp.ones(()) if weight is None else weight(u), k + 1)

    def whole(down, k, data: ClientData, key):
        return report(data.everything()["u"][0], k)

    walk = local_work(
        lambda down, k, key: jnp.zeros(d),
        lambda carry, batch, key, down: batch["u"][0],
        lambda u, down, k, n: report(u, k),
        Batches(1, steps=1, shuffle=False),
    )

    def receive(server, aggregate, key):
        return {"x": server["x"] + aggregate.count * aggregate.up.pseudograd["x"]}

    return Algorithm(
        init=lambda params: params,
        init_client=lambda params: jnp.zeros(()),
        exchanges=(Exchange("train", Down, whole if opaque else walk, receive),),
        params=lambda server: server,
    )


def take_in(exchange, server, aggregate, key):
    """The server's part. All clients are asked, so that as many uploads are expected as there are clients."""
    expected = jnp.asarray(aggregate.population, float)
    return receive_noised(exchange, server, aggregate, expected, key, address.server_noise(key)).server


def one_round(alg, params, data, *, there=None, seed=0):
    """(server, states, uploads, metrics) after one round without an engine. ``there``: mask of uploads that arrive.

    ``data`` is a split, or the clients' vectors.
    """
    split = data if isinstance(data, Split) else holding(data)
    n = split.num_clients
    there = np.ones(n, bool) if there is None else np.asarray(there)

    @jax.jit
    def run(params, keys, there, arrays, offsets, sizes):
        server, state = alg.init(params), alg.init_client(params)
        (exchange,) = alg.exchanges
        down = exchange.send(server)

        def client(offset, size, key):
            report = exchange.client(down, state, ClientData(arrays, offset, size, int(split.sizes.max())), key)
            return noised(exchange, report, down, address.client_noise(key, 0))

        reports = jax.vmap(client)(offsets, sizes, keys[1:])
        up, weight, count = reduce_reports(exchange.reducer, reports.up, jnp.where(there, reports.weight, 0))
        server = take_in(exchange, server, Aggregate(up, weight, count, n), keys[0])
        return server, reports.state, reports.up, reports.metrics

    keys = jax.random.split(jax.random.key(seed), n + 1)
    arrays = {name: jnp.asarray(a) for name, a in split.arrays.items()}
    return run(params, keys, there, arrays, split.offsets[:-1].astype(np.int32), split.sizes.astype(np.int32))


def many_rounds(alg, params, split, there, *, seed=0):
    """(server, states) after several rounds of all clients. ``there`` [rounds, clients]: uploads that arrive."""
    n = split.num_clients
    arrays = {name: jnp.asarray(a) for name, a in split.arrays.items()}
    (exchange,) = alg.exchanges

    @jax.jit
    def run(params, there, keys, arrays, offsets, sizes):
        first = alg.init_client(params)
        states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))), first)

        def one(carry, now):
            server, states = carry
            there, keys = now
            down = exchange.send(server)

            def client(state, offset, size, key):
                data = ClientData(arrays, offset, size, int(split.sizes.max()))
                report = exchange.client(down, state, data, key)
                report = noised(exchange, report, down, address.client_noise(key, 0))
                return report, exchange.admit(report.up)

            reports, admitted = jax.vmap(client)(states, offsets, sizes, keys[1:])
            heard = there & admitted
            up, weight, count = reduce_reports(exchange.reducer, reports.up, jnp.where(heard, reports.weight, 0))
            server = take_in(exchange, server, Aggregate(up, weight, count, n), keys[0])
            commit = lambda new, old: jnp.where(heard.reshape(n, *[1] * (old.ndim - 1)), new, old)  # noqa: E731
            return (server, jax.tree.map(commit, reports.state, states)), None

        return jax.lax.scan(one, (alg.init(params), states), (there, keys))[0]

    keys = jax.random.split(jax.random.key(seed), (len(there), n + 1))
    offsets, sizes = split.offsets[:-1].astype(np.int32), split.sizes.astype(np.int32)
    return run(params, jnp.asarray(there), keys, arrays, offsets, sizes)
