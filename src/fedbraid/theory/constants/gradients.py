"""Gradients of the sampled clients, and what follows from them: sigma^2, G^2, B^2 and zeta."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.theory.constants.sampling import Clients, Sample, padded
from fedbraid.theory.constants.table import Estimate

__all__ = ["ClientGradients", "client_gradients", "dissimilarity"]

# Up to this many numbers in the per-example gradients of one client, the noise is computed from single examples.
PER_EXAMPLE_LIMIT = 20_000_000


class ClientGradients(NamedTuple):
    """Of every sampled client: the loss, the gradient, and the variance of its batch gradients."""

    losses: np.ndarray  # [m]
    gradients: np.ndarray  # [m, d]
    noise: np.ndarray  # [m]


def client_gradients(
    flat_loss: Callable,
    x: Any,
    data: Clients,
    sample: Sample,
    batch_size: int | None,
    rng: np.random.Generator,
    jit: Callable = jax.jit,
) -> ClientGradients:
    """Exact gradients at ``x``, with the variance over batches of ``batch_size`` (None: full batches, no noise).

    Disjoint random batches of size b have sample variance S^2 / b in expectation, S^2 being the variance over the
    client's examples (with n - 1). So batches of any size give S^2, and S^2 gives the noise of a batch of
    ``batch_size`` drawn without replacement, S^2 / B (1 - B / n). ``jit``: `jax.jit`, with options or without.
    """
    together = int(np.clip(2_000_000 // x.size, 1, 256))
    sums = _batch_sums(flat_loss, together, jit)
    # Single examples if there is memory for their gradients, else about ten batches per client. Batches are padded to
    # the largest size, so that one compiled function serves every client.
    sizes = data.sizes[sample.ids]
    b_of = np.where(sizes * x.size <= PER_EXAMPLE_LIMIT, 1, np.maximum(1, np.minimum(sizes // 2, -(-sizes // 10))))
    cap = int(b_of.max())
    m = len(sample.ids)
    gradients = np.zeros((m, x.size), np.float32 if x.size > 50_000 else np.float64)
    losses, noise = np.zeros(m), np.zeros(m)
    for j, i in enumerate(sample.ids):
        client = data.client(int(i))
        n = len(next(iter(client.values())))
        b = int(b_of[j])
        order = rng.permutation(n)
        whole = n // b
        loss, grad, full, squares = 0.0, 0.0, 0.0, 0.0
        for start in range(0, -(-n // b), together):
            picked = [order[k * b : (k + 1) * b] for k in range(start, start + together)]
            rows = np.array([len(p) for p in picked], float)
            batches = padded(client, picked, cap)
            parts = sums(x, batches, jnp.asarray(rows, x.dtype), jnp.asarray(rows == b, x.dtype))
            parts = [np.asarray(p, np.float64) for p in parts]
            loss, grad, full, squares = loss + parts[0], grad + parts[1], full + parts[2], squares + parts[3]
        losses[j], gradients[j] = loss / n, grad / n
        scatter = max(float(squares - np.sum(full**2) / whole), 0.0) / (whole - 1) * b if whole > 1 else 0.0
        B = n if batch_size is None else min(batch_size, n)
        noise[j] = scatter / B * (1.0 - B / n)
    return ClientGradients(losses, gradients, noise)


def _batch_sums(flat_loss: Callable, together: int, jit: Callable) -> Callable:
    """Compiled sums over ``together`` batches: loss and gradient weighted by rows; gradient and its squared norm over
    full batches."""
    graded = jax.value_and_grad(flat_loss)

    @jit
    def sums(x: Any, batches: Mapping[str, Any], rows: Any, full: Any) -> Any:
        if together == 1:  # no vmap: with it, a convolution would take a slower path
            value, g = graded(x, {name: a[0] for name, a in batches.items()})
            return rows[0] * value, rows[0] * g, full[0] * g, full[0] * jnp.sum(g**2)
        values, g = jax.vmap(graded, in_axes=(None, 0))(x, batches)
        return rows @ values, rows @ g, full @ g, full @ jnp.sum(g**2, axis=1)

    return sums


def dissimilarity(
    found: ClientGradients, sample: Sample, rng: np.random.Generator
) -> tuple[dict[str, Estimate], list[str]]:
    """Loss, squared gradient norm, sigma^2, G^2, B^2 and zeta of the population; notes on undetermined values."""
    w, gradients, m = sample.weights, found.gradients, len(sample.ids)
    mean = np.einsum("i,ia->a", w, gradients, dtype=np.float64)
    apart = np.array([float(np.sum((g - mean) ** 2)) for g in gradients])
    # Gradients are closer to the mean of their own sample than to the population's mean. This factor corrects for
    # it; it is exact when all clients were sampled.
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
    estimates = {
        "loss": sample.mean(found.losses),
        "grad_norm2": norm2,
        "sigma2": sample.mean(found.noise),
        "G2": G2,
        "B2": B2,
        "zeta": sample.largest(np.sqrt(apart), rng),
    }
    return estimates, notes
