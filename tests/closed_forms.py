"""Heterogeneous least squares in closed form, in NumPy only: reference values for tests."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import Aggregate, reduce_reports
from fedbraid.data.federated import Split
from fedbraid.local import ClientData, masked_mean


class Problem(NamedTuple):
    """Client j has f_j(x) = 1/2 x'A_j x - b_j'x + const, the mean over its rows of (row . x - y)^2 / 2."""

    split: Split
    A: np.ndarray  # [m, d, d]
    b: np.ndarray  # [m, d]
    n: np.ndarray  # [m]

    @property
    def optimum(self) -> np.ndarray:
        return np.linalg.solve(self.A.sum(0), self.b.sum(0))

    @property
    def extremes(self) -> tuple[float, float]:
        """l and L of Pathak and Wainwright, eq. (14)."""
        values = np.linalg.eigvalsh(self.A)
        return float(values.min()), float(values.max())


def problem(sizes=(6, 9, 7, 8), d=3, seed=0, top=4.0) -> Problem:
    """Clients with different optima, with curvature exactly from 1 to ``top``."""
    rng = np.random.default_rng(seed)
    clients, A, b = [], [], []
    for j, n in enumerate(sizes):
        u = np.linalg.qr(rng.normal(size=(n, d)))[0]
        v = np.linalg.qr(rng.normal(size=(d, d)))[0]
        values = np.linspace(1.0, top, d)
        x = np.sqrt(n) * u @ np.diag(np.sqrt(values)) @ v.T
        y = x @ (rng.normal(size=d) + j) + rng.normal(size=n)
        clients.append({"x": x, "y": y})
        A.append(x.T @ x / n)
        b.append(x.T @ y / n)
    return Problem(Split.from_clients(clients), np.array(A), np.array(b), np.array(sizes))


def loss(params, batch, key):
    return masked_mean(0.5 * (batch["x"] @ params - batch["y"]) ** 2, batch["mask"])


def distortion(A: np.ndarray, theta, gamma: float, alpha: float = 0.0) -> np.ndarray:
    """Q = sum_k theta_k (I - gamma (A + alpha I))^(k-1) (Charles and Konecny, eq. 6)."""
    eye = np.eye(len(A))
    step = eye - gamma * (A + alpha * eye)
    return sum(t * np.linalg.matrix_power(step, k) for k, t in enumerate(theta))


def surrogate_minimizer(p: Problem, theta, gamma: float, alpha: float = 0.0, weights=None) -> np.ndarray:
    weights = np.ones(len(p.A)) if weights is None else weights
    Q = [distortion(A, theta, gamma, alpha) for A in p.A]
    H = sum(w * q @ A for w, q, A in zip(weights, Q, p.A, strict=True))
    return np.linalg.solve(H, sum(w * q @ b for w, q, b in zip(weights, Q, p.b, strict=True)))


def uploads(alg, params, p: Problem, exchange: int = 0):
    """The uploads of all clients in the first round from ``params``, stacked over clients."""
    step = alg.exchanges[exchange]
    arrays = {name: jnp.asarray(a) for name, a in p.split.arrays.items()}
    places = jnp.asarray(p.split.offsets[:-1], jnp.int32), jnp.asarray(p.n, jnp.int32)

    def one(offset, size, number):
        data = ClientData(arrays, offset, size, int(p.n.max()))
        key = jax.random.fold_in(jax.random.key(0), number)
        return step.client(step.send(alg.init(params)), alg.init_client(params), data, key).up

    return jax.jit(jax.vmap(one))(*places, jnp.arange(len(p.n)))


def rounds_of(alg, params, p: Problem, rounds: int):
    """(server, client states) after rounds of all clients, for an algorithm with one exchange; compiled once.

    It compiles much faster than the engine. The laws of the zoo check that the engine gives the same result.
    """
    (step,) = alg.exchanges
    arrays = {name: jnp.asarray(a) for name, a in p.split.arrays.items()}
    places = jnp.asarray(p.split.offsets[:-1], jnp.int32), jnp.asarray(p.n, jnp.int32), jnp.arange(len(p.n))

    def client(down, state, offset, size, key):
        return step.client(down, state, ClientData(arrays, offset, size, int(p.n.max())), key)

    def one_round(t, carry):
        server, states = carry
        keys = jax.vmap(lambda j: jax.random.fold_in(jax.random.key(t), j))(places[2])
        reports = jax.vmap(client, (None, 0, 0, 0, 0))(step.send(server), states, *places[:2], keys)
        up, weight, count = reduce_reports(step.reducer, reports.up, reports.weight)
        aggregate = Aggregate(up, weight, count, jnp.asarray(len(p.n)))
        return step.receive(server, aggregate, jax.random.key(t)), reports.state

    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(p.n)), alg.init_client(params))
    return jax.jit(lambda carry: jax.lax.fori_loop(0, rounds, one_round, carry))((alg.init(params), states))
