"""Local steps along a direction that a method defines: the client work that several methods share.

A method gives the direction, for example the gradient plus a correction. The rest is the same for all of them: the
client starts from the server's model, moves with its optimizer, counts its steps and adds up its losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.algorithms.client_optimizers import ClientOptimizer
from fedbraid.core import Down

__all__ = ["Walk", "moved", "walking"]

PyTree = Any


class Walk(NamedTuple):
    """A client's carry: model, optimizer's state, what it holds of its own state, step number, sum of losses."""

    params: PyTree
    opt: PyTree
    held: PyTree
    k: Any
    loss: Any

    def mean_loss(self) -> Any:
        """The mean of the batch losses."""
        return self.loss / self.k.astype(self.loss.dtype)


def _nothing(down: Down, state: PyTree) -> PyTree:
    del down, state
    return ()


def walking(
    opt: ClientOptimizer,
    direction: Callable,
    *,
    hold: Callable = _nothing,
    kept: Callable = lambda state: (),
) -> tuple[Callable[..., Walk], Callable[..., Walk]]:
    """The ``start`` and the ``step`` of a fold.

    direction: ``(params, batch, key, down, held) -> (loss, direction)``.
    hold: ``(down, client_state) -> held``, constant during the round.
    kept: ``(client_state) -> the optimizer's state``, used if the client keeps it between rounds.
    """

    def start(down: Down, state: PyTree, key: Any) -> Walk:
        zero = jnp.zeros((), jnp.result_type(float))
        return Walk(down.params, opt.start(down.params, kept(state)), hold(down, state), jnp.int32(0), zero)

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        value, g = direction(walk.params, batch, key, down, walk.held)
        y, opt_state = opt.step(walk.params, g, walk.opt)
        return Walk(y, opt_state, walk.held, walk.k + 1, walk.loss + value.astype(walk.loss.dtype))

    return start, step


def moved(walk: Walk, down: Down) -> PyTree:
    """The client's change of the model, x - y."""
    return jax.tree.map(jnp.subtract, down.params, walk.params)
