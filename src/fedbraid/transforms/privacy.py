"""User-level differential privacy over any algorithm: clipping and Gaussian noise.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang. Learning Differentially Private Recurrent Language Models. ICLR 2018
(DP-FedAvg). G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy. Differentially Private Learning with Adaptive Clipping.
NeurIPS 2021.

    clip            u <- u min(1, C / ||u||), with the norm of the whole upload: pseudograd and aux together
    adaptive_clip   each client adds one bit b = [||u|| <= C]; the server sets C <- C exp(-rate (mean b - quantile))
    dp              clipping, weights of 1, and noise N(0, (z C)^2) on every coordinate of the sum of the uploads

The sum of uploads changes by at most C if the upload of one client is added or removed. So z is the noise multiplier of
a Gaussian mechanism (:mod:`fedbraid.transforms.accounting` computes its epsilon). With adaptive clipping the bits get
noise, too: N(0, s_b^2) on their sum. The noise multiplier of the uploads is then z_u = (z^-2 - (2 s_b)^-2)^(-1/2), so
that both together cost the same epsilon as z.

The mean is the noisy sum divided by the expected number of uploads, the size of the cohort. This number is public. The
number of uploads that arrived depends on the clients: divided by it, one client could change the mean by more than C.
A lost upload therefore counts as an upload of zeros, with which the invariants of the algorithms (c = mean c_i) agree.

Where the noise is added: ``where="server"`` adds it to the reduced upload. Some algorithms have clients that keep their
uploads as state (SCAFFOLD's c = mean c_i, FedSplit's x = mean z_i). Noise at the server would break these equations, so
it is refused there. With ``where="clients"`` each client adds its share, knows it, and reconciles its state.

Where the noise comes from: the engine provides it (:class:`fedbraid.core.Guarantee`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.core import (
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Guarantee,
    Logged,
    Reducer,
    Report,
    StructureError,
    Up,
    check_choice,
    check_count,
    check_number,
    is_traced,
    is_zero,
    logged,
)
from fedbraid.transforms.clients import map_inputs, map_report
from fedbraid.transforms.codes import is_code, scaled
from fedbraid.transforms.uploads import (
    Extended,
    averages,
    change_exchanges,
    check_bound,
    extend_server,
    norm,
    refuse_sealed,
    refuse_whole,
)

__all__ = ["adaptive_clip", "clip", "dp"]

PyTree = Any


def _bounded(up: PyTree, bound: Any) -> tuple[PyTree, Any]:
    """The clipped upload, and its norm before clipping."""
    size = norm(up)
    return scaled(up, jnp.minimum(1, bound / jnp.where(size == 0, 1, size))), size


# --- flat clipping ---------------------------------------------------------------------------------------------------


def clip(alg: Algorithm, *, bound: Any = 1.0, exchanges: Sequence[str] | None = None) -> Algorithm:
    """Scale every upload down to a Euclidean norm of at most ``bound``, pseudograd and aux together.

    ``math.inf`` clips nothing. The share of uploads that were clipped is reported as the metric ``clipped``.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = clip(fedavg(lambda params, batch, key: jnp.sum(params**2)), bound=0.5)
    """
    check_bound("bound", bound)

    def change(exchange: Exchange) -> Exchange:
        refuse_sealed(exchange, "clip")
        refuse_whole(exchange, "clip")
        return _clip(exchange, bound)

    return change_exchanges(alg, exchanges, change)


def _clip(exchange: Exchange, bound: Any) -> Exchange:
    def change(report: Report, down: Down, state: PyTree, key: Any) -> Report:
        sent, size = _bounded(report.up, bound)
        return report._replace(
            up=sent,
            state=exchange.reconcile(report.state, report.up, sent),
            metrics=report.metrics | {"clipped": (size > bound).astype(size.dtype)},
        )

    return exchange._replace(client=map_report(exchange.client, change))


# --- adaptive clipping -----------------------------------------------------------------------------------------------


class Bounded(NamedTuple):
    """Down: the exchange's own aux, and the bound of this round."""

    aux: PyTree
    bound: Any


class Counted(NamedTuple):
    """Up: the exchange's own aux, and whether the upload was within the bound."""

    aux: PyTree
    within: Any


def _uncounted(up: Up) -> Up:
    return Up(up.pseudograd, up.aux.aux)


def adaptive_clip(
    alg: Algorithm,
    *,
    quantile: Any = 0.5,
    initial: Any = 1.0,
    rate: Any = 0.2,
    exchanges: Sequence[str] | None = None,
) -> Algorithm:
    """Clipping whose bound follows a quantile of the uploads' norms. The server does not see the norms.

    Sends one more number down and one more bit (a byte) up. The server keeps the bound.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = adaptive_clip(fedavg(lambda params, batch, key: jnp.sum(params**2)), quantile=0.5, initial=0.1)
    """
    for exchange in alg.exchanges:
        if exchanges is None or exchange.name in exchanges:
            refuse_sealed(exchange, "adaptive_clip")
            refuse_whole(exchange, "adaptive_clip")
    return _adaptive(alg, quantile, initial, rate, exchanges)


