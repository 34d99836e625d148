"""Momentum-based variance reduction: MimeMVR, MimeLiteMVR and the server-only method.

S. P. Karimireddy et al. Breaking the centralized barrier for cross-device federated learning (Mime). NeurIPS 2021.
Algorithm 5, equations (12) to (16). Server-only MVR: A. Cutkosky, F. Orabona. Momentum-based variance reduction in
non-convex SGD. NeurIPS 2019.

With x_t the server's model after round t, the cohort's mean gradients in round t are c_t = mean grad f_i(x_{t-1}) and
c~_t = mean grad f_i(x_{t-2}), at two models over the same clients, and

    m_t = a c_t + (1 - a) m_{t-1} + (1 - a) (c_t - c~_t)                                                     (16)

Client i starts from y = x_{t-1} and repeats y <- y - client_lr d with

    d = a (g(y) - g(x) + c) + (1 - a) m + (1 - a) (g(y) - g(x)) = g(y) - g(x) + [a c + (1 - a) m]            (13) Mime
    d = a g(y) + (1 - a) m + (1 - a) (g(y) - g(x))              = g(y) - (1 - a) g(x) + [(1 - a) m]          (14) Lite

where g is a gradient on the step's mini-batch. A client needs only the vector in brackets, the direction p: it is sent
instead of m and c. In the same way MimeLiteMVR and the server-only method need only one vector, c_t - (1 - a) c~_t.

The pair (c, m) behind p is that of the protocol (see :mod:`fedbraid.algorithms._mime`): "lagged" is Algorithm 5, with
(c_{t-1}, m_{t-1}), computed at x_{t-2}; "two-phase" and "split-cohort" have this round's (c_t, m_t), computed at
x_{t-1}. With a = 1 each is Mime with the base SGD and the same protocol. The point x of the correction g(y) - g(x) is
x_{t-1} in (13) and (14) (``anchor="current"``). The proof of Lemma 19 uses x_{t-2}, where the lagged pair was computed
(``anchor="previous"``). If all clients have the same loss, its only error is noise.

As in Algorithm 5, m = c = 0 and x_{-1} = x_0 at the start. So the first round of a lagged MimeMVR only collects
gradients and does not change x.

Sends, in models: lagged 3 down (x_{t-1}, x_{t-2}, p) and 3 up (x - y, the two gradients), 2 up for Lite. Two exchanges:
2 down and 2 up (1 for Lite), then 2 down and 1 up. Server-only: 2 down, 1 up. Keeps: nothing on the clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._mime import PROTOCOLS, Protocol
from fedbraid.algorithms._server_only import Gradients, Loss, full_gradients
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_number
from fedbraid.local import (
    WEIGHTINGS,
    Batches,
    Fold,
    LocalOptions,
    LocalWork,
    Weighting,
    batches_of,
    grad,
    value_and_grad,
    weight_of,
)

__all__ = ["mime_mvr", "mimelite_mvr", "server_only_mvr"]

PyTree = Any
Anchor = Literal["current", "previous"]


class MVRState(NamedTuple):
    """The server: its model, the model at which m was computed, m, and the direction p of the next local steps."""

    params: PyTree
    previous: PyTree
    m: PyTree
    p: PyTree = ()


class Sent(NamedTuple):
    """What is sent down with the model."""

    previous: PyTree = ()
    p: PyTree = ()


class Walk(NamedTuple):
    """A client's carry: its model y, the step number and the sum of its batch losses."""

    params: PyTree
    k: Any
    loss: Any


def _both(down: Down) -> tuple[PyTree, PyTree]:
    return down.params, down.aux.previous


def _difference(a: Any, gradients: Gradients) -> PyTree:
    """``grad f_i(x_{t-1}) - (1 - a) grad f_i(x_{t-2})``: (16) needs only this from a client."""
    return jax.tree.map(lambda new, old: new - (1 - a) * old, *gradients.at)


def _local_steps(
    loss: Loss, share: Any, client_lr: Any, anchor: Anchor, weighting: Weighting, batches: Batches
) -> Fold:
    """Equations (13) and (14): ``share`` is the factor of the gradient at the anchor."""

    def start(down: Down, state: Any, key: Any) -> Walk:
        return Walk(down.params, jnp.int32(0), jnp.zeros((), jnp.result_type(float)))

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        value, at_y = value_and_grad(loss)(walk.params, batch, key)
        at_x = grad(loss)(down.aux.previous if anchor == "previous" else down.params, batch, key)
        y = jax.tree.map(
            lambda y, g, g_x, p: y - client_lr * (g - share * g_x + p), walk.params, at_y, at_x, down.aux.p
        )
        return Walk(y, walk.k + 1, walk.loss + value.astype(walk.loss.dtype))

    def finish(walk: Walk, down: Down, state: Any, n: Any) -> Report:
        sent = jax.tree.map(jnp.subtract, down.params, walk.params)
        return Report(Up(sent), weight_of(weighting, n), metrics={"loss": walk.loss / walk.k.astype(walk.loss.dtype)})

    return Fold(start, step, finish, batches)


def _momentum(correction: bool, a: Any) -> tuple[Callable[[Gradients], Up], Callable[[MVRState, Up], MVRState]]:
    """What a client sends of its gradients, and how the server updates m and p with their mean."""

    def message(gradients: Gradients) -> Up:
        """Mime also needs c_t itself."""
        return Up(gradients.at[0], gradients.at[1]) if correction else Up(_difference(a, gradients))

    def track(server: MVRState, up: Up) -> MVRState:
        """Equation (16), and p from the newest pair (c, m)."""
        if correction:
            c, old = up
            m = jax.tree.map(lambda c, old, m: c + (1 - a) * (m - old), c, old, server.m)
            p = jax.tree.map(lambda c, m: a * c + (1 - a) * m, c, m)
        else:
            m = jax.tree.map(lambda d, m: d + (1 - a) * m, up.pseudograd, server.m)
            p = jax.tree.map(lambda m: (1 - a) * m, m)
        return server._replace(previous=server.params, m=m, p=p)

    return message, track


