"""Clients whose convolutions are matrix products: what the engine runs, unless it is told to leave them alone.

XLA's own convolution is many times slower inside a loop on a CPU, and with per-client kernels under ``vmap`` it is a
grouped one, slow everywhere. The rewrite works on the traced local step, after differentiation, so it needs nothing
from whoever wrote the model or the algorithm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax

from fedbraid.core import Algorithm
from fedbraid.cost import data_shapes
from fedbraid.data.federated import Split
from fedbraid.local import LocalWork
from fedbraid.models.rewrite import explain, fast_convolutions

__all__ = ["CONVOLUTIONS", "Convolutions", "explain_clients", "fast_clients"]

Convolutions = Literal["fast", "native"]
CONVOLUTIONS = ("fast", "native")


def fast_clients(alg: Algorithm) -> Algorithm:
    """``alg`` with the convolutions of its clients' work rewritten."""

    def fast(client: Any) -> Any:
        if not isinstance(client, LocalWork):
            return fast_convolutions(client)
        folds = tuple(fold._replace(step=fast_convolutions(fold.step)) for fold in client.folds)
        return replace(client, folds=folds)

    return replace(alg, exchanges=tuple(replace(e, client=fast(e.client)) for e in alg.exchanges))


def explain_clients(alg: Algorithm, params: Any, split: Split) -> dict[str, list[str]]:
    """For each exchange, one line for every convolution and max pool in a client's work: how it runs, and why."""
    data, key = data_shapes(split), jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    found = {}
    for exchange in alg.exchanges:
        down = jax.eval_shape(exchange.send, server)
        found[exchange.name] = explain(exchange.client, down, state, data, key)
    return found
