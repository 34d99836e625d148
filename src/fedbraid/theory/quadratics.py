"""Quadratic federations, and the instances of the papers.

Client ``i`` holds ``f_i(x) = 1/2 x' A_i x - b_i' x`` (up to a constant), which is ``1/2 ||A_i^(1/2) (x - c_i)||^2``
with ``c_i = A_i^-1 b_i`` where ``A_i`` has an inverse (Charles and Konecny, "Convergence and Accuracy Trade-Offs in
Federated Learning and Meta-Learning", eq. 1 to 3). ``b_i`` is stored instead of ``c_i``, so that a client may be
linear (``A_i = 0``).

Everything here is NumPy in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedbraid.problems import conditioned_linear, gaussian_linear, gaussian_logistic, random_orthogonal

__all__ = [
    "LeastSquares",
    "QuadraticFederation",
    "conditioned_least_squares",
    "crossing_pair",
    "federation",
    "gaussian_least_squares",
    "linear_federation",
    "logistic_clients",
    "lower_bound_pair",
    "random_federation",
    "random_spectrum",
]


@dataclass(frozen=True)
class QuadraticFederation:
    """Clients ``f_i(x) = 1/2 x' A_i x - b_i' x`` with weights that sum to one. Build one with `federation`.

    >>> fed = federation([[[2.0]], [[1.0]]], [[1.0], [-1.0]])
    >>> fed.minimizer.round(6).tolist(), fed.mu, fed.smoothness
    ([0.333333], 1.0, 2.0)
    """

    A: np.ndarray  # [m, d, d]
    b: np.ndarray  # [m, d]
    weights: np.ndarray  # [m]

    @property
    def num_clients(self) -> int:
        """The number of clients, m."""
        return self.A.shape[0]

    @property
    def dim(self) -> int:
        """The number of parameters, d."""
        return self.A.shape[1]

    @cached_property
    def eigh(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues ``[m, d]`` (ascending) and eigenvectors ``[m, d, d]`` (columns) of every ``A_i``."""
        values, vectors = np.linalg.eigh(self.A)
        return values, vectors

    @property
    def eigenvalues(self) -> np.ndarray:
        """Eigenvalues ``[m, d]`` of every ``A_i``, ascending."""
        return self.eigh[0]

    @property
    def mu(self) -> float:
        """The smallest eigenvalue of any client: mu of Assumption 1."""
        return float(self.eigenvalues.min())

    @property
    def smoothness(self) -> float:
        """The largest eigenvalue of any client: L of Assumption 1."""
        return float(self.eigenvalues.max())

    @property
    def kappa0(self) -> float:
        """L / mu, the condition number at the start of every frontier (K = 1)."""
        return self.smoothness / self.mu

    @cached_property
    def centers(self) -> np.ndarray:
        """``c_i``, the client minimizers ``[m, d]``; an error if a client has none."""
        _refuse_singular(self.eigenvalues, "the client minimizers c_i")
        return np.linalg.solve(self.A, self.b[..., None])[..., 0]

    @property
    def radius(self) -> float:
        """``max_i ||c_i||``: C of Assumption 2."""
        return float(np.linalg.norm(self.centers, axis=1).max())

    @cached_property
    def hessian(self) -> np.ndarray:
        """The Hessian ``E_i A_i`` of the overall loss."""
        return np.einsum("i,iab->ab", self.weights, self.A)

    @cached_property
    def linear(self) -> np.ndarray:
        """The linear term ``E_i b_i`` of the overall loss."""
        return self.weights @ self.b

    @cached_property
    def minimizer(self) -> np.ndarray:
        """``x*``, the minimizer of the overall loss."""
        return solve_positive(self.hessian, self.linear, "the overall loss")

    def loss(self, x: ArrayLike) -> float:
        """``E_i f_i(x)``. If every client has a minimizer, the constants are such that ``f_i(c_i) = 0``."""
        x = np.asarray(x, float)
        if self.mu <= 0:
            return float(0.5 * x @ self.hessian @ x - self.linear @ x)
        away = x - self.centers
        return float(0.5 * self.weights @ np.einsum("ia,iab,ib->i", away, self.A, away))

    def gradient(self, x: ArrayLike) -> np.ndarray:
        """The gradient of the overall loss at ``x``."""
        return self.hessian @ np.asarray(x, float) - self.linear

    def client_gradients(self, x: ArrayLike) -> np.ndarray:
        """``[m, d]``: every client's gradient at ``x`` (``[d]``, or ``[m, d]`` for one point per client)."""
        x = np.broadcast_to(np.asarray(x, float), self.b.shape)
        return np.einsum("iab,ib->ia", self.A, x) - self.b


