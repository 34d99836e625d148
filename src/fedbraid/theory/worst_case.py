"""Exact worst cases of federated methods, by performance estimation.

Which clients make a method slowest? For clients whose losses are L-smooth and mu-strongly convex (mu = 0: convex), the
worst case over all such losses, in any dimension, is the value of a semidefinite program (Drori and Teboulle 2014;
Taylor, Hendrickx and Glineur 2017). It is a bound that no proof can improve. The program's unknowns are the inner
products of the starting point and of all gradients that the method evaluates, and the clients' losses there; its
constraints say that smooth (strongly) convex losses with these values exist.

All clients take part in every round with equal weights and exact gradients. The minimizer x* of the mean loss F is the
origin. The clients differ there: (1/n) sum_i ||grad f_i(x*)||^2 <= zeta^2, where zeta may be infinite.

Needs the package clarabel, an interior-point solver: ``pip install 'fedbraid[proofs]'``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

__all__ = ["METHODS", "Measure", "WorstCase", "worst_case"]

Vector = np.ndarray  # coefficients over the basis of the Gram matrix
Value = np.ndarray  # coefficients over the unknown loss values
Measure = Literal["distance", "gap", "mean gap", "gap factor", "contraction"]

TOLERANCE = 1e-5  # of an accepted solution: primal against dual value, and feasibility
LARGEST = 60  # basis vectors: beyond this the program takes minutes


@dataclass(frozen=True)
class WorstCase:
    """The largest value of a measure over all federations of the class, and a federation that reaches it."""

    value: float  # of the measure
    certified: float  # the same from the dual program: an upper bound, up to the solver's tolerance
    measure: str
    size: int  # basis vectors of the Gram matrix
    gram: np.ndarray  # inner products of the basis in the worst case
    dimension: int  # rank of the Gram matrix: a worst case exists in so many dimensions


class _Federation:
    """Unknown clients, seen through the points at which a method evaluates them."""

    def __init__(self, clients: int, mu: float, smoothness: float, zeta: float):
        self.clients, self.mu, self.smoothness = clients, mu, smoothness
        capacity = LARGEST * max(clients, 2)  # of vectors and of losses: one loss per client and point
        self.capacity, self.vectors, self.values = capacity, 0, 0
        self.seen: list[list[tuple[Vector, Vector, Value]]] = [[] for _ in range(clients)]
        self.limits: list[tuple[np.ndarray, Value, float]] = []  # <A, G> + a.f <= b
        self.minimizer = np.zeros(capacity)
        last = np.zeros(capacity)
        for i in range(clients):
            different = self.vector() if zeta > 0 and i < clients - 1 else None
            g = last if different is None else different  # the last one makes the sum 0
            last = last - g
            self._learn(i, self.minimizer, g)
        if 0 < zeta < math.inf:
            norms = np.sum([np.outer(points[0][1], points[0][1]) for points in self.seen], axis=0) / clients
            self.limits.append((norms, np.zeros(capacity), zeta**2))

    def vector(self) -> Vector:
        """A new unknown vector."""
        if self.vectors == LARGEST:
            raise ValueError(
                f"this worst case has more than {LARGEST} unknown vectors, which would take minutes: "
                f"take fewer clients, steps or rounds"
            )
        self.vectors += 1
        return np.eye(1, self.capacity, self.vectors - 1)[0]

    def _learn(self, client: int, x: Vector, g: Vector) -> None:
        if not self.seen[client]:  # a loss can be shifted: it is 0 at its first point
            self.seen[client].append((x, g, np.zeros(self.capacity)))
            return
        self.values += 1
        self.seen[client].append((x, g, np.eye(1, self.capacity, self.values - 1)[0]))

    def _at(self, client: int, x: Vector) -> tuple[Vector, Vector, Value]:
        for point in self.seen[client]:
            if np.array_equal(point[0], x):
                return point
        self._learn(client, x, self.vector())
        return self.seen[client][-1]

    def gradient(self, client: int, x: Vector) -> Vector:
        return self._at(client, x)[1]

    def loss(self, x: Vector) -> Value:
        """F(x) - F*."""
        return self.mean(self._at(i, x)[2] for i in range(self.clients))

    def prox(self, client: int, x: Vector, step: float) -> Vector:
        """The point p with p = x - step grad f_i(p)."""
        g = self.vector()
        self._learn(client, x - step * g, g)
        return x - step * g

    def mean(self, parts: Iterable[np.ndarray]) -> np.ndarray:
        return sum(parts, np.zeros(self.capacity)) / self.clients

    def alike(self, zeta: float) -> None:
        """At every point seen so far, no client's gradient is farther than ``zeta`` from their mean."""
        points = {x.tobytes(): x for seen in self.seen for x, _, _ in seen}
        for x in points.values():
            gradients = [self.gradient(i, x) for i in range(self.clients)]
            middle = self.mean(gradients)
            for g in gradients:
                self.limits.append((np.outer(g - middle, g - middle), np.zeros(self.capacity), zeta**2))

    def interpolation(self) -> list[tuple[np.ndarray, Value, float]]:
        """Values and gradients of a smooth strongly convex loss (Taylor et al., Theorem 4), as <A, G> + a.f <= 0."""
        mu, L = self.mu, self.smoothness
        limits = []
        for seen in self.seen:
            for i, (x, g, f) in enumerate(seen):
                for j, (y, h, e) in enumerate(seen):
                    if i == j:
                        continue
                    dx, dg = x - y, g - h
                    quadratic = np.outer(dg, dg) / L + mu * np.outer(dx, dx) - 2 * mu / L * np.outer(dg, dx)
                    limits.append((np.outer(h, dx) + quadratic / (2 * (1 - mu / L)), e - f, 0.0))
        return limits


