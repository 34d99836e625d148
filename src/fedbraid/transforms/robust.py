"""Robust reductions: a minority of bad uploads cannot move their result far.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates.
ICML 2018 (coordinate median, trimmed mean). K. Pillutla, S. Kakade, Z. Harchaoui. Robust Aggregation for Federated
Learning. IEEE TSP 2022 (geometric median). P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer. Machine Learning
with Adversaries. NeurIPS 2017 (Krum, multi-Krum). Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan. Can You Really
Backdoor Federated Learning? 2019 (norm bounding).

    median             the median of every coordinate
    trimmed_mean       the mean of every coordinate, without the share ``trim`` of its smallest and largest values
    geometric_median   the point with the smallest sum of distances to the uploads, by Weiszfeld's iteration
    krum, multi_krum   the upload (the mean of several) with the smallest sum of squared distances to its nearest others
    norm_bound         the mean, after the server has scaled every upload down to a norm of at most ``bound``

Rank rules see all uploads at once (a gather reducer) and give each one vote. A client could claim any weight, so
weights only tell which uploads arrived. Uploads that did not arrive have weight 0 and are left out. Uploads are not
changed.

A rank rule is refused over an algorithm whose clients keep their uploads as state: SCAFFOLD's c is the mean of all c_i,
and a median of their changes is not the change of their mean. Norm bounding scales each upload by itself. A client can
compute the result and correct its state (``reconcile``), so any algorithm can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedbraid.core import Algorithm, Exchange, Reducer, check_count, check_number
from fedbraid.transforms.codes import scaled
from fedbraid.transforms.uploads import (
    averages,
    change_exchanges,
    check_bound,
    norm,
    recode,
    refuse_sealed,
    refuse_whole,
)

__all__ = [
    "admit_if",
    "geometric_median",
    "krum",
    "median",
    "multi_krum",
    "norm_bound",
    "trimmed_mean",
]

PyTree = Any
Rule = Callable[[PyTree, Any, Any], PyTree]  # (stacked uploads, mask of those that arrived, their number) -> one upload


def _by_rule(name: str, alg: Algorithm, rule: Rule, exchanges: Sequence[str] | None) -> Algorithm:
    def finish(stacked: PyTree, weight: Any, count: Any) -> PyTree:
        del count
        there = weight > 0
        return rule(stacked, there, jnp.sum(there))

    def change(exchange: Exchange) -> Exchange:
        refuse_sealed(exchange, name)
        if exchange.keeps:
            raise ValueError(
                f"{name} over exchange {exchange.name!r}: the states of server and clients would disagree. Clients "
                "keep their uploads, and only the mean of the uploads equals the mean of their states (as in "
                "c = mean c_i). norm_bound can be used: it scales each upload by itself"
            )
        if not averages(exchange.reducer):
            raise ValueError(
                f"{name} replaces the mean of the uploads, but exchange {exchange.name!r} does not average them: its "
                "own reduction would be lost"
            )
        decode = exchange.reducer.decode
        return exchange._replace(reducer=Reducer(lambda up, weight: decode(up), finish, kind="gather", decode=decode))

    return change_exchanges(alg, exchanges, change)


# --- coordinate by coordinate ----------------------------------------------------------------------------------------


def _real(count: Any) -> Any:
    """A count as a real number of the default precision."""
    return count.astype(jnp.result_type(float))


def _column(mask: Any, leaf: Any) -> Any:
    return mask.reshape(-1, *[1] * (leaf.ndim - 1))


def _sorted(leaf: Any, there: Any) -> Any:
    """The sorted values of every coordinate, those of absent uploads last."""
    return jnp.sort(jnp.where(_column(there, leaf), leaf, jnp.inf), axis=0)


def _trimmed(stacked: PyTree, there: Any, cut: Any, n: Any) -> PyTree:
    """The mean of every coordinate without its ``cut`` smallest and largest values; 0 if there are no uploads."""
    place = jnp.arange(len(there))
    used = (place >= cut) & (place < n - cut)

    def one(leaf: Any) -> Any:
        kept = jnp.where(_column(used, leaf), _sorted(leaf, there), 0)
        return jnp.sum(kept, 0) / jnp.maximum(n - 2 * cut, 1).astype(leaf.dtype)

    return jax.tree.map(one, stacked)


def median(alg: Algorithm, *, exchanges: Sequence[str] | None = None) -> Algorithm:
    """The median of every coordinate; with an even number of uploads, the mean of the middle two values.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = median(fedavg(lambda params, batch, key: jnp.sum(params**2)))
    >>> alg.exchanges[0].reducer.kind
    'gather'
    """
    return _by_rule("median", alg, _median, exchanges)


def _median(stacked: PyTree, there: Any, n: Any) -> PyTree:
    return _trimmed(stacked, there, jnp.maximum(n - 1, 0) // 2, n)


def trimmed_mean(alg: Algorithm, *, trim: Any = 0.2, exchanges: Sequence[str] | None = None) -> Algorithm:
    """The mean of every coordinate without the share ``trim``, rounded up, of its smallest and of its largest values.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = trimmed_mean(fedavg(lambda params, batch, key: jnp.sum(params**2)), trim=0.3)
    """
    check_number("trim", trim, low=0, high=0.5, open_high=True)

    def rule(stacked: PyTree, there: Any, n: Any) -> PyTree:
        cut = jnp.minimum(jnp.ceil(trim * _real(n) - 1e-6).astype(n.dtype), jnp.maximum(n - 1, 0) // 2)
        return _trimmed(stacked, there, cut, n)

    return _by_rule("trimmed_mean", alg, rule, exchanges)


# --- by distances between whole uploads ------------------------------------------------------------------------------


def _squared_norms(stacked: PyTree) -> Any:
    return sum(jnp.sum(leaf.reshape(len(leaf), -1) ** 2, 1) for leaf in jax.tree.leaves(stacked))


def _mean_of(stacked: PyTree, weights: Any) -> PyTree:
    total = jnp.sum(weights)
    share = weights / jnp.where(total > 0, total, 1)
    return jax.tree.map(lambda leaf: jnp.sum(_column(share, leaf).astype(leaf.dtype) * leaf, 0), stacked)


def geometric_median(alg: Algorithm, *, iterations: int = 32, exchanges: Sequence[str] | None = None) -> Algorithm:
    """The point with the smallest sum of distances to the uploads, by ``iterations`` of Weiszfeld from the median.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = geometric_median(fedavg(lambda params, batch, key: jnp.sum(params**2)))
    """
    check_count("iterations", iterations)

    def rule(stacked: PyTree, there: Any, n: Any) -> PyTree:
        def distances(point: PyTree) -> Any:
            return jnp.sqrt(_squared_norms(jax.tree.map(lambda leaf, p: leaf - p, stacked, point)))

        first = _median(stacked, there, n)
        middle = jnp.sort(jnp.where(there, distances(first), jnp.inf))[jnp.maximum(n - 1, 0) // 2]
        # Weiszfeld's weights 1 / distance are infinite at an upload, so distances have a lower bound: a small share of
        # the median distance. The largest distance would not do, because an attacker could choose it.
        tiny = jnp.finfo(middle.dtype)
        least = jnp.where((middle > 0) & (n > 0), middle * jnp.sqrt(tiny.eps), jnp.sqrt(tiny.tiny))

        def step(_: Any, point: PyTree) -> PyTree:
            return _mean_of(stacked, there.astype(least.dtype) / jnp.maximum(distances(point), least))

        return jax.lax.fori_loop(0, iterations, step, first)

    return _by_rule("geometric_median", alg, rule, exchanges)


def krum(alg: Algorithm, *, fraction: Any = 0.2, exchanges: Sequence[str] | None = None) -> Algorithm:
    """The one upload that is nearest to its neighbours, where a share ``fraction`` of the uploads may be bad.

    Of n uploads, f = ceil(fraction n) may be bad. An upload's score is the sum of its squared distances to the
    n - f - 2 nearest others (at least one). The guarantee needs n > 2 f + 2. Uploads with equal scores are averaged, so
    that the order of the cohort does not matter.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = krum(fedavg(lambda params, batch, key: jnp.sum(params**2)), fraction=0.2)
    """
    return _krum("krum", alg, fraction, None, exchanges)


def multi_krum(
    alg: Algorithm, *, fraction: Any = 0.2, keep: Any = None, exchanges: Sequence[str] | None = None
) -> Algorithm:
    """The mean of the share ``keep`` (by default 1 - ``fraction``) of the uploads with the best Krum scores.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = multi_krum(fedavg(lambda params, batch, key: jnp.sum(params**2)), fraction=0.2, keep=0.5)
    """
    kept = 1 - fraction if keep is None else check_number("keep", keep, low=0, high=1, open_low=True)
    return _krum("multi_krum", alg, fraction, kept, exchanges)


def _krum(name: str, alg: Algorithm, fraction: Any, kept: Any, exchanges: Sequence[str] | None) -> Algorithm:
    check_number("fraction", fraction, low=0, high=0.5, open_high=True)

    def rule(stacked: PyTree, there: Any, n: Any) -> PyTree:
        bad = jnp.ceil(fraction * _real(n) - 1e-6).astype(n.dtype)
        scores = _krum_scores(stacked, there, jnp.maximum(n - bad - 2, 1))
        many = 1 if kept is None else jnp.maximum(jnp.floor(kept * _real(n) + 1e-6).astype(n.dtype), 1)
        last = jnp.sort(scores)[many - 1]
        return _mean_of(stacked, (there & (scores <= last * (1 + 1e-5))).astype(last.dtype))

    return _by_rule(name, alg, rule, exchanges)


def _krum_scores(stacked: PyTree, there: Any, neighbours: Any) -> Any:
    """Each upload's sum of squared distances to its nearest others; infinite for absent ones."""
    n = len(there)
    centre = _median(stacked, there, jnp.sum(there))  # subtracted, to keep small distances exact
    rows = jnp.concatenate(
        [(leaf - c).reshape(n, -1) for leaf, c in zip(*map(jax.tree.leaves, (stacked, centre)), strict=True)], 1
    )
    squares = jnp.sum(rows**2, 1)
    inner = jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)
    distances = jnp.maximum(squares[:, None] + squares[None, :] - 2 * inner, 0)
    others = there[None, :] & ~jnp.eye(n, dtype=bool)
    nearest = jnp.sort(jnp.where(others, distances, jnp.inf), 1)
    used = (jnp.arange(n) < neighbours) & jnp.isfinite(nearest)
    return jnp.where(there, jnp.sum(jnp.where(used, nearest, 0), 1), jnp.inf)