def _adaptive(alg: Algorithm, quantile: Any, initial: Any, rate: Any, exchanges: Sequence[str] | None) -> Algorithm:
    check_number("quantile", quantile, low=0, high=1)
    check_number("initial", initial, low=0, open_low=True)
    check_number("rate", rate, low=0)
    names = [e.name for e in alg.exchanges if exchanges is None or e.name in exchanges]

    def first(params: PyTree) -> dict[str, Any]:
        return {name: jnp.asarray(initial, jnp.result_type(float)) for name in names}

    def change(exchange: Exchange) -> Exchange:
        return _adapt(exchange, quantile, rate)

    return change_exchanges(extend_server(alg, first), exchanges, change)


def _adapt(exchange: Exchange, quantile: Any, rate: Any) -> Exchange:
    name, inner = exchange.name, exchange.reducer

    def send(server: Extended) -> Down:
        down = exchange.send(server)
        return Down(down.params, Bounded(down.aux, server.own[name]))

    def change(report: Report, down: Down, state: PyTree, key: Any) -> Report:
        bound = down.aux.bound
        sent, size = _bounded(report.up, bound)
        return report._replace(
            up=Up(sent.pseudograd, Counted(sent.aux, size <= bound)),
            state=exchange.reconcile(report.state, report.up, sent),
            metrics=report.metrics | {"clipped": (size > bound).astype(size.dtype), "bound": bound},
        )

    def lift(up: Up, weight: Any) -> tuple[PyTree, Any]:
        within = up.aux.within.astype(jnp.result_type(float))
        return inner.lift(_uncounted(up), weight), jnp.where(weight > 0, within, 0)

    def finish(combined: tuple[PyTree, Any], weight: Any, count: Any) -> Up:
        up = inner.finish(combined[0], weight, count)
        return Up(
            up.pseudograd, Counted(up.aux, jnp.sum(combined[1]) / jnp.maximum(count, 1).astype(combined[1].dtype))
        )

    def receive(server: Extended, aggregate: Aggregate, key: Any) -> Logged:
        bound, share = server.own[name], aggregate.up.aux.within
        received = logged(exchange.receive(server, aggregate._replace(up=_uncounted(aggregate.up)), key))
        moved = (bound * jnp.exp(-rate * (share - quantile))).astype(bound.dtype)
        return Logged(received.server._replace(own=received.server.own | {name: moved}), received.logs)

    return exchange._replace(
        send=send,
        client=map_report(map_inputs(exchange.client, down=lambda down: Down(down.params, down.aux.aux)), change),
        receive=receive,
        reducer=Reducer(lift, finish, kind=inner.kind),
        reconcile=lambda state, meant, got: exchange.reconcile(state, _uncounted(meant), _uncounted(got)),
        admit=lambda up: exchange.admit(_uncounted(up)),
    )


# --- clipping, equal weights and noise -------------------------------------------------------------------------------


class Noise(NamedTuple):
    """Standard deviations on the sum of the uploads, in units of the bound, and on the sum of the bits."""

    uploads: Any
    bits: Any


def _plus_noise(tree: PyTree, level: Any, unit: Any, draw: Callable) -> PyTree:
    """Independent Gaussian noise of the deviation ``level * unit`` on every number of a tree."""
    if is_zero(level):
        return tree
    if any(map(is_code, jax.tree.leaves(tree, is_leaf=is_code))):
        raise StructureError(
            "clients cannot add Gaussian noise to compressed uploads: use where='server', dp(quantize(algorithm))"
        )
    return jax.tree.map(lambda leaf, z: leaf + jnp.asarray(level * unit, leaf.dtype) * z, tree, draw(tree))


def _guarantee(levels: Noise, shares: int | None, bound: Any, noise: Any, delta: float) -> Guarantee:
    """The guarantee of an exchange. ``bound``: None if it is adaptive; then the message to the clients contains it."""

    def noisy(up: PyTree, down: Down, over: Any, draw: Callable) -> PyTree:
        """``up`` with the noise of a sum, divided by ``over``."""
        if bound is not None:
            return _plus_noise(up, levels.uploads, bound / over, draw)
        own = _plus_noise(_uncounted(up), levels.uploads, down.aux.bound / over, draw)
        within = up.aux.within
        if not is_zero(levels.bits):
            within = _plus_noise(within.astype(jnp.result_type(float)), levels.bits, 1 / over, draw)
        return Up(own.pseudograd, Counted(own.aux, within))

    def client(up: PyTree, down: Down, draw: Callable) -> PyTree:
        return up if shares is None else noisy(up, down, math.sqrt(shares), draw)

    def server(aggregate: Aggregate, expected: Any, down: Down, draw: Callable) -> Aggregate:
        """From the mean of the uploads that arrived to the noisy sum divided by the expected number of uploads."""
        count, expected = (jnp.asarray(n, jnp.result_type(float)) for n in (aggregate.count, expected))
        share = count / expected
        mean = jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), aggregate.up)
        if bound is None:  # bits of -1/2 and 1/2: one client moves their sum by 1/2, and a lost one counts as 0
            within = 0.5 + (aggregate.up.aux.within - 0.5) * share.astype(aggregate.up.aux.within.dtype)
            mean = Up(mean.pseudograd, mean.aux._replace(within=within))
        if shares is None:
            mean = noisy(mean, down, expected, draw)
        return aggregate._replace(up=mean, weight=expected, count=expected)

    return Guarantee(client, server, noise, shares, delta)


