"""User-level differential privacy over any algorithm: clipping, Gaussian noise and the accountant.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang. Learning Differentially Private Recurrent Language Models. ICLR 2018
(DP-FedAvg). G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy. Differentially Private Learning with Adaptive Clipping.
NeurIPS 2021.

    clip            u <- u min(1, C / ||u||), with the norm of the whole upload: pseudograd and aux together
    adaptive_clip   each client adds one bit b = [||u|| <= C]; the server sets C <- C exp(-rate (mean b - quantile))
    dp              clipping, weights of 1, and noise N(0, (z C)^2) on every coordinate of the sum of the uploads

The sum of uploads changes by at most C if one client is added or removed. So z is the noise multiplier of a Gaussian
mechanism, and :func:`epsilon` is computed by dp-accounting. With adaptive clipping the bits get noise, too: N(0, s_b^2)
on their sum. The noise multiplier of the uploads is then z_u = (z^-2 - (2 s_b)^-2)^(-1/2), so that both together cost
the same epsilon as z.

Where the noise is added: ``where="server"`` adds it to the reduced upload. Some algorithms have clients that keep their
uploads as state (SCAFFOLD's c = mean c_i, FedSplit's x = mean z_i). Noise at the server would break these equations, so
it is refused there. With ``where="clients"`` each client adds its share, knows it, and reconciles its state.

The accountant assumes that each client takes part in a round with probability ``sampling``, independently (Poisson).
A simulation has cohorts of a fixed size. They are commonly accounted for in the same way, as an approximation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import (
    Aggregate,
    Algorithm,
    Down,
    Exchange,
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
)

__all__ = ["adaptive_clip", "clip", "dp", "epsilon", "epsilon_by_round", "is_private"]

PyTree = Any
_NOISE, _BITS = 0x6A05, 0xB175  # folded into a key, one constant per purpose


class Noise(NamedTuple):
    """Standard deviations on the sum of the uploads, in units of the bound, and on the sum of the bits.

    ``shares``: the number of clients whose shares add up to this noise; None if the server adds it.
    """

    uploads: Any = 0.0
    bits: Any = 0.0
    shares: int | None = None

    @property
    def at_clients(self) -> bool:
        return self.shares is not None


def add_noise(tree: PyTree, deviation: Any, key: Any) -> PyTree:
    """Independent Gaussian noise on every number."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_code)
    if any(map(is_code, leaves)):
        raise StructureError(
            "clients cannot add Gaussian noise to compressed uploads: use where='server', dp(quantize(algorithm))"
        )
    keys = jax.random.split(key, max(len(leaves), 1))
    noisy = [
        leaf + jnp.asarray(deviation, leaf.dtype) * jax.random.normal(k, leaf.shape, leaf.dtype)
        for leaf, k in zip(leaves, keys, strict=False)
    ]
    return jax.tree.unflatten(structure, noisy)


def _bounded(up: PyTree, bound: Any, noise: Noise, key: Any) -> tuple[PyTree, Any]:
    """The clipped upload, with noise if the clients add it; and the norm before clipping."""
    size = norm(up)
    sent = scaled(up, jnp.minimum(1, bound / jnp.where(size == 0, 1, size)))
    if noise.at_clients and not is_zero(noise.uploads):
        assert noise.shares is not None
        share = noise.uploads * bound / np.sqrt(noise.shares)
        sent = add_noise(sent, share, jax.random.fold_in(key, _NOISE))
    return sent, size


def _server_noise(up: PyTree, bound: Any, noise: Noise, count: Any, key: Any) -> PyTree:
    if noise.at_clients or is_zero(noise.uploads):
        return up
    return add_noise(up, noise.uploads * bound / jnp.maximum(count, 1), jax.random.fold_in(key, _NOISE))


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
        return _clip(exchange, bound, Noise())

    return change_exchanges(alg, exchanges, change)


def _clip(exchange: Exchange, bound: Any, noise: Noise) -> Exchange:
    def change(report: Report, down: Down, state: PyTree, key: Any) -> Report:
        sent, size = _bounded(report.up, bound, noise, key)
        return report._replace(
            up=sent,
            state=exchange.reconcile(report.state, report.up, sent),
            metrics=report.metrics | {"clipped": (size > bound).astype(size.dtype)},
        )

    def receive(server: PyTree, aggregate: Aggregate, key: Any) -> PyTree:
        noisy = _server_noise(aggregate.up, bound, noise, aggregate.count, key)
        return exchange.receive(server, aggregate._replace(up=noisy), key)

    return exchange._replace(client=map_report(exchange.client, change), receive=receive)


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
    return _adaptive(alg, quantile, initial, rate, exchanges, Noise())


