"""To check the formulas of the frontiers: Algorithm 2 run step by step, and the eigenvalues of its messages."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from fedbraid.problems import random_orthogonal
from fedbraid.theory import Frontier, random_spectrum, server_optimizer, simulated_frontier
from fedbraid.theory.frontier import Momentum

PAPER = "Charles and Konecny, Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning, AISTATS 2021"
PLOTTED = 0.005  # two curves closer than this look like one curve in a printed figure


class Measured(NamedTuple):
    """``message`` is the matrix that maps ``x - c`` to the client's message; the others are ratios of eigenvalues."""

    message: np.ndarray
    kappa: float  # largest over smallest eigenvalue of the message, Q A
    spread: float  # largest over smallest eigenvalue of the distortion Q
    delta: float  # Lemma 5, as printed


def matrix(smoothness: float, *, dim: int = 6, seed: int = 0) -> np.ndarray:
    """A random symmetric matrix with eigenvalues from exactly 1 to exactly L, drawn as in Appendix D.1."""
    rng = np.random.default_rng(seed)
    spectrum = random_spectrum(dim, 1.0, smoothness, rng)
    basis = random_orthogonal(dim, rng)
    return (basis * spectrum) @ basis.T


def local_update(
    A: np.ndarray, *, gamma: float, steps: int, family: Literal["sum", "last"] = "sum", alpha: float = 0.0
) -> Measured:
    """Algorithm 2 on ``1/2 x' A x``, one gradient step after the other, from every unit vector at once."""
    start = np.eye(len(A))
    x, sent = start, np.zeros_like(A)
    for k in range(steps):
        g = A @ x + alpha * (x - start)
        sent = sent + g if family == "sum" or k == steps - 1 else sent
        x = x - gamma * g
    q = np.linalg.eigvalsh(_symmetric(sent @ np.linalg.inv(A)))
    qa = np.linalg.eigvalsh(_symmetric(sent))
    a, b = math.sqrt(q[0]), math.sqrt(q[-1])
    return Measured(sent, float(qa[-1] / qa[0]), float(q[-1] / q[0]), (b - a) / (b + a))


def server_rate(message: np.ndarray, momentum: Momentum) -> float:
    """Spectral radius of a round, with the server's optimizer tuned to the extreme eigenvalues of the message."""
    values = np.linalg.eigvalsh(_symmetric(message))
    step, beta, nesterov = server_optimizer(float(values[-1]), float(values[0]), momentum)
    radius = 0.0
    for value in values:
        # heavy ball: x+ = x - step g(x) + beta (x - x-); Nesterov takes the gradient at x + beta (x - x-)
        keep = 1.0 - step * value
        row = [(1 + beta) * keep, -beta * keep] if nesterov else [keep + beta, -beta]
        radius = max(radius, float(np.abs(np.linalg.eigvals(np.array([row, [1.0, 0.0]]))).max()))
    return radius


def printed_rate(kappa: float, momentum: Momentum) -> float:
    """Table 2 in plain arithmetic; the heavy ball's rate is (sqrt(kappa) - 1) / (sqrt(kappa) + 1)."""
    if momentum == "none":
        return (kappa - 1) / (kappa + 1)
    if momentum == "nesterov":
        return 1 - 2 / math.sqrt(3 * kappa + 1)
    return (math.sqrt(kappa) - 1) / (math.sqrt(kappa) + 1)


def curve(rho: np.ndarray, kappa0: float, momentum: Momentum = "none") -> np.ndarray:
    """Delta on the curve that all frontiers within the lemmas share: eq. (17), with kappa from Table 2."""
    rho = np.asarray(rho, float)
    if momentum == "none":
        kappa = (1 + rho) / (1 - rho)
    elif momentum == "nesterov":
        kappa = ((2 / (1 - rho)) ** 2 - 1) / 3
    else:
        kappa = ((1 + rho) / (1 - rho)) ** 2
    return (math.sqrt(kappa0) - np.sqrt(kappa)) / (math.sqrt(kappa0) + np.sqrt(kappa))


def off_curve(frontier: Frontier, kappa0: float, momentum: Momentum = "none") -> float:
    """The largest vertical distance of a frontier from that curve."""
    return float(np.abs(frontier.delta - curve(frontier.rho, kappa0, momentum)).max())


def one_shot(kappa0: float) -> float:
    """Delta of averaging the clients' minimizers: the limit of K to infinity."""
    return (math.sqrt(kappa0) - 1) / (math.sqrt(kappa0) + 1)


def excess(frontier: Frontier, kappa0: float) -> np.ndarray:
    """rho of each point minus rho of FedAvg's curve at the same Delta; above the end of that curve, minus 0."""
    rho = np.linspace((kappa0 - 1) / (kappa0 + 1), 0.0, 8001)
    return frontier.rho - np.interp(frontier.delta, curve(rho, kappa0), rho)


def noise(smoothness: float, *, dim: int) -> float:
    """Standard deviation of rho over 40 random matrices, averaged over K from Lemma 4's end to twice the cusp's K."""
    gamma, matrices = 0.001, 40
    first = 1 / (gamma * smoothness)
    cusp = math.log(smoothness) / (math.log1p(-gamma) - math.log1p(-gamma * smoothness))
    ks = np.geomspace(1.2 * first, 2 * cusp, 6).round().astype(int)
    rhos = [
        simulated_frontier(
            mu=1.0, smoothness=smoothness, dim=dim, gamma=gamma, values=ks, seed=seed, resample=False
        ).rho
        for seed in range(matrices)
    ]
    return float(np.std(rhos, axis=0).mean())


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    return (matrix + matrix.T) / 2
