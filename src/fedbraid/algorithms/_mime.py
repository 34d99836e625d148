"""Mime, MimeLite and Loc-Mime with any base optimizer (U, V).

S. P. Karimireddy, M. Jaggi, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. Breaking the centralized barrier
for cross-device federated learning. NeurIPS 2021. Algorithm 1; Algorithms 3 and 4 are its momentum and Adam.

Client i starts from y = x and repeats, with mini-batches zeta and the base's state s that the server sent,

    g = grad f_i(y; zeta) - grad f_i(x; zeta) + c      (Mime: c is the cohort's full gradient at x)
    g = grad f_i(y; zeta)                              (MimeLite)
    y <- y - client_lr U(g, s),

and sends x - y. Only the server applies V:

    s <- V(mean of grad f_i(x), s),    x <- x - server_lr mean(x - y_i).

The statistics are computed once, at the server's model, and used unchanged in every local step. In Loc-Mime each client
updates its copy of s after every local step, s <- V(g, s), and drops it when the round ends. It is an ablation that
shows why s should stay fixed.

The protocol says where c and the gradients of V come from:

    two-phase       two exchanges with the same clients: first their gradients, then their updates (Algorithm 1)
    lagged          one exchange; c is that of the previous round, 0 in the first (Algorithms 3 and 4)
    split-cohort    two exchanges with two cohorts: one sends gradients, another trains (Section 5, Table 4)

MimeLite uses no c, so "two-phase" and "lagged" give the same model, and "lagged" sends less. With a base without state
(sgd) MimeLite needs no gradient from clients: it is FedAvg. If no gradient arrives in a round, s stays the same and the
last c is used.

Sends, in models: gradients 1 down and 1 up; updates 1 + s (+ 1 for Mime's c) down and 1 up, + 1 up if lagged. A pair of
the split cohort: MimeLiteMom 5, MimeLiteAdam 6, MimeMom 6, MimeAdam 7. Clients keep nothing, so the second phase sends
x again. Keeps: nothing on the clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Unpack, cast

import jax
import jax.numpy as jnp

from fedbraid.algorithms._server_only import Gradients, Loss, full_gradients, gradient_exchange
from fedbraid.algorithms.base_optimizers import BaseOptimizer, BaseOptions, base_optimizer, warn_if_not_linear
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
from fedbraid.recipes import adam_steps, prescribed, sgd_steps

__all__ = ["PROTOCOLS", "Protocol", "locmime", "mime", "mimelite"]

PyTree = Any
Protocol = Literal["two-phase", "lagged", "split-cohort"]
PROTOCOLS = ("two-phase", "lagged", "split-cohort")


class MimeState(NamedTuple):
    """The server: its model, the base's state s, Mime's c, and the new s that replaces s when the round ends."""

    params: PyTree
    s: PyTree
    c: PyTree = ()
    pending: PyTree = ()


class Sent(NamedTuple):
    """What is sent down with the model."""

    s: PyTree
    c: PyTree


class Walk(NamedTuple):
    """A client's carry: its model y, Loc-Mime's own copy of s, the step number and the sum of its batch losses."""

    params: PyTree
    s: PyTree
    k: Any
    loss: Any


class MimeOptions(LocalOptions, BaseOptions, total=False):
    """How clients go over their data, the options of a base that is given by name, and a recipe for the rate."""

    recipe: Mapping[str, float] | None  # constants: client_lr follows from Corollary II (sgd) or III (adam, b1 = 0)


class Method(NamedTuple):
    """The options in which the three methods differ."""

    name: str
    correction: bool  # local gradients are corrected by those at x, and c
    local_state: bool = False  # clients update their own copy of s


def _local_steps(
    method: Method, loss: Loss, base: BaseOptimizer, rate: Any, weighting: Weighting, batches: Batches
) -> Fold:
    def start(down: Down, state: Any, key: Any) -> Walk:
        return Walk(
            down.params, down.aux.s if method.local_state else (), jnp.int32(0), jnp.zeros((), jnp.result_type(float))
        )

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        value, g = value_and_grad(loss)(walk.params, batch, key)
        if method.correction:
            at_x = grad(loss)(down.params, batch, key)
            g = jax.tree.map(lambda g, at_x, c: g - at_x + c, g, at_x, down.aux.c)
        s = walk.s if method.local_state else down.aux.s
        return Walk(
            jax.tree.map(lambda y, u: y - rate * u, walk.params, base.update(g, s, walk.params)),
            base.track(g, s, walk.params) if method.local_state else (),
            walk.k + 1,
            walk.loss + value.astype(walk.loss.dtype),
        )

    def finish(walk: Walk, down: Down, state: Any, n: Any) -> Report:
        sent = jax.tree.map(jnp.subtract, down.params, walk.params)
        return Report(Up(sent), weight_of(weighting, n), metrics={"loss": walk.loss / walk.k.astype(walk.loss.dtype)})

    return Fold(start, step, finish, batches)


def _prescribed_rate(method: Method, base: Any, client_lr: Any, options: MimeOptions, recipe: Mapping) -> float:
    """The step size of Corollary II or III."""
    steps = options.get("steps")
    if client_lr is not None:
        raise ValueError("recipe computes client_lr: leave it out, or leave recipe out")
    if steps is None:
        raise ValueError("recipe needs a number of local steps: give steps, not epochs")
    lite = not method.correction
    if not method.local_state and base == "sgd":
        return prescribed(sgd_steps, recipe, steps=steps, lite=lite).client_lr
    if not method.local_state and base == "adam" and options.get("b1") == 0 and options.get("eps") is not None:
        return prescribed(adam_steps, recipe, steps=steps, lite=lite, eps=options.get("eps")).client_lr
    raise ValueError(
        f"recipe needs mime or mimelite with base='sgd' (Corollary II), or base='adam' with b1=0 and eps (Corollary "
        f"III), got {method.name} with base={base!r}; for momentum use mime_mvr"
    )


def _mime(
    method: Method,
    loss: Loss,
    base: str | BaseOptimizer,
    client_lr: Any,
    server_lr: Any,
    protocol: Protocol,
    weighting: Weighting,
    options: MimeOptions,
) -> Algorithm:
    correction = method.correction
    given = {key: value for key, value in options.items() if key in BaseOptions.__annotations__}
    recipe = options.get("recipe")
    if recipe is not None:
        client_lr = _prescribed_rate(method, base, client_lr, options, recipe)
    base = base_optimizer(base, **cast(BaseOptions, given))
    local = cast(LocalOptions, {key: value for key, value in options.items() if key not in (*given, "recipe")})
    warn_if_not_linear(method.name, base)
    rate = check_number("client_lr", base.lr if client_lr is None else client_lr, low=0, open_low=True)
    check_number("server_lr", server_lr, low=0)
    check_choice("protocol", protocol, PROTOCOLS)
    check_choice("weighting", weighting, WEIGHTINGS)
    batches = batches_of(**local)
    needs_gradients = correction or base.tracks
    two_exchanges = needs_gradients and protocol != "lagged"

    def with_gradient(results: tuple[Report, Gradients], down: Down, state: Any, key: Any) -> Report:
        report, gradients = results
        return report._replace(up=report.up._replace(aux=gradients.at[0]))

    def send(server: MimeState) -> Down:
        return Down(server.params, Sent(server.s, server.c))

    def receive_gradient(server: MimeState, aggregate: Aggregate, key: Any) -> MimeState:
        c = aggregate.up.pseudograd
        # the clients of this round still use the old s (Appendix G), so the new one replaces it later
        pending = base.track(c, server.s, server.params)
        return server._replace(c=c if correction else (), pending=pending)

    def receive_update(server: MimeState, aggregate: Aggregate, key: Any) -> MimeState:
        x = jax.tree.map(lambda x, g: x - server_lr * g, server.params, aggregate.up.pseudograd)
        if two_exchanges:
            return server._replace(params=x, s=server.pending)
        if not needs_gradients:
            return server._replace(params=x)
        c = aggregate.up.aux
        return MimeState(x, base.track(c, server.s, server.params), c if correction else ())

    train = _local_steps(method, loss, base, rate, weighting, batches)
    if not needs_gradients or two_exchanges:
        work = LocalWork((train,))
    else:  # the pass for the gradient comes second, so that training uses the same batches as FedAvg
        work = LocalWork((train, full_gradients(loss, lambda down: (down.params,), batches.size)), with_gradient)
    update = Exchange("train", send, work, receive_update)
    exchanges = (update,)
    if two_exchanges:
        ask = gradient_exchange(loss, receive_gradient, name="gradient", weighting=weighting, batch_size=batches.size)
        exchanges = (ask, update._replace(cohort="same" if protocol == "two-phase" else "fresh"))

    def init(params: PyTree) -> MimeState:
        s = base.init(params)
        c = jax.tree.map(jnp.zeros_like, params) if correction else ()
        return MimeState(params, s, c, s if two_exchanges else ())

    return Algorithm(init=init, init_client=lambda params: (), exchanges=exchanges, params=lambda server: server.params)


def mime(
    loss: Loss,
    *,
    base: str | BaseOptimizer = "momentum",
    client_lr: Any = None,
    server_lr: Any = 1.0,
    protocol: Protocol = "two-phase",
    weighting: Weighting = "examples",
    **options: Unpack[MimeOptions],
) -> Algorithm:
    """Mime: every local step is a step of the base optimizer on an SVRG-corrected gradient, with the server's state.

    ``base`` is "sgd", "momentum", "adam", "adagrad" with their options (``beta``; ``b1``, ``b2``, ``eps``, ``initial``,
    ``bias_correction``), or a :class:`BaseOptimizer`. ``client_lr`` defaults to 0.1, for adam to 0.01. ``recipe`` has
    the constants of :func:`fedbraid.recipes.sgd_steps` (base sgd) or ``adam_steps`` (base adam, b1 = 0, eps given), and
    replaces ``client_lr``; it needs ``steps``.

    >>> quadratic = lambda params, batch, key: 0.5 * jnp.sum((params - batch["x"].mean(0)) ** 2)
    >>> alg = mime(quadratic, base="adam", b2=0.999, client_lr=0.01, epochs=2)
    >>> [(exchange.name, exchange.cohort) for exchange in alg.exchanges]
    [('gradient', 'fresh'), ('train', 'same')]
    """
    return _mime(Method("mime", correction=True), loss, base, client_lr, server_lr, protocol, weighting, options)


def mimelite(
    loss: Loss,
    *,
    base: str | BaseOptimizer = "momentum",
    client_lr: Any = None,
    server_lr: Any = 1.0,
    protocol: Protocol = "lagged",
    weighting: Weighting = "examples",
    **options: Unpack[MimeOptions],
) -> Algorithm:
    """MimeLite: Mime without the correction, so no c is sent; with the base sgd it is FedAvg.

    >>> alg = mimelite(lambda params, batch, key: jnp.sum(params**2), base="adagrad", protocol="split-cohort")
    >>> [(exchange.name, exchange.cohort) for exchange in alg.exchanges]
    [('gradient', 'fresh'), ('train', 'fresh')]
    """
    return _mime(Method("mimelite", correction=False), loss, base, client_lr, server_lr, protocol, weighting, options)


def locmime(
    loss: Loss,
    *,
    base: str | BaseOptimizer = "momentum",
    client_lr: Any = None,
    server_lr: Any = 1.0,
    correction: bool = True,
    protocol: Protocol = "two-phase",
    weighting: Weighting = "examples",
    **options: Unpack[MimeOptions],
) -> Algorithm:
    """Loc-Mime: clients also update their copy of the base's state; ``correction=False`` is the MimeLite variant.

    >>> alg = locmime(lambda params, batch, key: jnp.sum(params**2), base="momentum", beta=0.5)
    """
    return _mime(
        Method("locmime", correction, local_state=True), loss, base, client_lr, server_lr, protocol, weighting, options
    )
