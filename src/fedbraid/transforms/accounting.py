"""The accountant: the epsilon that the noisy sums of a run cost, computed by dp-accounting.

I. Mironov. Renyi Differential Privacy. CSF 2017. A. Koskela, J. Jalko, A. Honkela. Computing Tight Differential Privacy
Guarantees Using FFT. AISTATS 2020 (privacy loss distributions, PLD). B. Balle, Y.-X. Wang. Improving the Gaussian
Mechanism for Differential Privacy. ICML 2018 (the exact epsilon of Gaussian noise). Y. Zhu, J. Dong, Y.-X. Wang.
Optimal Accounting of Differential Privacy via Characteristic Function. AISTATS 2022 (dominating pairs).

Two data sets are neighbours if one has a client that the other does not have ("add or remove one client"). What a round
releases is the sum of the cohort's uploads, each of norm at most C, with noise N(0, (z C)^2). How much one client moves
it depends on how the cohort is drawn:

    all          every client takes part: the sum moves by its upload, at most C. A Gaussian mechanism with z.
    fixed        m of n clients, without replacement. Without the client another client j takes its place. So with
                 probability q = m / n the sum moves by x_i - x_j, at most 2 C, and else not at all: given all other
                 draws, the two sums are (1 - q) N(0) + q N(x_i - x_j) and N(0). That pair is the one of a Gaussian
                 mechanism with z / 2 under Poisson sampling with rate q, which the accountants compute.
    poisson      every client takes part with probability q, independently, and nobody learns how many did: the same
                 pair with z instead of z / 2. fedbraid's engines draw cohorts of a fixed size; this is for comparison.

The epsilon is the smallest of sound bounds: by Renyi divergences, by PLD, and for Gaussian mechanisms without sampling
the exact one.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedbraid.core import Algorithm, Exchange, check_choice, check_count, check_number, is_traced

__all__ = ["epsilon", "epsilon_by_round", "epsilon_of_rows", "is_private"]

Cohorts = Literal["fixed", "poisson"]
DISTINCT = 16  # PLDs of more different releases are not computed, because each takes some tenths of a second
TIGHT = 16  # number of rounds of a run for which PLDs are computed
# The interval of PLDs: at least the first, and the second times the epsilon. A longer one is sound but less tight.
INTERVAL = 2e-4, 5e-4


class Mechanism(NamedTuple):
    """A Gaussian mechanism under Poisson sampling, whose pair of distributions is that of a release."""

    noise: float  # noise multiplier
    rate: float


def _mechanism(noise: float, sampling: float, cohorts: Cohorts) -> Mechanism:
    return Mechanism(noise / 2 if cohorts == "fixed" and sampling < 1 else noise, sampling)


def _accountants() -> Any:
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as error:
        raise ValueError("accounting needs dp-accounting: pip install 'fedbraid[privacy]'") from error
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of every order that it leaves out
    return dp_accounting, rdp, pld


# --- bounds ----------------------------------------------------------------------------------------------------------


def _event(mechanism: Mechanism) -> Any:
    accounting, _, _ = _accountants()
    return accounting.PoissonSampledDpEvent(mechanism.rate, accounting.GaussianDpEvent(mechanism.noise))


@functools.lru_cache(maxsize=4096)
def _renyi(mechanism: Mechanism) -> np.ndarray:
    """The Renyi divergences of one release, at the accountant's orders."""
    _, rdp, _ = _accountants()
    accountant = rdp.RdpAccountant()
    accountant.compose(_event(mechanism))
    return accountant.rdp


def _by_renyi(releases: Counter[Mechanism], delta: float) -> float:
    _, rdp, _ = _accountants()
    total = sum(count * _renyi(mechanism) for mechanism, count in releases.items())
    return float(rdp.compute_epsilon(rdp.RdpAccountant().orders, total, delta)[0])


@functools.lru_cache(maxsize=256)
def _pld(mechanism: Mechanism, interval: float) -> Any:
    """The privacy loss distribution of one release."""
    _, _, pld = _accountants()
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        mechanism.noise, value_discretization_interval=interval, sampling_prob=mechanism.rate
    )


