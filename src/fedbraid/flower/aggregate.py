"""The server's computation in one exchange: from the uploads to the server's next state, as in the simulator."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid import address
from fedbraid.core import Algorithm, Exchange
from fedbraid.simulation.tally import server_step

__all__ = ["Aggregator", "Upload"]

PyTree = Any


class Upload(NamedTuple):
    """One client's upload, in the form that the reducer takes."""

    lifted: PyTree
    weight: float
    metrics: dict[str, float]


def _judge(exchange: Exchange, up: PyTree, weight: Any) -> tuple[Any, PyTree]:
    weight = jnp.asarray(weight).astype(jnp.result_type(float))
    return exchange.admit(up) & jnp.isfinite(weight) & (weight >= 0), exchange.reducer.lift(up, weight)


class Aggregator:
    """The server's compiled functions of one exchange. Their results do not depend on the order of arrival."""

    def __init__(self, alg: Algorithm, index: int, *, rows: int, population: int) -> None:
        exchange = alg.exchanges[index]
        self.name, self._index, self._rows = exchange.name, index, rows
        self._gather = exchange.reducer.kind == "gather"
        self.send = jax.jit(exchange.send)
        self._judge = jax.jit(partial(_judge, exchange))
        self._add = jax.jit(partial(jax.tree.map, jnp.add))

        def receive(server: PyTree, combined: PyTree, weight: Any, count: Any, key: Any) -> tuple[PyTree, dict]:
            return server_step(exchange, server, combined, weight, count, population, key)

        self._receive = jax.jit(receive)

    def upload(self, up: PyTree, weight: float, metrics: dict[str, float]) -> Upload | None:
        """The upload for the reducer; None if the exchange does not admit it (it is not finite)."""
        admitted, lifted = self._judge(up, weight)
        return Upload(lifted, weight, metrics) if admitted else None

    def step(
        self, server: PyTree, uploads: dict[int, Upload], round_: int, seed: int
    ) -> tuple[PyTree, dict[str, float]]:
        """The server's state after the uploads (by client), their mean metrics and what the server logs.

        Without uploads the state is unchanged.
        """
        if not uploads:
            return server, {}
        taken = [uploads[client] for client in sorted(uploads)]
        lifted = [u.lifted for u in taken]
        weights = np.zeros(self._rows if self._gather else len(taken), jnp.result_type(float))
        weights[: len(taken)] = [u.weight for u in taken]
        if self._gather:  # padded to a fixed number of rows with weight 0, so that the program compiles once
            empty = jax.tree.map(jnp.zeros_like, lifted[0])
            rows = lifted + [empty] * (self._rows - len(lifted))
            combined, weight = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows), jnp.asarray(weights)
        else:
            combined = lifted[0]
            for more in lifted[1:]:
                combined = self._add(combined, more)
            weight = jnp.asarray(weights.sum())
        key = address.exchange_key(jax.random.key(seed), round_, self._index)
        server, logs = self._receive(server, combined, weight, jnp.int32(len(taken)), key)
        total = float(weights.sum())
        names = taken[0].metrics
        mean = {
            name: sum(u.metrics.get(name, np.nan) * u.weight for u in taken) / total if total > 0 else float("nan")
            for name in names
        }
        return server, mean | {name: float(value) for name, value in logs.items()}