def _mvr(
    correction: bool,
    loss: Loss,
    a: Any,
    client_lr: Any,
    server_lr: Any,
    protocol: Protocol,
    anchor: Anchor,
    weighting: Weighting,
    local: LocalOptions,
) -> Algorithm:
    check_number("a", a, low=0, high=1)
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_number("server_lr", server_lr, low=0)
    check_choice("protocol", protocol, PROTOCOLS)
    check_choice("anchor", anchor, ("current", "previous"))
    check_choice("weighting", weighting, WEIGHTINGS)
    lagged = protocol == "lagged"
    if anchor == "previous" and not lagged:
        raise ValueError(f"anchor='previous' needs protocol='lagged'; protocol={protocol!r} needs anchor='current'")
    batches = batches_of(**local)
    message, track = _momentum(correction, a)

    def moved(server: MVRState, pseudograd: PyTree) -> MVRState:
        return server._replace(params=jax.tree.map(lambda x, g: x - server_lr * g, server.params, pseudograd))

    share = 1.0 if correction else 1 - a  # of the gradient at the anchor
    train = _local_steps(loss, share, client_lr, anchor, weighting, batches)
    gradients = full_gradients(loss, _both, batches.size)
    if lagged:

        def with_gradients(results: tuple[Report, Gradients], down: Down, state: Any, key: Any) -> Report:
            report, found = results
            return report._replace(up=Up(report.up.pseudograd, message(found)))

        def receive(server: MVRState, aggregate: Aggregate, key: Any) -> MVRState:
            return moved(track(server, aggregate.up.aux), aggregate.up.pseudograd)

        exchanges = (
            Exchange(
                "train",
                lambda server: Down(server.params, Sent(server.previous, server.p)),
                LocalWork((train, gradients), with_gradients),
                receive,
            ),
        )
    else:

        def gradients_only(results: tuple[Gradients], down: Down, state: Any, key: Any) -> Report:
            found = results[0]
            return Report(message(found), weight_of(weighting, found.n), state, {"loss": found.loss})

        exchanges = (
            Exchange(
                "gradient",
                lambda server: Down(server.params, Sent(previous=server.previous)),
                LocalWork((gradients,), gradients_only),
                lambda server, aggregate, key: track(server, aggregate.up),
            ),
            Exchange(
                "train",
                lambda server: Down(server.params, Sent(p=server.p)),
                LocalWork((train,)),
                lambda server, aggregate, key: moved(server, aggregate.up.pseudograd),
                cohort="same" if protocol == "two-phase" else "fresh",
            ),
        )

    def init(params: PyTree) -> MVRState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return MVRState(params, params, zeros, zeros)

    return Algorithm(init=init, init_client=lambda params: (), exchanges=exchanges, params=lambda server: server.params)


def mime_mvr(
    loss: Loss,
    *,
    a: Any = 0.1,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    protocol: Protocol = "lagged",
    anchor: Anchor = "current",
    weighting: Weighting = "examples",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """MimeMVR: local steps along corrected momentum; ``a`` is 1 - beta, and a = 1 is Mime with the base SGD.

    >>> alg = mime_mvr(lambda params, batch, key: jnp.sum(params**2), a=0.1, client_lr=0.05)
    """
    return _mvr(True, loss, a, client_lr, server_lr, protocol, anchor, weighting, local)


def mimelite_mvr(
    loss: Loss,
    *,
    a: Any = 0.1,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    protocol: Protocol = "lagged",
    anchor: Anchor = "current",
    weighting: Weighting = "examples",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """MimeLiteMVR: MimeMVR without the control variate c; a = 1 is FedAvg.

    >>> alg = mimelite_mvr(lambda params, batch, key: jnp.sum(params**2), a=0.1, client_lr=0.05)
    """
    return _mvr(False, loss, a, client_lr, server_lr, protocol, anchor, weighting, local)


def server_only_mvr(
    loss: Loss, *, a: Any = 0.1, lr: Any = 0.5, weighting: Weighting = "examples", batch_size: int | None = 20
) -> Algorithm:
    """MVR without local steps: m by (16), then ``x <- x - lr m``. ``batch_size`` only limits the memory.

    >>> alg = server_only_mvr(lambda params, batch, key: jnp.sum(params**2), a=0.1, lr=0.1)
    """
    check_number("a", a, low=0, high=1)
    check_number("lr", lr, low=0)
    check_choice("weighting", weighting, WEIGHTINGS)

    def report(results: tuple[Gradients], down: Down, state: Any, key: Any) -> Report:
        found = results[0]
        return Report(Up(_difference(a, found)), weight_of(weighting, found.n), state, {"loss": found.loss})

    def receive(server: MVRState, aggregate: Aggregate, key: Any) -> MVRState:
        m = jax.tree.map(lambda d, m: d + (1 - a) * m, aggregate.up.pseudograd, server.m)
        return MVRState(jax.tree.map(lambda x, m: x - lr * m, server.params, m), server.params, m)

    exchange = Exchange(
        "train",
        lambda server: Down(server.params, Sent(previous=server.previous)),
        LocalWork((full_gradients(loss, _both, batch_size),), report),
        receive,
    )
    return Algorithm(
        init=lambda params: MVRState(params, params, jax.tree.map(jnp.zeros_like, params)),
        init_client=lambda params: (),
        exchanges=(exchange,),
        params=lambda server: server.params,
    )
