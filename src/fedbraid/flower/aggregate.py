"""The server's computation in one exchange: from the uploads to the server's next state, as in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid import address
from fedbraid.core import Algorithm, Exchange, numbers_drawn, replay
from fedbraid.flower import entropy
from fedbraid.simulation.tally import Sizes, server_step

__all__ = ["Aggregator", "Summed", "Upload"]

PyTree = Any
After = tuple[PyTree, dict[str, float]]  # the server's next state, and what it logs


class Upload(NamedTuple):
    """One client's upload, in the form that the reducer takes."""

    lifted: PyTree
    weight: float
    metrics: dict[str, float]
    size: float  # its largest number


class Summed(NamedTuple):
    """The sum of the uploads of an exchange, where single uploads are not known (secure aggregation)."""

    combined: PyTree
    weight: float
    count: Any  # number of uploads in the sum
    metrics: dict[str, float]  # weighted means


class Step(NamedTuple):
    """The server after an exchange, mean metrics and logs, and the clients that would have made it not finite."""

    server: PyTree
    metrics: dict[str, float]
    unfit: list[int]


def _largest(tree: PyTree) -> list[Any]:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return [jnp.max(jnp.abs(leaf), initial=0) for leaf in floats]


def _judge(exchange: Exchange, rows: int, up: PyTree, weight: Any) -> tuple[Any, PyTree, Any]:
    """(whether the upload is admitted, the upload for the reducer, its largest number).

    Weighted uploads are judged as they are added: each must be so small that ``rows`` of them have a finite sum.
    """
    weight = jnp.asarray(weight).astype(jnp.result_type(float))
    lifted = exchange.reducer.lift(up, weight)
    largest = _largest(lifted)
    fits = jnp.stack([jnp.array(True), *(number <= jnp.finfo(number.dtype).max / rows for number in largest)])
    size = jnp.max(jnp.stack([weight, *(number.astype(weight.dtype) for number in largest)]))
    return exchange.admit(up) & jnp.all(fits), lifted, size


def _stays_finite(before: PyTree, after: PyTree) -> Any:
    """Whether no finite number of the server's state has become NaN or infinite."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    kept = [
        jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old)) for old, new in pairs if jnp.issubdtype(new.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.stack(kept)) if kept else jnp.array(True)


class Aggregator:
    """The server's compiled functions of one exchange. Their results do not depend on the order of arrival."""

    name: str
    send: Callable[[PyTree], PyTree]

    def __init__(self, alg: Algorithm, index: int, *, rows: int, population: int) -> None:
        exchange = alg.exchanges[index]
        self.name, self._index, self._rows = exchange.name, index, rows
        self._gather = exchange.reducer.kind == "gather"
        self.send = jax.jit(exchange.send)
        self._judge = jax.jit(partial(_judge, exchange, rows))
        self._stays_finite = jax.jit(_stays_finite)
        self._add = jax.jit(partial(jax.tree.map, jnp.add))

        sizes = Sizes(population, rows)

        def receive(server: PyTree, sums: tuple[PyTree, Any, Any], key: Any, draw: Callable) -> Any:
            return server_step(exchange, server, sums, sizes, key, draw)

        self._noise = partial(numbers_drawn, receive) if exchange.sealed is not None else lambda *given: ()
        self._receive = jax.jit(lambda server, sums, key, numbers: receive(server, sums, key, replay(numbers)))

    def upload(self, up: PyTree, weight: float, metrics: dict[str, float]) -> Upload | None:
        """The upload for the reducer; None if the exchange does not admit it (it or its summand is not finite)."""
        if not 0 <= weight <= float(jnp.finfo(jnp.result_type(float)).max) / self._rows:
            return None
        admitted, lifted, size = self._judge(up, weight)
        return Upload(lifted, weight, metrics, float(size)) if admitted else None

    def step_sum(self, server: PyTree, summed: Summed, round_: int, seed: int) -> Step:
        """As `step`, where only the sum of the uploads is known."""
        weight = jnp.asarray(summed.weight, jnp.result_type(float))
        after, logs = self._next(server, (summed.combined, weight, jnp.int32(summed.count)), round_, seed)
        return Step(after, summed.metrics | logs, [])

    def _next(self, server: PyTree, sums: tuple[PyTree, Any, Any], round_: int, seed: int) -> After:
        """The server's next state and its logs. Its noise comes from the operating system: no client can compute it."""
        given = server, sums, address.exchange_key(jax.random.key(seed), round_, self._index)
        after, logs = self._receive(*given, entropy.normals(self._noise(*given)))
        return after, {name: float(value) for name, value in logs.items()}

    def step(self, server: PyTree, uploads: dict[int, Upload], round_: int, seed: int) -> Step:
        """The server's state after the uploads (by client). Without uploads it is unchanged.

        If the new state is not finite, the upload with the largest number is left out, until it is.
        """
        rest, unfit = dict(uploads), []
        while rest:
            after, logs = self._reduce(server, rest, round_, seed)
            if self._stays_finite(server, after):
                return Step(after, _mean_metrics([rest[client] for client in sorted(rest)]) | logs, unfit)
            unfit.append(max(sorted(rest), key=lambda client: rest[client].size))
            del rest[unfit[-1]]
        return Step(server, {}, unfit)

    def _reduce(self, server: PyTree, uploads: dict[int, Upload], round_: int, seed: int) -> After:
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
        return self._next(server, (combined, weight, jnp.int32(len(taken))), round_, seed)


def _mean_metrics(taken: list[Upload]) -> dict[str, float]:
    """The weighted mean of every metric, over the uploads that have it."""
    out = {}
    for name in dict.fromkeys(name for u in taken for name in u.metrics):
        have = [(u.metrics[name], u.weight) for u in taken if name in u.metrics]
        total = sum(weight for _, weight in have)
        out[name] = sum(value * weight for value, weight in have) / total if total > 0 else float("nan")
    return out