# --- upload by upload ------------------------------------------------------------------------------------------------


def norm_bound(alg: Algorithm, *, bound: Any = 1.0, exchanges: Sequence[str] | None = None) -> Algorithm:
    """The server scales every upload down to a norm of at most ``bound``.

    ``clip`` is done by the clients, so an attacker can leave it out. This is done by the server. Honest clients know
    the rule and correct their states by it.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = norm_bound(fedavg(lambda params, batch, key: jnp.sum(params**2)), bound=2.0)
    """
    check_bound("bound", bound)

    def decode(up: PyTree) -> PyTree:
        size = norm(up)
        return scaled(up, jnp.minimum(1, bound / jnp.where(size == 0, 1, size)))

    def change(exchange: Exchange) -> Exchange:
        refuse_sealed(exchange, "norm_bound")
        refuse_whole(exchange, "norm_bound")
        changed = recode(exchange, lambda up, down, key: up, decode, mixes=True)
        return changed._replace(guards=(*exchange.guards, "norm_bound"))

    return change_exchanges(alg, exchanges, change)


def admit_if(
    alg: Algorithm, predicate: Callable[[PyTree], Any], *, exchanges: Sequence[str] | None = None
) -> Algorithm:
    """Uploads for which ``predicate(up)`` is False count as not arrived. Earlier admission rules still hold.

    By default every exchange refuses uploads that are not finite (:func:`fedbraid.core.finite`).

    >>> from fedbraid.algorithms import fedavg
    >>> from fedbraid.transforms.uploads import norm
    >>> alg = admit_if(fedavg(lambda params, batch, key: jnp.sum(params**2)), lambda up: norm(up) < 10.0)
    """

    def change(exchange: Exchange) -> Exchange:
        guards = (*exchange.guards, "admit_if")
        return exchange._replace(admit=lambda up: exchange.admit(up) & predicate(up), guards=guards)

    return change_exchanges(alg, exchanges, change)