def federation(A: ArrayLike, c: ArrayLike, weights: ArrayLike | None = None) -> QuadraticFederation:
    """Clients by curvature and minimizer: ``f_i(x) = 1/2 ||A_i^(1/2) (x - c_i)||^2``.

    ``A`` is ``[m, d, d]`` symmetric positive definite, ``c`` is ``[m, d]``, ``weights`` are normalised (default:
    uniform).

    >>> federation([[[2.0]]], [[3.0]]).minimizer.tolist()
    [3.0]
    """
    A, c = _square(A), np.asarray(c, float)
    if c.shape != A.shape[:2]:
        raise ValueError(f"c must be [m, d] = {A.shape[:2]} to go with A {A.shape}, got {c.shape}")
    fed = linear_federation(A, np.einsum("iab,ib->ia", A, c), weights)
    _refuse_singular(fed.eigenvalues, "A")
    return fed


def linear_federation(A: ArrayLike, b: ArrayLike, weights: ArrayLike | None = None) -> QuadraticFederation:
    """Clients by gradient, ``grad f_i(x) = A_i x - b_i``: ``A_i`` may be singular (a linear client has ``A_i = 0``).

    >>> linear_federation([[[2.0]], [[0.0]]], [[-1.0], [1.0]]).minimizer.tolist()
    [0.0]
    """
    A, b = _square(A), np.asarray(b, float)
    if b.shape != A.shape[:2]:
        raise ValueError(f"b must be [m, d] = {A.shape[:2]} to go with A {A.shape}, got {b.shape}")
    if not (np.isfinite(A).all() and np.isfinite(b).all()):
        raise ValueError("A, b or c holds a value that is not finite; quadratic clients need finite entries")
    scale = np.abs(A).max(initial=1e-300)
    if not np.allclose(A, A.transpose(0, 2, 1), atol=1e-10 * scale, rtol=0):
        raise ValueError("A must be symmetric for every client; pass (A + A.T) / 2 if it is symmetric up to rounding")
    if weights is None:
        w = np.full(len(A), 1.0 / len(A))
    else:
        w = np.asarray(weights, float)
        if w.shape != (len(A),) or not np.isfinite(w).all() or (w < 0).any() or w.sum() <= 0:
            raise ValueError(f"weights must be {len(A)} finite non-negative numbers with a positive sum, got {weights}")
        w = w / w.sum()
    fed = QuadraticFederation(A, b, w)
    if fed.mu < -1e-9 * max(fed.smoothness, 1e-300):
        i = int(fed.eigenvalues.min(1).argmin())
        raise ValueError(f"A of client {i} has the negative eigenvalue {fed.mu:.6g}; the clients must be convex")
    return fed


def random_spectrum(dim: int, mu: float, smoothness: float, rng: np.random.Generator) -> np.ndarray:
    """Eigenvalues of ``beta1 B'B + beta2 I`` with Gaussian ``B``; the extreme ones are exactly mu and L (Appendix D).

    >>> s = random_spectrum(5, 1.0, 10.0, np.random.default_rng(0))
    >>> float(s.min()), float(s.max()), len(s)
    (1.0, 10.0, 5)
    """
    check_curvature(mu, smoothness)
    if dim < 1:
        raise ValueError(f"dim must be at least 1, got {dim}")
    if dim == 1:
        if mu != smoothness:
            raise ValueError(f"dim = 1 has one eigenvalue: mu ({mu}) and smoothness ({smoothness}) must be equal")
        return np.array([float(mu)])
    # B'B is similar to a tridiagonal matrix of chi variables (Dumitriu and Edelman 2002): the same law, in O(d^2).
    from scipy.linalg import eigvalsh_tridiagonal

    across = np.sqrt(rng.chisquare(np.arange(dim, 0, -1)))
    below = np.sqrt(rng.chisquare(np.arange(dim - 1, 0, -1)))
    values = eigvalsh_tridiagonal(across**2 + np.append(0.0, below) ** 2, across[:-1] * below)
    values = mu + (smoothness - mu) * (values - values[0]) / (values[-1] - values[0])
    values[-1] = smoothness  # exactly, without rounding error
    return values


