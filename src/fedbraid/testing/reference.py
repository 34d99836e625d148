"""The reference: the rounds of an algorithm, client by client in Python. Every engine must agree with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedbraid import address
from fedbraid.core import Aggregate, Algorithm, Exchange, Report, noised, receive_noised, reduce_reports
from fedbraid.data.federated import Split
from fedbraid.local import ClientData, LocalWork
from fedbraid.simulation.plan import cohorts_of

__all__ = ["client_data", "interpret", "strong"]

PyTree = Any


def strong(tree: PyTree) -> PyTree:
    """Remove weak types, so that a client's program is compiled only once."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.asarray(leaf).dtype), tree)


def client_data(split: Split, client: int) -> ClientData:
    """The examples of one client, as the simulator gives them to it."""
    arrays = {name: jnp.asarray(array) for name, array in split.arrays.items()}
    offset, size = jnp.int32(split.offsets[client]), jnp.int32(split.sizes[client])
    return ClientData(arrays, offset, size, int(max(split.sizes)), split.preprocess)


def interpret(
    alg: Algorithm,
    params: PyTree,
    split: Split,
    *,
    rounds: int,
    cohort: int,
    seed: int = 0,
    arrival: Callable | None = None,
) -> tuple[PyTree, PyTree]:
    """Parameters, and the states of all clients stacked, after ``rounds`` rounds."""
    server, states = strong(alg.init(params)), [strong(alg.init_client(params))] * split.num_clients
    work = [jax.jit(partial(_work, exchange)) for exchange in alg.exchanges]
    take_in = [jax.jit(partial(_take_in, exchange, (split.num_clients, cohort))) for exchange in alg.exchanges]
    data = [client_data(split, i) for i in range(split.num_clients)]
    for round_ in range(rounds):
        cohorts = cohorts_of(alg, seed, round_, split.num_clients, cohort)
        for index, exchange in enumerate(alg.exchanges):
            key = address.exchange_key(jax.random.key(seed), round_, index)
            down, ups, weights = strong(exchange.send(server)), [], []
            for i in cohorts[index].tolist():
                own = replace(data[i], key=address.rows_key(jax.random.key(seed), i))
                report = work[index](down, states[i], own, key, i)
                steps = exchange.client.count(data[i].size) if isinstance(exchange.client, LocalWork) else 1
                if arrival is not None and not arrival(address.arrival_key(key, i), steps):
                    continue
                states[i] = report.state
                ups.append(report.up)
                weights.append(report.weight)
            if ups:
                server = take_in[index](server, ups, weights, key)
    return alg.params(server), jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def _work(exchange: Exchange, down: PyTree, state: PyTree, data: ClientData, key: Any, client: Any) -> Report:
    report = exchange.client(down, state, data, address.client_key(key, client))
    return noised(exchange, report, down, address.client_noise(key, client))


def _take_in(exchange: Exchange, sizes: tuple[int, int], server: PyTree, ups: list, weights: list, key: Any) -> PyTree:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ups)
    population, expected = sizes
    aggregate = Aggregate(*reduce_reports(exchange.reducer, stacked, jnp.stack(weights)), population)
    expected = jnp.asarray(expected, jnp.result_type(float))
    draw = address.server_noise(key)
    return receive_noised(exchange, server, aggregate, expected, address.server_key(key), draw).server