@dataclass(frozen=True)
class _Setting:
    clients: int
    steps: int
    client_lr: float
    server_lr: float


State = Any
Round = Callable[[_Federation, _Setting, State], State]


def _local_path(
    federation: _Federation, setting: _Setting, client: int, x: Vector, shift: Vector
) -> tuple[list[Vector], list[Vector]]:
    """The K + 1 points and the K gradients of a client that steps along gradient + shift."""
    points, gradients = [x], []
    for _ in range(setting.steps):
        gradients.append(federation.gradient(client, points[-1]))
        points.append(points[-1] - setting.client_lr * (gradients[-1] + shift))
    return points, gradients


def _averaged(federation: _Federation, setting: _Setting, x: Vector, ends: list[Vector]) -> Vector:
    return x + setting.server_lr * (federation.mean(ends) - x)


def _fedavg(federation: _Federation, setting: _Setting, x: Vector) -> Vector:
    none = np.zeros(federation.capacity)
    ends = [_local_path(federation, setting, i, x, none)[0][-1] for i in range(setting.clients)]
    return _averaged(federation, setting, x, ends)


def _fedprox(federation: _Federation, setting: _Setting, x: Vector) -> Vector:
    """Exact proxes: each client minimizes f_i(y) + ||y - x||^2 / (2 client_lr)."""
    ends = [federation.prox(i, x, setting.client_lr) for i in range(setting.clients)]
    return _averaged(federation, setting, x, ends)


def _mime(federation: _Federation, setting: _Setting, x: Vector) -> Vector:
    """SGD corrected by the gradients at the server's model (MimeSGD; FedLin of Mitra et al. 2021)."""
    at_server = [federation.gradient(i, x) for i in range(setting.clients)]
    middle = federation.mean(at_server)
    ends = [_local_path(federation, setting, i, x, middle - g)[0][-1] for i, g in enumerate(at_server)]
    return _averaged(federation, setting, x, ends)