def random_federation(
    clients: int,
    dim: int,
    *,
    mu: float,
    smoothness: float,
    radius: float = 1.0,
    seed: int = 0,
    weights: ArrayLike | None = None,
) -> QuadraticFederation:
    """Random clients: every ``A_i`` has smallest eigenvalue mu and largest L, and ``||c_i|| <= radius``.

    >>> fed = random_federation(3, 4, mu=1.0, smoothness=10.0, seed=1)
    >>> round(fed.mu, 9), round(fed.smoothness, 9), fed.radius <= 1 + 1e-12
    (1.0, 10.0, True)
    """
    if clients < 1:
        raise ValueError(f"clients must be at least 1, got {clients}")
    rng = np.random.default_rng(seed)
    A = np.empty((clients, dim, dim))
    for i in range(clients):
        values, U = random_spectrum(dim, mu, smoothness, rng), random_orthogonal(dim, rng)
        A[i] = (U * values) @ U.T
    c = rng.standard_normal((clients, dim))
    length = radius * rng.uniform(size=(clients, 1)) ** (1.0 / dim)  # uniform in the ball
    c *= length / np.linalg.norm(c, axis=1, keepdims=True)
    return federation((A + A.transpose(0, 2, 1)) / 2, c, weights)


class LeastSquares(NamedTuple):
    """Designs ``[m, n, d]``, responses ``[m, n]`` and the parameters ``[d]`` that generated them.

    Client ``j`` holds ``f_j(x) = 1/2 ||A_j x - b_j||^2``.
    """

    designs: np.ndarray
    responses: np.ndarray
    truth: np.ndarray

    def federation(self) -> QuadraticFederation:
        """The quadratic clients; the overall loss is the mean over clients where the paper writes the sum."""
        A = np.einsum("jna,jnb->jab", self.designs, self.designs)
        return linear_federation(A, np.einsum("jna,jn->ja", self.designs, self.responses))

    def clients(self) -> list[dict[str, np.ndarray]]:
        """The examples of each client, fields ``x`` and ``y``, as `fedbraid.Split.from_clients` takes them."""
        return [{"x": a, "y": b} for a, b in zip(self.designs, self.responses, strict=True)]


def gaussian_least_squares(
    *, clients: int = 25, dim: int = 100, examples: int = 500, noise_variance: float = 0.25, seed: int = 0
) -> LeastSquares:
    """Gaussian designs and a linear model: Figure 1 and Appendix B.1 of Pathak and Wainwright, "FedSplit".

    >>> gaussian_least_squares(clients=2, dim=3, examples=8).designs.shape
    (2, 8, 3)
    """
    if examples < dim:
        raise ValueError(f"examples per client ({examples}) must be at least dim ({dim}), else A_j is singular")
    return LeastSquares(
        *gaussian_linear(clients=clients, dim=dim, examples=examples, noise_variance=noise_variance, seed=seed)
    )


def conditioned_least_squares(
    kappa: float, *, clients: int = 10, dim: int = 100, examples: int = 400, noise_variance: float = 1.0, seed: int = 0
) -> LeastSquares:
    """Every client has condition number kappa, with its own eigenvectors: Figure 3 and Appendix B.3 of "FedSplit".

    ``A_j = U_j Lambda V_j`` with singular values ``(sqrt(kappa), 1, ..., 1)`` stacked over zeros, n_j x d.

    >>> fed = conditioned_least_squares(100.0, clients=2, dim=4, examples=6).federation()
    >>> round(fed.kappa0, 6)
    100.0
    """
    if kappa < 1:
        raise ValueError(f"kappa must be at least 1, got {kappa}")
    if examples < dim:
        raise ValueError(f"examples per client ({examples}) must be at least dim ({dim}), else A_j is singular")
    sizes = {"clients": clients, "dim": dim, "examples": examples}
    return LeastSquares(*conditioned_linear(kappa, **sizes, noise_variance=noise_variance, seed=seed))


