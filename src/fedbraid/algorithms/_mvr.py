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
gradients and does not change x. The proof of Theorem V instead starts from an m_0 that T_0 rounds compute at x_0
(``warmup``), which do not change x either:

    m_0 = 1 / (T_0 S) sum_{t <= T_0} sum_{j in S_t} grad f_j(x_0)

``recipe`` computes client_lr, a and T_0 from the problem's constants as Theorems V and VI prescribe
(:func:`fedbraid.recipes.mvr_steps`).

Sends, in models: lagged 3 down (x_{t-1}, x_{t-2}, p) and 3 up (x - y, the two gradients), 2 up for Lite. Two exchanges:
2 down and 2 up (1 for Lite), then 2 down and 1 up. Server-only: 2 down, 1 up. Keeps: nothing on the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Unpack, cast

import jax
import jax.numpy as jnp

from fedbraid.algorithms._mime import PROTOCOLS, Protocol
from fedbraid.algorithms._server_only import Gradients, Loss, full_gradients
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_count, check_number
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
from fedbraid.recipes import mvr_steps, prescribed

__all__ = ["mime_mvr", "mimelite_mvr", "server_only_mvr"]

PyTree = Any
LOCKSTEP = "the momentum compares gradients at the server's last two models"
A, CLIENT_LR = 0.1, 0.1  # defaults; a value that is another object was given
Anchor = Literal["current", "previous"]


class MVRState(NamedTuple):
    """The server: its model, the model at which m was computed, m, and the direction p of the next local steps.

    t: the number of finished rounds, if there is a warm-up.
    """

    params: PyTree
    previous: PyTree
    m: PyTree
    p: PyTree = ()
    t: Any = ()


class Sent(NamedTuple):
    """What is sent down with the model.

    share: MimeLite with a warm-up: the factor of the gradient at ``previous``, 0 during the warm-up.
    """

    previous: PyTree = ()
    p: PyTree = ()
    share: Any = ()


class MVROptions(LocalOptions, total=False):
    """How clients go over their data, and how the rates and m_0 are chosen."""

    warmup: int | None  # rounds that only compute m_0; default 0, with a recipe T
    recipe: Mapping[str, float] | None  # constants: client_lr, a and warmup follow from Theorems V and VI


class Walk(NamedTuple):
    """A client's carry: its model y, the step number and the sum of its batch losses."""

    params: PyTree
    k: Any
    loss: Any


def _both(down: Down) -> tuple[PyTree, PyTree]:
    return down.params, down.aux.previous


def _difference(share: Any, gradients: Gradients) -> PyTree:
    """``grad f_i(x_{t-1}) - (1 - a) grad f_i(x_{t-2})``: (16) needs only this from a client. ``share`` is 1 - a."""
    return jax.tree.map(lambda new, old: new - share * old, *gradients.at)


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


def _momentum(
    correction: bool, a: Any, warmup: int
) -> tuple[Callable[[Gradients, Down], Up], Callable[[MVRState, Up], MVRState]]:
    """What a client sends of its gradients, and how the server updates m and p with their mean."""

    def message(gradients: Gradients, down: Down) -> Up:
        """Mime also needs c_t itself."""
        if correction:
            return Up(gradients.at[0], gradients.at[1])
        return Up(_difference(down.aux.share if warmup else 1 - a, gradients))

    def track(server: MVRState, up: Up) -> MVRState:
        """Equation (16), or the mean of the warm-up, and p from the newest pair (c, m)."""
        if correction:
            m = jax.tree.map(lambda c, old, m: c + (1 - a) * (m - old), *up, server.m)
        else:
            m = jax.tree.map(lambda d, m: d + (1 - a) * m, up.pseudograd, server.m)
        if warmup:  # during it the first part of the message is c_t
            mean = jax.tree.map(lambda c, m: m + (c - m) / (server.t + 1), up.pseudograd, server.m)
            m = jax.tree.map(lambda mean, m: jnp.where(server.t < warmup, mean, m), mean, m)
        if correction:
            p = jax.tree.map(lambda c, m: a * c + (1 - a) * m, up.pseudograd, m)
        else:
            p = jax.tree.map(lambda m: (1 - a) * m, m)
        return server._replace(previous=server.params, m=m, p=p)

    return message, track


def _chosen(correction: bool, a: Any, client_lr: Any, options: MVROptions) -> tuple[Any, Any, int, LocalOptions]:
    """a, client_lr and warmup as given, or by the recipe; and the options of the local work."""
    recipe, warmup = options.get("recipe"), options.get("warmup")
    local = cast(LocalOptions, {key: value for key, value in options.items() if key not in ("recipe", "warmup")})
    if recipe is not None:
        if a is not A or client_lr is not CLIENT_LR:
            raise ValueError("recipe computes a and client_lr: leave these out, or leave recipe out")
        steps = local.get("steps")
        if steps is None:
            raise ValueError("recipe needs a number of local steps: give steps, not epochs")
        found = prescribed(mvr_steps, recipe, steps=steps, lite=not correction)
        a, client_lr = found.a, found.client_lr
        warmup = found.warmup if warmup is None else warmup
    warmup = 0 if warmup is None else warmup
    if warmup != 0:
        check_count("warmup", warmup)
    return a, client_lr, warmup, local


