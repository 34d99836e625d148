"""What a row of the zoo is, and the problem with a convolution."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid import transforms as tf
from fedbraid.core import Algorithm
from fedbraid.data.federated import Split
from fedbraid.local import masked_mean
from fedbraid.testing.problem import SQUARES, Problem, loss

# --- a problem with a convolution ------------------------------------------------------------------------------------


def _network(params: Any, batch: dict) -> Any:
    """A 3 x 3 convolution of two channels, tanh, a dense layer."""
    layout = ("NHWC", "HWIO", "NHWC")
    hidden = jnp.tanh(jax.lax.conv_general_dilated(batch["x"], params["kernel"], (1, 1), "VALID", None, None, layout))
    return hidden.reshape(len(hidden), -1) @ params["w"] + params["b"]


def _network_loss(params: Any, batch: dict, key: Any) -> Any:
    residual = _network(params, batch) - batch["y"]
    return masked_mean(0.1 * residual**2, batch["mask"])  # flat enough that proximal points exist


def _network_start() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    kernel, w = rng.normal(size=(3, 3, 1, 2)) / 3, rng.normal(size=8) / 3
    return {"kernel": jnp.asarray(kernel), "w": jnp.asarray(w), "b": jnp.array(0.1)}


def _pictures() -> Split:
    rng = np.random.default_rng(2)
    return Split.from_clients(
        [{"x": rng.normal(size=(n, 4, 4, 1)), "y": 0.3 * n + rng.normal(size=n)} for n in (2, 3, 4)]
    )


IMAGES = Problem(_network_loss, _network, _network_start, _pictures)


# --- rows ------------------------------------------------------------------------------------------------------------

LOCAL = ("batch_size", "epochs", "steps", "shuffle")  # options of the local steps


class Varied(NamedTuple):
    """Rates that have an effect only with other options of the row; each has a second value."""

    options: Mapping[str, Any]
    rates: Mapping[str, float]


class Row(NamedTuple):
    """One algorithm or transform.

    options: the options with which the laws run it.
    local: the local options (batch_size, epochs, steps, shuffle) that it takes; it ignores the others.
    rates: the options that may be traced, each with a second value; the first is in ``options``. ``varied``: more such.
    over: for a transform, the algorithm that it transforms.
    draws: clients draw random numbers even with full batches.
    invariant: (server, states) -> largest violation, for stateful ones; states are stacked over clients.
    exact: with full participation and full batches it converges to the optimum of the mean of the client losses.
    refuses: calls that must raise ValueError, with a word that the message must contain.
    """

    factory: Callable[..., Algorithm]
    options: Mapping[str, Any] = {}
    local: tuple[str, ...] = LOCAL
    rates: Mapping[str, float] = {}
    varied: tuple[Varied, ...] = ()
    over: Callable[..., Algorithm] | None = None
    draws: bool = False
    invariant: Callable[[Any, Any], Any] | None = None
    exact: bool = False
    refuses: tuple[tuple[Callable[[], Any], str], ...] = ()

    def make(self, problem: Problem = SQUARES, **given: Any) -> Algorithm:
        """The row's algorithm; ``given`` options, local ones and others, override those of the row."""
        local = {name: value for name, value in given.items() if name in LOCAL and name in self.local}
        options = {**self.options, **{name: value for name, value in given.items() if name not in LOCAL}}
        if self.over is None:
            return self.factory(problem.loss, **options, **local)
        inner = self.over(problem.loss, client_lr=0.05, **local)
        more = (problem.outputs,) if self.factory is tf.elastic else ()
        return self.factory(inner, *more, **options)

    def first(self, rates: Mapping[str, float], options: Mapping[str, Any] = {}) -> dict[str, Any]:
        """The row's values of these rates."""
        defaults = {name: p.default for name, p in inspect.signature(self.factory).parameters.items()}
        return {name: {**defaults, **self.options, **options}[name] for name in rates}


def refuse_rates(factory: Callable, *names: str) -> tuple:
    return tuple((lambda n=n: factory(loss, **{n: -1.0}), n) for n in names)


def gap(mean: Any, states: Any) -> Any:
    """The distance of a server's tree from the mean of its clients' states."""
    pairs = zip(jax.tree.leaves(mean), jax.tree.leaves(states), strict=True)
    return max(jnp.abs(m - own.mean(0)).max() for m, own in pairs)