def _scaffold(federation: _Federation, setting: _Setting, state: tuple[Vector, list[Vector]]) -> State:
    """Option II. The first control variates are the gradients at the start."""
    x, controls = state
    if not controls:
        controls = [federation.gradient(i, x) for i in range(setting.clients)]
    middle = federation.mean(controls)
    ends, renewed = [], []
    for i, c in enumerate(controls):
        points, gradients = _local_path(federation, setting, i, x, middle - c)
        ends.append(points[-1])
        renewed.append(sum(gradients, np.zeros(federation.capacity)) / setting.steps)
    return _averaged(federation, setting, x, ends), renewed


def _fedsplit(federation: _Federation, setting: _Setting, z: list[Vector]) -> list[Vector]:
    """Exact proxes with step ``client_lr``; the state is the clients' points, whose mean is the server's."""
    x = federation.mean(z)
    return [z[i] + 2 * (federation.prox(i, 2 * x - z[i], setting.client_lr) - x) for i in range(setting.clients)]


@dataclass(frozen=True)
class _Method:
    round: Round
    start: Callable[[Vector, int], State]
    server: Callable[[_Federation, State], Vector]
    compared: bool = True  # its state lies in a space where two runs can be compared


def _plain(x: Vector, clients: int) -> Vector:
    return x


METHODS: dict[str, _Method] = {
    "fedavg": _Method(_fedavg, _plain, lambda _, x: x),
    "fedprox": _Method(_fedprox, _plain, lambda _, x: x),
    "mime": _Method(_mime, _plain, lambda _, x: x),
    "scaffold": _Method(_scaffold, lambda x, clients: (x, []), lambda _, state: state[0], compared=False),
    "fedsplit": _Method(_fedsplit, lambda x, clients: [x] * clients, lambda federation, z: federation.mean(z)),
}
"""The methods whose worst case can be computed."""


def worst_case(
    method: str,
    *,
    client_lr: float,
    steps: int = 1,
    clients: int = 2,
    rounds: int = 1,
    smoothness: float = 1.0,
    mu: float = 0.0,
    server_lr: float = 1.0,
    distance: float = 1.0,
    zeta: float = 0.0,
    measure: Measure = "distance",
) -> WorstCase:
    """The worst case of a method after some rounds.

    The measures are

    - ``"distance"``: ||x_R - x*||, from a start within ``distance`` of x*;
    - ``"gap"``: F(x_R) - F*, from the same start;
    - ``"mean gap"`` (FedAvg): the mean of F - F* over the averages of the clients' points before each local step, for
      clients whose gradients differ from their mean by at most ``zeta`` everywhere;
    - ``"gap factor"``: F(x_R) - F* over F(x_0) - F*;
    - ``"contraction"``: the factor by which R rounds shrink the distance to the point where the method ends (FedSplit:
      the distance of all clients' points together).

    ``client_lr`` is the local step size; for FedProx and FedSplit it is the step s of the prox.

    >>> round(worst_case("fedavg", client_lr=1.0, mu=0.1).value, 6)  # one local step: gradient descent
    0.9
    """
    _check(method, measure, clients=clients, steps=steps, rounds=rounds)
    _check_numbers(client_lr, server_lr, smoothness, mu, distance, zeta)
    chosen, setting = METHODS[method], _Setting(clients, steps, client_lr, server_lr)
    if zeta == math.inf and measure != "contraction" and (method == "fedprox" or (method == "fedavg" and steps > 1)):
        raise ValueError(
            f"{method} does not end at the minimizer if clients differ: zeta must be finite, or use 'contraction'"
        )
    if measure == "contraction":
        return _contraction(chosen, setting, rounds, mu, smoothness)
    if measure == "mean gap" and zeta == 0:  # the clients are the same
        setting = _Setting(1, steps, client_lr, server_lr)
    federation = _Federation(setting.clients, mu, smoothness, zeta)
    x = federation.vector()
    nothing, no_loss = np.zeros((federation.capacity, federation.capacity)), np.zeros(federation.capacity)
    if measure == "gap factor":
        federation.limits.append((nothing, federation.loss(x), 1.0))
    else:
        federation.limits.append((np.outer(x, x), no_loss, distance**2))
    if measure == "mean gap":
        return _solve(federation, nothing, _mean_gap(federation, setting, x, rounds, zeta), measure)
    state = chosen.start(x, clients)
    for _ in range(rounds):
        state = chosen.round(federation, setting, state)
    end = chosen.server(federation, state)
    if measure == "distance":
        return _solve(federation, np.outer(end, end), no_loss, measure)
    return _solve(federation, nothing, federation.loss(end), measure)