def _by_pld(releases: Counter[Mechanism], delta: float, scale: float) -> float:
    """The epsilon by PLDs; ``scale`` is about the size of the epsilon, from which their resolution follows."""
    if len(releases) > DISTINCT:
        return math.inf
    wanted = max(INTERVAL[0], INTERVAL[1] * (scale if math.isfinite(scale) else 1e3))
    interval = 2.0 ** math.floor(math.log2(wanted))  # few different ones, so that PLDs are made once
    parts = [_pld(mechanism, interval).self_compose(count) for mechanism, count in releases.items()]
    return float(functools.reduce(lambda one, other: one.compose(other), parts).get_epsilon_for_delta(delta))


def _exactly(releases: Counter[Mechanism], delta: float) -> float:
    """The epsilon of Gaussian mechanisms without sampling: together they are one Gaussian mechanism."""
    accounting, _, _ = _accountants()
    spent = sum(count / mechanism.noise**2 for mechanism, count in releases.items())
    return float(accounting.get_epsilon_gaussian(spent**-0.5, delta))


def _smallest(releases: Counter[Mechanism], delta: float, scale: float | None = None) -> float:
    """The smallest of the bounds on the epsilon of some releases; ``scale``: as for PLDs, by default this epsilon."""
    if not releases:
        return 0.0
    if any(mechanism.noise == 0 for mechanism in releases):
        return math.inf
    if all(mechanism.rate == 1 for mechanism in releases):
        return _exactly(releases, delta)
    simple = _by_renyi(releases, delta)
    return min(simple, _by_pld(releases, delta, simple if scale is None else scale))


# --- the epsilon of a run --------------------------------------------------------------------------------------------


def _check_account(sampling: Any, rounds: Any, delta: Any) -> None:
    for share in np.ravel(sampling):
        check_number("sampling", float(share), low=0, high=1, open_low=True)
    check_count("rounds", rounds, low=0)
    check_number("delta", delta, low=0, high=1, open_low=True, open_high=True)


def epsilon(noise: float, sampling: float, rounds: int, delta: float, *, cohorts: Cohorts = "fixed") -> float:
    """The epsilon that ``rounds`` rounds cost at ``delta``; neighbours differ in one client.

    noise: the noise multiplier z. sampling: the share of the clients that take part in a round. cohorts: "fixed" is
    what fedbraid's engines draw, always the same number of clients; "poisson" draws each client independently.

    >>> round(epsilon(1.0, 0.01, 1000, 1e-6), 1), round(epsilon(1.0, 0.01, 1000, 1e-6, cohorts="poisson"), 1)
    (15.5, 2.1)
    >>> round(epsilon(1.0, 1.0, 10, 1e-6), 1)  # all clients in every round
    19.4
    """
    check_number("noise", noise, low=0)
    check_choice("cohorts", cohorts, ("fixed", "poisson"))
    _check_account(sampling, rounds, delta)
    return _smallest(Counter({_mechanism(float(noise), float(sampling), cohorts): rounds} if rounds else {}), delta)


def is_private(alg: Algorithm) -> bool:
    """Whether ``dp`` covers the uploads of all exchanges.

    >>> import jax.numpy as jnp
    >>> from fedbraid.algorithms import fedavg
    >>> from fedbraid.transforms import dp
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

    >>> import jax.numpy as jnp
    >>> from fedbraid.algorithms import fedavg
    >>> from fedbraid.transforms import dp
    >>> alg = dp(fedavg(lambda params, batch, key: jnp.sum(params**2)), noise=4.0, bound=0.3)
    >>> epsilon_by_round(alg, sampling=1.0, rounds=3, delta=1e-6).round(2).tolist()
    [1.06, 1.54, 1.93]
    """
    delta = _delta(alg, delta)
    _check_account(sampling, rounds, delta)
    if history is None and any(exchange.sealed.shares is not None for exchange in alg.exchanges if exchange.sealed):
        raise ValueError("the clients add the noise: pass the run's history, which has the number of uploads")
    arrived = {f"{e.name}/arrived": np.asarray((history or {}).get(f"{e.name}/arrived", [])) for e in alg.exchanges}
    asked = {f"{e.name}/sampling": float(sampling) for e in alg.exchanges}
    rows = [asked | {name: float(column[i]) for name, column in arrived.items() if len(column)} for i in range(rounds)]
    return _prefixes([_releases(alg, row) for row in rows], delta)