def dp(
    alg: Algorithm,
    *,
    noise: Any = 1.0,
    bound: Any = 1.0,
    where: Literal["server", "clients"] = "server",
    shares: int | None = None,
    quantile: Any = None,
    rate: Any = 0.2,
    bit_noise: Any = None,
    delta: float = 1e-5,
    metrics: bool = True,
) -> Algorithm:
    """User-level differential privacy: clipped uploads of equal weight, and Gaussian noise on their sum.

    noise: z, the standard deviation of the noise on the sum in units of the bound; 0 means no noise and no guarantee.
    bound: C, the bound on the norm of a whole upload; with ``quantile``, the adaptive bound of the first round.
    where: "server" adds the noise to the mean; with "clients" each client adds a share, and ``shares`` of them add up
        to z. If fewer uploads arrive there is less noise, which :func:`epsilon_by_round` takes into account.
        The mean is divided by the size of the cohort, also if fewer uploads arrive.
    quantile, rate: adaptive clipping; ``bit_noise`` is s_b, by default 5 z, and must exceed z / 2.
    delta: the delta for which :func:`epsilon_by_round` reports epsilon; well below 1 / number of clients.
    metrics: the guarantee does *not* cover client metrics such as the training loss; False does not report them.

    All weights become 1: otherwise the largest client would set the sensitivity. Apply dp outside the other transforms.
    Only an attack or an admission rule may be outside of it.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = dp(fedavg(lambda params, batch, key: jnp.sum(params**2)), noise=0.8, bound=0.3)
    """
    _check_noise(noise, bound, where, shares, quantile)
    check_number("delta", delta, low=0, high=1, open_low=True, open_high=True)
    for exchange in alg.exchanges:
        _check_private(exchange, where)

    levels = _levels(noise, quantile, bit_noise)

    def level(report: Report, down: Down, state: PyTree, key: Any) -> Report:
        one = jnp.ones_like(jnp.asarray(report.weight))
        return report._replace(weight=one, metrics=report.metrics if metrics else {})

    def seal(exchange: Exchange) -> Exchange:
        sealed = _guarantee(levels, shares, bound if quantile is None else None, noise, delta)
        return exchange._replace(client=map_report(exchange.client, level), sealed=sealed)

    if quantile is None:
        clipped = change_exchanges(alg, None, lambda exchange: _clip(exchange, bound))
    else:
        clipped = _adaptive(alg, quantile, bound, rate, None)
    return change_exchanges(clipped, None, seal)


def _check_noise(noise: Any, bound: Any, where: str, shares: int | None, quantile: Any) -> None:
    check_number("noise", noise, low=0)
    check_bound("bound", bound)
    check_choice("where", where, ("server", "clients"))
    if where == "clients":
        if shares is None:
            raise ValueError("where='clients' needs shares: the number of uploads whose noise adds up, e.g. the cohort")
        check_count("shares", shares)
    elif shares is not None:
        raise ValueError(f"shares is for where='clients', got shares={shares!r} with where='server'")
    if isinstance(bound, float) and bound == float("inf") and (quantile is not None or not is_zero(noise)):
        raise ValueError("noise needs a finite bound: without one the sensitivity of the sum is infinite")


def _levels(noise: Any, quantile: Any, bit_noise: Any) -> Noise:
    """The noise on the uploads and on the bits of adaptive clipping; together they cost the epsilon of ``noise``."""
    if quantile is not None and not is_zero(noise):
        bits = 5 * noise if bit_noise is None else check_number("bit_noise", bit_noise, low=0, open_low=True)
        if not is_traced(bits) and not is_traced(noise) and 2 * bits <= noise:
            raise ValueError(f"bit_noise must exceed noise / 2 = {noise / 2:g}, got {bits:g}: the bits alone cost more")
        return Noise((noise**-2 - (2 * bits) ** -2) ** -0.5, bits)
    if bit_noise is not None:
        raise ValueError("bit_noise is for adaptive clipping with noise: give quantile, and a noise above 0")
    return Noise(noise, 0.0)


def _check_private(exchange: Exchange, where: str) -> None:
    if exchange.sealed is not None:
        raise ValueError("dp over dp would add noise twice and account for the outer only: apply it once")
    if not averages(exchange.reducer, uniform=True):
        raise ValueError(
            f"dp needs uploads that are averaged, so that one client moves the sum by at most the bound; exchange "
            f"{exchange.name!r} reduces them in another way"
        )
    if where == "server" and exchange.keeps:
        raise ValueError(
            f"noise at the server over exchange {exchange.name!r}: the states of server and clients would disagree, "
            "because clients keep their uploads (as in c = mean c_i). Use where='clients' and shares"
        )