def _adaptive(
    alg: Algorithm, quantile: Any, initial: Any, rate: Any, exchanges: Sequence[str] | None, noise: Noise
) -> Algorithm:
    check_number("quantile", quantile, low=0, high=1)
    check_number("initial", initial, low=0, open_low=True)
    check_number("rate", rate, low=0)
    names = [e.name for e in alg.exchanges if exchanges is None or e.name in exchanges]

    def first(params: PyTree) -> dict[str, Any]:
        return {name: jnp.asarray(initial, jnp.result_type(float)) for name in names}

    def change(exchange: Exchange) -> Exchange:
        return _adapt(exchange, quantile, rate, noise)

    return change_exchanges(extend_server(alg, first), exchanges, change)


def _adapt(exchange: Exchange, quantile: Any, rate: Any, noise: Noise) -> Exchange:
    name, inner = exchange.name, exchange.reducer

    def send(server: Extended) -> Down:
        down = exchange.send(server)
        return Down(down.params, Bounded(down.aux, server.own[name]))

    def change(report: Report, down: Down, state: PyTree, key: Any) -> Report:
        bound = down.aux.bound
        sent, size = _bounded(report.up, bound, noise, key)
        within = size <= bound
        if noise.at_clients and not is_zero(noise.bits):
            assert noise.shares is not None
            drawn = jax.random.normal(jax.random.fold_in(key, _BITS), (), size.dtype)
            within = within.astype(drawn.dtype) + noise.bits / np.sqrt(noise.shares) * drawn
        return report._replace(
            up=Up(sent.pseudograd, Counted(sent.aux, within)),
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
        if not noise.at_clients and not is_zero(noise.bits):
            drawn = jax.random.normal(jax.random.fold_in(key, _BITS), (), bound.dtype)
            share = share + noise.bits / jnp.maximum(aggregate.count, 1) * drawn
        up = _server_noise(_uncounted(aggregate.up), bound, noise, aggregate.count, key)
        received = logged(exchange.receive(server, aggregate._replace(up=up), key))
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


class Promise(NamedTuple):
    """The parameters of one exchange that the accountant needs."""

    noise: Any
    shares: int | None
    delta: float


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

    levels = _levels(noise, shares, quantile, bit_noise)

    def level(report: Report, down: Down, state: PyTree, key: Any) -> Report:
        one = jnp.ones_like(jnp.asarray(report.weight))
        return report._replace(weight=one, metrics=report.metrics if metrics else {})

    def seal(exchange: Exchange) -> Exchange:
        return exchange._replace(client=map_report(exchange.client, level), sealed=Promise(noise, shares, delta))

    if quantile is None:
        clipped = change_exchanges(alg, None, lambda exchange: _clip(exchange, bound, levels))
    else:
        clipped = _adaptive(alg, quantile, bound, rate, None, levels)
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


def _levels(noise: Any, shares: int | None, quantile: Any, bit_noise: Any) -> Noise:
    """The noise on the uploads and on the bits of adaptive clipping; together they cost the epsilon of ``noise``."""
    if quantile is not None and not is_zero(noise):
        bits = 5 * noise if bit_noise is None else check_number("bit_noise", bit_noise, low=0, open_low=True)
        if not is_traced(bits) and not is_traced(noise) and 2 * bits <= noise:
            raise ValueError(f"bit_noise must exceed noise / 2 = {noise / 2:g}, got {bits:g}: the bits alone cost more")
        return Noise((noise**-2 - (2 * bits) ** -2) ** -0.5, bits, shares)
    if bit_noise is not None:
        raise ValueError("bit_noise is for adaptive clipping with noise: give quantile, and a noise above 0")
    return Noise(noise, 0.0, shares)


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


# --- the accountant --------------------------------------------------------------------------------------------------


def _accountants() -> Any:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError as error:
        raise ValueError("accounting needs dp-accounting: pip install 'fedbraid[privacy]'") from error
    return dp_accounting, rdp


def _check_account(sampling: Any, rounds: Any, delta: Any) -> None:
    check_number("sampling", sampling, low=0, high=1, open_low=True)
    check_count("rounds", rounds, low=0)
    check_number("delta", delta, low=0, high=1, open_low=True, open_high=True)


def _renyi(noise: float, sampling: float) -> np.ndarray:
    """The Renyi divergences of one round, at the accountant's orders."""
    accounting, rdp = _accountants()
    accountant = rdp.RdpAccountant()
    accountant.compose(accounting.PoissonSampledDpEvent(sampling, accounting.GaussianDpEvent(noise)))
    return accountant.rdp


def _epsilons(divergences: np.ndarray, delta: float) -> np.ndarray:
    _, rdp = _accountants()
    orders = rdp.RdpAccountant().orders
    return np.array([rdp.compute_epsilon(orders, row, delta)[0] if row.any() else 0.0 for row in divergences])


def epsilon(noise: float, sampling: float, rounds: int, delta: float) -> float:
    """The epsilon that ``rounds`` rounds cost at ``delta``, by the Renyi accountant of dp-accounting.

    noise: the noise multiplier z. sampling: the probability that a client takes part in a round.

    >>> round(epsilon(1.0, 0.01, 1000, 1e-6), 3)
    2.437
    """
    check_number("noise", noise, low=0)
    _check_account(sampling, rounds, delta)
    if rounds == 0 or noise == 0:
        return 0.0 if rounds == 0 else float("inf")
    return float(_epsilons(rounds * _renyi(noise, sampling)[None], delta)[0])


def is_private(alg: Algorithm) -> bool:
    """Whether ``dp`` covers the uploads of all exchanges.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = fedavg(lambda params, batch, key: jnp.sum(params**2))
    >>> is_private(alg), is_private(dp(alg))
    (False, True)
    """
    return all(exchange.sealed is not None for exchange in alg.exchanges)


def epsilon_by_round(
    alg: Algorithm,
    *,
    sampling: float,
    rounds: int,
    delta: float | None = None,
    history: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """The epsilon spent after each round at ``delta`` (by default dp's own): a column for a run's history.

    Exchanges with the same cohort are one Gaussian mechanism; those with fresh cohorts compose. ``history`` is needed
    if clients add the noise: with fewer uploads than shares there is less noise. A round without uploads costs 0.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = dp(fedavg(lambda params, batch, key: jnp.sum(params**2)), noise=1.0, bound=0.3)
    >>> epsilon_by_round(alg, sampling=0.01, rounds=3, delta=1e-6).round(2).tolist()
    [1.21, 1.24, 1.25]
    """
    for exchange in alg.exchanges:
        if exchange.sealed is None:
            raise ValueError(f"exchange {exchange.name!r} is not private: apply dp to the algorithm")
        delta = exchange.sealed.delta if delta is None else delta
    _check_account(sampling, rounds, delta)
    assert delta is not None
    groups: list[np.ndarray] = []  # per cohort and round: sum of 1 / z^2 over its exchanges
    for exchange in alg.exchanges:
        spent = _spent(exchange.name, exchange.sealed, rounds, history)
        if exchange.cohort == "same":
            groups[-1] = groups[-1] + spent
        else:
            groups.append(spent)
    total = np.zeros(rounds)
    divergences: Any = 0.0
    for spent in groups:
        if np.isinf(spent).any():
            total[int(np.argmax(np.isinf(spent))) :] = np.inf
        levels, which = np.unique(np.where(np.isinf(spent), 0, spent), return_inverse=True)
        rows = np.stack([_renyi(s**-0.5, sampling) if s > 0 else np.zeros_like(_renyi(1.0, 1.0)) for s in levels])
        divergences = divergences + np.cumsum(rows[which], 0)
    return total + _epsilons(divergences, delta) if rounds else total


def _spent(name: str, promise: Promise, rounds: int, history: Mapping[str, Any] | None) -> np.ndarray:
    """1 / z^2 of an exchange in every round."""
    if is_traced(promise.noise):
        raise ValueError("noise is traced (inside a vmap): compute epsilon outside of it, with numbers")
    arrived = np.ones(rounds)
    if promise.shares is not None:
        if history is None:
            raise ValueError("the clients add the noise: pass the run's history, which has the number of uploads")
        arrived = np.asarray(history[f"{name}/arrived"])[:rounds] / promise.shares
    with np.errstate(divide="ignore"):
        return np.where(arrived > 0, 1 / np.where(arrived > 0, float(promise.noise) ** 2 * arrived, 1), 0.0)
