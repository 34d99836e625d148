"""The program of an exchange's client in a deployment: the client function, and its noise as one more argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedbraid.core import Exchange, Report, noised, numbers_drawn, replay
from fedbraid.local import ClientData

__all__ = ["client_program", "noise_shapes"]

PyTree = Any


def client_program(exchange: Exchange) -> Callable:
    """(down, state, data, key, normal numbers of its noise) -> Report, as the client sends it."""

    def run(down: PyTree, state: PyTree, data: ClientData, key: Any, numbers: tuple[PyTree, ...]) -> Report:
        return noised(exchange, exchange.client(down, state, data, key), down, replay(numbers))

    return run


def noise_shapes(exchange: Exchange, down: PyTree, *given: Any) -> tuple[PyTree, ...]:
    """The shapes of the numbers that the program takes for its noise; none if the exchange is not private."""
    if exchange.sealed is None:
        return ()
    return numbers_drawn(exchange.sealed.client, jax.eval_shape(exchange.client, down, *given).up, down)
