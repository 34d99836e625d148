"""Random problems of the papers, as plain NumPy arrays in float64.

`fedbraid.theory` makes quadratic federations of them, `fedbraid.data.synthetic` makes federated data of them. Both get
the same numbers for the same seed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

__all__ = [
    "LinearProblem",
    "LogisticProblem",
    "conditioned_linear",
    "gaussian_linear",
    "gaussian_logistic",
    "random_orthogonal",
]


class LinearProblem(NamedTuple):
    """Least squares: designs ``[m, n, d]``, responses ``[m, n]``, and the parameters ``[d]`` that generated them."""

    designs: np.ndarray
    responses: np.ndarray
    truth: np.ndarray


class LogisticProblem(NamedTuple):
    """Logistic regression: features ``[m, n, d]``, whether the label is positive ``[m, n]``, parameters ``[d]``."""

    features: np.ndarray
    positive: np.ndarray
    truth: np.ndarray


def gaussian_linear(
    *, clients: int, dim: int, examples: int, noise_variance: float, drift: float = 0.0, seed: int = 0
) -> LinearProblem:
    """Standard normal designs and a linear model with Gaussian noise: "FedSplit", Appendix B.1.

    drift: client ``j`` has its own parameters ``truth + drift u_j`` with standard normal ``u_j``; 0 in the paper.

    >>> gaussian_linear(clients=2, dim=3, examples=8, noise_variance=0.25).designs.shape
    (2, 8, 3)
    """
    rng = np.random.default_rng(seed)
    designs = rng.standard_normal((clients, examples, dim))
    truth = rng.standard_normal(dim)
    noise = math.sqrt(noise_variance) * rng.standard_normal((clients, examples))
    if not drift:
        return LinearProblem(designs, designs @ truth + noise, truth)
    own = truth + drift * rng.standard_normal((clients, dim))
    return LinearProblem(designs, np.einsum("jna,ja->jn", designs, own) + noise, truth)


def conditioned_linear(
    kappa: float, *, clients: int, dim: int, examples: int, noise_variance: float, seed: int = 0
) -> LinearProblem:
    """Least squares in which every client has condition number kappa: "FedSplit", Appendix B.3.

    ``A_j = U_j Lambda V_j`` has the singular values ``(sqrt(kappa), 1, ..., 1)``; ``U_j`` and ``V_j`` are uniformly
    distributed. Needs ``examples >= dim``.

    >>> a = conditioned_linear(9.0, clients=1, dim=3, examples=5, noise_variance=1.0).designs[0]
    >>> np.linalg.svd(a, compute_uv=False).round(6).tolist()
    [3.0, 1.0, 1.0]
    """
    rng = np.random.default_rng(seed)
    singular = np.ones(dim)
    singular[0] = math.sqrt(kappa)
    designs = np.stack(
        [
            (random_orthogonal(examples, rng, columns=dim) * singular) @ random_orthogonal(dim, rng)
            for _ in range(clients)
        ]
    )
    truth = rng.standard_normal(dim)
    noise = math.sqrt(noise_variance) * rng.standard_normal((clients, examples))
    return LinearProblem(designs, designs @ truth + noise, truth)


def gaussian_logistic(*, clients: int, dim: int, examples: int, seed: int = 0) -> LogisticProblem:
    """Standard normal features, and labels of a logistic model: "FedSplit", Appendix B.2.1.

    >>> gaussian_logistic(clients=2, dim=3, examples=5).positive.shape
    (2, 5)
    """
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(dim)
    features, positive = np.empty((clients, examples, dim)), np.empty((clients, examples), bool)
    for j in range(clients):
        features[j] = rng.standard_normal((examples, dim))
        positive[j] = rng.random(examples) < 1.0 / (1.0 + np.exp(-(features[j] @ truth)))
    return LogisticProblem(features, positive, truth)


def random_orthogonal(dim: int, rng: np.random.Generator, columns: int | None = None) -> np.ndarray:
    """``dim x columns`` with orthonormal columns, uniformly distributed (Haar); square by default.

    The factor Q of a Gaussian matrix is uniform only if the diagonal of R is positive, hence the signs.

    >>> q = random_orthogonal(4, np.random.default_rng(0), columns=2)
    >>> bool(np.allclose(q.T @ q, np.eye(2)))
    True
    """
    Q, R = np.linalg.qr(rng.standard_normal((dim, columns or dim)))
    return Q * np.sign(np.diag(R))
