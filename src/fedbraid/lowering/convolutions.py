"""Clients whose convolutions are matrix products: what the engine runs, unless it is told to leave them alone.

XLA's own convolution is many times slower inside a loop on a CPU, and with per-client kernels under ``vmap`` it is a
grouped one, slow everywhere. The algorithms of this library rewrite the loss that they are given, before they
differentiate it. The engine does the rest: convolutions in clients that somebody else wrote, after differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from fedbraid.core import Algorithm
from fedbraid.costs import data_shapes
from fedbraid.data.federated import Split
from fedbraid.local import map_work
from fedbraid.lowering.rewrite import explain, fast_convolutions, native_convolutions

__all__ = ["CONVOLUTIONS", "Convolutions", "explain_clients", "with_convolutions"]

Convolutions = Literal["fast", "native"]
CONVOLUTIONS = ("fast", "native")


def with_convolutions(alg: Algorithm, how: Convolutions) -> Algorithm:
    """``alg`` with the convolutions of its clients' work rewritten, or left as their authors wrote them."""
    return map_work(alg, fast_convolutions if how == "fast" else _natively)


def _natively(function: Callable) -> Callable:
    def run(*args: Any) -> Any:
        with native_convolutions():
            return function(*args)

    return run


def explain_clients(alg: Algorithm, params: Any, split: Split, how: Convolutions = "fast") -> dict[str, list[str]]:
    """For each exchange, one line for every convolution and max pool in a client's work: how it runs, and why."""
    data, key = data_shapes(split), jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    found = {}
    for exchange in alg.exchanges:
        down = jax.eval_shape(exchange.send, server)
        with native_convolutions():  # as they were written
            lines = explain(exchange.client, down, state, data, key)
        if how == "native":
            lines = [f"{line.split(': ')[0]}: left to XLA, as asked" for line in lines]
        found[exchange.name] = lines
    return found