def _mean_gap(federation: _Federation, setting: _Setting, x: Vector, rounds: int, zeta: float) -> Value:
    none, total = np.zeros(federation.capacity), np.zeros(federation.capacity)
    for _ in range(rounds):
        paths = [_local_path(federation, setting, i, x, none)[0] for i in range(setting.clients)]
        for k in range(setting.steps):
            total = total + federation.loss(federation.mean(path[k] for path in paths))
        x = _averaged(federation, setting, x, [path[-1] for path in paths])
    if setting.clients > 1:
        federation.alike(zeta)
    return total / (rounds * setting.steps)


def _contraction(chosen: _Method, setting: _Setting, rounds: int, mu: float, smoothness: float) -> WorstCase:
    """A run beside one that stays at the method's fixed point.

    For all but FedAvg, clients can be moved and tilted by linear terms without changing the differences of the two
    runs, so that the fixed point is the origin and every gradient there is 0. FedAvg's clients leave its fixed point
    during a round; there, the second run starts at the origin and is any run.
    """
    federation = _Federation(setting.clients, mu, smoothness, 0.0)
    start = [federation.vector() for _ in range(setting.clients if chosen.round is _fedsplit else 1)]
    other, leaves = [federation.minimizer] * len(start), chosen.round is _fedavg
    if leaves:
        federation.seen = [[] for _ in range(setting.clients)]  # no client's gradient is known at the origin
    ends = [_after(chosen, federation, setting, start, rounds)]
    ends.append(_after(chosen, federation, setting, other, rounds) if leaves else other)
    before, after = (
        sum((np.outer(a - b, a - b) for a, b in zip(*pair, strict=True)), np.zeros((federation.capacity,) * 2))
        for pair in ((start, other), ends)
    )
    federation.limits.append((before, np.zeros(federation.capacity), 1.0))
    return _solve(federation, after, np.zeros(federation.capacity), "contraction")


def _after(
    chosen: _Method, federation: _Federation, setting: _Setting, points: list[Vector], rounds: int
) -> list[Vector]:
    state: Any = points if chosen.round is _fedsplit else points[0]
    for _ in range(rounds):
        state = chosen.round(federation, setting, state)
    return state if chosen.round is _fedsplit else [state]