def logistic_clients(
    *, clients: int = 10, dim: int = 100, examples: int = 1000, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Binary logistic regression, labels -1 and +1: Appendix B.2.1 of "FedSplit".

    One mapping with the fields ``x`` and ``y`` per client, as `fedbraid.Split.from_clients` takes them.

    >>> [client["y"].shape for client in logistic_clients(clients=2, dim=3, examples=5)]
    [(5,), (5,)]
    """
    made = gaussian_logistic(clients=clients, dim=dim, examples=examples, seed=seed)
    labels = np.where(made.positive, 1.0, -1.0)
    return [{"x": x, "y": y} for x, y in zip(made.features, labels, strict=True)]


def lower_bound_pair(mu: float, G: float) -> QuadraticFederation:
    """``f_1 = mu x^2 + G x`` and ``f_2 = -G x``: local steps move x away from the minimizer 0 at any step size.

    Section 9.5 of the supplement of "Elastic Aggregation for Federated Optimization" (after Karimireddy et al.,
    SCAFFOLD).

    >>> pair = lower_bound_pair(1.0, 2.0)
    >>> pair.minimizer.tolist(), pair.client_gradients([0.0]).tolist()
    ([0.0], [[2.0], [-2.0]])
    """
    if mu <= 0 or G <= 0:
        raise ValueError(f"mu and G must be positive, got mu = {mu}, G = {G}")
    return linear_federation([[[2.0 * mu]], [[0.0]]], [[-G], [G]])


def crossing_pair(kappa0: float, *, radius: float = 1.0, half_angle: float | None = None) -> QuadraticFederation:
    """Two clients in the plane with large curvature along nearly parallel lines: x* is far from both minimizers.

    Client 1 has curvature kappa0 along ``u = (cos h, sin h)``, 1 across it, and its minimizer at ``C u``. Client 2 has
    the same along ``v = (cos h, -sin h)``, and its minimizer at ``-C v``. With ``sin h = 1 / sqrt(kappa0 + 1)`` the
    minimizer of the mean is ``(0, C sqrt(kappa0 + 1) / 2)``, while the mean of the clients' minimizers is
    ``(0, C sin h)``. The distance to x* thus grows like ``sqrt(kappa0)``, which contradicts every bound of the form
    constant times C times Delta (docs/theory/suboptimality.md).

    half_angle: the angle h, with the minimizers at ``(C, 0)`` and ``(-C, 0)`` instead. Then x* is
        ``(0, C (kappa0 - 1) sin h cos h / (1 + (kappa0 - 1) sin^2 h))``. The angle ``0.62 / sqrt(kappa0)`` is close to
        the worst one for two local steps.

    >>> crossing_pair(399.0).minimizer.round(6).tolist()
    [0.0, 10.0]
    >>> crossing_pair(60.0, half_angle=0.08).minimizer.round(6).tolist()
    [0.0, 3.413643]
    """
    check_curvature(1.0, kappa0)
    sine = 1.0 / math.sqrt(kappa0 + 1.0) if half_angle is None else math.sin(half_angle)
    cosine = math.sqrt(1.0 - sine**2)
    stiff = np.array([[cosine, sine], [cosine, -sine]])
    A = np.eye(2) + (kappa0 - 1.0) * np.einsum("ia,ib->iab", stiff, stiff)
    own = stiff if half_angle is None else np.array([[1.0, 0.0], [1.0, 0.0]])
    return federation(A, radius * own * np.array([[1.0], [-1.0]]))


def check_curvature(mu: float, smoothness: float) -> None:
    """Refuse values that are impossible for a strongly convex smooth loss."""
    if not (math.isfinite(mu) and math.isfinite(smoothness)):
        raise ValueError(f"mu and smoothness must be finite, got mu = {mu}, smoothness = {smoothness}")
    if mu <= 0:
        raise ValueError(f"mu must be positive (strong convexity), got {mu}")
    if mu > smoothness:
        raise ValueError(f"mu ({mu}) must not exceed smoothness L ({smoothness}); were they swapped?")


def _square(A: ArrayLike) -> np.ndarray:
    A = np.asarray(A, float)
    if A.ndim != 3 or A.shape[1] != A.shape[2] or 0 in A.shape:
        raise ValueError(f"A must be [clients, d, d] with at least one client, got the shape {A.shape}")
    return A


def _refuse_singular(eigenvalues: np.ndarray, what: str) -> None:
    i = int(eigenvalues.min(1).argmin())
    low, high = eigenvalues[i].min(), eigenvalues.max()
    if low <= 1e-13 * high or high <= 0:
        raise ValueError(
            f"{what}: A of client {i} is singular (eigenvalues from {low:.3g} to {high:.3g}); "
            "give full-rank data, add ridge, or use linear_federation(A, b), which needs no client minimizer"
        )


def solve_positive(H: np.ndarray, rhs: np.ndarray, what: str) -> np.ndarray:
    """Solve ``H x = rhs`` for symmetric positive definite ``H``; ``what`` names the loss in the error."""
    values, vectors = np.linalg.eigh(H)
    if values[0] <= 1e-14 * abs(values[-1]):
        raise ValueError(
            f"{what} has no minimizer that float64 can resolve: its Hessian has eigenvalues "
            f"{values[0]:.3g} .. {values[-1]:.3g}"
        )
    return vectors @ ((vectors.T @ rhs) / values)