def _mvr(
    correction: bool,
    loss: Loss,
    a: Any,
    client_lr: Any,
    server_lr: Any,
    protocol: Protocol,
    anchor: Anchor,
    weighting: Weighting,
    options: MVROptions,
) -> Algorithm:
    a, client_lr, warmup, local = _chosen(correction, a, client_lr, options)
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
    message, track = _momentum(correction, a, warmup)

    def moved(server: MVRState, pseudograd: PyTree) -> MVRState:
        """The end of a round: the new model, which is the old one during the warm-up."""
        x = jax.tree.map(lambda x, g: x - server_lr * g, server.params, pseudograd)
        if not warmup:
            return server._replace(params=x)
        x = jax.tree.map(lambda old, new: jnp.where(server.t < warmup, old, new), server.params, x)
        return server._replace(params=x, t=server.t + 1)

    def sent(server: MVRState, **parts: PyTree) -> Down:
        share = jnp.where(server.t < warmup, 0.0, 1 - a) if warmup and not correction else ()
        return Down(server.params, Sent(server.previous, share=share, **parts))

    share = 1.0 if correction else 1 - a  # of the gradient at the anchor
    train = _local_steps(loss, share, client_lr, anchor, weighting, batches)
    gradients = full_gradients(loss, _both, batches.size)
    if lagged:

        def with_gradients(results: tuple[Report, Gradients], down: Down, state: Any, key: Any) -> Report:
            report, found = results
            return report._replace(up=Up(report.up.pseudograd, message(found, down)))

        def receive(server: MVRState, aggregate: Aggregate, key: Any) -> MVRState:
            return moved(track(server, aggregate.up.aux), aggregate.up.pseudograd)

        exchanges = (
            Exchange(
                "train",
                lambda server: sent(server, p=server.p),
                LocalWork((train, gradients), with_gradients),
                receive,
                lockstep=LOCKSTEP,
            ),
        )
    else:

        def gradients_only(results: tuple[Gradients], down: Down, state: Any, key: Any) -> Report:
            found = results[0]
            return Report(message(found, down), weight_of(weighting, found.n), state, {"loss": found.loss})

        exchanges = (
            Exchange(
                "gradient",
                sent,
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
        return MVRState(params, params, zeros, zeros, jnp.int32(0) if warmup else ())

    return Algorithm(init=init, init_client=lambda params: (), exchanges=exchanges, params=lambda server: server.params)


def mime_mvr(
    loss: Loss,
    *,
    a: Any = A,
    client_lr: Any = CLIENT_LR,
    server_lr: Any = 1.0,
    protocol: Protocol = "lagged",
    anchor: Anchor = "current",
    weighting: Weighting = "examples",
    **options: Unpack[MVROptions],
) -> Algorithm:
    """MimeMVR: local steps along corrected momentum; ``a`` is 1 - beta, and a = 1 is Mime with the base SGD.

    ``warmup`` is the number of rounds that only compute m_0. ``recipe`` has the constants ``smoothness``, ``delta``,
    ``G2``, ``gap``, ``sampled`` and ``rounds``, and replaces ``client_lr``, ``a`` and ``warmup``; it needs ``steps``.

    >>> alg = mime_mvr(lambda params, batch, key: jnp.sum(params**2), a=0.1, client_lr=0.05)
    >>> constants = {"smoothness": 1.0, "delta": 0.1, "G2": 1.0, "gap": 1.0, "sampled": 10, "rounds": 100}
    >>> alg = mime_mvr(lambda params, batch, key: jnp.sum(params**2), steps=20, recipe=constants)
    """
    return _mvr(True, loss, a, client_lr, server_lr, protocol, anchor, weighting, options)


def mimelite_mvr(
    loss: Loss,
    *,
    a: Any = A,
    client_lr: Any = CLIENT_LR,
    server_lr: Any = 1.0,
    protocol: Protocol = "lagged",
    anchor: Anchor = "current",
    weighting: Weighting = "examples",
    **options: Unpack[MVROptions],
) -> Algorithm:
    """MimeLiteMVR: MimeMVR without the control variate c; a = 1 is FedAvg.

    >>> alg = mimelite_mvr(lambda params, batch, key: jnp.sum(params**2), a=0.1, client_lr=0.05)
    """
    return _mvr(False, loss, a, client_lr, server_lr, protocol, anchor, weighting, options)


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
        return Report(Up(_difference(1 - a, found)), weight_of(weighting, found.n), state, {"loss": found.loss})

    def receive(server: MVRState, aggregate: Aggregate, key: Any) -> MVRState:
        m = jax.tree.map(lambda d, m: d + (1 - a) * m, aggregate.up.pseudograd, server.m)
        return MVRState(jax.tree.map(lambda x, m: x - lr * m, server.params, m), server.params, m)

    exchange = Exchange(
        "train",
        lambda server: Down(server.params, Sent(previous=server.previous)),
        LocalWork((full_gradients(loss, _both, batch_size),), report),
        receive,
        lockstep=LOCKSTEP,
    )
    return Algorithm(
        init=lambda params: MVRState(params, params, jax.tree.map(jnp.zeros_like, params)),
        init_client=lambda params: (),
        exchanges=(exchange,),
        params=lambda server: server.params,
    )