def _solve(federation: _Federation, objective: np.ndarray, gain: Value, measure: str) -> WorstCase:
    """Maximize <objective, G> + gain.f over Gram matrices G and losses f."""
    try:
        clarabel: Any = importlib.import_module("clarabel")  # it has no type information
    except ImportError as error:
        raise ImportError("worst cases need a solver: pip install 'fedbraid[proofs]'") from error
    from scipy import sparse

    d, m = federation.vectors, federation.values
    limits = [*federation.limits, *federation.interpolation()]
    rows = np.array([np.concatenate([_packed(A[:d, :d]), a[:m]]) for A, a, _ in limits])
    bounds = np.array([b for _, _, b in limits])
    triangle = d * (d + 1) // 2
    scale = np.linalg.norm(rows, axis=1)
    kept = scale > 0
    cone = sparse.hstack([-sparse.identity(triangle), sparse.csc_matrix((triangle, m))])
    matrix = sparse.vstack([sparse.csc_matrix(rows[kept] / scale[kept, None]), cone]).tocsc()
    right = np.concatenate([bounds[kept] / scale[kept], np.zeros(triangle)])
    cost = -np.concatenate([_packed(objective[:d, :d]), gain[:m]])
    options = clarabel.DefaultSettings()
    options.verbose = False
    options.tol_gap_abs = options.tol_gap_rel = options.tol_feas = 1e-10
    cones = [clarabel.NonnegativeConeT(int(kept.sum())), clarabel.PSDTriangleConeT(d)]
    nothing = sparse.csc_matrix((len(cost), len(cost)))
    solution = clarabel.DefaultSolver(nothing, cost, matrix, right, cones, options).solve()
    status = str(solution.status)
    if "Infeasible" in status:
        raise ValueError(f"the worst case is unbounded ({status}): the method can diverge with these settings")
    apart = abs(solution.obj_val - solution.obj_val_dual) / max(1.0, abs(solution.obj_val))
    if not max(apart, solution.r_prim, solution.r_dual) < TOLERANCE:
        raise RuntimeError(f"the solver stopped with {status}: take fewer clients, steps or rounds, or other settings")
    gram = _unpacked(np.array(solution.x[:triangle]), d)
    squared = measure in ("distance", "contraction")
    value, certified = (max(-v, 0.0) for v in (solution.obj_val, solution.obj_val_dual))
    if squared:
        value, certified = math.sqrt(value), math.sqrt(certified)
    eigenvalues = np.linalg.eigvalsh(gram)
    return WorstCase(value, certified, measure, d, gram, int(np.sum(eigenvalues > 1e-6 * eigenvalues[-1])))


def _packed(matrix: np.ndarray) -> np.ndarray:
    """The upper triangle by columns, with off-diagonal entries times sqrt 2, so that inner products are kept."""
    symmetric = (matrix + matrix.T) / 2
    columns, rows = np.tril_indices(len(matrix))
    return symmetric[rows, columns] * np.where(rows == columns, 1.0, math.sqrt(2.0))


def _unpacked(packed: np.ndarray, d: int) -> np.ndarray:
    columns, rows = np.tril_indices(d)
    matrix = np.zeros((d, d))
    matrix[rows, columns] = packed / np.where(rows == columns, 1.0, math.sqrt(2.0))
    return matrix + np.triu(matrix, 1).T


def _check(method: str, measure: str, **counts: int) -> None:
    if method not in METHODS:
        raise ValueError(f"no worst case for the algorithm {method!r}: choose one of {', '.join(METHODS)}")
    if measure not in get_args(Measure):
        raise ValueError(f"measure must be one of {', '.join(get_args(Measure))}, got {measure!r}")
    for name, value in counts.items():
        if isinstance(value, bool) or value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value}")
    if measure == "mean gap" and method != "fedavg":
        raise ValueError(f"the measure 'mean gap' is for fedavg, got {method!r}: use 'gap' or 'distance'")
    if measure == "contraction" and not METHODS[method].compared:
        raise ValueError(f"{method} keeps control variates, and one round need not shrink any distance: use 'distance'")
    if method in ("fedprox", "fedsplit") and counts["steps"] != 1:
        raise ValueError(f"{method} solves its prox exactly here: steps must be 1, got {counts['steps']}")


def _check_numbers(
    client_lr: float, server_lr: float, smoothness: float, mu: float, distance: float, zeta: float
) -> None:
    for name, value in (("client_lr", client_lr), ("server_lr", server_lr), ("smoothness", smoothness)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0, got {value}")
    if not 0 <= mu < smoothness:
        raise ValueError(f"mu must be at least 0 and below smoothness = {smoothness}, got {mu}")
    if not (math.isfinite(distance) and distance > 0):
        raise ValueError(f"distance must be a finite number above 0, got {distance}")
    if not zeta >= 0:
        raise ValueError(f"zeta must be at least 0 (infinite is allowed), got {zeta}")
