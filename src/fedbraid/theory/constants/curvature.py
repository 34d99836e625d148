"""Hessians of the sampled clients: L, mu and delta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.theory.constants.lanczos import extreme, lowest
from fedbraid.theory.constants.sampling import Clients, Sample, padded
from fedbraid.theory.constants.table import Estimate

__all__ = ["Hessians", "curvature"]

SMALL = 20_000  # parameters up to which a model counts as small: Hessians of all clients, on more examples


@dataclass(frozen=True)
class Hessians:
    """How `estimate` computes curvatures.

    examples: rows of a client that its Hessian is computed on, at most; default 1000, or 20 for models of more than
        20,000 parameters. (Gradients always use all rows.)
    clients: how many of the sampled clients have their Hessians computed; default all, or 6 for models of more than
        20,000 parameters.
    compared: how many of those have their Hessian compared with the mean Hessian. Each costs about ten products with
        the mean Hessian. Models up to ``dense`` parameters compare all.
    tolerance: relative residual at which an eigenpair is accepted; its eigenvalue is more accurate than that.
    dense: models up to this size get full Hessians.

    >>> Hessians(examples=100, dense=0).tolerance
    0.05
    """

    examples: int | None = None
    clients: int | None = None
    compared: int = 3
    tolerance: float = 0.05
    dense: int = 400

    def __post_init__(self) -> None:
        for name in ("examples", "clients", "compared"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie between 0 and 1, got {self.tolerance}")

    def sized(self, parameters: int, clients: int) -> tuple[int, int]:
        """Examples per client and number of clients, with the defaults for a model of this size filled in."""
        small = parameters <= SMALL
        examples = self.examples if self.examples is not None else 1000 if small else 20
        return examples, self.clients if self.clients is not None else clients if small else 6


class _Spectra(NamedTuple):
    """Extreme eigenvalues of the mean Hessian and of the clients' Hessians."""

    high: float  # of the mean Hessian
    low: float
    along_high: np.ndarray  # [m]: the clients' curvature along the mean Hessian's extreme eigenvectors
    along_low: np.ndarray
    tops: np.ndarray  # [m]: the largest eigenvalue of every client
    bottoms: np.ndarray  # the smallest, of the compared clients
    apart: np.ndarray  # ||Hess f_i - Hess f|| of the compared clients


def curvature(
    flat_loss: Callable,
    x: Any,
    data: Clients,
    sample: Sample,
    options: Hessians,
    rng: np.random.Generator,
    jit: Callable = jax.jit,
) -> tuple[dict[str, Estimate], list[str]]:
    """L, mu and delta of f and of its clients at ``x``, and notes on their limitations.

    jit: `jax.jit`, with options or without.
    """
    examples, _ = options.sized(x.size, len(sample.ids))
    products = _Products(flat_loss, x, data, sample, examples, rng, jit)
    notes = []
    if products.cut:
        notes.append(
            f"Hessians on at most {examples} examples of a client, some have more: delta and L_i are somewhat too large"
        )
    m = len(sample.ids)
    if x.size <= options.dense:
        compared = np.arange(m)
        found = _dense_spectra(products.dense(), sample.weights)
    else:
        compared = np.sort(rng.choice(m, min(options.compared, m), replace=False))
        found = _lanczos_spectra(products, compared, options.tolerance, rng)
        if len(compared) < m:
            notes.append(f"delta and mu_i from {len(compared)} of these clients")
        notes.append(f"smallest curvatures are resolved to {options.tolerance:.0%} of the largest")
    part = sample.part(compared)
    lows = part.largest(-found.bottoms, rng)
    estimates = {
        "L": Estimate(float(found.high), sample.mean(found.along_high).stderr),
        "mu": Estimate(float(found.low), sample.mean(found.along_low).stderr),
        "L_client_max": sample.largest(found.tops, rng),
        "L_client_mean": sample.mean(found.tops),
        "mu_client_min": Estimate(-lows.value, lows.stderr),
        "delta": part.largest(found.apart, rng),
        "delta_mean": part.mean(found.apart),
    }
    return estimates, notes


def _dense_spectra(H: np.ndarray, weights: np.ndarray) -> _Spectra:
    """From the full Hessians ``[m, d, d]``."""
    mean = np.einsum("i,iab->ab", weights, H)
    values, vectors = np.linalg.eigh(mean)
    v_low, v_high = vectors[:, 0], vectors[:, -1]
    spans = np.linalg.eigvalsh(H)
    return _Spectra(
        high=values[-1],
        low=values[0],
        along_high=np.einsum("a,iab,b->i", v_high, H, v_high),
        along_low=np.einsum("a,iab,b->i", v_low, H, v_low),
        tops=spans[:, -1],
        bottoms=spans[:, 0],
        apart=np.abs(np.linalg.eigvalsh(H - mean)).max(1),
    )