def epsilon_of_rows(alg: Algorithm, rows: Iterable[Mapping[str, float]], *, delta: float | None = None) -> float:
    """The epsilon of releases that are given one by one, in a deployment: a row for every round, or part of a round.

    A row has for every exchange that released a sum ``<exchange>/arrived``, the number of uploads in it, and
    ``<exchange>/sampling``, the share of the clients that were asked. A round that was repeated after a crash released
    its sums twice and has two rows.
    """
    releases: Counter[Mechanism] = Counter()
    for row in rows:
        releases.update(_releases(alg, row))
    return _smallest(releases, _delta(alg, delta))


def _delta(alg: Algorithm, delta: float | None) -> float:
    for exchange in alg.exchanges:
        if exchange.sealed is None:
            raise ValueError(f"exchange {exchange.name!r} is not private: apply dp to the algorithm")
        delta = exchange.sealed.delta if delta is None else delta
    assert delta is not None
    return delta


def _prefixes(releases: Sequence[list[Mechanism]], delta: float) -> np.ndarray:
    """The epsilon after every round.

    The bound by Renyi divergences is computed for every round. The tighter ones take longer: they are computed for 16
    rounds, evenly spaced, with the last one. A bound for a later round holds for the earlier ones, too.
    """
    rounds = len(releases)
    after, so_far = np.zeros(rounds), Counter()
    everything = Counter(mechanism for new in releases for mechanism in new if mechanism.noise > 0)
    scale = _by_renyi(everything, delta) if everything else 0.0  # one for all rounds, so that each PLD is made once
    tight = {-(-rounds * k // TIGHT) for k in range(1, TIGHT + 1)}
    for i, new in enumerate(releases):
        so_far.update(new)
        if not new:
            after[i] = after[i - 1] if i else 0.0
        elif any(mechanism.noise == 0 for mechanism in so_far):
            after[i] = math.inf
        else:
            exact = i + 1 in tight or all(mechanism.rate == 1 for mechanism in so_far)
            after[i] = _smallest(so_far, delta, scale) if exact else _by_renyi(so_far, delta)
    return np.minimum.accumulate(after[::-1])[::-1]


def _releases(alg: Algorithm, row: Mapping[str, float]) -> list[Mechanism]:
    """The mechanisms of one round; exchanges with the same cohort are one."""
    groups: list[tuple[float, float]] = []  # per cohort: the sum of 1 / z^2 over its exchanges, and the share asked
    for exchange in alg.exchanges:
        if f"{exchange.name}/sampling" not in row:
            continue
        spent, sampling = _spent(exchange, row), float(row[f"{exchange.name}/sampling"])
        if exchange.cohort == "same" and groups:
            groups[-1] = groups[-1][0] + spent, max(groups[-1][1], sampling)
        else:
            groups.append((spent, sampling))
    return [_mechanism(spent**-0.5 if spent < math.inf else 0.0, share, "fixed") for spent, share in groups if spent]


def _spent(exchange: Exchange, row: Mapping[str, float]) -> float:
    """1 / z^2 of an exchange, where z is the noise multiplier of the uploads that arrived; 0 without uploads."""
    sealed = exchange.sealed
    assert sealed is not None
    if is_traced(sealed.noise):
        raise ValueError("noise is traced (inside a vmap): compute epsilon outside of it, with numbers")
    arrived = row.get(f"{exchange.name}/arrived", 1.0)
    if arrived == 0:
        return 0.0
    share = 1.0 if sealed.shares is None else arrived / sealed.shares
    return math.inf if sealed.noise == 0 else 1 / (float(sealed.noise) ** 2 * share)
