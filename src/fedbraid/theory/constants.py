"""The constants of your data: L, mu, sigma^2, G^2, B^2, zeta and delta at given parameters, with standard errors.

For any ``loss(params, batch, key)`` (a mean over the examples that ``batch["mask"]`` marks) and any `Split`. Clients
are sampled, their gradients are exact, their Hessians are seen through Hessian-vector products. Extreme eigenvalues
come from ARPACK's implicitly restarted Lanczos (`scipy.sparse.linalg.eigsh`), which stops at a stated tolerance; its
loop runs on the host, so that one compiled product serves every eigenproblem and no convolution ends up inside a
compiled loop. Small models (up to ``dense`` parameters) get their Hessians in full, hence exactly.

Names and definitions, with ``f = sum_i p_i f_i`` over clients:

    L, mu        largest and smallest eigenvalue of the Hessian of f
    L_client_*   the same of single clients: what a local step must respect (Charles and Konecny, Assumption 1)
    sigma2       variance of a client's gradient over its batches (Karimireddy et al., A3)
    G2           sum_i p_i ||grad f_i - grad f||^2 (Karimireddy et al., A1)
    B2           sum_i p_i ||grad f_i||^2 / ||grad f||^2 (Li et al., local dissimilarity)
    zeta         max_i ||grad f_i - grad f|| (Renard, Assumption 7)
    delta        max_i ||Hess f_i - Hess f|| (Karimireddy et al., A2, over clients)

All of it is local: it holds at these parameters and promises nothing elsewhere. A maximum over sampled clients is a
lower bound of the maximum over all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedbraid.data.federated import MASK, Split

__all__ = ["Constants", "Estimate", "envelope", "estimate"]

PyTree = Any
Loss = Callable[[PyTree, dict, Any], Any]


class Estimate(NamedTuple):
    """A value and its standard error from sampling clients (0 when all clients were used)."""

    value: float
    stderr: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" +- {self.stderr:.2g}" if self.stderr > 0 else "")


@dataclass(frozen=True)
class Constants:
    """What `estimate` found. ``str(constants)`` is a table; ``notes`` say what limits it."""

    L: Estimate
    mu: Estimate
    L_client_max: Estimate
    L_client_mean: Estimate
    mu_client_min: Estimate
    sigma2: Estimate
    G2: Estimate
    B2: Estimate
    zeta: Estimate
    delta: Estimate
    delta_mean: Estimate
    grad_norm2: Estimate
    loss: Estimate
    clients: int
    population: int
    batch_size: int | None
    notes: tuple[str, ...] = ()

    @property
    def convex_here(self) -> bool:
        """No negative curvature found in f or any sampled client, beyond rounding."""
        return self.mu_client_min.value >= -1e-4 * max(self.L_client_max.value, 1e-30)

    def rows(self) -> list[tuple[str, Estimate, str]]:
        size = "a client's whole data" if self.batch_size is None else f"batches of {self.batch_size}"
        return [
            ("loss", self.loss, "mean loss"),
            ("|grad f|^2", self.grad_norm2, "squared gradient norm"),
            ("L", self.L, "largest curvature of the mean loss"),
            ("mu", self.mu, "smallest curvature of the mean loss"),
            ("L_i mean", self.L_client_mean, "largest curvature of a client, on average"),
            ("L_i max", self.L_client_max, "largest curvature of any sampled client"),
            ("mu_i min", self.mu_client_min, "smallest curvature of any sampled client"),
            ("sigma^2", self.sigma2, f"gradient noise within clients, {size}"),
            ("G^2", self.G2, "gradient variance between clients"),
            ("B^2", self.B2, "mean squared client gradient over squared mean gradient"),
            ("zeta", self.zeta, "largest distance of a client gradient from the mean"),
            ("delta", self.delta, "largest distance of a client Hessian from the mean"),
            ("delta mean", self.delta_mean, "the same on average"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        table = {
            name: self.__dict__[name]._asdict() for name in self.__dict__ if isinstance(self.__dict__[name], Estimate)
        }
        return {**table, "clients": self.clients, "population": self.population, "notes": list(self.notes)}

    def __str__(self) -> str:
        lines = [f"{name:<12} {estimate!s:<22} {meaning}" for name, estimate, meaning in self.rows()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def estimate(
    loss: Loss,
    params: PyTree,
    split: Split,
    *,
    clients: int = 10,
    examples: int | None = None,
    batch_size: int | None = 20,
    weighting: Literal["examples", "uniform"] = "examples",
    hessian: bool = True,
    hessian_clients: int | None = None,
    delta_clients: int = 3,
    tolerance: float = 0.05,
    dense: int = 400,
    seed: int = 0,
    key: Any = None,
) -> Constants:
    """Estimate the constants at ``params`` from ``clients`` sampled clients (all of them if there are fewer).

    examples: rows of a client its Hessian is computed on, at most (its gradient uses all of them); default 1000, or 20
        for models of more than 20,000 parameters.
    batch_size: of training; sigma2 is the noise of such a batch. None: full batches, no noise.
    weighting: how clients count in f, as in training.
    hessian: False leaves L, mu and delta out (NaN), which makes it fast.
    hessian_clients: how many of the clients have their Hessians looked at; default all, or 6 for models of more than
        20,000 parameters.
    delta_clients: how many of those have their Hessian compared with the mean one (each costs about ten products
        with the mean Hessian; models up to ``dense`` parameters compare all).
    tolerance: relative residual at which an eigenpair is good enough; its eigenvalue is more accurate than that.
    dense: models up to this size get exact Hessians.
    key: given to the loss; None means evaluation mode for this library's models (no dropout).

    >>> import numpy as np, jax.numpy as jnp
    >>> data = Split.from_clients([{"x": np.full((4, 1), c, np.float32)} for c in (1.0, 3.0)])
    >>> loss = lambda params, batch, key: 0.5 * jnp.mean((params - batch["x"]) ** 2 * batch["mask"][:, None])
    >>> c = estimate(loss, jnp.zeros(1), data)
    >>> round(c.L.value, 4), round(c.G2.value, 4), round(c.zeta.value, 4), round(c.delta.value, 4)
    (1.0, 1.0, 1.0, 0.0)
    """
    for name, value in (
        ("clients", clients),
        ("examples", examples),
        ("delta_clients", delta_clients),
        ("hessian_clients", hessian_clients),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, or None for full batches, got {batch_size}")
    if weighting not in ("examples", "uniform"):
        raise ValueError(f"weighting must be 'examples' or 'uniform', got {weighting!r}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance}")
    split.check()
    rng = np.random.default_rng(seed)
    sample = _Sample.draw(split, clients, weighting, rng)
    notes = []
    if len(sample.ids) < split.num_clients:
        notes.append(f"{len(sample.ids)} of {split.num_clients} clients sampled; maxima are over these")
    flat, unravel = ravel_pytree(params)
    if not jnp.issubdtype(flat.dtype, jnp.floating):
        raise ValueError(f"params must be floating point, got {flat.dtype}")

    small = flat.size <= 20_000
    if examples is None:
        examples = 1000 if small else 20
    if hessian_clients is None:
        hessian_clients = clients if small else 6

    def flat_loss(x: Any, batch: dict) -> Any:
        return loss(unravel(x), batch, key)

    found = _gradients(flat_loss, flat, split, sample, batch_size, rng)
    if not np.all(np.isfinite(found["loss"])):
        i = sample.ids[int(np.argmin(np.isfinite(found["loss"])))]
        raise ValueError(f"the loss of {split.name_of(i)} is not finite at these parameters; take others")
    curvature = dict.fromkeys(_CURVATURES, Estimate(math.nan))
    if hessian:
        fewer = sample.some(hessian_clients, rng)
        if len(fewer.ids) < len(sample.ids):
            notes.append(f"curvatures from {len(fewer.ids)} of these clients")
        curvature = _curvature(flat_loss, flat, split, fewer, examples, delta_clients, tolerance, dense, rng, notes)
    return Constants(
        **found["estimates"],
        **curvature,
        clients=len(sample.ids),
        population=split.num_clients,
        batch_size=batch_size,
        notes=(*notes, *found["notes"]),
    )


def envelope(points: Sequence[Constants]) -> Constants:
    """The worst of several points, name by name: what a bound over a whole run would have to assume at least.

    >>> a = Estimate(1.0); b = Estimate(2.0)
    >>> base = dict.fromkeys(list(_CURVATURES) + ["sigma2", "G2", "B2", "zeta", "grad_norm2", "loss"], a)
    >>> one = Constants(**base, clients=1, population=1, batch_size=1)
    >>> two = Constants(**{**base, "L": b, "mu": b}, clients=1, population=1, batch_size=1)
    >>> envelope([one, two]).L.value, envelope([one, two]).mu.value
    (2.0, 1.0)
    """
    if not points:
        raise ValueError("envelope needs at least one point")
    worst = {}
    for name, value in points[0].__dict__.items():
        if isinstance(value, Estimate):
            pick = min if name in ("mu", "mu_client_min") else max
            finite = [getattr(p, name) for p in points if not math.isnan(getattr(p, name).value)]
            worst[name] = pick(finite, key=lambda e: e.value) if finite else value
    notes = tuple(dict.fromkeys(note for p in points for note in p.notes))
    first = points[0]
    return Constants(
        **worst, clients=first.clients, population=first.population, batch_size=first.batch_size, notes=notes
    )


_FEW = 20_000_000  # numbers in the per-example gradients of one client, up to which they are all computed
_CURVATURES = ("L", "mu", "L_client_max", "L_client_mean", "mu_client_min", "delta", "delta_mean")


# --- client sampling -------------------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    ids: np.ndarray
    weights: np.ndarray  # of the sampled clients, summing to 1
    population: int
    concentration: float  # sum of squared weights over the whole population

    @classmethod
    def draw(cls, split: Split, clients: int, weighting: str, rng: np.random.Generator) -> _Sample:
        count = min(clients, split.num_clients)
        ids = np.sort(rng.choice(split.num_clients, count, replace=False))
        w = split.sizes.astype(float) if weighting == "examples" else np.ones(split.num_clients)
        return cls(ids, w[ids] / w[ids].sum(), split.num_clients, float(np.sum((w / w.sum()) ** 2)))

    def some(self, count: int, rng: np.random.Generator) -> _Sample:
        """A smaller sample: ``count`` of these clients."""
        if count >= len(self.ids):
            return self
        at = np.sort(rng.choice(len(self.ids), count, replace=False))
        return self._replace(ids=self.ids[at], weights=self.weights[at] / self.weights[at].sum())

    @property
    def unseen(self) -> float:
        """Finite population correction: 0 when everyone was sampled."""
        return 1.0 - len(self.ids) / self.population

    def mean(self, values: np.ndarray) -> Estimate:
        """A weighted mean over clients and its standard error (ratio estimator, linearised)."""
        m, centre = len(self.ids), float(self.weights @ values)
        if m < 2:
            return Estimate(centre, math.nan if self.unseen > 0 else 0.0)
        spread = m / (m - 1) * float(np.sum((self.weights * (values - centre)) ** 2))
        return Estimate(centre, math.sqrt(self.unseen * spread))

    def largest(self, values: np.ndarray, rng: np.random.Generator) -> Estimate:
        """The maximum over the sample; its error by the bootstrap, which sees only the sample's own spread."""
        if self.unseen == 0 or len(values) < 2:
            return Estimate(float(np.max(values)))
        draws = rng.choice(values, (200, len(values))).max(1)
        return Estimate(float(np.max(values)), float(draws.std()) * math.sqrt(self.unseen))


