"""Server-only methods: clients send gradients at the server's model and take no local step.

S. P. Karimireddy et al. Breaking the centralized barrier for cross-device federated learning (Mime). NeurIPS 2021.

    c = mean over the cohort of grad f_i(x),    x <- x - lr U(c, s),    s <- V(c, s)

for any base optimizer (U, V). If all clients take part, this is the centralized method. It is the baseline for methods
with local steps.

Sends: the model down, one gradient up. Keeps: nothing on the clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms.base_optimizers import BaseOptimizer, BaseOptions, base_optimizer
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_number
from fedbraid.local import WEIGHTINGS, Batches, Fold, LocalWork, Weighting, value_and_grad, weight_of

__all__ = ["Gradients", "full_gradients", "gradient_exchange", "server_only"]

Loss = Callable[[Any, dict, Any], Any]
PyTree = Any


class Gradients(NamedTuple):
    """Gradients of a client's whole loss at one or more points, its loss at the first, and its number of examples."""

    at: tuple[PyTree, ...]
    loss: Any
    n: Any


def full_gradients(loss: Loss, points: Callable[[Down], tuple[PyTree, ...]], batch_size: int | None) -> Fold:
    """A pass over all of a client's examples that gives its full gradients at ``points(down)``.

    Batches only limit the memory: their gradients are weighted by their numbers of examples, so the result is the
    gradient of the mean over all examples for any batch size.
    """

    def start(down: Down, state: Any, key: Any) -> Gradients:
        zeros = tuple(jax.tree.map(jnp.zeros_like, point) for point in points(down))
        zero = jnp.zeros((), jnp.result_type(float))
        return Gradients(zeros, zero, zero)

    def step(total: Gradients, batch: dict, key: Any, down: Down) -> Gradients:
        n = jnp.sum(batch["mask"])
        found = [value_and_grad(loss)(point, batch, key) for point in points(down)]
        sums = tuple(
            jax.tree.map(lambda a, g: a + n.astype(g.dtype) * g, old, new)
            for old, (_, new) in zip(total.at, found, strict=True)
        )
        return Gradients(sums, total.loss + n * found[0][0].astype(total.loss.dtype), total.n + n)

    def finish(total: Gradients, down: Down, state: Any, n: Any) -> Gradients:
        means = tuple(jax.tree.map(lambda a: a / total.n.astype(a.dtype), one) for one in total.at)
        return Gradients(means, total.loss / total.n, n)

    return Fold(start, step, finish, Batches(batch_size, epochs=1, shuffle=False))


def gradient_exchange(
    loss: Loss, receive: Callable, *, name: str, weighting: Weighting, batch_size: int | None
) -> Exchange:
    """The server sends its model, and each client its full gradient there."""

    def report(results: tuple[Gradients], down: Down, state: Any, key: Any) -> Report:
        found = results[0]
        return Report(Up(found.at[0]), weight_of(weighting, found.n), state, {"loss": found.loss})

    work = LocalWork((full_gradients(loss, lambda down: (down.params,), batch_size),), report)
    return Exchange(name, lambda server: Down(server.params), work, receive)


class ServerOnlyState(NamedTuple):
    """The model and the state of the base optimizer."""

    params: PyTree
    s: PyTree


def server_only(
    loss: Loss,
    *,
    base: str | BaseOptimizer = "sgd",
    lr: Any = None,
    weighting: Weighting = "examples",
    batch_size: int | None = 20,
    **options: Unpack[BaseOptions],
) -> Algorithm:
    """The centralized base optimizer on the clients' full gradients.

    ``base`` is "sgd", "momentum", "adam", "adagrad" with their options, or a :class:`BaseOptimizer`. The default of
    ``lr`` depends on the base. ``batch_size`` limits the memory of the gradients and does not change them.

    >>> alg = server_only(lambda params, batch, key: jnp.sum(params**2), base="momentum", beta=0.9, lr=0.1)
    """
    chosen = base_optimizer(base, **options)
    rate = check_number("lr", RATES.get(chosen.name, chosen.lr) if lr is None else lr, low=0)
    check_choice("weighting", weighting, WEIGHTINGS)

    def receive(server: ServerOnlyState, aggregate: Aggregate, key: Any) -> ServerOnlyState:
        x, s = server
        c = aggregate.up.pseudograd
        return ServerOnlyState(
            jax.tree.map(lambda x, u: x - rate * u, x, chosen.update(c, s, x)), chosen.track(c, s, x)
        )

    return Algorithm(
        init=lambda params: ServerOnlyState(params, chosen.init(params)),
        init_client=lambda params: (),
        exchanges=(gradient_exchange(loss, receive, name="train", weighting=weighting, batch_size=batch_size),),
        params=lambda server: server.params,
    )


RATES = {"sgd": 0.5, "momentum": 0.5}
"""Default learning rates: with one step per round they can be larger than with many local steps."""