def _lanczos_spectra(products: _Products, compared: np.ndarray, tolerance: float, rng: np.random.Generator) -> _Spectra:
    """From Hessian-vector products alone."""
    size, m = products.x.size, len(products.batches)
    high, v_high = extreme(products.mean, size, tolerance, rng)
    low, v_low = lowest(products.mean, size, high, tolerance, rng)
    along_high = np.array([v_high @ products.client(i, v_high) for i in range(m)])
    along_low = np.array([v_low @ products.client(i, v_low) for i in range(m)])
    tops = np.array([extreme(partial(products.client, i), size, tolerance, rng, v_high)[0] for i in range(m)])
    bottoms = [lowest(partial(products.client, i), size, float(tops[i]), tolerance, rng)[0] for i in compared.tolist()]
    apart = [
        abs(extreme(partial(products.difference, i), size, tolerance, rng, v_high, which="LM")[0])
        for i in compared.tolist()
    ]
    return _Spectra(high, low, along_high, along_low, tops, np.array(bottoms), np.array(apart))


class _Products:
    """Hessian-vector products of the mean loss and of single clients, at one point, from padded batches."""

    def __init__(
        self,
        flat_loss: Callable,
        x: Any,
        data: Clients,
        sample: Sample,
        examples: int,
        rng: np.random.Generator,
        jit: Callable,
    ) -> None:
        sizes = data.sizes[sample.ids]
        self.cut = bool(sizes.max() > examples)
        cap = int(min(sizes.max(), examples))
        rows = [rng.permutation(int(n))[:cap] for n in sizes]
        members = [padded(data.client(int(i)), [r], cap) for i, r in zip(sample.ids, rows, strict=True)]
        self.batches = [{k: jnp.asarray(a[0]) for k, a in member.items()} for member in members]
        self.weights, self.x = sample.weights, x
        product = _product(flat_loss, x, self.batches[0])
        self._product, self._jit = product, jit
        self._add = jit(lambda total, x, v, batch, w: total + w * product(x, v, batch))

    def client(self, i: int, v: np.ndarray) -> np.ndarray:
        direction, zero = jnp.asarray(v, self.x.dtype), jnp.zeros_like(self.x)
        # with the program of `mean`: a program of its own would compile the same product again
        return np.asarray(self._add(zero, self.x, direction, self.batches[i], 1.0), np.float64)

    def mean(self, v: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """One client after the other: each product is large enough to fill the device, and memory is needed for one."""
        direction, total = jnp.asarray(v, self.x.dtype), jnp.zeros_like(self.x)
        for batch, w in zip(self.batches, self.weights if weights is None else weights, strict=True):
            total = self._add(total, self.x, direction, batch, float(w))
        return np.asarray(total, np.float64)

    def difference(self, i: int, v: np.ndarray) -> np.ndarray:
        """``Hess f - Hess f_i``: the product of the mean with client i's weight lowered by 1."""
        weights = self.weights.copy()
        weights[i] -= 1.0
        return self.mean(v, weights)

    def dense(self) -> np.ndarray:
        """The full Hessians ``[m, d, d]``."""
        columns = self._jit(jax.vmap(self._product, in_axes=(None, 0, None)))
        eye = np.eye(self.x.size, dtype=self.x.dtype)  # jnp.eye would compile six programs
        H = np.stack([np.asarray(columns(self.x, eye, batch), np.float64) for batch in self.batches])
        return (H + H.transpose(0, 2, 1)) / 2


def _product(f: Callable, x: Any, *arguments: Any) -> Callable:
    """``(x, v, ...) -> Hess f(x) v``: forward over reverse mode; reverse over reverse if f has no forward mode."""

    def forward(x: Any, v: Any, *arguments: Any) -> Any:
        return jax.jvp(lambda y: jax.grad(f)(y, *arguments), (x,), (v,))[1]

    def reverse(x: Any, v: Any, *arguments: Any) -> Any:
        return jax.grad(lambda y: jnp.vdot(jax.grad(f)(y, *arguments), v))(x)

    try:
        jax.eval_shape(forward, x, x, *arguments)
    except TypeError:  # a custom_vjp inside the loss has no forward mode
        return reverse
    return forward