# --- gradients -------------------------------------------------------------------------------------------------------


def _gradients(
    flat_loss: Callable, x: Any, split: Split, sample: _Sample, batch_size: int | None, rng: np.random.Generator
) -> dict[str, Any]:
    """Every sampled client's gradient and the variance of its batch gradients, exactly.

    Disjoint random batches of size b have sample variance S^2 / b in expectation, S^2 being the variance over the
    client's examples (with n - 1): so batches of any size give S^2, and S^2 gives the noise of a batch of
    ``batch_size`` drawn without replacement, S^2 / B (1 - B / n).
    """
    size = x.size
    together = int(np.clip(2_000_000 // size, 1, 256))
    graded = jax.value_and_grad(flat_loss)

    @jax.jit
    def sums(x: Any, batches: dict, rows: Any, full: Any) -> Any:
        if together == 1:  # no vmap: with it, a convolution would take a slower path
            value, g = graded(x, {name: a[0] for name, a in batches.items()})
            return rows[0] * value, rows[0] * g, full[0] * g, full[0] * jnp.sum(g**2)
        values, g = jax.vmap(graded, in_axes=(None, 0))(x, batches)
        return rows @ values, rows @ g, full @ g, full @ jnp.sum(g**2, axis=1)

    # Enough batches to see their variance, few enough to afford: single rows, or about ten batches of a large model.
    # All are padded to the largest, so that one compiled function serves every client.
    sizes = split.sizes[sample.ids]
    b_of = np.where(sizes * size <= _FEW, 1, np.maximum(1, np.minimum(sizes // 2, -(-sizes // 10))))
    cap = int(b_of.max())
    m = len(sample.ids)
    gradients = np.zeros((m, size), np.float32 if size > 50_000 else np.float64)
    losses, noise, scatter = np.zeros(m), np.zeros(m), np.zeros(m)
    for j, i in enumerate(sample.ids):
        client = split.client(int(i))
        n = len(next(iter(client.values())))
        b = int(b_of[j])
        order = rng.permutation(n)
        whole = n // b
        loss, grad, full, squares = 0.0, 0.0, 0.0, 0.0
        for start in range(0, -(-n // b), together):
            picked = [order[k * b : (k + 1) * b] for k in range(start, start + together)]
            rows = np.array([len(p) for p in picked], float)
            batches = _pad(client, picked, cap)
            parts = sums(x, batches, jnp.asarray(rows, x.dtype), jnp.asarray(rows == b, x.dtype))
            parts = [np.asarray(p, np.float64) for p in parts]
            loss, grad, full, squares = loss + parts[0], grad + parts[1], full + parts[2], squares + parts[3]
        losses[j], gradients[j] = loss / n, grad / n
        if whole > 1:
            scatter[j] = max(float(squares - np.sum(full**2) / whole), 0.0) / (whole - 1) * b
        B = n if batch_size is None else min(batch_size, n)
        noise[j] = scatter[j] / B * (1.0 - B / n)
    w = sample.weights
    mean = np.einsum("i,ia->a", w, gradients, dtype=np.float64)
    apart = np.array([float(np.sum((g - mean) ** 2)) for g in gradients])
    # The sample's mean is closer to its members than the population's: undo that, exactly so when all were sampled.
    shrink = (1.0 - sample.concentration) / max(1.0 - float(np.sum(w**2)), 1e-30) if m > 1 else math.nan
    if sample.population == 1:
        shrink = 1.0
    raw = sample.mean(apart)
    G2 = Estimate(raw.value * shrink, raw.stderr * shrink)
    own = np.array([float(np.sum(g.astype(np.float64) ** 2)) for g in gradients])
    # ||mean of a sample||^2 exceeds ||mean||^2 by the variance of that mean.
    variance = sample.unseen * (m / (m - 1) * float(np.sum(w**2 * apart)) if m > 1 else 0.0)
    squared = float(np.sum(mean**2)) - variance
    slope = sample.mean(2.0 * (gradients @ mean.astype(gradients.dtype)).astype(float))
    norm2 = Estimate(max(squared, 0.0), slope.stderr)
    notes = []
    if squared <= 2 * norm2.stderr or squared <= 0:
        notes.append("the mean gradient is within its sampling error of zero: B^2 is not determined here")
        B2 = Estimate(math.inf if squared <= 0 else (squared + G2.value) / squared, math.nan)
    else:
        ratio = (squared + G2.value) / squared
        B2 = Estimate(ratio, sample.mean((own - ratio * 2.0 * (gradients @ mean)) / squared).stderr)
    return {
        "loss": losses,
        "notes": notes,
        "estimates": {
            "loss": sample.mean(losses),
            "grad_norm2": norm2,
            "sigma2": sample.mean(noise),
            "G2": G2,
            "B2": B2,
            "zeta": sample.largest(np.sqrt(apart), rng),
        },
    }


def _pad(client: dict[str, np.ndarray], picked: Sequence[np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Batches of ``size`` rows ``[k, size, ...]``; missing rows repeat row 0 and are masked out.

    A batch without rows keeps one unmasked, because a mean over nothing would be NaN; its caller gives it no weight.
    """
    index = np.zeros((len(picked), size), np.int64)
    mask = np.zeros((len(picked), size), np.float32)
    for k, rows in enumerate(picked):
        index[k, : len(rows)], mask[k, : max(len(rows), 1)] = rows, 1.0
    batch = {name: np.asarray(a)[index] for name, a in client.items()}
    return {**batch, MASK: mask}


# --- curvature -------------------------------------------------------------------------------------------------------


def _curvature(
    flat_loss: Callable,
    x: Any,
    split: Split,
    sample: _Sample,
    examples: int,
    delta_clients: int,
    tolerance: float,
    dense: int,
    rng: np.random.Generator,
    notes: list[str],
) -> dict[str, Estimate]:
    products = _Products(flat_loss, x, split, sample, examples, rng)
    if products.cut:
        notes.append(
            f"Hessians on at most {examples} examples of a client, some have more: delta and L_i are somewhat too large"
        )
    m, w = len(sample.ids), sample.weights
    compared = np.sort(rng.choice(m, min(delta_clients, m), replace=False)) if x.size > dense else np.arange(m)
    if x.size <= dense:
        H = products.dense()
        mean = np.einsum("i,iab->ab", w, H)
        values, vectors = np.linalg.eigh(mean)
        low, high, v_low, v_high = values[0], values[-1], vectors[:, 0], vectors[:, -1]
        spans = np.linalg.eigvalsh(H)
        tops, bottoms = spans[:, -1], spans[:, 0]
        apart = np.abs(np.linalg.eigvalsh(H - mean)).max(1)
        along_high = np.einsum("a,iab,b->i", v_high, H, v_high)
        along_low = np.einsum("a,iab,b->i", v_low, H, v_low)
    else:
        high, v_high = _extreme(products.mean, x.size, tolerance, rng)
        low, v_low = _lowest(products.mean, x.size, high, tolerance, rng)
        along_high = np.array([v_high @ products.client(i, v_high) for i in range(m)])
        along_low = np.array([v_low @ products.client(i, v_low) for i in range(m)])
        tops = np.array([_extreme(partial(products.client, i), x.size, tolerance, rng, v_high)[0] for i in range(m)])
        bottoms = np.array(
            [_lowest(partial(products.client, i), x.size, tops[i], tolerance, rng)[0] for i in compared.tolist()]
        )
        apart = np.array(
            [
                abs(_extreme(partial(products.difference, i), x.size, tolerance, rng, v_high, which="LM")[0])
                for i in compared.tolist()
            ]
        )
        if len(compared) < m:
            notes.append(f"delta and mu_i from {len(compared)} of these clients")
        notes.append(f"smallest curvatures are resolved to {tolerance:.0%} of the largest")
    part = sample._replace(ids=sample.ids[compared], weights=w[compared] / w[compared].sum())
    lows = part.largest(-bottoms, rng)
    return {
        "L": Estimate(float(high), sample.mean(along_high).stderr),
        "mu": Estimate(float(low), sample.mean(along_low).stderr),
        "L_client_max": sample.largest(tops, rng),
        "L_client_mean": sample.mean(tops),
        "mu_client_min": Estimate(-lows.value, lows.stderr),
        "delta": part.largest(apart, rng),
        "delta_mean": part.mean(apart),
    }


class _Products:
    """Hessian-vector products of the mean loss and of single clients, at one point, from padded batches."""

    def __init__(
        self, flat_loss: Callable, x: Any, split: Split, sample: _Sample, examples: int, rng: np.random.Generator
    ) -> None:
        sizes = split.sizes[sample.ids]
        self.cut = bool(sizes.max() > examples)
        cap = int(min(sizes.max(), examples))
        rows = [rng.permutation(int(n))[:cap] for n in sizes]
        members = [_pad(split.client(int(i)), [r], cap) for i, r in zip(sample.ids, rows, strict=True)]
        self.batches = [{k: jnp.asarray(a[0]) for k, a in member.items()} for member in members]
        self.weights, self.x = sample.weights, x
        product = _product(flat_loss, x, self.batches[0])
        self._client = product
        self._add = jax.jit(lambda total, x, v, batch, w: total + w * product(x, v, batch))

    def client(self, i: int, v: np.ndarray) -> np.ndarray:
        return np.asarray(self._client(self.x, jnp.asarray(v, self.x.dtype), self.batches[i]), np.float64)

    def mean(self, v: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """One client after the other: large enough work each, and memory for one."""
        direction, total = jnp.asarray(v, self.x.dtype), jnp.zeros_like(self.x)
        for batch, w in zip(self.batches, self.weights if weights is None else weights, strict=True):
            total = self._add(total, self.x, direction, batch, float(w))
        return np.asarray(total, np.float64)

    def difference(self, i: int, v: np.ndarray) -> np.ndarray:
        """``Hess f - Hess f_i``: the mean's own product with client i's weight lowered by 1."""
        weights = self.weights.copy()
        weights[i] -= 1.0
        return self.mean(v, weights)

    def dense(self) -> np.ndarray:
        columns = jax.jit(jax.vmap(self._client, in_axes=(None, 0, None)))
        eye = jnp.eye(self.x.size, dtype=self.x.dtype)
        H = np.stack([np.asarray(columns(self.x, eye, batch), np.float64) for batch in self.batches])
        return (H + H.transpose(0, 2, 1)) / 2


def _product(f: Callable, x: Any, *arguments: Any) -> Callable:
    """``(x, v, ...) -> Hess f(x) v``, forward over reverse; reverse over reverse where f forbids the former."""

    def forward(x: Any, v: Any, *arguments: Any) -> Any:
        return jax.jvp(lambda y: jax.grad(f)(y, *arguments), (x,), (v,))[1]

    def reverse(x: Any, v: Any, *arguments: Any) -> Any:
        return jax.grad(lambda y: jnp.vdot(jax.grad(f)(y, *arguments), v))(x)

    try:
        jax.eval_shape(forward, x, x, *arguments)
    except TypeError:  # a custom_vjp inside the loss has no forward mode
        return jax.jit(reverse)
    return jax.jit(forward)


class _Operator:
    """The least that scipy takes for a linear operator."""

    def __init__(self, matvec: Callable, size: int) -> None:
        self.matvec, self.shape, self.dtype = matvec, (size, size), np.dtype(np.float64)


def _extreme(
    product: Callable,
    size: int,
    tolerance: float,
    rng: np.random.Generator,
    near: np.ndarray | None = None,
    which: str = "LA",
) -> tuple[float, np.ndarray]:
    """The largest eigenvalue ("LA"), or the largest in magnitude ("LM"), with its eigenvector.

    ``near`` is a guess of the eigenvector; some noise is added, lest it be an eigenvector of something else.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, aslinearoperator, eigsh

    operator = aslinearoperator(_Operator(product, size))
    start = rng.standard_normal(size)
    if near is not None:
        start = near + 0.3 * start / np.linalg.norm(start)
    if not np.any(product(start)):
        return 0.0, start / np.linalg.norm(start)
    for loosen in (1.0, 5.0, 20.0):
        tol: Any = tolerance * loosen
        try:
            values, vectors = eigsh(operator, k=1, which=which, tol=tol, v0=start, ncv=min(size, 8), maxiter=40)
            return float(values[0]), vectors[:, 0]
        except ArpackNoConvergence:
            continue
    raise ValueError(f"Lanczos found no extreme eigenvalue within {tolerance * 20:.0%}: is the loss smooth here?")


def _lowest(
    product: Callable, size: int, top: float, tolerance: float, rng: np.random.Generator
) -> tuple[float, np.ndarray]:
    """The smallest eigenvalue to ``tolerance`` times the largest: of the operator turned upside down."""
    scale = max(abs(top), 1e-30)
    value, vector = _extreme(lambda v: scale * v - product(v), size, tolerance, rng)
    return scale - value, vector
